"""Chapter 2's launch files, and runs on two nodes that lose a worker, a node, or are told to stop."""

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import book
import kubernetes_validate
import programs
import psutil
import pytest
import torch
import yaml
from runs import assert_same_bits, state, weights

CHAPTER = book.ROOT / "02_multi_gpu"
LAUNCH = CHAPTER / "launch"
FLAGS = "--patch-size 16 --batch-size 4 --max-steps 12 --checkpoint-every 3 --validate-every 100".split()
TOLERANCE = {"rtol": 1e-3, "atol": 5e-5}  # of weights after 12 steps, as in test_02_multi_gpu.py

# What torchrun.sh starts in the place of train.py: train_ddp_by_hand.py, slowed down, so that a signal hits
# it in the middle, and with its process id in a file beside the checkpoint.
SLOWLY = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import faults

folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
name = f"started_{{time.time():.6f}}_rank_{{os.environ['RANK']}}_of_{{os.environ['WORLD_SIZE']}}"
(folder / f"{{name}}.part").write_text(str(os.getpid()))
(folder / f"{{name}}.part").rename(folder / name)  # whoever sees it can read it
faults.run({str(CHAPTER / "train_ddp_by_hand.py")!r}, sys.argv[1:], slow_steps=0.5)
"""

thorough = pytest.mark.thorough


def saved_step(folder: Path) -> int:
    """The step of a run's last checkpoint; -1 if there is none yet."""
    try:
        return state(folder)["step"]
    except FileNotFoundError:
        return -1


# ---------------------------------------------------------------------------------- the launch files


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_the_shell_takes_the_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


@pytest.fixture
def stubs(tmp_path: Path):
    """A folder of programs that stand in for `uv` and others on PATH; call it with (name, shell script)."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def stub(name: str, script: str) -> dict:
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
        return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    return stub


def launched(command: list, environment: dict) -> list[str]:
    """The arguments that a launch file gives to torchrun, from a stub of Python that prints them."""
    done = subprocess.run(command, cwd=CHAPTER, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.mark.parametrize("node", [0, 1])
def test_every_launch_file_starts_train_py_on_its_nodes(node: int, stubs, tmp_path: Path) -> None:
    stubs("python", 'printf "%q " "$@"')
    environment = stubs("uv", f"echo {tmp_path}/bin/python")
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"} == set(sky)
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    fields = {  # what Kubernetes puts there
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(node),
        "status.podIP": f"10.0.0.{node + 1}",
    }
    in_pod = {
        item["name"]: item.get("value") or fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        for item in container["env"]
    }
    in_sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    in_sky |= {
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "winds-1",
        "SKYPILOT_NODE_RANK": str(node),
    }
    calls = {
        "10.0.0.1:29400": (["bash", "-c", f"cd ..\n{sky['run']}"], in_sky),
        "winds-0.winds:29400": (container["command"], in_pod),
    }
    for endpoint, (command, variables) in calls.items():
        words = launched(command, environment | variables)
        given = dict(pairwise(words))
        assert given["-m"] == "torch.distributed.run"
        assert given["--rdzv-endpoint"] == endpoint
        assert given["--nnodes"] in ("1:2", "2:2")  # elastic, or all nodes anew
        assert (given["--nproc-per-node"], given["--rdzv-backend"]) == ("8", "c10d")
        assert given["--local-addr"] == f"10.0.0.{node + 1}"
        assert f"is_host={'true' if node == 0 else 'false'}" in given["--rdzv-conf"].split(",")
        flags = words[words.index("train.py") + 1 :]
        assert flags == "--resume auto --batch-size 64 --output-dir /outputs".split()
        assert 64 % (2 * int(given["--nproc-per-node"])) == 0


@thorough
def test_torchrun_sh_trains_stops_and_goes_on(tmp_path: Path) -> None:
    environment = os.environ | {"HEAD": f"localhost:{programs.free_port()}"}
    environment |= {"MAX_NODES": "1", "PROCESSES": "2", "MAX_RESTARTS": "0"}
    flags = [*FLAGS, "--max-steps", "200", "--output-dir", tmp_path]
    command = ["bash", LAUNCH / "torchrun.sh", *flags]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    programs.wait_for(lambda: saved_step(tmp_path) >= 3, run, "step 3")
    run.terminate()
    _, errors = run.communicate()
    assert run.returncode == 143, errors
    stopped = saved_step(tmp_path)
    assert 3 <= stopped < 200
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 200
    assert (tmp_path / f"resumed_at_{stopped}/metrics.csv").exists()


SRUN = """
# As srun: start the tasks, which inherit no handler, and exit with the highest code.
shift 2  # --kill-on-bad-exit, --cpus-per-task
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 env --default-signal "$@" &
    echo $! >> "$TASKS"
