"""Chapter 6: a project of your own, made of this folder.

    uv run python new_project.py ../../fill                  # the winds, on data of your own
    uv run python new_project.py ../../mine --task blank     # another task, to be replaced

You should see the two commands to run next. The project has what trains, survives, is
tracked, planned, checked and predicted, the tests of its modules, its packages at the book's
versions, launch files, and a README that says what to replace first. It needs nothing of the
book. Where the text of a file is not the chapter's, project_template/edits.toml says so.
"""

import argparse
import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

from errors import first_line, program, refuse

HERE = Path(__file__).resolve().parent
BOOK = HERE.parent
TESTS = BOOK / "tests"
TEMPLATE = HERE / "project_template"

COPIED = ("*.py", "*/*.py", "launch/*", "prices.toml", "Dockerfile")
# Of those: what only the book needs,
OF_BOOK = ("new_project.py", "demo_store.py", "studies/", "outputs/")
# and what only the winds need.
OF_WINDS = (
    "chunking.py",
    "climatology.py",
    "coast.py",
    "coordinates.py",
    "data.py",
    "datamodule.py",
    "decoding.py",
    "evaluation.py",
    "fields.py",
    "icechunk_store.py",
    "interpolator.py",
    "kept_rmse.py",
    "levels.py",
    "model.py",
    "oi_baseline.py",
    "optimal_interpolation.py",
    "options.py",
    "remedies.py",
    "sampling.py",
    "search_space.py",
    "store.py",
    "store_checksum.py",
    "store_climatology.py",
    "store_defaults.py",
    "store_remedies.py",
    "task.py",
    "wind_blocks.py",
    "predict/",
    "preflight/",
)
# Tests of modules that both tasks have, with the winds' options or data.
TESTS_OF_WINDS = (
    "test_best.py",
    "test_config_file.py",
    "test_model.py",
    "test_run_record.py",
    "test_tune.py",
)
# What tests import beside the modules that they test.
HELPERS = {
    "winds": ["made_up_winds.py", "numbered_blocks.py", "web_server.py"],
    "blank": ["numbered_blocks.py"],
}
# Packages that no file imports, but others of the list do, by name.
BY_NAME = {
    "winds": ["boto3", "cftime", "h5netcdf", "h5py", "numcodecs", "tensorboard"],
    "blank": ["boto3", "tensorboard"],
}
DEVELOPMENT = ["pytest", "pytest-timeout", "ruff"]
IGNORED = """.venv/
__pycache__/
.ipynb_checkpoints/
.pytest_cache/
.ruff_cache/
outputs/
slurm-*.log
"""
# The book's folders, in launch files and in the image, and what they are in a project.
FOLDERS = {
    "-f 06_whats_next/Dockerfile ": "",
    "/book/06_whats_next": "/project",
    "/book": "/project",
    "06_whats_next/": "./",
    "../.venv": ".venv",
    "workdir: ..": "workdir: .",
}
# Lines there that a project does not need.
LINES_OF_BOOK = re.compile(r".*(01_setup|03_cloud_data|cd 06_whats_next).*\n")

Files = dict[str, str]  # the text of each, by its path in the project


def make_files(task: str, name: str) -> Files:
    """All files of a project but its lock. `name` is its name in launch files."""
    files = copy_files(task)
    files |= read_templates(task)
    files |= copy_tests(task, files)
    for path, text in files.items():
        files[path] = reword(path, text, name)
    files["pyproject.toml"] = describe_project(task, name, files)
    files[".gitignore"] = IGNORED
    return files


def copy_files(task: str) -> Files:
    """The files of this folder that the task needs, edited."""
    left_out = OF_BOOK
    if task == "blank":
        left_out += OF_WINDS
    files = {}
    for path in list_files():
        if not path.startswith(left_out):
            files[path] = (HERE / path).read_text()
    edits = tomllib.loads((TEMPLATE / "edits.toml").read_text())
    for edit in edits[task]:
        path = edit["file"]
        files[path] = replace(path, files.get(path, ""), edit["old"], edit["new"])
    return files


def list_files() -> list[str]:
    """The files of this folder that make the chapter, in packages and beside train.py."""
    found = []
    for path in [path for pattern in COPIED for path in HERE.glob(pattern)]:
        folder = path.parent
        is_package = (folder / "__init__.py").exists()
        is_ours = is_package or folder in (HERE, HERE / "launch")
        if is_ours and path.is_file() and not path.name.startswith("."):
            found.append(path.relative_to(HERE).as_posix())
    return sorted(found)


def replace(path: str, text: str, old: str, new: str) -> str:
    """The text with `new` in the place of `old`, which it must have exactly once."""
    if text.count(old) != 1:
        reason = f"{path} has {text.count(old)} times {old.strip()!r}, not once"
        refuse(
            f"{reason}; restore the book's file, or mend project_template/edits.toml"
        )
    return text.replace(old, new)


def read_templates(task: str) -> Files:
    """What the book does not have itself: README, smoke test, and a task to be replaced."""
    files = {"README.md": (TEMPLATE / f"README_{task}.template").read_text()}
    files["tests/small_run.py"] = (TEMPLATE / f"tests/small_run_{task}.py").read_text()
    for name in ("conftest.py", "test_smoke.py"):
        files[f"tests/{name}"] = (TEMPLATE / "tests" / name).read_text()
    ruff = (TEMPLATE / "tests/ruff.toml").read_text()
    files["tests/ruff.toml"] = ruff.replace("../ruff.toml", "../pyproject.toml")
    if task == "blank":
        for path in sorted((TEMPLATE / "blank").glob("*.py")):
            files[path.name] = path.read_text()
    return files


