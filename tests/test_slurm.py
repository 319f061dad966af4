"""The batch scripts on a real Slurm, a controller and two nodes: what is stopped, preempted or killed comes back."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, curve, final_bytes, free_port, write_texts
from tests.test_survival import until

# Names that resolve: the batch script gives the first one to torch as the address to meet at.
NODES = ("127.0.0.1", "127.0.0.2")
# So many, and so slow by their accumulation, that no fault comes after the end on a fast machine either.
STEPS = 400

# No cgroups, no accounting, CPUs and GPUs that are not there, and 5 s instead of 120 between requeue and restart.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[{ports[1]}-{ports[2]}] CPUs=8 RealMemory=8000 Gres=gpu:4
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
GPUS = "".join(f"Name=gpu File=/dev/{device}\n" for device in ("null", "zero", "full", "random"))


class Cluster:
    """A private Slurm in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.daemons: list[subprocess.Popen] = []
        port = free_port()
        ports = (port, port + 1, port + 2)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, host=socket.gethostname().split(".")[0], ports=ports)
        )
        (folder / "gres.conf").write_text(GPUS)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()

    def start(self) -> None:
        """munge, the controller and the nodes, until they can be used."""
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self.daemon("munged", "--foreground", "--force", *munge)
        until((self.folder / "munge.socket").exists, 20, "munged")
        self.daemon("slurmctld", "-D")
        for node in NODES:
            self.daemon("slurmd", "-D", "-N", node)
        until(lambda: self.ask("sinfo", "--noheader", "--format=%T").split() == ["idle"], 60, "the nodes")

    def daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self.daemons += [subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)]

    def ask(self, *command: object, **variables: object) -> str:
        """What a command of Slurm's prints; empty where it fails."""
        words = [str(word) for word in command]
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout

    def processes(self) -> list[int]:
        """Everything that belongs to this Slurm: its configuration's name is in the environment of each."""
        mark, found = f"SLURM_CONF={self.folder}/slurm.conf".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        """End all jobs, then the daemons; nothing may be left."""
        self.ask("scancel", "--user=root")
        try:
            until(lambda: not self.ask("squeue", "--noheader"), 60, "the jobs to end")
            for daemon in reversed(self.daemons):
                daemon.terminate()
                daemon.wait(timeout=30)
            until(lambda: not self.processes(), 10, "the last processes to end")
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)


