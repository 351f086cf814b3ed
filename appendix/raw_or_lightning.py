"""Appendix: how many lines each part of training takes in this book, with Lightning and by hand.

    uv run python raw_or_lightning.py                      # the table: a row for each part, chapters 1 and 2
    uv run python raw_or_lightning.py --show strategies    # the lines themselves that a row counts

It reads the four scripts and runs none of them. You should see that both sides take as many lines, within 3%, and
that neither has one for precision or for checkpoints in the cloud.
"""

import argparse
import ast
import io
import re
import tokenize
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path

BOOK = Path(__file__).resolve().parent.parent
SCRIPTS = {  # chapter: side: script
    1: {"Lightning": "01_setup/train.py", "by hand": "01_setup/train_by_hand.py"},
    2: {"Lightning": "02_multi_gpu/train.py", "by hand": "02_multi_gpu/train_ddp_by_hand.py"},
}
# Where each row's lines stand; places are separated by "; ". A name such as `Class.method` or `main.optimizer` is a
# definition or an assignment, with all its lines. Anything else is a fragment of one line, and takes that line out of
# the name in which it stands; `definition | fragment` looks in that definition alone. Each is there exactly once.
LIGHTNING = {
    "devices": "accelerator=args.accelerator,",
    "loop": "import LightningModule, Trainer; FillGaps; main.model; main.trainer; main.batches; trainer.fit(",
    "optimizer and schedule": "FillGaps.configure_optimizers",
    "validation": "import MeanMetric; self.mean_squares = ; FillGaps.validation_step; main.judging; main.judged; "
    'FillGaps.on_validation_epoch_end; test_step, on_test_epoch_end = ; main.rmse; "U-Net": rmse',
    "logging": 'import CSVLogger; self.log("loss"; self.log(f"{test}rmse; log_every_n_steps=; logger=CSVLogger(; '
    "import logging; import warnings; logging.getLogger(; warnings.filterwarnings(; enable_model_summary=False",
    "callbacks": "pytorch.callbacks import; main.every; main.checkpoints; callbacks=[; trainer.save_checkpoint(",
    "strategies": "use_distributed_sampler=",
    "starting the ranks": "",
    "profiling": "import SimpleProfiler; profiler=SimpleProfiler(); main.spans; waits, works = spans",
    "reproducibility": "torch.manual_seed(; self.save_hyperparameters(); FillGaps.on_train_start; check_resumable; "
    "main.start",
    "precision": "",
    "sanity check": "num_sanity_val_steps=",
    "checkpoints in the cloud": "",
}
BY_HAND = {
    "devices": "",
    "loop": "train_step; main.model; main.batches; for step in bar:; loss = train_step(; "
    "if (step + 1) % args.validate_every",
    "optimizer and schedule": "main.optimizer; main.factor; main.schedule",
    "validation": "validate; rmse = next(iter(validate(",
    "logging": 'folder.mkdir(; main.log; print("step,loss; rate = schedule.get_last_lr(); rmse = ""; '
    "if (step + 1) % args.log_every; print(step, ; log.close()",
    "callbacks": "import tqdm; main.save_checkpoint; main.bar; bar.set_postfix(; save_checkpoint(step + 1); "
    "if (step + 1) % args.checkpoint_every; save_checkpoint(args.max_steps)",
    "strategies": "",
    "starting the ranks": "",
    "profiling": "waits, works = [], []; asked = perf_counter(); waits.append(; given = perf_counter(); works.append(",
    "reproducibility": "torch.manual_seed(; load_checkpoint; main.checkpoint; main.state; if checkpoint:; "
    'for name, part in state.items():; part.load_state_dict(; start = checkpoint["step"]',
    "precision": "",
    "sanity check": "",
    "checkpoints in the cloud": "",
}
MORE = {  # what one script has beyond the other of its side
    "01_setup/train.py": {"devices": "devices=1,"},
    "02_multi_gpu/train.py": {
        "devices": "devices=args.devices,",
        "logging": 'for package in ("lightning',
        "callbacks": "StepCheckpoint",
        "strategies": "import DDPStrategy; FillGaps.__init__ | self.sums = 0; self.sums = self.sums + ; "
        "FillGaps.on_before_optimizer_step; main.several; num_nodes=args.num_nodes,; strategy=DDPStrategy(; "
        "accumulate_grad_batches=args; rank, world_size = trainer.global_rank; if not trainer.is_global_zero:",
        "starting the ranks": "parse_arguments",
    },
    "01_setup/train_by_hand.py": {
        "devices": "main.on_gpu; main.device; main | batch = {name: value.to(device)",
        "loop": "batch = next(batches)",
        "validation": '"U-Net": validate(',
    },
    "02_multi_gpu/train_ddp_by_hand.py": {
        "devices": 'device, backend = ; if args.accelerator != "cpu" and; device = torch.device(torch.acc; '
        "torch.accelerator.set_device_index(; parts = [{name: value.to(device)",
        "loop": "main.network; parts = [next(batches)",
        "validation": 'main.judged; "U-Net": judged',
        "logging": "main.name",
        "strategies": "import nullcontext; import DistributedDataParallel; rank, world_size, local_rank = ; "
        "backend = distributed.get_default; init_process_group(; model = DistributedDataParallel(; if rank == 0:; "
        "all_reduce(loss); main.mean; destroy_process_group(); if rank > 0:; train_step | world_size = ; "
        "unseen = sum(; all_reduce(unseen); with nullcontext(); part = squares * world_size; all_reduce(sums)",
        "starting the ranks": "parse_arguments",
    },
}
ROWS = [*LIGHTNING, "everything else", "shared"]
NAME = re.compile(r"[\w.]+")


