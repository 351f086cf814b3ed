"""Chapter 6's launch files and its image: how they start train.py, and what they make of its exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
from argparse import Namespace
from pathlib import Path

import book
import kubernetes_validate
import pytest
import slots
import store_checks
import yaml
from options import Options
from run_options import make_parser
from survival.preemption import EXIT_AGAIN
from torch.distributed import run as torchrun

CHAPTER = book.ROOT / "06_whats_next"
LAUNCH = CHAPTER / "launch"
DOCKERFILE = (CHAPTER / "Dockerfile").read_text()
PRINT = 'printf "%q " "$@" "$NODE_RANK" "$MASTER_ADDR" "$MASTER_PORT"'  # a stub's script: what it was given
SERVICE, JOB = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
SKY = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
SBATCH = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE))


def parse(flags: list[str]) -> Namespace:
    """What chapter 6's parser makes of flags; it exits at one that it does not know."""
    args = make_parser("", Options).parse_args(flags)
    assert args.resume == "auto"
    return args


def command_of(launcher: str, node: int) -> tuple[str, list, dict]:
    """The program that it calls, what it runs on a node, and the environment that it makes."""
    if launcher == "kubernetes":
        number = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(node)}
        environment = {}
        for item in CONTAINER["env"]:
            field = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environment[item["name"]] = item.get("value") or number[field]
        return "uv", CONTAINER["command"], environment
    if launcher == "skypilot":
        environment = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": str(node)}
        environment["NUM_GPUS_PER_NODE"] = "8"
        script = f"cp() {{ :; }}\ncd ..\n{SKY['run']}"  # the copy at the end is not for this machine
        return "uv", ["bash", "-c", script], {f"SKYPILOT_{name}": environment[name] for name in environment}
    if launcher == "slurm":
        environment = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
        return "srun", ["bash", LAUNCH / "slurm.sbatch", "--batch-size", "64"], environment
    environment = {"HEAD": "node1:29400", "NODE": str(node), "LOCAL_ADDR": "10.0.0.1", "PROCESSES": "8"}
    return "uv", ["bash", LAUNCH / "torchrun.sh", "--batch-size", "64"], environment


class Stubs:
    """Scripts that take the places of programs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def write(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (self.folder / name).chmod(0o755)

    def launch(self, launcher: str, script: str, node: int = 0) -> subprocess.CompletedProcess:
        """Run a launch file with this script in the place of the program that it calls."""
        program, command, environment = command_of(launcher, node)
        self.write(program, script)
        environment = os.environ | environment | self.path
        return subprocess.run(command, cwd=CHAPTER, env=environment, capture_output=True, text=True)

    def started(self, launcher: str, node: int = 0) -> tuple[list[str], Namespace, list[str]]:
        """What it has before train.py, train.py's flags, and its place among the nodes."""
        done = self.launch(launcher, PRINT, node)
        assert done.returncode == 0, done.stderr
        *given, rank, address, port = shlex.split(done.stdout)
        at = given.index("train.py")
        return given[:at], parse(given[at + 1 :]), [rank, address, port]


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


# ------------------------------------------------------------------------------------- how it starts


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(("launcher", "head"), [("kubernetes", "winds-0.winds"), ("skypilot", "10.0.0.1")])
def test_each_node_starts_train_py_with_its_rank_and_the_place_to_meet(launcher, head, node, stubs) -> None:
    program, flags, place = stubs.started(launcher, node)
    assert program == "run --frozen --no-sync python".split()
    assert place[:2] == [str(node), head]
    assert 1024 <= int(place[2]) < 65536
    assert (flags.devices, flags.num_nodes) == (8, 2)
    slots.set_slots(flags)  # exits if the batch is too small for the ranks
    store_checks.check_secrets(flags, "store", "checkpoint_dir")
    store_checks.check_store("--store", flags.store)
    store_checks.check_server(flags, "checkpoint_dir")
    reserved = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}  # with these Lightning would start no processes itself
    assert not reserved & command_of(launcher, node)[2].keys()


def test_slurm_starts_a_task_a_gpu_and_each_starts_train_py(stubs: Stubs) -> None:
    program, flags, _ = stubs.started("slurm")
    assert program[-1] == "../.venv/bin/python"
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=0", "--wait=0"} <= set(program)
    assert SBATCH["ntasks-per-node"] == SBATCH["gpus-per-node"]
    assert int(SBATCH["nodes"]) * int(SBATCH["ntasks-per-node"]) <= flags.batch_size == 64
    assert SBATCH["signal"].startswith("USR1@")  # with B: it would go to the script alone
    assert (SBATCH["requeue"], SBATCH["open-mode"]) == ("", "append")


@pytest.mark.parametrize("node", [0, 1])
def test_torchrun_starts_train_py_and_passes_signals_on(node: int, stubs: Stubs) -> None:
    program, flags, _ = stubs.started("torchrun", node)
    assert program[:2] == ["run", "torchrun"]
    config = torchrun.config_from_args(torchrun.parse_args([*program[2:], "train.py"]))[0]
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "node1:29400")
    assert config.rdzv_configs["is_host"] == ("1" if node == 0 else "0")
    assert config.local_addr == "10.0.0.1"
    signals = config.signals_to_handle.split(",")
    assert {"SIGTERM", "SIGUSR1"} <= set(signals)
    assert all(hasattr(signal, name) for name in signals)
    assert flags.batch_size == 64


