"""A project that new_project.py makes of chapter 6: whole, without the book, and resumed to the bit."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import alone
import book
import kubernetes_validate
import new_project
import programs
import pytest
import runs
import torch
import yaml
from chapter_6 import codes
from made_up_winds import flags_for, make_winds, write

CHAPTER = book.ROOT / "06_whats_next"
TASKS = ("winds", "blank")
# What the book keeps to itself.
THE_BOOKS = {"README.md", "demo_store.py", "new_project.py", "notebook.ipynb", "project_template"}
THE_BOOKS |= {"results", "studies"}

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A project of each task. They are not locked: that needs a network."""
    folder = tmp_path_factory.mktemp("projects")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_project, "lock", lambda folder: None)
        for task, name in (("winds", "My_data"), ("blank", "My_task")):
            made[task] = new_project.main([str(folder / name), "--task", task])
    return made


@pytest.fixture(params=TASKS)
def project(request: pytest.FixtureRequest, projects: dict[str, Path]) -> Path:
    return projects[request.param]


# ------------------------------------------------------------------------------ what is in it


def test_each_file_of_the_chapter_is_in_it_or_is_declared_to_be_left_out(projects: dict[str, Path]) -> None:
    chapter = [path.relative_to(CHAPTER) for path in book.files() if path.is_relative_to(CHAPTER)]
    left = [name for name in chapter if not (projects["winds"] / name).exists()]
    left += [name for name in chapter if name.name in THE_BOOKS]  # README.md is another one
    assert {name.parts[0] for name in left} == THE_BOOKS
    replaced = {path.name for path in new_project.TEMPLATE.glob("blank/*.py")}
    also = [name for name in chapter if not (projects["blank"] / name).exists() and name not in left]
    of_winds = {name.removesuffix("/") for name in new_project.OF_WINDS}
    assert {name.parts[0] for name in also} | replaced - {"shapes.py"} == of_winds


def test_each_test_of_a_module_is_in_it_or_is_of_what_is_left_out(projects: dict[str, Path]) -> None:
    tests = {path.name for path in (book.TESTS / "modules").glob("test_*.py")}
    copied = {task: {path.name for path in (projects[task] / "tests").glob("test_*.py")} for task in TASKS}
    of_book = "failing_bucket moving_average programs residual skill studies".split()
    assert tests - copied["winds"] == {f"test_{name}.py" for name in of_book}
    of_any_task = (
        "block_loader block_order checkpoints clock diary errors heartbeat plan preemption resume".split()
    )
    of_any_task += "smoke step_times stragglers".split()
    assert copied["blank"] == {f"test_{name}.py" for name in of_any_task}


IMPORT_ALL = """
import sys
from importlib import import_module
from pathlib import Path

sys.path[:] = [name for name in sys.path if not name.startswith(BOOKS_TESTS)]
sys.path.append("tests")
for path in Path().rglob("*.py"):
    name = path.with_suffix("").as_posix()
    import_module(name.removeprefix("tests/").replace("/", "."))
    print(path)
"""


def test_all_of_it_and_its_tests_can_be_imported_without_the_book(project: Path) -> None:
    script = project / "import_all.py"
    script.write_text(IMPORT_ALL.replace("BOOKS_TESTS", repr(str(book.TESTS))))
    done = programs.run(script)
    script.unlink()
    assert done.code == 0, done.err
    assert {"train.py", "survival/boundary.py", "plan/__main__.py", "tests/test_resume.py"} <= set(
        done.out.split()
    )


def texts(project: Path) -> dict[str, str]:
    """What one reads of a project, by path: not its tests, which are the modules'."""
    names = [name for name in files_of(project) if not name.startswith("tests/") and name != "uv.lock"]
    return {name: (project / name).read_text() for name in names}


