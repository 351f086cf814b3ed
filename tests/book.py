"""What keeps text, code, figures and notebooks together. No chapter needs this file.

A page imports it in its cog blocks, which are run from the repository's root, and the tests
import it. Relative paths are taken from the root, wherever the caller stands.

    uv run python tests/book.py notebooks [PATH ...]    # execute notebooks and save them in place
    uv run python tests/book.py readme                  # fill the cog blocks of every page
    uv run python tests/book.py carry                   # copy what chapters share forward, see HANDED_ON
    uv run python tests/book.py density [PATH ...]      # how densely scripts are written
"""

import argparse
import ast
import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import density
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CHAPTERS = [
    "01_setup",
    "02_multi_gpu",
    "03_cloud_data",
    "04_data_pipeline",
    "05_model_profiling",
    "06_whats_next",
]
# The files that a chapter has first, or changes last: from then on every chapter with modules has the same bytes.
# Edit them there, and `carry` copies them on.
HANDED_ON = {
    "01_setup": [
        "arguments.py",
        "checks.py",
        "climatology.py",
        "clock.py",
        "coast.py",
        "coordinates.py",
        "data.py",
        "decoding.py",
        "ending.py",
        "errors.py",
        "evaluation.py",
        "fields.py",
        "interpolator.py",
        "kept_rmse.py",
        "levels.py",
        "local_file.py",
        "oi_baseline.py",
        "optimal_interpolation.py",
        "remedies.py",
        "results.py",
        "sampling.py",
        "store_defaults.py",
        "task.py",
    ],
    "02_multi_gpu": ["checkpoints.py", "devices.py", "model.py", "steps.py", "workers.py"],
    "03_cloud_data": [
        "chunking.py",
        "command_line.py",
        "demo_store.py",
        "icechunk_store.py",
        "location.py",
        "store.py",
        "store_checks.py",
        "store_climatology.py",
        "store_remedies.py",
        "studies/__init__.py",
        "studies/server.py",
        "studies/stores.py",
    ],
    "04_data_pipeline": ["block_loader.py", "block_order.py", "datamodule.py", "slots.py", "wind_blocks.py"],
    "05_model_profiling": ["model.py", "precision.py"],
}
STUDIES = ["studies/__init__.py", "studies/server.py", "studies/stores.py"]
OF_A_FILE = ["local_file.py", "task.py"]  # chapters 3 to 6 read a store
NOT_HANDED_ON = {
    "03_cloud_data": OF_A_FILE,
    "04_data_pipeline": OF_A_FILE,
    "05_model_profiling": [*OF_A_FILE, *STUDIES],  # it has none
    "06_whats_next": [*OF_A_FILE, "checkpoints.py", *STUDIES],  # it has survival/checkpoints.py
}


def _carried_files() -> dict[str, list[str]]:
    """The files of each chapter that are copies of an earlier chapter's."""
    carried = {}
    for number, chapter in enumerate(CHAPTERS):
        earlier = [name for before in CHAPTERS[:number] for name in HANDED_ON.get(before, [])]
        own = {*HANDED_ON.get(chapter, []), *NOT_HANDED_ON.get(chapter, [])}
        if number:
            carried[chapter] = sorted(set(earlier) - own)
    return carried


CARRIED = _carried_files()
KERNELSPEC = {
    "display_name": "Training at Larger Scale",
    "language": "python",
    "name": "training-at-larger-scale",
}
MAX_NOTEBOOK_BYTES = 1_500_000


def files(pattern: str = "*") -> list[Path]:
    """Every file of the book whose name matches: what git has, or would add, and so nothing that a run wrote."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = sorted({ROOT / name for name in listed.split("\0") if name})
    return [path for path in found if path.match(pattern) and path.is_file()]


def pages() -> list[Path]:
    """The pages that a reader reads: every README.md, and every entry of the appendix."""
    return sorted({*files("README.md"), *files("appendix/*.md")})


def clone(folder: Path) -> Path:
    """Copy the book's files to a folder and return it: what runs there writes nothing here."""
    for path in files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


