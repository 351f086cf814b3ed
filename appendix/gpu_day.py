"""Appendix: what this book measures on a GPU, in parts of a few minutes.

    uv run python gpu_day.py                   # all parts, 10 to 20 minutes on one GPU
    uv run python gpu_day.py --parts step wide # some of them
    uv run python gpu_day.py --save-results    # and write results/gpu_day_NAME.json
    uv run python gpu_day.py --draw FILE       # measure nothing: draw results/gpu_day_NAME.json
    uv run python gpu_day.py --dry-run         # tiny, on a CPU, to see that it works

You should see a line for each thing that was measured, and at the end tables for a pull
request. Finished parts are kept in outputs/gpu_day: after a kill, the same command goes
on. A part that fails or takes too long is named, and the next one begins.
"""

import argparse
import importlib
import json
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import NamedTemporaryFile

import torch

import gpu_picture
import gpu_tables
from gpu_plan import CHAPTER_5, DRY, FULL, Found, Plan
from ladder import make_store

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs" / "gpu_day"
MINUTES = 4.0
# Of each part: its module and its function. Those that say most come first.
PARTS = {
    "machine": ("gpu_steps", "run_machine"),
    "ladder": ("gpu_runs", "run_ladder"),
    "step": ("gpu_steps", "run_step"),
    "exact": ("gpu_runs", "run_exact"),
    "loader": ("gpu_loader", "run_loader"),
    "wide": ("gpu_steps", "run_wide"),
    "kernels": ("gpu_kernels", "run_kernels"),
    "energy": ("gpu_steps", "run_energy"),
    "roofline": ("gpu_steps", "run_roofline"),
    "large": ("gpu_runs", "run_large"),
    "memory": ("gpu_runs", "run_memory"),
    "compile": ("gpu_steps", "run_compile"),
    "cpu": ("gpu_runs", "run_cpu"),
    "scaling": ("gpu_runs", "run_scaling"),
}
# Imported once; the parts and the trainings are forks of this process. None uses CUDA yet.
HEAVY = (
    "lightning.pytorch",
    "matplotlib.figure",
    "obstore.store",
    "scipy.interpolate",
    "torch.utils.tensorboard",
    "torchmetrics",
    "xarray",
    "zarr",
)


def run_part(name: str, plan: Plan, path: Path) -> None:
    """What the process of a part does."""
    os.setsid()  # what it starts can be killed with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as what it starts expects
    module, function = PARTS[name]
    if module != "gpu_runs":
        sys.path.insert(0, str(CHAPTER_5))
    found = Found(path)
    try:
        getattr(importlib.import_module(module), function)(plan, found)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    found.finish(name)


def run_apart(
    name: str, plan: Plan, path: Path, args: argparse.Namespace
) -> str | None:
    """Run a part in its own process. Return None, or why it did not finish."""
    minutes = args.minutes
    context = get_context(args.start_method)
    process = context.Process(target=run_part, args=(name, plan, path))
    process.start()
    try:
        process.join(60 * minutes)
    finally:
        if process.exitcode is None:
            with suppress(ProcessLookupError):  # it has not yet a group of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if process.exitcode == 0:
        return None
    if process.exitcode == -signal.SIGKILL:
        return f"not finished in {minutes:g} minutes"
    return "failed: see above"


def can_compute() -> bool:
    """Whether a fork of this process can compute on a GPU. The fork tries, because CUDA
    that this process used could not be used in later forks, and takes GPU memory."""
    process = get_context("fork").Process(target=try_gpu)
    process.start()
    process.join()
    return process.exitcode == 0


def try_gpu() -> None:
    """End with 0 if a GPU can add numbers."""
    try:
        torch.ones(2, device="cuda").sum().item()
    except (AssertionError, RuntimeError):
        sys.exit(1)


def choose_start_method(args: argparse.Namespace) -> str:
    """Fork, with what is imported here, unless that has used CUDA and no fork can."""
    for package in HEAVY:
        importlib.import_module(package)
    if args.dry_run or can_compute():
        return "fork"
    print("note: an import has used CUDA; parts begin without imports", flush=True)
    return "spawn"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """What to run, and where results are kept; exits with code 2 if a flag is wrong."""
    summary = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    parser.error = argparse.ArgumentParser(usage=argparse.SUPPRESS).error  # one line
    add = parser.add_argument
    names = ", ".join(PARTS)
    add("--parts", nargs="+", metavar="PART", help=f"some of {names} (default: all)")
    add("--again", action="store_true", help="repeat parts that are finished")
    add("--dry-run", action="store_true", help="tiny, on a CPU, to see that it works")
    add("--minutes", type=float, default=MINUTES, help="most minutes for each part")
    add("--output-dir", default=str(OUTPUTS), help="where finished parts are kept")
    add("--report", action="store_true", help="measure nothing: show results so far")
    add("--save-results", action="store_true", help="write results/ and its picture")
    add(
        "--draw",
        metavar="FILE",
        type=Path,
        help="measure nothing: draw results/gpu_day_NAME.json",
    )
    args = parser.parse_args(argv)
    if args.draw:
        draw_or_refuse(parser, args.draw)
    for part in args.parts or []:
        if part not in PARTS:
            parser.error(f"--parts {part}: no such part; choose from {names}")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: give more than 0")
    if args.dry_run and args.save_results:
        parser.error("--save-results: --dry-run finds nothing; leave one out")
    check_folder(parser, args.output_dir)
    args.parts = list(dict.fromkeys(args.parts or PARTS))
    if not args.dry_run and not args.report and not can_compute():
        parser.error(
            "no GPU that torch can use; give --dry-run to see what it would do"
        )
    return args