done
highest=0
for task in 0 1; do
    wait -n; code=$?
    [ $code -gt $highest ] && highest=$code
done
exit $highest
"""


@thorough
@pytest.mark.parametrize("limit", [True, False], ids=["time limit", "scancel"])
def test_slurm_requeues_a_job_at_its_time_limit_until_it_is_done(limit: bool, stubs, tmp_path: Path) -> None:
    """With stubs: srun and scancel start and signal two tasks as the real ones would, scontrol notes what it is told."""
    stubs("srun", SRUN)
    stubs("scancel", '[ "$*" = "--signal=USR1 7" ] && xargs kill -USR1 < "$TASKS"')
    environment = stubs("scontrol", f'echo "$@" >> {tmp_path}/scontrol')
    tasks = tmp_path / "tasks"
    environment |= {"TASKS": str(tasks), "SLURM_SUBMIT_DIR": str(CHAPTER)}
    slurm = {"JOB_ID": 7, "JOB_NAME": "winds", "NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1}
    environment |= {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(programs.free_port())}
    flags = [*FLAGS, "--max-steps", "200", "--output-dir", tmp_path / "run"]
    command = ["bash", LAUNCH / "slurm.sbatch", *flags]
    log = tmp_path / "run/metrics.csv"
    job = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        programs.wait_for(lambda: saved_step(tmp_path / "run") >= 3, job, "step 3")
        if limit:
            job.send_signal(signal.SIGUSR1)
        else:  # one task is enough
            os.kill(int(tasks.read_text().split()[1]), signal.SIGTERM)
        _, errors = job.communicate()
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    assert job.returncode == 143, errors
    assert (tmp_path / "scontrol").exists() == limit
    stopped = saved_step(tmp_path / "run")
    assert 0 < stopped < 200
    if not limit:
        return
    tasks.unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert (tmp_path / f"run/resumed_at_{stopped}/metrics.csv").exists()
    assert log.exists()


def test_slurm_does_not_requeue_what_would_fail_again(stubs, tmp_path: Path) -> None:
    stubs("srun", "exit 2")
    environment = stubs("scontrol", f'echo "$@" >> {tmp_path}/scontrol')
    environment |= {"SLURM_SUBMIT_DIR": str(CHAPTER), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", LAUNCH / "slurm.sbatch"], env=environment)
    assert done.returncode == 2
    assert not (tmp_path / "scontrol").exists()


# ---------------------------------------------------------------------------- two nodes, one of them lost


def ip(command: str) -> None:
    """Run iproute2's program; CalledProcessError if it may not do that, OSError if it is not there."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