@lru_cache
def code(source: str) -> dict[int, str]:
    """The lines that hold code, by number from 1, without their comments: no blank line, comment or docstring is one."""
    found: set[int] = set()
    lines = source.splitlines()
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type not in layout:
            found |= set(range(row, token.end[0] + 1))
    for node in ast.walk(parsed(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            found -= span(node.body[0])
    return {number: lines[number - 1] for number in sorted(found)}


@lru_cache
def parsed(source: str) -> ast.Module:
    """The script's syntax tree."""
    return ast.parse(source)


def span(node: ast.stmt) -> set[int]:
    """The line numbers of a statement, its decorators included."""
    first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
    return set(range(first, node.end_lineno + 1))


def lines_of_name(source: str, name: str) -> set[int]:
    """The lines of `function`, `Class.method` or `function.variable`; LookupError if not just one is so called."""
    found, inside = [], parsed(source).body
    for part in name.split("."):
        found = [
            node
            for node in inside
            if getattr(node, "name", None) == part
            or (isinstance(node, ast.Assign) and any(getattr(t, "id", None) == part for t in node.targets))
        ]
        inside = [node for outer in found for node in ast.walk(outer) if node is not outer]
    if len(found) != 1:
        raise LookupError(f"{len(found)} definitions are called `{name}`")
    return span(found[0])


def line_of_fragment(source: str, fragment: str) -> set[int]:
    """The line that holds a fragment; LookupError if not just one does."""
    scope, bar, text = fragment.partition(" | ")
    within = lines_of_name(source, scope) if bar and NAME.fullmatch(scope) else None
    text = fragment if within is None else text
    lines = enumerate(source.splitlines(), 1)
    found = {number for number, line in lines if text in line and (within is None or number in within)}
    if len(found) != 1:
        raise LookupError(f"{len(found)} lines hold `{fragment}`")
    return found


def shared_lines(sources: dict[str, str]) -> dict[str, set[int]]:
    """For each side the lines that both have verbatim, in the same order, in definitions of the same name.

    What stands outside of definitions, such as imports, is compared as one.
    """
    lines = {side: code(source) for side, source in sources.items()}
    parts: dict[str, dict[str, list[int]]] = {side: {} for side in sources}
    for side, source in sources.items():
        for node in parsed(source).body:
            part = parts[side].setdefault(getattr(node, "name", ""), [])
            part += sorted(span(node) & lines[side].keys())
    one, other = sources
    shared: dict[str, set[int]] = {one: set(), other: set()}
    for name in parts[one].keys() & parts[other].keys():
        texts = [[lines[side][number] for number in parts[side][name]] for side in sources]
        for block in SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks():
            shared[one] |= set(parts[one][name][block.a : block.a + block.size])
            shared[other] |= set(parts[other][name][block.b : block.b + block.size])
    return shared


def assign(source: str, places: dict[str, list[str]], shared: set[int]) -> dict[str, set[int]]:
    """The lines of each row: each code line is in one. LookupError for a place that is missing, taken or empty."""
    taken: dict[int, tuple[str, str]] = {}  # number: row and place
    listed = [(row, place) for row in places for place in places[row]]
    for row, place in sorted(listed, key=lambda each: (not NAME.fullmatch(each[1]), each[1].count("."))):
        is_name = bool(NAME.fullmatch(place))
        lines = lines_of_name(source, place) if is_name else line_of_fragment(source, place)
        for number in lines & code(source).keys() - shared:
            _, before = taken.get(number, ("", ""))
            if before and not (NAME.fullmatch(before) and (not is_name or place.startswith(f"{before}."))):
                raise LookupError(f"`{place}`: line {number} is already counted by `{before}`")
            taken[number] = row, place
        if (row, place) not in taken.values():
            raise LookupError(f"`{place}`: no line of code that only this side has")
    owner = dict.fromkeys(code(source), "everything else") | dict.fromkeys(shared, "shared")
    owner |= {number: row for number, (row, _) in taken.items()}
    return {row: {number for number, of in owner.items() if of == row} for row in ROWS}


def count(book: Path) -> dict[str, dict[str, set[int]]]:
    """For each of the four scripts, the lines of each row; LookupError names the script and the place."""
    found = {}
    for sides in SCRIPTS.values():
        sources = {side: (book / script).read_text() for side, script in sides.items()}
        shared = shared_lines(sources)
        for side, script in sides.items():
            common = LIGHTNING if side == "Lightning" else BY_HAND
            texts = {row: "; ".join(filter(None, (common[row], MORE[script].get(row)))) for row in common}
            places = {row: text.split("; ") if text else [] for row, text in texts.items()}
            try:
                found[script] = assign(sources[side], places, shared[side])
            except LookupError as error:
                raise LookupError(f"{script}: {error.args[0]}; mend the table of places") from None
            assert sum(map(len, found[script].values())) == len(code(sources[side]))
    return found


def main(argv: list[str] | None = None) -> list[dict]:
    """Print the table and return its rows: {"row", and for each script its number of lines}, the total last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--show", choices=ROWS, metavar="ROW", help=f"print the lines of a row: {', '.join(ROWS)}")
    add("--book", type=Path, default=BOOK, help="folder of the chapters (default: this book)")
    args = parser.parse_args(argv)
    try:
        found = count(args.book)
    except OSError as error:
        parser.error(f"--book {args.book}: {error.strerror}: {error.filename}; give the book's folder")
    except (LookupError, SyntaxError) as error:
        parser.error(f"--book {args.book}: {error.args[0]}")
    rows = [{"row": row} | {script: len(lines[row]) for script, lines in found.items()} for row in ROWS]
    rows.append({"row": "total"} | {script: sum(row[script] for row in rows) for script in found})
    if args.show:
        for script, lines in found.items():
            source = (args.book / script).read_text().splitlines()
            print(f"{script}: {len(lines[args.show])} lines")
            print(*(f"{number:5} {source[number - 1]}" for number in sorted(lines[args.show])), "", sep="\n")
        return rows
    sides = [(side, chapter) for chapter, both in SCRIPTS.items() for side in both]
    print(f"{'code lines, in chapter':26}", *(f"{side + ' ' + str(chapter):>12}" for side, chapter in sides))
    for row in rows:
        print(f"{row['row']:26}", *(f"{row[script]:12}" for script in found))
    return rows


if __name__ == "__main__":
    main()