def _same_bytes(one: Path, other: Path) -> bool:
    """Whether both files exist and are equal."""
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


# ------------------------------------------------------------------------------ chapters and modules


def carried() -> list[tuple[Path, Path]]:
    """Each file that CARRIED has: an earlier chapter's, then its copy, in the order of the chapters."""
    pairs = []
    for number, chapter in enumerate(CHAPTERS):
        for name in CARRIED.get(chapter, []):
            before = [ROOT / earlier / name for earlier in CHAPTERS[:number]]
            source = next(path for path in reversed(before) if path.exists())
            pairs.append((source, ROOT / chapter / name))
    return pairs


def outdated_copies() -> list[Path]:
    """The declared copies that are not equal to the earlier chapter's file."""
    return [copied for source, copied in carried() if not _same_bytes(source, copied)]


def carry() -> list[Path]:
    """Copy each declared file forward, chapter after chapter, and return the copies that changed.

    GitHub folds the copies in a pull request, by .gitattributes.
    """
    changed = []
    folded = []
    for source, copied in carried():
        folded.append(f"{copied.relative_to(ROOT).as_posix()} linguist-generated\n")
        if not _same_bytes(source, copied):
            shutil.copy(source, copied)
            changed.append(copied)
    (ROOT / ".gitattributes").write_text("".join(sorted(folded)))
    return changed


def module_names() -> set[str]:
    """The names under which the Python files of all chapters and of the appendix are imported."""
    paths = [*ROOT.glob("[0-9][0-9]_*/*.py"), *ROOT.glob("appendix/*.py")]
    packages = ROOT.glob("[0-9][0-9]_*/*/__init__.py")
    return {path.stem for path in paths} | {path.parent.name for path in packages}


def _take_out(names: set[str]) -> dict[str, ModuleType]:
    """Take the modules of these names out of sys.modules, and return them."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


_open_rooms: str | None = None


def rooms_are_open() -> bool:
    """Whether a block of `rooms` has been entered."""
    return _open_rooms is not None


@contextmanager
def rooms(folder: str) -> Iterator[None]:
    """Make the files of one chapter's folder importable by their own names, within a block.

        with book.rooms("05_model_profiling"):
            from fields import DataError

    Chapters have files of the same names. Modules of any chapter that are loaded already are therefore put
    aside, as are their folders, and come back at the end of the block, where this folder's own modules are
    taken out. Functions and classes that were imported in the block can be used after it, but not pickled.
    RuntimeError inside another such block, because sys.modules holds one module of each name.
    """
    global _open_rooms
    if _open_rooms is not None:
        raise RuntimeError(f"the rooms of {_open_rooms} are open; leave them before those of {folder}")
    names = module_names() - {module.stem for module in TESTS.glob("*.py")}
    put_aside = _take_out(names)
    paths = list(sys.path)
    elsewhere = [name for name in paths if Path(name).parent != ROOT or Path(name) == TESTS]
    sys.path[:] = [str(ROOT / folder), *elsewhere]
    _open_rooms = folder
    try:
        yield
    finally:
        _open_rooms = None
        _take_out(names)
        sys.modules.update(put_aside)
        sys.path[:] = paths


# ------------------------------------------------------------------------------------ into a README


def show(text: str) -> None:
    """Write text, as a paragraph of its own, where the cog block stands. Without cog, print it.

    ValueError for text that cog, on its next run, would take for the end of a block.
    """
    for line in text.splitlines():
        if "]]]" in line or "[[[cog" in line:
            raise ValueError(f"cog takes ]]] for a marker of its own; rewrite this line: {line}")
    cog = sys.modules.get("cog")
    if cog is None or isinstance(sys.stdout, io.StringIO):  # cog -P puts a StringIO in its place
        print(f"\n{text}\n")
    else:
        cog.outl(f"\n{text}\n")


def fence(text: str, language: str) -> str:
    """A fenced block, with a fence longer than any in the text."""
    ticks = max([2, *(len(run) for run in re.findall(r"`{3,}", text))]) + 1
    return f"{'`' * ticks}{language}\n{text.rstrip()}\n{'`' * ticks}"


def _markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. A column that holds numbers and nothing else is aligned to the right."""
    number = re.compile(r"\W?\d[\d\Wex]*")  # no letters but those of 1e-3 and 2.5x
    columns = [[row[i] for row in rows if row[i]] for i in range(len(headers))]
    numeric = [bool(cells) and all(map(number.fullmatch, cells)) for cells in columns]
    rule = ["--:" if right else "---" for right in numeric]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, rule, *escaped])