def draw_or_refuse(parser: argparse.ArgumentParser, path: Path) -> None:
    """Draw a file of results and end; exits with code 2 if it has no results."""
    try:
        print(f"picture: {draw(path)}")
    except OSError as error:
        parser.error(
            f"--draw {path}: {error.strerror}; give a results/gpu_day_NAME.json"
        )
    except (ValueError, KeyError, TypeError) as error:
        parser.error(f"--draw {path}: {error}; give a results/gpu_day_NAME.json")
    parser.exit()


def draw(path: Path) -> Path:
    """Draw a file of results, beside it."""
    figure = gpu_picture.draw(json.loads(path.read_text()))
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=100)
    return picture


def check_folder(parser: argparse.ArgumentParser, folder: str) -> None:
    """Refuse a folder in which nothing can be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        NamedTemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{error.strerror}; give a folder that can be written to"
        parser.error(f"--output-dir {folder}: {reason}")


def make_small_store(plan: Plan) -> None:
    """Make the store that chapters 3 to 6 read; without it, go on with the other parts."""
    try:
        make_store(plan.size)
    except CalledProcessError as error:
        print(f"make_store.py: {error.stderr.strip().splitlines()[-1]}", flush=True)


def save(found: Found, parts: list[str]) -> Path:
    """Write results/gpu_day_NAME.json, with the machine as its first part has found it."""
    about = found.row("machine", "describe")
    machine = about["machine"] | {
        "gpus": about["gpus"],
        "driver": about["driver"],
        "cuda": about["cuda"],
        "cudnn": about["cudnn"],
    }
    name = re.sub("[^a-z0-9]+", "_", machine["gpu"].lower()).strip("_")
    chosen = "" if parts == list(PARTS) else f" --parts {' '.join(parts)}"
    results = {
        "command": f"uv run python gpu_day.py{chosen} --save-results",
        "date": str(date.today()),
        "machine": machine,
        "versions": about["versions"],
        "not_finished": [part for part in parts if part not in found.finished],
        "rows": [row for row in found.rows if row["case"] != "describe"],
    }
    path = HERE / "results" / f"gpu_day_{name}.json"
    path.write_text(json.dumps(results) + "\n")
    return path


def main(argv: list[str] | None = None) -> list[dict]:
    """Run the parts, print what they found, and save it if asked to; the rows."""
    args = parse_arguments(argv)
    plan = DRY if args.dry_run else FULL
    name = "dry_run.json" if args.dry_run else "gpu_day.json"
    path = Path(args.output_dir, name).absolute()
    found = Found(path)
    if args.again:
        found.forget(args.parts)
    todo = [part for part in args.parts if part not in found.finished]
    for part in args.parts:
        if part not in todo:
            print(f"{part}: finished before; --again repeats it", flush=True)
    if args.report:
        todo = []
    if todo:
        args.start_method = choose_start_method(args)
    if any(PARTS[part][0] in ("gpu_runs", "gpu_loader") for part in todo):
        make_small_store(plan)
    # Also where a launcher ignores Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    failed = []
    for part in todo:
        print(f"{part}: begins", flush=True)
        try:
            reason = run_apart(part, plan, path, args)
        except KeyboardInterrupt:
            print(f"{part}: stopped; the same command goes on", flush=True)
            raise SystemExit(130) from None
        if reason:
            print(f"{part}: {reason}", flush=True)
            failed.append(part)
    found = Found(path)
    print(gpu_tables.show(found.rows))
    if args.save_results and found.has("machine", "describe"):
        path = save(found, args.parts)
        print(f"results: {path.relative_to(HERE)}")
        with suppress(ValueError):  # the part called step has not been run
            print(f"picture: {draw(path).relative_to(HERE)}")
    elif args.save_results:
        print("no results: the part called machine did not finish")
    if failed:
        print(f"not finished: {', '.join(failed)}; the same command goes on")
        raise SystemExit(1)
    return found.rows


if __name__ == "__main__":
    main()
