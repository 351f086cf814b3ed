"""Chapter 6: a project of your own, made of this folder.

    uv run python new_project.py ../../fill                  # the winds, on data of your own
    uv run python new_project.py ../../mine --task blank     # another task, to be replaced

You should see the two commands to run next. The project has what trains, survives, is
tracked, planned, checked and predicted, the tests of its modules, its packages at the book's
versions, launch files, and a README that says what to replace first. It needs nothing of the
book. What is copied otherwise than byte for byte is in project_template/edits.toml.
"""

import argparse
import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from errors import first_line, program, refuse

HERE = Path(__file__).resolve().parent
BOOK = HERE.parent
TEMPLATE = HERE / "project_template"

COPIED = ("*.py", "*/*.py", "launch/*", "prices.toml", "Dockerfile")
# Of those: what only the book needs,
NOT_COPIED = ("new_project.py", "demo_store.py", "studies/", "outputs/")
# and what only the winds need.
OF_WINDS = (
    "chunking.py",
    "climatology.py",
    "coordinates.py",
    "data.py",
    "datamodule.py",
    "decoding.py",
    "evaluation.py",
    "fields.py",
    "levels.py",
    "model.py",
    "options.py",
    "remedies.py",
    "sampling.py",
    "store_checksum.py",
    "store_climatology.py",
    "store_defaults.py",
    "task.py",
    "wind_blocks.py",
    "predict/",
    "preflight/",
)
# What checkpoints need of store.py, where the data are no Zarr.
OF_ANY_STORE = {"Location", "client_options"}
# What tests need beside the modules that they test.
HELPERS = ("made_up_winds.py", "numbered_blocks.py")
# Tests that give the winds' options, or take a score for better when it is lower.
TESTS_OF_WINDS = ("test_config_file.py", "test_run_record.py", "test_tune.py")
# Packages that are imported by name, by others of the list.
BY_NAME = {
    "winds": ["boto3", "cftime", "h5netcdf", "h5py", "numcodecs", "tensorboard"],
    "blank": ["boto3", "tensorboard"],
}
DEVELOPMENT = ["pytest", "pytest-timeout", "ruff"]
IGNORED = ".venv/\n__pycache__/\n.pytest_cache/\n.ruff_cache/\noutputs/\n"

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
    left_out = NOT_COPIED + (OF_WINDS if task == "blank" else ())
    files = {}
    for path in list_files():
        if not path.startswith(left_out):
            files[path] = (HERE / path).read_text()
    edits = tomllib.loads((TEMPLATE / "edits.toml").read_text())
    for edit in edits["both"] + edits[task]:
        files[edit["file"]] = replace(files[edit["file"]], **edit)
    if task == "blank":
        defined = set(find_definitions(files["store.py"]))
        files["store.py"] = cut(files["store.py"], defined - OF_ANY_STORE)
    return files


def list_files() -> list[str]:
    """The files of this folder that make the chapter, in packages and beside train.py."""
    paths = [path for pattern in COPIED for path in HERE.glob(pattern)]
    return sorted(path.relative_to(HERE).as_posix() for path in paths)


def replace(text: str, file: str, old: str, new: str) -> str:
    """The text with `new` in the place of `old`, which it must have exactly once."""
    if text.count(old) != 1:
        reason = f"{file} has {text.count(old)} times {old.strip()!r}, not once"
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


# --------------------------------------------------------------------------------------- tests


def copy_tests(task: str, files: Files) -> Files:
    """The tests of modules that the project has, without what they need of the book."""
    tests = BOOK / "tests"
    helpers = HELPERS if task == "winds" else ("numbered_blocks.py",)
    present = {path.removesuffix(".py").split("/")[0] for path in files}
    present |= {name.removesuffix(".py") for name in helpers}
    if task == "blank":
        present -= {"model", "store", "task"}  # whose tests are of the winds'
    book = {path.removesuffix(".py").split("/")[0] for path in list_files()}
    book |= {path.stem for path in tests.glob("*.py")}
    fixtures = set(find_definitions((tests / "conftest.py").read_text()))
    fixtures -= set(find_definitions(files["tests/conftest.py"]))

    copied = {f"tests/{name}": (tests / name).read_text() for name in helpers}
    left_out = TESTS_OF_WINDS if task == "blank" else ()
    for path in sorted(tests.glob("modules/test_*.py")):
        if path.name in left_out:
            continue
        text = path.read_text()
        missing = set(find_imports(text, book - present))
        left = cut(text, missing | fixtures)
        if any(name.startswith("test_") for name in find_definitions(left)):
            copied[f"tests/{path.name}"] = left
    return copied