# --------------------------------------------------------------------------- scripts, by definition


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement defines; none for an import or a docstring.

    A bare statement, such as a call, goes by its first line, so that no change escapes the table.
    """
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            return [ast.unparse(part) for part in parts]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [ast.unparse(target)]
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return []
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return ["__main__"]
    return [ast.unparse(statement).splitlines()[0]]


def _lines(node: ast.stmt, lines: list[str]) -> range:
    """The line numbers, from 1, of a definition with its decorators and the comment upon it."""
    first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return range(first, node.end_lineno + 1)


def _docstring_lines(definition: ast.stmt, lines: list[str]) -> set[int]:
    """The line numbers of every docstring in a definition, and of the blank line below each."""
    found: set[int] = set()
    for node in ast.walk(definition):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None and len(node.body) > 1:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            found |= set(range(first, last + (1 if lines[last].strip() else 2)))
    return found


def _target(path: Path) -> str:
    """The path as seen from the README that cog is filling; its name alone when none is."""
    reader = getattr(sys.modules.get("cog"), "inFile", path)
    return Path(os.path.relpath(path, (ROOT / reader).parent)).as_posix()


def line(script: str, text: str) -> str:
    """A link to the one line of a script that holds `text`, and shows it; LookupError if not just one does."""
    lines = (ROOT / script).read_text().splitlines()
    numbers = [number for number, source in enumerate(lines, 1) if text in source]
    if len(numbers) != 1:
        raise LookupError(f"{script}: {len(numbers)} lines hold `{text}`")
    return f"[`{text.strip()}`]({_target(ROOT / script)}#L{numbers[0]})"


def excerpt(script: str, *names: str, docstring: bool = True, link: bool = True) -> str:
    """The named definitions of a script, as they are written, in one fenced block.

    A method is named `Class.method` and is dedented. `docstring=False` leaves out the docstrings.
    A line below the block links each name to its line, as seen from the README that cog is filling.
    """
    path = ROOT / script
    text = path.read_text()
    lines = text.splitlines()
    target = _target(path)
    sources, links = [], []
    for name in names:
        body = ast.parse(text).body
        for part in name.split("."):
            node = next((node for node in body if part in _names(node)), None)
            if node is None:
                raise LookupError(f"{script} defines no `{name}`")
            body = getattr(node, "body", [])
        numbers = _lines(node, lines)
        left_out = set() if docstring else _docstring_lines(node, lines)
        source = "\n".join(lines[number - 1] for number in numbers if number not in left_out)
        sources.append(textwrap.dedent(source))
        label = path.name if len(names) == 1 else f"`{name}`"
        links.append(f"[{label}, line {numbers[0]}]({target}#L{numbers[0]})")
    block = fence("\n\n\n".join(sources), "python")
    return f"{block}\n\n{', '.join(links)}" if link else block


def definitions(script: str) -> dict[str, str]:
    """The source of each top-level def, class and constant by name, and of the guard as `__main__`.

    Constants that are assigned together go by their joined names, as in "WIDTH, HEIGHT".
    """
    text = (ROOT / script).read_text()
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if name := ", ".join(_names(node)):
            source = "\n".join(lines[number - 1] for number in _lines(node, lines))
            found[name] = f"{found[name]}\n\n\n{source}" if name in found else source
    return found


def files_table(old: str, new: str, reasons: dict[str, str]) -> str:
    """The table of the Python files in a chapter's folder that are new, or changed from the old folder.

    `reasons` must name each of them, and may name carried ones. A key may name several files, of one kind.
    In the first chapter, whose `old` is "", all are new.
    """
    paths = {path.name: path for path in files("*.py") if path.parent == ROOT / new}
    kinds = {}
    for name, path in paths.items():
        before = ROOT / old / name
        if not before.is_file():
            kinds[name] = "new"
        elif _same_bytes(before, path):
            kinds[name] = "carried"
        else:
            kinds[name] = "changed"

    groups = {tuple(names.split()): why for names, why in reasons.items()}
    named = [name for names in groups for name in names]
    unexplained = [name for name, kind in kinds.items() if kind != "carried" and name not in named]
    wrong = [f"no reason for {name} ({kinds[name]})" for name in unexplained]
    wrong += [f"there is no {name}" for name in named if name not in paths]
    wrong += [f"{names} differ in kind" for names in groups if len({kinds.get(name) for name in names}) > 1]
    if wrong:
        raise ValueError(f"{old} -> {new}: {'; '.join(wrong)}")
    rows = []
    for names, why in groups.items():
        links = [f"[`{name}`]({_target(paths[name])})" for name in names]
        rows.append([", ".join(links), kinds[names[0]], why])
    if not old:
        return _markdown_table(["File", "What it is"], [[row[0], row[2]] for row in rows])
    return _markdown_table(["File", "What", "Why"], rows)


def packages_table(folder: str, headers: list[str], cells: dict[str, list[str]]) -> str:
    """The table of the packages in a chapter's folder. `cells` must have a row for each, and no other."""
    found = [path.parent for path in files("__init__.py") if path.parent.parent == ROOT / folder]
    packages = {path.name: path for path in found}
    wrong = [f"no row for {name}" for name in packages if name not in cells]
    wrong += [f"there is no {name}" for name in cells if name not in packages]
    if wrong:
        raise ValueError(f"{folder}: {'; '.join(wrong)}")
    rows = [[f"[`{name}/`]({_target(packages[name])})", *row] for name, row in cells.items()]
    return _markdown_table(["Package", *headers], rows)