def files_of(project: Path) -> list[str]:
    """All but what Python has compiled."""
    paths = [path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return sorted(path.relative_to(project).as_posix() for path in paths)


def test_a_reader_of_the_other_task_meets_no_winds(projects: dict[str, Path]) -> None:
    for path, text in texts(projects["blank"]).items():
        assert re.findall(r"wind(?!ow)|swath|climatolog|rmse", text, re.IGNORECASE) == [], path


def test_a_reader_meets_neither_the_book_nor_what_is_not_there(project: Path) -> None:
    """But in the first line of the README, and what a record of the code leaves out."""
    for path, text in texts(project).items():
        said = text.replace("chapter 6 of Training at Larger Scale", "").replace(
            "the chapter's `preflight/`", ""
        )
        found = re.findall(r"chapter|\bbook\b|06_|03_|\.\./\.venv|demo store|\{\{", said, re.IGNORECASE)
        assert found == [] or path == "tracking/diary.py", path  # a diary has chapters of its own
    named = re.findall(r"`((?:\w+/)?\w+(?:\.py|/))`", (project / "README.md").read_text())
    assert len(named) > 10
    left_out = {"preflight/", "predict/"} if project.name == "My_task" else set()
    assert {name for name in named if not (project / name).exists()} == left_out


def test_its_launch_files_and_its_image_find_its_files(project: Path) -> None:
    dockerfile = (project / "Dockerfile").read_text()
    last = dict(re.findall(r"^([A-Z]+) (.*)$", dockerfile, re.MULTILINE))
    service, job = yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert last["WORKDIR"] == container["workingDir"]
    assert last["ENV"].startswith(f"PATH={last['WORKDIR']}/.venv/bin:")
    sources = [
        source.removeprefix("./")
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.MULTILINE)
        for source in line.split()
    ]
    assert [source for source in sources if not any(project.glob(source))] == []
    packages = {f"{path.parent.name}/*.py" for path in project.glob("*/__init__.py")}
    assert packages - set(sources) == {"plan/*.py"}
    assert yaml.safe_load((project / "launch/skypilot.yaml").read_text())["workdir"] == "."
    [*_, command] = re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)
    starts = [(project / "launch/skypilot.yaml").read_text(), " ".join(container["command"]), command]
    assert [("--store" in start) for start in starts] == [project.name == "My_data"] * 3
    for document in (service, job):
        kubernetes_validate.validate(document, "1.31", strict=True)
    assert job["metadata"]["name"] == project.name.lower().replace("_", "-")


def test_its_packages_are_those_that_it_imports_as_the_book_requires_them(project: Path) -> None:
    books = tomllib.loads((book.ROOT / "pyproject.toml").read_text())
    described = tomllib.loads((project / "pyproject.toml").read_text())
    assert described["project"]["name"] == project.name.lower().replace("_", "-")
    assert set(described["project"]["dependencies"]) < set(books["project"]["dependencies"])
    development = described["dependency-groups"]["dev"]
    assert set(development) < set(books["dependency-groups"]["dev"])
    assert {requirement.split(">")[0] for requirement in development} == {"pytest", "pytest-timeout", "ruff"}
    by_name = {"boto3", "tensorboard"}
    if project.name == "My_data":
        by_name |= {"cftime", "h5netcdf", "h5py", "numcodecs"}
    imported = set()
    for path in project.rglob("*.py"):
        imported |= new_project.find_modules(path.read_text())
    own = {path.stem for path in project.rglob("*.py")} | {path.name for path in project.glob("*/")}
    imported -= own | sys.stdlib_module_names | {"pytest", "demo_store"}  # which one may write
    declared = {requirement.split(">")[0] for requirement in described["project"]["dependencies"]}
    assert declared == {module.replace("_", "-") for module in imported} | by_name
    [versioned] = re.findall(r"^PACKAGES = (.*)$", (project / "results.py").read_text(), re.MULTILINE)
    assert set(ast.literal_eval(versioned)) <= declared


def test_git_keeps_its_files_and_nothing_that_a_run_writes(project: Path, tmp_path: Path) -> None:
    repository = shutil.copytree(project, tmp_path / "repository")
    for name in ("outputs/train/x.ckpt", "slurm-1.log", "survival/__pycache__/x.pyc", ".venv/x"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).touch()
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    kept = subprocess.check_output(command, cwd=repository, text=True).splitlines()
    assert sorted(kept) == files_of(project)
    assert "uv.lock" in kept


# ------------------------------------------------------------------------------ what it does


def test_the_winds_train_and_want_a_store(projects: dict[str, Path], tmp_path: Path) -> None:
    script = projects["winds"] / "train.py"
    flags = ["--output-dir", tmp_path / "run", "--climatology-dir", tmp_path / "climatology"]
    flags += "--accelerator cpu --max-steps 4 --patches-per-block 2".split()
    store = write(tmp_path / "winds.zarr", make_winds())
    refused = programs.run(script, *flags)
    assert refused.code == 2
    assert "--store: not given" in refused.err.splitlines()[-1]
    assert "Traceback" not in refused.err
    programs.require_success(script, *flags_for(store, *flags))
    assert runs.summary(tmp_path / "run")["parameters"] > 0