class Job:
    """A batch script of ours, submitted."""

    def __init__(self, cluster: Cluster, script: str, name: str, *options: object, **variables: object) -> None:
        self.cluster, self.run_dir, self.log = cluster, cluster.folder / name, cluster.folder / f"{name}.log"
        data = ["--data_path", cluster.folder / "texts.jsonl", "--cache_dir", cluster.folder / "cache"]
        data += [
            "--checkpoint_interval",
            10,
            "--gradient_accumulation_steps",
            8,
            "--max_steps",
            STEPS,
            "--dropout",
            0.1,
        ]
        asked = ["--gpus-per-node=1", "--cpus-per-task=1", f"--output={self.log}"]
        asked += [f"scripts/slurm/{script}.sbatch"]
        variables = {"OUT_DIR": self.run_dir, "PYTHON": sys.executable, **variables}
        self.id = cluster.ask("sbatch", "--parsable", *asked, *TINY, *data, *options, **variables).strip()
        assert self.id.isdecimal(), "sbatch refused the job"

    def field(self, name: str) -> str:
        """A field of what Slurm knows about the job."""
        return re.search(rf"\b{name}=(\S+)", self.cluster.ask("scontrol", "show", "job", self.id))[1]

    def ended(self) -> bool:
        return self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until the condition holds; where the job ends before or it takes too long, show the job's log."""
        try:
            until(lambda: condition() or self.ended(), 120, what)
            assert condition(), f"the job ended before {what}"
        except AssertionError as late:
            raise AssertionError(f"{late}; job {self.id} is {self.field('JobState')}\n{self.text()}") from None

    def wait(self) -> tuple[str, str]:
        """State and exit code at the end."""
        self.until(self.ended, "the end")
        return self.field("JobState"), self.field("ExitCode")

    def lines(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def starts(self) -> int:
        """How often training has begun."""
        path = self.run_dir / "events.jsonl"
        return len(re.findall('"event": "(?:started|resumed)"', path.read_text())) if path.exists() else 0

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def processes(self, part: str) -> list[int]:
        """Those with these words in their command line and this run's folder."""
        found = []
        for pid in self.cluster.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command.startswith(f"{sys.executable} {part}") and str(self.run_dir) in command:
                found.append(pid)
        return found

    def disturb(self, how: str) -> None:
        """Make Slurm end the run, or break it."""
        ask = self.cluster.ask
        if how in ("USR1", "TERM"):
            # What --signal=B:USR1@120 and a preemption send, to the batch script alone.
            ask("scancel", "--batch", f"--signal={how}", self.id)
        elif how == "preemption":
            ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
        elif how == "node failure":
            ask("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
        else:
            assert how == "killed launchers"
            launchers = self.processes("-m scripts.launch")
            assert launchers
            for pid in launchers:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; on Debian and Ubuntu: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts jobs in the name of users")
    folder = tmp_path_factory.mktemp("slurm")
    write_texts(folder / "texts.jsonl", 64)
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()


DISTURBANCES = ["USR1", "node failure", "preemption", "killed launchers", "TERM", "USR1", "preemption", "USR1"]
DISTURBANCES += ["killed launchers", "USR1"]


def directives(script: str) -> list[str]:
    lines = (ROOT / f"scripts/slurm/{script}.sbatch").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_one_node_and_several_ask_slurm_for_the_same_with_time_for_twice_a_long_step_and_save() -> None:
    single, multi = directives("single_node"), directives("multi_node")
    assert [line for line in single if "--nodes" not in line] == [line for line in multi if "--nodes" not in line]
    assert {"--requeue", "--open-mode=append", f"--signal=B:USR1@{2 * (20 + 40)}"} <= set(single)


@pytest.mark.integration
def test_ten_requeues_end_with_the_curve_and_weights_of_the_undisturbed_run(cluster: Cluster) -> None:
    straight = Job(cluster, "multi_node", "straight")
    assert straight.wait() == ("COMPLETED", "0:0"), straight.text()
    disturbed = Job(cluster, "multi_node", "disturbed")
    for count, how in enumerate(DISTURBANCES, 1):
        disturbed.until(lambda starts=count: disturbed.starts() >= starts, f"start {count}")
        lines = disturbed.lines()
        disturbed.until(lambda steps=lines + 5: disturbed.lines() >= steps, f"five steps of start {count}")
        begun = time.monotonic()
        disturbed.disturb(how)
        disturbed.until(lambda times=str(count): disturbed.field("Restarts") == times, f"the requeue after {how}")
        print(f"{count}. {how}: requeued after {time.monotonic() - begun:.1f} s")
        cluster.ask("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    assert disturbed.wait() == ("COMPLETED", "0:0"), disturbed.text()
    assert [point[0] for point in curve(straight.run_dir)] == list(range(1, STEPS + 1))
    assert curve(disturbed.run_dir) == curve(straight.run_dir)
    assert final_bytes(disturbed.run_dir) == final_bytes(straight.run_dir)


@pytest.mark.integration
def test_a_killed_rank_is_started_again_inside_the_job_on_both_nodes(cluster: Cluster) -> None:
    job = Job(cluster, "multi_node", "killed")
    job.until(lambda: job.lines() >= 25, "step 25")
    os.kill(job.processes("-u train_pretrain.py")[0], signal.SIGKILL)
    assert job.wait() == ("COMPLETED", "0:0"), job.text()
    assert job.field("Restarts") == "0"
    assert [point[0] for point in curve(job.run_dir)] == list(range(1, STEPS + 1))


def exit_code(job: Job) -> int:
    return json.loads((job.run_dir / "exit.json").read_text())["code"]


@pytest.mark.integration
def test_only_what_may_help_and_is_wanted_is_requeued(cluster: Cluster) -> None:
    long = Job(cluster, "single_node", "long", "--max_steps", 100_000)
    hopeless = Job(cluster, "multi_node", "hopeless", "--data_path", cluster.folder / "nothing.jsonl")
    failing = Job(cluster, "single_node", "failing", PYTHON="/bin/false", MAX_RESTARTS=1)
    # Near its time limit: saved, and brought back. 120 s before the end of two minutes is now; Slurm looks every 30 s.
    long.until(lambda: long.lines() > 0, "the first step")
    cluster.ask("scontrol", "update", f"JobId={long.id}", "TimeLimit=2")
    long.until(lambda: long.field("Restarts") == "1", "the requeue")
    cluster.ask("scontrol", "update", f"JobId={long.id}", "TimeLimit=60")
    assert exit_code(long) == 75
    stopped_at = long.lines()
    long.until(lambda: long.lines() > stopped_at, "the next step")
    # Cancelled: saved, and not brought back.
    cluster.ask("scancel", long.id)
    busy = ("squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--jobs={long.id}")
    until(lambda: not cluster.ask(*busy), 60, "the batch script to end")
    assert long.field("JobState") == "CANCELLED", long.text()
    assert exit_code(long) == 75
    assert hopeless.wait() == ("FAILED", "78:0"), hopeless.text()
    assert failing.wait() == ("FAILED", "1:0"), failing.text()
    assert [job.field("Restarts") for job in (long, hopeless, failing)] == ["1", "0", "1"]