# ------------------------------------------------------------------------------------------ results


def results(path: str) -> dict:
    """Load results/*.json; ValueError if it lacks how, when, where or what was measured."""
    loaded = json.loads((ROOT / path).read_text())
    missing = {"command", "date", "machine", "versions", "rows"} - loaded.keys()
    missing |= {"cpu", "cores", "memory_gb", "gpu"} - loaded.get("machine", {}).keys()
    if missing or not loaded["rows"]:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing)) or 'rows'}")
    return loaded


def table(rows: list[dict], columns: dict[str, str | Callable[[dict], object]]) -> str:
    """A Markdown table; a column is a key of the row, a format like "{rmse:.2f}" or a function."""

    def cell(row: dict, column: str | Callable[[dict], object]) -> str:
        if callable(column):
            value = column(row)
        else:
            value = column.format(**row) if "{" in column else row[column]
        return "" if value is None else str(value)

    cells = [[cell(row, column) for column in columns.values()] for row in rows]
    return _markdown_table(list(columns), cells)


def measured(results: dict, list_versions: bool = True) -> str:
    """One sentence: the command, the machine, the versions and the date behind some results.

    A page that has named the versions before may leave them out.
    """
    machine = results["machine"]
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    spelt = {"python": "Python"}
    versions = [f"{spelt.get(name, name)} {number}" for name, number in results["versions"].items()]
    where = f"{cores} of {machine['cpu']}, {machine['memory_gb']:g} GB, {machine['gpu'] or 'no GPU'}"
    numbers = f"; {', '.join(versions)}" if list_versions else ""
    return f"Measured with `{results['command']}` on {where}{numbers}; {results['date']}."


# ---------------------------------------------------------------------------------------- notebooks