def test_kubernetes_accepts_the_manifest_and_its_pods_find_each_other() -> None:
    for document in (SERVICE, JOB):
        kubernetes_validate.validate(document, "1.31", strict=True)
    name, domain = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert command_of("kubernetes", 0)[2]["MASTER_ADDR"] == f"{name}-0.{domain}"
    assert (POD["subdomain"], SERVICE["spec"]["selector"]["job-name"]) == (domain, name)
    flags = parse(CONTAINER["command"][6:])
    assert flags.num_nodes == JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert flags.devices == int(CONTAINER["resources"]["limits"]["nvidia.com/gpu"])
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in POD["volumes"]}
    assert flags.output_dir == mounts["outputs"]


# --------------------------------------------------------------------------------------- how it ends


def test_kubernetes_retries_what_can_go_on_and_nothing_else() -> None:
    actions = {}
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "containerName": "train", "values": []})
        assert (codes["operator"], codes["containerName"]) == ("In", CONTAINER["name"])
        conditions = [condition["type"] for condition in rule.get("onPodConditions", [])]
        actions |= dict.fromkeys([*codes["values"], *conditions], rule["action"])
    assert actions == {2: "FailJob", EXIT_AGAIN: "Ignore", "DisruptionTarget": "Ignore"}
    assert POD["restartPolicy"] == "Never"  # Kubernetes refuses the rules with any other
    assert JOB["spec"]["backoffLimit"] > 0


@pytest.mark.parametrize("code", [0, 1, 2, EXIT_AGAIN, 137])
@pytest.mark.parametrize("launcher", ["slurm", "skypilot"])
def test_it_ends_with_the_code_of_train_py_and_slurm_requeues_after_75_only(
    launcher: str, code: int, stubs: Stubs, tmp_path: Path
) -> None:
    requeued = tmp_path / "requeued"
    stubs.write("scontrol", f'echo "$@" > {shlex.quote(str(requeued))}')
    assert stubs.launch(launcher, f"exit {code}").returncode == code
    assert requeued.exists() == (launcher == "slurm" and code == EXIT_AGAIN)
    assert not requeued.exists() or requeued.read_text().split() == ["requeue", "7"]


def test_skypilot_starts_again_what_can_go_on_and_keeps_what_is_needed_for_that() -> None:
    known = {"name", "resources", "num_nodes", "workdir", "envs", "file_mounts", "setup", "run"}
    assert set(SKY) == known
    assert SKY["resources"]["use_spot"]
    assert SKY["resources"]["job_recovery"] == {"recover_on_exit_codes": [EXIT_AGAIN]}
    assert f"--checkpoint-dir {SKY['file_mounts']['/outputs']['source']}/" in SKY["run"]


def test_each_launcher_waits_for_the_last_checkpoint_and_one_under_way() -> None:
    torchrun_sh = (LAUNCH / "torchrun.sh").read_text()
    seconds = {
        "Kubernetes": POD["terminationGracePeriodSeconds"],
        "SLURM": SBATCH["signal"].partition("@")[2],
        "torchrun": re.search(r"^    .*--shutdown-timeout (\d+)", torchrun_sh, re.MULTILINE)[1],
        "Docker": re.search(r"docker stop -t (\d+)", DOCKERFILE)[1],
    }
    grace = parse(["--resume", "auto"]).grace
    assert [name for name in seconds if int(seconds[name]) <= 2 * grace] == []


# --------------------------------------------------------------------------------------- the image


def test_the_image_has_the_packages_of_the_lock_in_a_layer_below_the_programs() -> None:
    sync = DOCKERFILE.index("RUN uv sync --frozen --no-dev --no-install-project\n")
    copies = re.findall(r"^COPY (?!--)(.*) (\S+)$", DOCKERFILE, re.MULTILINE)
    assert copies[0] == ("pyproject.toml uv.lock", "./")
    first, second = (DOCKERFILE.index(f"COPY {copied[0]}") for copied in copies[:2])
    assert first < sync < second
    assert ("06_whats_next/*.py 06_whats_next/prices.toml", "06_whats_next/") in copies
    for package in ("survival", "tracking", "preflight", "predict"):
        assert (f"06_whats_next/{package}/*.py", f"06_whats_next/{package}/") in copies
    sources = " ".join(copied[0] for copied in copies).split()
    assert [source for source in sources if not any(book.ROOT.glob(source))] == []


def test_the_image_runs_train_py_as_process_1_of_a_user_who_may_write_the_outputs() -> None:
    last = dict(re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE, re.MULTILINE))  # of each kind
    user = int(last["USER"].split(":")[0])
    assert user != 0
    assert f"useradd --create-home --uid {user} " in DOCKERFILE
    owner = f"--owner {user} --group {user}"
    folders = re.search(rf"install --directory {owner} ((?:\\\n|.)*)$", DOCKERFILE, re.MULTILINE)[1].split()
    assert {"03_cloud_data/outputs", "06_whats_next/outputs"} <= set(folders)
    context = POD["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, user, user)
    assert last["WORKDIR"] == CONTAINER["workingDir"] == "/book/06_whats_next"
    python, script, *flags = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    assert (python, script) == ("python", "train.py")
    parse(flags)
