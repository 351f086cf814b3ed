"""Chapter 6's launch files and its image: how they start train.py, and what they make of its exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import book
import kubernetes_validate
import pytest
import yaml
from torch.distributed import run as torchrun

CHAPTER = book.ROOT / "06_whats_next"
LAUNCH = CHAPTER / "launch"
PRINT = 'printf "%q " "$@"'  # a stub's script: what it was given


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[None]:
    """The chapter's files can be imported in each test."""
    with book.rooms("06_whats_next"):
        yield


@pytest.fixture
def stub(tmp_path: Path):
    """Call it with (name, shell script): the environment in which the script takes that program's place."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, script: str) -> dict:
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
        return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    return write


def parse(flags: list[str]) -> Namespace:
    """What chapter 6's parser makes of flags; it exits at one that it does not know."""
    import options

    args = options.make_parser("").parse_args(flags)
    assert args.resume == "auto"
    return args


def longest_stop() -> int:
    """Seconds that train.py may take to end: for a checkpoint that is being written, and for the last one."""
    return 2 * parse(["--resume", "auto"]).grace


def manifest() -> tuple[dict, dict]:
    """The Service and the Job."""
    return tuple(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))


def sky_task() -> dict:
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def words(command: list, environment: dict, folder: Path = CHAPTER) -> list[str]:
    """What a launch file gives to a program whose stub prints it."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


# ---------------------------------------------------------------------------------------- Kubernetes


def test_kubernetes_accepts_the_manifest() -> None:
    documents = manifest()
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    broken = manifest()[1]
    broken["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_the_pods_find_each_other_and_their_volumes() -> None:
    service, job = manifest()
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    flags = parse(container["command"][6:])
    assert flags.num_nodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert flags.devices == int(container["resources"]["limits"]["nvidia.com/gpu"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert flags.output_dir == mounts["outputs"]


def test_kubernetes_retries_what_can_go_on_and_nothing_else() -> None:
    from survival import preemption

    spec = manifest()[1]["spec"]
    pod = spec["template"]["spec"]
    by_code = {}
    by_condition = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})
        assert codes.get("operator", "In") == "In"
        assert codes.get("containerName", "train") == pod["containers"][0]["name"]
        by_code |= dict.fromkeys(codes["values"], rule["action"])
        conditions = [condition["type"] for condition in rule.get("onPodConditions", [])]
        by_condition |= dict.fromkeys(conditions, rule["action"])
    assert by_code == {2: "FailJob", preemption.EXIT_AGAIN: "Ignore"}
    assert by_condition == {"DisruptionTarget": "Ignore"}
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses the rules with any other
    assert spec["backoffLimit"] > 0
    assert pod["terminationGracePeriodSeconds"] > longest_stop()


# ------------------------------------------------------------------------ Lightning's own launcher


def by_kubernetes(node: int) -> tuple[list, dict]:
    """What Kubernetes runs in a pod, and the environment that it makes."""
    container = manifest()[1]["spec"]["template"]["spec"]["containers"][0]
    assert container["workingDir"] == "/book/06_whats_next"
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(node)}
    environment = {
        item["name"]: item.get("value") or fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        for item in container["env"]
    }
    return container["command"], environment


def by_skypilot(node: int) -> tuple[list, dict]:
    """What SkyPilot runs on a node, and the environment that it makes."""
    names = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": str(node)}
    names["NUM_GPUS_PER_NODE"] = "8"
    # The copy at the end is not for this machine.
    script = f"cp() {{ :; }}\ncd ..\n{sky_task()['run']}"
    return ["bash", "-c", script], {f"SKYPILOT_{name}": names[name] for name in names}


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(("starter", "head"), [(by_kubernetes, "winds-0.winds"), (by_skypilot, "10.0.0.1")])
def test_each_node_starts_train_py_with_its_rank_and_the_place_to_meet(starter, head, node, stub) -> None:
    import checks

    command, environment = starter(node)
    printed = f'{PRINT} "$NODE_RANK" "$MASTER_ADDR" "$MASTER_PORT"'
    *given, rank, address, port = words(command, stub("uv", printed) | environment)
    assert (rank, address) == (str(node), head)
    assert 1024 <= int(port) < 65536
    assert given[:5] == "run --frozen --no-sync python train.py".split()
    flags = parse(given[5:])
    assert (flags.devices, flags.num_nodes) == (8, 2)
    checks.set_slots(flags)  # exits if the batch is too small for the ranks
    checks.check_secrets(flags, "store", "checkpoint_dir")
    checks.check_store("--store", flags.store)
    checks.check_server(flags, "checkpoint_dir")
    reserved = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}  # with these Lightning would start no processes itself
    assert not reserved & environment.keys()


def test_skypilot_starts_again_what_can_go_on_and_keeps_what_is_needed_for_that() -> None:
    from survival import preemption

    task = sky_task()
    known = {"name", "resources", "num_nodes", "workdir", "envs", "file_mounts", "setup", "run"}
    assert set(task) == known
    assert task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [preemption.EXIT_AGAIN]}
    bucket = task["file_mounts"]["/outputs"]["source"]
    assert f"--checkpoint-dir {bucket}/" in task["run"]


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_skypilot_gets_the_exit_code_of_train_py(code: int, stub) -> None:
    command, environment = by_skypilot(0)
    environment = stub("uv", f"exit {code}") | environment
    assert subprocess.run(command, cwd=CHAPTER, env=environment).returncode == code


# --------------------------------------------------------------------------------------------- SLURM


def sbatch_options() -> dict[str, str]:
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    given = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (option.partition("=") for option in given)}


def test_slurm_starts_a_task_a_gpu_and_each_starts_train_py(stub) -> None:
    environment = stub("srun", PRINT) | {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
    given = words(["bash", LAUNCH / "slurm.sbatch", "--max-steps", "4000"], environment)
    program = given.index("../.venv/bin/python")
    assert "--cpus-per-task=8" in given[:program]
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= set(given[:program])
    assert given[program + 1] == "train.py"
    flags = parse(given[program + 2 :])
    assert flags.max_steps == 4000
    asked = sbatch_options()
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) <= flags.batch_size


def test_slurm_tells_the_tasks_in_time_and_keeps_the_log() -> None:
    from survival import preemption

    asked = sbatch_options()
    name, seconds = asked["signal"].split("@")  # with B: it would go to the script alone
    assert hasattr(preemption.signal, f"SIG{name}")
    assert name == "USR1"
    assert int(seconds) > longest_stop()
    assert asked["requeue"] == ""
    assert asked["open-mode"] == "append"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", asked["time"])


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137])
def test_slurm_requeues_the_job_after_75_and_only_then(code: int, stub, tmp_path: Path) -> None:
    from survival import preemption

    requeued = tmp_path / "requeued"
    stub("scontrol", f'echo "$@" > {shlex.quote(str(requeued))}')
    environment = stub("srun", f"exit {code}") | {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", LAUNCH / "slurm.sbatch"], cwd=CHAPTER, env=environment)
    assert done.returncode == code
    assert requeued.exists() == (code == preemption.EXIT_AGAIN)
    if requeued.exists():
        assert requeued.read_text().split() == ["requeue", "7"]


# ------------------------------------------------------------------------------------------ torchrun


@pytest.mark.parametrize("node", [0, 1])
def test_torchrun_passes_signals_on_and_waits_for_the_last_checkpoint(node: int, stub, tmp_path) -> None:
    own = {"HEAD": "node1:29400", "NODE": str(node), "LOCAL_ADDR": "10.0.0.1", "PROCESSES": "8"}
    command = ["bash", LAUNCH / "torchrun.sh", "--batch-size", "64", "--output-dir", "/outputs"]
    uv_run, program, *flags = words(command, stub("uv", PRINT) | own, tmp_path)
    assert (uv_run, program) == ("run", "torchrun")
    given = torchrun.parse_args(flags)
    config = torchrun.config_from_args(given)[0]
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "node1:29400")
    assert config.rdzv_configs["is_host"] == ("1" if node == 0 else "0")
    assert config.local_addr == "10.0.0.1"
    signals = config.signals_to_handle.split(",")
    assert {"SIGTERM", "SIGUSR1"} <= set(signals)
    assert all(hasattr(signal, name) for name in signals)
    assert config.shutdown_timeout > longest_stop()
    assert given.training_script == "train.py"
    assert parse(given.training_script_args).batch_size == 64


# --------------------------------------------------------------------------------------- the image


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and what they are given, in order."""
    text = re.sub(r"^#.*\n", "", (CHAPTER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def test_the_image_has_the_packages_of_the_lock_in_a_layer_below_the_programs() -> None:
    steps = instructions()
    sync = steps.index(("RUN", "uv sync --frozen --no-dev --no-install-project"))
    assert ("COPY", "pyproject.toml uv.lock ./") in steps[:sync]
    assert [given for name, given in steps[:sync] if name == "COPY" and "06_whats_next" in given] == []
    copied = " ".join(given for name, given in steps[sync:] if name == "COPY")
    assert "06_whats_next/*.py 06_whats_next/prices.toml 06_whats_next/" in copied
    for package in ("survival", "tracking", "preflight", "predict"):
        assert f"06_whats_next/{package}/*.py 06_whats_next/{package}/" in copied
    for name, given in steps:
        sources = given.split()[:-1] if name == "COPY" and "--from" not in given else []
        assert all(any(book.ROOT.glob(source)) for source in sources)
    images = [given for name, given in steps if name == "FROM"]
    images += re.findall(r"--from=(\S+)", (CHAPTER / "Dockerfile").read_text())
    assert len(images) == 2
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in images)


def test_the_image_runs_train_py_as_process_1_of_a_user_who_may_write_the_outputs() -> None:
    steps = instructions()
    last = dict(steps)  # of each kind
    user = int(last["USER"].split(":")[0])
    assert user != 0
    owned = next(given for name, given in steps if name == "RUN" and "chown" in given)
    assert f"--uid {user} " in owned
    folders = owned.partition(f"chown {user}:{user} ")[2].split()
    assert {"03_cloud_data/outputs", "06_whats_next/outputs"} <= set(folders)
    context = manifest()[1]["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] == context["fsGroup"] == user
    python, script, *flags = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    assert (python, script) == ("python", "train.py")
    assert last["WORKDIR"] == "/book/06_whats_next"
    parse(flags)


def test_the_image_stops_after_the_last_checkpoint() -> None:
    seconds = re.search(r"docker stop -t (\d+)", (CHAPTER / "Dockerfile").read_text())[1]
    assert int(seconds) > longest_stop()