RANKS = [1, pytest.param(2, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_other_task_is_killed_and_resumes_to_the_bit(
    projects: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    flags = "--accelerator cpu --batch-size 8 --max-steps 8 --checkpoint-every 2 --validate-every 4".split()
    flags += "--loggers CSVLogger --resume auto --output-dir".split()

    def train(name: str, **faults: object) -> list[int]:
        script = projects["blank"] / "train.py"
        return codes(
            programs.run_ranks(script, ranks, *flags, tmp_path / name, wait_for_writes=True, **faults)
        )

    assert train("whole") == [0] * ranks
    assert -9 in train("killed", planted={0: {"kill_at_step": 5}})
    assert train("killed") == [0] * ranks
    assert (tmp_path / "killed/resumed_at_4").is_dir()
    whole, killed = runs.state(tmp_path / "whole"), runs.state(tmp_path / "killed")
    assert whole["step"] == 8
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)
    assert runs.summary(tmp_path / "killed")["tested"] == runs.summary(tmp_path / "whole")["tested"]


# ------------------------------------------------------------------------------ how it is made


def test_a_folder_that_is_there_or_in_the_book_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt", tmp_path / "mine.txt/project", CHAPTER / "project"):
        with pytest.raises(SystemExit) as ended:
            new_project.main([str(folder), "--task", "blank"])
        assert ended.value.code == 2
        assert f"DEST {folder}: " in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_up(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for folder, reason in (
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "full", "No space left"),
    ):
        with pytest.raises(SystemExit) as ended, monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", fill_up)
            new_project.main([str(folder), "--task", "blank"])
        assert ended.value.code == 2
        assert f"DEST {folder}: {reason}" in capsys.readouterr().err.splitlines()[-1]


NAMES = {"a b/it's": "it-s", "2024": "project-2024", "torch": "project-torch", "x" * 200: "x" * 50}


@pytest.mark.parametrize("name", NAMES)
def test_its_name_can_be_a_package_and_a_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new_project, "lock", lambda folder: None)
    folder = tmp_path / name
    folder.mkdir(parents=True)  # an empty one may be there
    new_project.main([str(folder), "--task", "blank"])
    described = tomllib.loads((folder / "pyproject.toml").read_text())
    assert described["project"]["name"] == NAMES[name]
    told = capsys.readouterr().out.splitlines()
    assert shlex.split(told[-2])[1] == str(folder)


def test_what_a_reader_keeps_beside_the_chapters_files_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = alone.copy_chapter(CHAPTER, tmp_path / "book/06_whats_next").parent
    before = new_project.list_files()
    monkeypatch.setattr(new_project, "HERE", copied)
    for name in ("launch/.x.swp", ".ipynb_checkpoints/train-checkpoint.py", "venv/a.py", "launch/old/x.sh"):
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).write_bytes(b"\xff")
    assert new_project.list_files() == before


def test_without_the_book_or_with_a_file_that_is_not_the_books_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(named: str) -> None:
        with pytest.raises(SystemExit) as ended:
            new_project.main([str(tmp_path / "project")])
        assert ended.value.code == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "project").exists()

    copied = alone.copy_chapter(CHAPTER, tmp_path / "book/06_whats_next").parent
    monkeypatch.setattr(new_project, "HERE", copied)
    (copied / "Dockerfile").write_text("FROM scratch\n")
    refuse("Dockerfile")
    monkeypatch.setattr(new_project, "BOOK", copied.parent)
    refuse("run this in the book's repository")


def test_without_uv_it_says_what_to_run_and_it_ends_with_the_next_two_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    new_project.main([str(tmp_path / "project"), "--task", "blank"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("note: not locked (")
    assert said[0].endswith(f"run: uv lock --project {tmp_path / 'project'}")
    assert said[-2:] == [
        f"    cd {tmp_path / 'project'} && uv sync",
        "    uv run python train.py --resume auto",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("task", TASKS)
def test_in_an_environment_of_its_own(task: str, tmp_path: Path) -> None:
    """All that its README says, and the versions of the book's lock."""
    project = new_project.main([str(tmp_path / "project"), "--task", task])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_", "VIRTUAL_"))
    }

    def run(*command: object, code: int = 0) -> str:
        words = ["uv", *map(str, command)]
        done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, code), done.stdout + done.stderr
        return done.stdout

    run("sync", "--locked")
    assert versions(project / "uv.lock").items() <= versions(book.ROOT / "uv.lock").items()
    run("run", "ruff", "check")
    run("run", "ruff", "format", "--check")
    run("run", "pytest")
    folder = ["--output-dir", tmp_path / "run"]
    flags = "--accelerator cpu --max-steps 4 --checkpoint-every 4 --validate-every 4".split()
    if task == "winds":
        store = write(tmp_path / "winds.zarr", make_winds())
        flags = flags_for(store, *flags, "--patches-per-block", 2)
        found = run("run", "python", "-m", "preflight", *flags, *folder, code=2)
        assert set(re.findall(r"^RED +(\w+)", found, re.MULTILINE)) <= {"loader"}  # which is about speed
        assert re.search(r"^green +one batch", found, re.MULTILINE)
    run("run", "python", "train.py", *flags, *folder)
    run("run", "python", "-m", "plan", tmp_path / "run", "--device", "cpu", "--samples", "1e6")
    search = ["--trials", 1, "--search-dir", tmp_path / "search"]
    run("run", "python", "tune.py", *search, *flags, *folder)
    if task == "winds":
        checkpoint = max((tmp_path / "run/checkpoints").glob("step_*.ckpt"))
        place = [
            "--store",
            store,
            "--times",
            1985,
            1985,
            "--overlap",
            4,
            "--output",
            tmp_path / "filled.zarr",
        ]
        run("run", "python", "-m", "predict", checkpoint, *place)


def versions(lock: Path) -> dict[str, str]:
    """The version of each package in a lock, but for the project itself."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {one["name"]: one["version"] for one in packages if "virtual" not in one["source"]}