def find_imports(text: str, modules: set[str]) -> Iterator[str]:
    """The names under which a script imports these modules, or anything of them."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                if module.split(".")[0] in modules:
                    yield alias.asname or alias.name


def find_definitions(text: str) -> Iterator[str]:
    """The functions, classes and constants of a script."""
    for node in ast.parse(text).body:
        yield from names_defined(node)


def names_defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a script defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        each = [part for target in targets for part in ast.walk(target)]
        return [part.id for part in each if isinstance(part, ast.Name)]
    return []


def names_used(node: ast.AST) -> set[str]:
    """The names in a statement: of variables, and of fixtures, which are arguments."""
    used = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            used.add(part.id)
        elif isinstance(part, ast.arg):
            used.add(part.arg)
    return used


def cut(text: str, gone: set[str]) -> str:
    """A script without what defines, imports or uses these names, and its unused imports."""
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [node for node in body if node not in imports]
    gone = set(gone)
    while doomed := [node for node in kept if gone & names_of(node)]:
        kept = [node for node in kept if node not in doomed]
        gone |= {name for node in doomed for name in names_defined(node)}
    used = set().union(*map(names_used, kept))
    lines = text.splitlines(keepends=True)
    for node in reversed(body):
        first, last = find_lines(node, lines)
        if node in imports:
            lines[first:last] = keep_imports(node, used - gone, lines[first:last])
        elif node not in kept:
            del lines[first:last]
    return tidy("".join(lines))


def names_of(node: ast.stmt) -> set[str]:
    return {*names_defined(node), *names_used(node)}


def find_lines(node: ast.stmt, lines: list[str]) -> tuple[int, int]:
    """Where a statement begins, with its decorators and the comment above it, and ends."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)]) - 1
    while first and lines[first - 1].startswith("# ") and "---" not in lines[first - 1]:
        first -= 1
    return first, node.end_lineno


def keep_imports(
    node: ast.Import | ast.ImportFrom, used: set[str], lines: list[str]
) -> list[str]:
    """The lines of an import, without the names that are not used."""
    names = [alias for alias in node.names if bound_by(alias) in used]
    if len(names) == len(node.names):
        return lines
    if not names:
        return []
    node.names = names
    return [f"{ast.unparse(node)}\n"]


def bound_by(alias: ast.alias) -> str:
    """The name that an import makes: xml for `import xml.dom`."""
    return alias.asname or alias.name.split(".")[0]


def tidy(text: str) -> str:
    """A script without headings of nothing, and without more than two blank lines."""
    text = re.sub(r"(# -{9}.*\n\s*)+(?=# -{9}|\Z)", "", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return f"{text.rstrip()}\n"


# ------------------------------------------------------------------------------------- the project


def reword(path: str, text: str, name: str) -> str:
    """The text as it stands in a project of this name."""
    text = re.sub(r'\A"""Chapter 6: (.)', lambda m: f'"""{m[1].upper()}', text)
    text = text.replace("this chapter", "this project").replace("{{name}}", name)
    if path.startswith("launch/") or path == "Dockerfile":
        text = text.replace("winds.zarr", "data").replace("winds", name)
    return text


def describe_project(task: str, name: str, files: Files) -> str:
    """pyproject.toml: the packages that are imported, as the book requires them."""
    required = tomllib.loads((BOOK / "pyproject.toml").read_text())
    imported = set(BY_NAME[task])
    for path, text in files.items():
        if path.endswith(".py"):
            imported |= find_packages(text)
    packages = [
        one for one in required["project"]["dependencies"] if is_of(one, imported)
    ]
    development = required["dependency-groups"]["dev"]
    development = [one for one in development if is_of(one, DEVELOPMENT)]
    text = (TEMPLATE / "pyproject.template").read_text().replace("{{name}}", name)
    text = text.replace("DEV_PACKAGES", list_packages(development))
    return text.replace("PACKAGES", list_packages(packages))


def find_packages(text: str) -> set[str]:
    """The first part of each module that a script imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name.split(".")[0].replace("_", "-") for name in found}


def is_of(requirement: str, packages: set[str] | list[str]) -> bool:
    """Whether a requirement such as "zarr>=3.1" is one of these packages."""
    return re.split(r"[\[<>=]", requirement)[0] in packages


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
        failure = done.stderr.strip().split("\n")[0] if done.returncode else ""
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
        refuse(f"DEST {folder}: is there, and not an empty folder; give another")


def make_name(folder: Path) -> str:
    """A name for packages, images and jobs: letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return name if name[:1].isalpha() else f"project-{name}".rstrip("-")


def main(argv: list[str] | None = None) -> Path:
    """Make the project; its folder. What is wrong ends with code 2, and writes nothing."""
    parser = argparse.ArgumentParser(
        prog=program(), description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DEST", help="the project's, new or empty")
    task = "winds: this chapter's. blank: images drawn on the spot, to be replaced"
    add("--task", choices=("winds", "blank"), default="winds", help=task)
    args = parser.parse_args(argv)
    check_folder(args.folder)
    for path in ("pyproject.toml", "uv.lock", "tests/conftest.py"):
        if not (BOOK / path).is_file():
            refuse(f"{BOOK / path}: not there; run this in the book's repository")
    files = make_files(args.task, make_name(args.folder))
    try:
        write_project(args.folder, files)
    except OSError as error:
        refuse(f"DEST {args.folder}: {error.strerror}; give another")
    lock(args.folder)
    flags = " --store STORE --variables NAME ..." if args.task == "winds" else ""
    print(f"{args.folder}: {len(files)} files. Next:")
    print(f"    cd {shlex.quote(str(args.folder))} && uv sync")
    print(f"    uv run python train.py{flags} --resume auto")
    return args.folder


if __name__ == "__main__":
    main()