class Cluster:
    """Two nodes on this machine, each with an agent of torchrun.sh in a network namespace of its own."""

    def __init__(self, folder: Path):
        self.folder, self.agents = folder, []
        self.names = [f"winds{os.getpid()}{letter}" for letter in "ab"]
        self.links = [name[-8:] for name in self.names]
        (folder / "slowly.py").write_text(SLOWLY)

    def probe(self) -> None:
        """Make the namespaces and the link between them, if this machine and user may."""
        (one, other), (link, end) = self.names, self.links
        ip(f"netns add {one}")
        ip(f"netns add {other}")
        ip(f"link add {link} netns {one} type veth peer name {end} netns {other}")

    def connect(self) -> None:
        """Give each node its address."""
        for node, (name, link) in enumerate(zip(self.names, self.links)):
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} addr add 10.77.0.{node + 1}/24 dev {link}")
            ip(f"-n {name} link set {link} up")

    def start(self, node: int) -> subprocess.Popen:
        """Start torchrun.sh on node 0, which hosts the rendezvous, or on node 1."""
        environment = os.environ | {"HEAD": "10.77.0.1:29400", "NODE": str(node), "PROCESSES": "1"}
        environment |= {"LOCAL_ADDR": f"10.77.0.{node + 1}", "GLOO_SOCKET_IFNAME": self.links[node]}
        environment |= {"SCRIPT": str(self.folder / "slowly.py")}
        environment["RDZV_CONF"] = "last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=5"
        command = ["ip", "netns", "exec", self.names[node], "bash", LAUNCH / "torchrun.sh", *FLAGS]
        log = open(self.folder / f"agent_{node}.log", "w")
        process = subprocess.Popen(
            [*command, "--output-dir", self.folder],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.agents.append(process)
        return process

    def lose(self, agent: subprocess.Popen) -> None:
        """Take a node away at once, with all that runs on it."""
        family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def workers(self) -> list[tuple[str, int]]:
        """(name of the file that a worker wrote when it started, its process id), in the order of starts."""
        started = [path for path in sorted(self.folder.glob("started_*")) if path.suffix != ".part"]
        return [(path.name, int(path.read_text())) for path in started]

    def wait_until_both_train(self) -> None:
        """Wait for a checkpoint of step 3 or later, and for the last start to be one of two ranks."""

        def both() -> bool:
            last = {name.partition("_rank_")[2] for name, _ in self.workers()[-2:]}
            return last == {"0_of_2", "1_of_2"} and saved_step(self.folder) >= 3

        programs.wait_for(both, self.agents[0], "two ranks were at step 3")

    def printed(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent_*.log")))

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.lose(agent)
            agent.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path):
    """A cluster of two nodes, of which no process and no namespace stays; skips where it may not be made."""
    cluster = Cluster(tmp_path)
    try:
        cluster.probe()
    except (OSError, subprocess.CalledProcessError) as error:
        cluster.end()
        pytest.skip(f"network namespaces need root, iproute2 and veth: {error}")
    cluster.connect()
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run on one rank and on two, with nobody lost."""
    folders = {ranks: tmp_path_factory.mktemp(f"undisturbed_{ranks}") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        done = programs.run_ranks("02_multi_gpu/train_ddp_by_hand.py", ranks, *FLAGS, "--output-dir", folder)
        assert [one.code for one in done] == [0] * ranks, programs.printed(done)
    return folders


@thorough
def test_a_killed_worker_is_started_again_and_ends_at_the_same_bits(
    nodes: Cluster, undisturbed: dict
) -> None:
    agents = [nodes.start(0), nodes.start(1)]
    nodes.wait_until_both_train()
    started = nodes.workers()
    os.kill(next(pid for name, pid in started[-2:] if "rank_1" in name), signal.SIGKILL)
    assert [agent.wait() for agent in agents] == [0, 0], nodes.printed()
    assert saved_step(nodes.folder) == 12
    again = nodes.workers()[len(started) :]
    assert {name.partition("_rank_")[2] for name, _ in again} == {"0_of_2", "1_of_2"}
    assert list(nodes.folder.glob("resumed_at_*_rank_0.csv"))
    assert_same_bits(nodes.folder, undisturbed[2])


@thorough
def test_when_a_node_is_lost_the_other_goes_on_to_the_same_weights(nodes: Cluster, undisturbed: dict) -> None:
    head, other = nodes.start(0), nodes.start(1)
    nodes.wait_until_both_train()
    nodes.lose(other)
    assert head.wait() == 0, nodes.printed()
    assert saved_step(nodes.folder) == 12
    assert nodes.workers()[-1][0].endswith("_rank_0_of_1")
    assert json.loads((nodes.folder / "summary.json").read_text())["steps"] == 12
    torch.testing.assert_close(weights(nodes.folder), weights(undisturbed[1]), **TOLERANCE)


@thorough
@pytest.mark.parametrize(("how", "ranks"), [("SIGTERM", 1), ("lost", 2)])
def test_a_job_whose_head_is_stopped_or_lost_goes_on_when_it_is_started_again(
    how: str, ranks: int, nodes: Cluster, undisturbed: dict
) -> None:
    agents = [nodes.start(0), nodes.start(1)]
    nodes.wait_until_both_train()
    if how == "SIGTERM":
        agents[0].send_signal(signal.SIGTERM)
        assert agents[0].wait() == 143, nodes.printed()
    else:
        nodes.lose(agents[0])
    assert agents[1].wait() != 0
    stopped = saved_step(nodes.folder)
    assert 3 <= stopped < 12
    nodes.end()
    flags = [*FLAGS, "--resume", "--output-dir", nodes.folder]
    done = programs.run_ranks("02_multi_gpu/train_ddp_by_hand.py", ranks, *flags)
    assert [one.code for one in done] == [0] * ranks, programs.printed(done)
    if ranks == 2:
        assert_same_bits(nodes.folder, undisturbed[2])
    else:
        torch.testing.assert_close(weights(nodes.folder), weights(undisturbed[2]), **TOLERANCE)