def execute(path: Path, parameters: dict | None = None, timeout: int = 600) -> NotebookNode:
    """Run a notebook in its own folder and return it; nothing is written.

    The kernel is this interpreter, whatever kernels are registered under the notebook's name.
    `parameters` are assigned in a new cell below the one that is tagged "parameters".
    """
    path = ROOT / path
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
        tagged = [i for i, names in enumerate(tags) if "parameters" in names]
        if not tagged:
            raise ValueError(f"{path}: no cell is tagged `parameters`")
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(tagged[0] + 1, nbformat.v4.new_code_cell(source))
    # With no folder of kernels to look in, only `python3` is left, and that is sys.executable.
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        if (
            os.name == "posix"
        ):  # sockets in a folder of its own: no other program can take a port of the kernel
            manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=timeout,
            resources={"metadata": {"path": str(path.parent)}},
            coalesce_streams=True,
        )
        return client.execute(cleanup_kc=True, env=os.environ | {"PATH": programs})


def output_text(output: NotebookNode) -> str:
    """All that an output holds except its pictures, as JSON."""
    data = {kind: value for kind, value in output.get("data", {}).items() if "image/" not in kind}
    return json.dumps(output | {"data": data}, ensure_ascii=False)


def clean(notebook: NotebookNode) -> NotebookNode:
    """A copy to commit: stable cell ids, no timings, the book's kernel.

    ValueError, naming the cell, for what a reader should not see: warnings and progress bars, and
    paths of this machine.
    """
    notebook = copy.deepcopy(notebook)
    private = {str(ROOT), str(Path.home())} - {"/"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if key in cell.metadata}
        cell.metadata = NotebookNode(kept)
        for output in cell.get("outputs", []):
            text = output_text(output)
            if output.get("name") == "stderr" or re.search(r"jupyter\.widget-view|it/s\]", text):
                raise ValueError(f"cell-{number} shows a warning or a progress bar: {text[:500]}")
            if any(path in text for path in private):
                raise ValueError(f"cell-{number} shows a path of this machine: {text[:500]}")
    kernelspec, language = NotebookNode(KERNELSPEC), NotebookNode(name="python")
    notebook.metadata = NotebookNode(kernelspec=kernelspec, language_info=language)
    notebook.nbformat_minor = max(5, notebook.nbformat_minor)  # from 4.5 on, cells carry ids
    return notebook


