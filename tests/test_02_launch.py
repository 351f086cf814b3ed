"""Chapter 2's launch files, and runs by torchrun.sh that lose a worker, a node, or the node where all meet."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import book
import kubernetes_validate
import programs
import psutil
import pytest
import torch
import yaml
from runs import assert_same_bits, state, summary, weights
from torch.distributed import run as torchrun

CHAPTER = book.ROOT / "02_multi_gpu"
LAUNCH = CHAPTER / "launch"
TORCHRUN_SH = ["bash", LAUNCH / "torchrun.sh"]
SMALL = "--patch-size 16 --batch-size 4 --max-steps 12 --checkpoint-every 3".split()
TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}  # of weights after 12 steps in single precision

thorough = pytest.mark.thorough


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


# ---------------------------------------------------------------------------------- the launch files


def test_kubernetes_accepts_the_manifest() -> None:
    documents = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    broken = yaml.safe_load(yaml.safe_dump(documents[1]))
    broken["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_the_pods_find_the_rendezvous_and_the_volumes() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    environment = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert environment["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert int(environment["MAX_NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert environment["PROCESSES"] == gpus
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def words(command: list, environment: dict) -> list[str]:
    """What a launch file gives to a program whose stub prints it."""
    done = subprocess.run(command, cwd=CHAPTER, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def by_hand(node: int) -> tuple[list, dict]:
    """The command of the walkthrough, and its environment."""
    flags = ["--batch-size", "64", "--output-dir", "/outputs"]
    return [*TORCHRUN_SH, *flags], {"HEAD": "node1:29400", "NODE": str(node), "PROCESSES": "8"}


def by_skypilot(node: int) -> tuple[list, dict]:
    """What SkyPilot runs on a node, and the environment that it makes."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"} == set(task)
    environment = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": str(node)}
    environment["NUM_GPUS_PER_NODE"] = "8"
    return ["bash", "-c", f"cd ..\n{task['run']}"], {
        f"SKYPILOT_{name}": environment[name] for name in environment
    }