def reword(path: str, text: str, name: str) -> str:
    """The text as it stands in a project of this name."""
    text = re.sub(r'\A"""Chapter 6: (.)', lambda m: f'"""{m[1].upper()}', text)
    text = text.replace("this chapter", "this project").replace("{{name}}", name)
    if not path.startswith(("launch/", "Dockerfile")):
        return text
    text = LINES_OF_BOOK.sub("", text)
    for folder, of_project in FOLDERS.items():
        text = text.replace(folder, of_project)
    return text.replace("winds", name)


# --------------------------------------------------------------------------------------- tests


def copy_tests(task: str, files: Files) -> Files:
    """The tests of modules that need no other file of the book, and their helpers."""
    absent = set(map(module_of, [*list_files(), *list_tests("*.py")]))
    absent -= set(map(module_of, [*files, *HELPERS[task]]))
    left_out = TESTS_OF_WINDS if task == "blank" else ()
    copied = {f"tests/{name}": (TESTS / name).read_text() for name in HELPERS[task]}
    for path in list_tests("modules/test_*.py"):
        name = Path(path).name
        text = (TESTS / path).read_text()
        if name not in left_out and not absent & find_modules(text):
            copied[f"tests/{name}"] = text
    return copied


def list_tests(pattern: str) -> list[str]:
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.glob(pattern))


def module_of(path: str) -> str:
    """The name to import a file or its package by: survival for survival/best.py."""
    return path.split("/")[0].removesuffix(".py")


def find_modules(text: str) -> set[str]:
    """The modules that a script imports, also within functions: the first part of each."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


# ------------------------------------------------------------------------------------- the project


def describe_project(task: str, name: str, files: Files) -> str:
    """pyproject.toml: the packages that are imported, as the book requires them."""
    required = tomllib.loads((BOOK / "pyproject.toml").read_text())
    imported = set(BY_NAME[task])
    for path, text in files.items():
        if path.endswith(".py"):
            imported |= {module.replace("_", "-") for module in find_modules(text)}
    packages = choose(required["project"]["dependencies"], imported)
    development = choose(required["dependency-groups"]["dev"], set(DEVELOPMENT))
    text = (TEMPLATE / "pyproject.template").read_text().replace("{{name}}", name)
    text = text.replace("DEV_PACKAGES", list_packages(development))
    text = text.replace("PACKAGES", list_packages(packages))
    return text


def choose(requirements: list[str], packages: set[str]) -> list[str]:
    """The requirements, such as "zarr>=3.1", of these packages."""
    return [one for one in requirements if re.split(r"[\[<>=]", one)[0] in packages]


def list_packages(requirements: list[str]) -> str:
    return "\n".join(f'    "{one}",' for one in requirements)


def write_project(folder: Path, files: Files) -> None:
    """Write all files, and the book's lock, whose versions uv prefers."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "uv.lock").write_bytes((BOOK / "uv.lock").read_bytes())


def lock(folder: Path) -> None:
    """Make the lock the project's own. Without uv, or a network, say how."""
    try:
        command = ["uv", "lock", "--quiet", "--project", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        failure = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        failure = first_line(error)
    if failure:
        here = shlex.quote(str(folder))
        print(f"note: not locked ({failure}); run: uv lock --project {here}")


def check_folder(folder: Path) -> None:
    """Refuse a folder that has something in it, or lies in the book."""
    if folder.resolve().is_relative_to(BOOK):
        refuse(f"DEST {folder}: inside the book; give a folder outside of {BOOK}")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        remedy = "give another, or delete it"
        refuse(f"DEST {folder}: is there, and not an empty folder; {remedy}")


def make_name(folder: Path) -> str:
    """A name for packages, images and jobs: letters, digits and dashes, 63 at most.

    It is that of no package, which could not be locked beside the project.
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower())
    name = name[:50].strip("-")
    packages = tomllib.loads((BOOK / "uv.lock").read_text())["package"]
    is_taken = name in [package["name"] for package in packages]
    if is_taken or not name[:1].isalpha():
        name = f"project-{name}".rstrip("-")
    return name


def main(argv: list[str] | None = None) -> Path:
    """Make the project; its folder. What is wrong ends with code 2."""
    parser = argparse.ArgumentParser(
        prog=program(), description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DEST", help="the project's, new or empty")
    task = "winds: this chapter's. blank: images drawn on the spot, to be replaced"
    add("--task", choices=("winds", "blank"), default="winds", help=task)
    args = parser.parse_args(argv)
    for path in (BOOK / "pyproject.toml", BOOK / "uv.lock", TESTS, TEMPLATE):
        if not path.exists():
            refuse(f"{path}: not there; run this in the book's repository")
    try:
        check_folder(args.folder)
        files = make_files(args.task, make_name(args.folder))
        write_project(args.folder, files)
    except OSError as error:
        remedy = "give another, or mend that and delete what is there"
        refuse(f"DEST {args.folder}: {error.strerror}; {remedy}")
    lock(args.folder)
    flags = " --store STORE --variables NAME ..." if args.task == "winds" else ""
    print(f"{args.folder}: {len(files)} files. Next:")
    print(f"    cd {shlex.quote(str(args.folder))} && uv sync")
    print(f"    uv run python train.py{flags} --resume auto")
    return args.folder


if __name__ == "__main__":
    main()