def save(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, or raise ValueError and leave the file alone if it is over 1.5 MB."""
    nbformat.validate(notebook)
    text = nbformat.writes(notebook).rstrip() + "\n"
    if len(text.encode()) > MAX_NOTEBOOK_BYTES:
        raise ValueError(f"{path} would hold {len(text.encode()) / 1e6:.1f} MB; the limit is 1.5 MB")
    (ROOT / path).write_text(text)


# ----------------------------------------------------------------------------- reading the Markdown


def _blocks(text: str) -> Iterator[tuple[str | None, str]]:
    """The fenced blocks of a Markdown text as (language, body), the rest as (None, text)."""
    lines, language, ticks = [], None, ""
    for line in text.splitlines():
        opening = re.match(r"\s*(`{3,}|~{3,})\s*([\w-]*)", line)
        closes = ticks and line.strip().startswith(ticks) and not line.strip().strip(ticks[0])
        if closes or (opening and not ticks):
            yield language, "\n".join(lines)
            lines, language, ticks = [], None, ""
            if not closes:
                ticks, language = opening.groups()
        else:
            lines.append(line)
    yield language, "\n".join(lines)


def _prose(markdown: Path) -> str:
    """A Markdown file without its HTML comments, where cog's code stands, and its fenced blocks."""
    text = re.sub(r"<!--.*?-->", "", markdown.read_text(), flags=re.DOTALL)
    return "\n".join(body for language, body in _blocks(text) if language is None)


def command_blocks(markdown: Path, language: str = "sh") -> list[list[str]]:
    """The command lines of each fenced ```sh block: continued lines joined, comments taken off."""
    blocks = [body for name, body in _blocks((ROOT / markdown).read_text()) if name == language]
    joined = [re.sub(r"\s*\\\n\s*", " ", body).splitlines() for body in blocks]
    bare = [[re.sub(r"(^|\s)#.*", "", line).strip() for line in lines] for lines in joined]
    return [[line for line in lines if line] for lines in bare]


def commands(markdown: Path, language: str = "sh") -> list[str]:
    """The command lines of all ```sh blocks of a Markdown file, in order."""
    return [line for block in command_blocks(markdown, language) for line in block]


def anchors(markdown: Path) -> set[str]:
    """What `#anchor` can name in a Markdown file: its headings by GitHub's rule, and HTML ids."""
    prose = _prose(markdown)
    found = set(re.findall(r"<\w+[^>]* (?:id|name)=\"([^\"]+)\"", prose))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^ {0,3}#{1,6}\s+(.*?)[\s#]*$", prose, flags=re.MULTILINE):
        visible = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", visible.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken_links(markdown: Path, root: Path = ROOT) -> list[str]:
    """The relative links and images of a Markdown file that lead nowhere, each with the reason.

    Nowhere is: no such file, a file that is not in the repository (outside it, or in outputs/), no
    such heading, a line beyond the end. Links to the web are not followed.
    """
    markdown = root / markdown
    prose = re.sub(r"(`+)[^\n]+?\1", "", _prose(markdown))
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose)
    targets += re.findall(r"^ {0,3}\[[^\]]+\]:\s*(\S+)", prose, flags=re.MULTILINE)
    targets += re.findall(r"<(?:img|a|source)\b[^>]* (?:src|href)=\"([^\"]+)\"", prose)
    broken = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = Path(os.path.normpath(markdown.parent / name)) if name else markdown
        if not path.exists():
            broken.append(f"{target}: no such file")
        elif not path.is_relative_to(root) or "outputs" in path.relative_to(root).parts:
            broken.append(f"{target}: not in the repository")
        elif re.fullmatch(r"L\d+(-L\d+)?", anchor) and path.suffix != ".md":
            if int(anchor.rpartition("L")[2]) > len(path.read_text().splitlines()):
                broken.append(f"{target}: beyond the end of the file")
        elif anchor and (path.suffix != ".md" or anchor not in anchors(path)):
            broken.append(f"{target}: no such heading")
    return broken


# ------------------------------------------------------------------------------------- command line


def _execute_notebooks(paths: list[Path]) -> None:
    """Execute these notebooks and save them in place; all if none is named."""
    for path in [path.resolve() for path in paths] or files("*.ipynb"):
        save(clean(execute(path)), path)
        print(f"{path}: executed, {path.stat().st_size / 1e3:.0f} kB")


def _print_densities(paths: list[Path]) -> None:
    """Print the density of each script in these files and folders; of all but the tests if none is named."""
    scripts = files("*.py")
    if paths:
        places = [path.resolve() for path in paths]
        chosen = [path for path in scripts if any(path.is_relative_to(place) for place in places)]
    else:
        chosen = [path for path in scripts if path.parent != TESTS]
    print(density.report(chosen))


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return an exit code."""
    parser = argparse.ArgumentParser(description="Bring notebooks, pages and shared files up to date.")
    programs = parser.add_subparsers(dest="program", required=True)
    notebooks = programs.add_parser("notebooks", help="execute notebooks and save them in place")
    notebooks.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="all if none is named")
    programs.add_parser("readme", help="fill the cog blocks of every README.md and of the appendix's pages")
    programs.add_parser("carry", help="copy the files that chapters share from each chapter to the next")
    densities = programs.add_parser("density", help="count the tokens of scripts in each statement and file")
    densities.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="all but the tests if none is named"
    )
    options = parser.parse_args(argv)
    if options.program == "notebooks":
        _execute_notebooks(options.paths)
    elif options.program == "carry":
        for path in carry():
            print(f"{path.relative_to(ROOT)}: copied from the chapter before")
    elif options.program == "density":
        _print_densities(options.paths)
    else:
        names = [str(path.relative_to(ROOT)) for path in pages()]
        return subprocess.run([sys.executable, "-m", "cogapp", "-r", *names], cwd=ROOT).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