def by_kubernetes(node: int) -> tuple[list, dict]:
    """What Kubernetes runs in a pod, and the environment that it makes."""
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    fields = {index: str(node), "status.podIP": f"10.0.0.{node + 1}"}
    environment = {
        item["name"]: item.get("value") or fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        for item in container["env"]
    }
    return container["command"], environment


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    ("starter", "head", "least"),
    [(by_hand, "node1", 1), (by_skypilot, "10.0.0.1", 2), (by_kubernetes, "winds-0.winds", 1)],
)
def test_every_launch_file_starts_train_py_on_its_nodes(starter, head, least, node, stub) -> None:
    command, environment = starter(node)
    uv_run, program, *flags = words(command, stub("uv", 'printf "%q " "$@"') | environment)
    assert (uv_run, program) == ("run", "torchrun")
    options = torchrun.parse_args(flags)
    config = torchrun.config_from_args(options)[0]
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (least, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", f"{head}:29400")
    assert config.rdzv_configs["is_host"] == ("1" if node == 0 else "0")
    assert config.local_addr == (None if starter is by_hand else f"10.0.0.{node + 1}")
    assert options.training_script == "train.py"
    assert options.training_script_args == "--resume auto --batch-size 64 --output-dir /outputs".split()


def test_slurm_starts_a_task_a_gpu_and_each_starts_train_py(stub) -> None:
    environment = stub("srun", 'printf "%q " "$@"') | {"SLURM_CPUS_PER_TASK": "8"}
    given = words(["bash", LAUNCH / "slurm.sbatch", "--max-steps", "4000"], environment)
    program = given.index("../.venv/bin/python")
    assert "--cpus-per-task=8" in given[:program]
    assert given[program + 1 :] == "train.py --resume auto --max-steps 4000".split()
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH"))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) <= 8  # train.py's --batch-size


# --------------------------------------------------------------------------------- something is lost


@pytest.fixture
def plant(stub, tmp_path: Path):
    """Call it with faults as Python source: the environment in which torchrun.sh's train.py has them planted."""

    def write(planted: str) -> dict:
        worker = tmp_path / "worker.py"
        path, script = str(Path(__file__).parent), str(CHAPTER / "train.py")
        worker.write_text(f"""
import os, sys
sys.path.insert(0, {path!r})
import faults

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
faults.run({script!r}, sys.argv[1:], **({planted}))
""")
        python = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
        return stub("uv", f'shift 2; exec {python} "${{@/#train.py/{worker}}}"')

    return write


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    """Call it with the number of ranks: the folder of the run that nothing has disturbed."""

    @cache
    def folder(ranks: int) -> Path:
        made = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
        done = programs.run_ranks("02_multi_gpu/train.py", ranks, *SMALL, "--output-dir", made)
        assert [one.code for one in done] == [0] * ranks, programs.printed(done)
        return made

    return folder


@thorough
@pytest.mark.parametrize("restarts", [1, 0], ids=["by torchrun", "by hand"])
def test_after_a_killed_worker_the_run_is_started_again_and_ends_at_the_same_bits(
    restarts: int, plant, undisturbed, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    own = {"HEAD": f"localhost:{programs.free_port()}", "MAX_NODES": "1", "PROCESSES": "2"}
    own["MAX_RESTARTS"] = str(restarts)
    faulty = plant("dict(kill_at_step=4) if first and os.environ['RANK'] == '1' else {}") | own
    command = [*TORCHRUN_SH, *SMALL, "--output-dir", folder]
    done = subprocess.run(command, env=faulty, capture_output=True, text=True)
    if restarts == 0:
        assert done.returncode != 0
        assert state(folder)["step"] == 3
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "resumed_at_3/metrics.csv").exists()
    assert_same_bits(folder, undisturbed(2))


def ip(command: str) -> None:
    """Run iproute2's program; CalledProcessError if it may not do that, OSError if it is not there."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


class Cluster:
    """Two nodes on this machine, each with an agent of torchrun.sh in a network namespace of its own."""

    def __init__(self, folder: Path, environment: dict):
        self.folder, self.environment, self.agents = folder, environment, []
        self.names = [f"winds{os.getpid()}{letter}" for letter in "ab"]
        self.links = [name[-8:] for name in self.names]

    def make(self) -> None:
        """Make the namespaces and the link between them, if this machine and user may."""
        (one, other), (link, end) = self.names, self.links
        ip(f"netns add {one}")
        ip(f"netns add {other}")
        ip(f"link add {link} netns {one} type veth peer name {end} netns {other}")

    def connect(self) -> None:
        """Give each node its address."""
        for node, (name, link) in enumerate(zip(self.names, self.links), 1):
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} addr add 10.77.0.{node}/24 dev {link}")
            ip(f"-n {name} link set {link} up")

    def start(self) -> list[subprocess.Popen]:
        """Start torchrun.sh on both nodes; the first hosts the rendezvous."""
        self.agents = []
        for node, (name, link) in enumerate(zip(self.names, self.links)):
            own = {"HEAD": "10.77.0.1:29400", "NODE": str(node), "LOCAL_ADDR": f"10.77.0.{node + 1}"}
            own |= {"PROCESSES": "1", "GLOO_SOCKET_IFNAME": link}
            command = ["ip", "netns", "exec", name, *TORCHRUN_SH, *SMALL, "--output-dir", self.folder / "run"]
            with open(self.folder / f"agent_{node}.log", "w") as log:
                agent = subprocess.Popen(command, env=self.environment | own, stdout=log, stderr=log)
            self.agents.append(agent)
        return self.agents

    def lose(self, agent: subprocess.Popen) -> None:
        """Take a node away at once, with all that runs on it."""
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    def saved_step(self) -> int:
        """The step of the last checkpoint; -1 if there is none yet."""
        try:
            return state(self.folder / "run")["step"]
        except FileNotFoundError:
            return -1

    def wait_until_both_train(self) -> None:
        """Wait for a checkpoint, and for ranks of a group of two."""

        def both() -> bool:
            sizes = set()
            for worker in psutil.Process(self.agents[0].pid).children():
                with suppress(psutil.Error):  # it has just ended
                    sizes.add(worker.environ().get("WORLD_SIZE"))
            return "2" in sizes and self.saved_step() >= 3

        programs.wait_for(both, self.agents[0], "two ranks were at step 3")

    def printed(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent_*.log")))

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.lose(agent)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path, plant):
    """A cluster of two nodes, of which no process and no namespace stays; skips where it may not be made."""
    cluster = Cluster(tmp_path, plant("dict(slow_steps=0.5)"))  # else a run is over before a node is lost
    try:
        cluster.make()
    except (OSError, subprocess.CalledProcessError) as error:
        cluster.end()
        pytest.skip(f"network namespaces need root, iproute2 and veth: {error}")
    try:
        cluster.connect()
        yield cluster
    finally:
        cluster.end()


@thorough
def test_when_a_node_is_lost_the_other_goes_on_to_the_same_weights(nodes: Cluster, undisturbed) -> None:
    head, other = nodes.start()
    nodes.wait_until_both_train()
    nodes.lose(other)
    assert nodes.saved_step() < 12
    assert head.wait() == 0, nodes.printed()
    assert nodes.saved_step() == summary(nodes.folder / "run")["steps"] == 12
    torch.testing.assert_close(weights(nodes.folder / "run"), weights(undisturbed(1)), **TOLERANCE)


@thorough
def test_a_job_whose_head_is_lost_goes_on_when_it_is_started_again(nodes: Cluster, undisturbed) -> None:
    head, other = nodes.start()
    nodes.wait_until_both_train()
    nodes.lose(head)
    assert other.wait() != 0
    stopped = nodes.saved_step()
    assert 3 <= stopped < 12
    assert [agent.wait() for agent in nodes.start()] == [0, 0], nodes.printed()
    assert (nodes.folder / f"run/resumed_at_{stopped}/metrics.csv").exists()
    assert_same_bits(nodes.folder / "run", undisturbed(2))
