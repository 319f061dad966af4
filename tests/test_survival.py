"""Real processes, real signals: whatever kills a run, the same command goes on and nothing is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, curve, final_bytes, write_texts

STOPPED = 75
STEPS = 60


def until(condition: Callable[[], object], seconds: float, what: str) -> object:
    """Poll until the condition holds and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.002)
    return value


class Job:
    """Two ranks under scripts.launch, in one run folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run_dir, self.log = folder / name, folder / f"{name}.log"
        self.options = [*TINY, "--data_path", folder / "texts.jsonl", "--cache_dir", folder / "cache"]
        self.options += ["--checkpoint_interval", 5, "--max_steps", STEPS, "--dropout", 0.1, "--num_workers", 1]
        self.options += ["--gradient_accumulation_steps", 2, "--out_dir", self.run_dir]

    def start(self) -> "Job":
        command = [sys.executable, "-m", "scripts.launch", "--nproc_per_node", "2", "train_pretrain.py", *self.options]
        self.skip_lines = self.lines()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=log, stderr=log)
        return self

    def lines(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def ranks(self) -> list[int]:
        """Process ids of everything below the launcher that still runs."""
        found, parents = [], {self.process.pid}
        for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) in parents and fields[0] != "Z":
                found.append(int(stat.parent.name))
                parents.add(found[-1])
        return found

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("survival")
    write_texts(folder / "texts.jsonl", 64)
    job = Job(folder, "straight").start()
    assert job.wait() == 0, job.text()
    assert [point[0] for point in curve(job.run_dir)] == list(range(1, STEPS + 1))
    return job


def assert_same(job: Job, straight: Job) -> None:
    assert curve(job.run_dir) == curve(straight.run_dir), job.text()
    assert final_bytes(job.run_dir) == final_bytes(straight.run_dir), job.text()


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; a zombie does not."""
    running = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                running.append(pid)
        except OSError:
            continue
    return running


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_the_step_in_hand_and_exits_75(straight: Job, number: signal.Signals) -> None:
    job = Job(straight.run_dir.parent, number.name).start()
    until(lambda: job.lines() >= 12, 60, "step 12")
    ranks, sent = job.ranks(), time.monotonic()
    job.process.send_signal(number)
    assert job.wait() == STOPPED, job.text()
    # One step and one save of the tiny model are well under a second; the bar is that much and 2 s.
    assert time.monotonic() - sent < 3
    assert not alive(ranks)
    stopped = json.loads((job.run_dir / "exit.json").read_text())
    assert stopped["code"] == STOPPED
    assert stopped["reason"].startswith("stopped by SIG")
    # The last step that was logged is the one that was saved: none is redone.
    last = curve(job.run_dir)[-1][0]
    assert last < STEPS
    assert sorted(job.run_dir.glob("step_*"))[-1].name == f"step_{last:08d}"
    assert job.start().wait() == 0, job.text()
    assert_same(job, straight)


def saving(job: Job) -> bool:
    return any(".tmp-" in path.name for path in job.run_dir.glob("step_*"))


def kill_somewhere(job: Job, draw: random.Random) -> str:
    """SIGKILL a rank or the launcher, at a random step or inside a save; return what was hit."""
    target = draw.choice(["rank 0's tree", "a rank", "launcher"])
    inside_a_save = draw.random() < 0.35
    step = draw.randint(1, STEPS - 10)
    until(lambda: job.lines() >= step, 60, f"step {step}")
    if inside_a_save:
        until(lambda: saving(job) or job.lines() >= STEPS, 60, "a save")
    ranks = job.ranks()
    victim = job.process.pid if target == "launcher" else draw.choice(ranks) if target == "a rank" else ranks[0]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    if target == "launcher":
        until(lambda: not alive(ranks), 2, "the ranks of a dead launcher to end")
    assert job.wait() != 0, job.text()
    until(lambda: not alive(ranks), 10, "all ranks to end")
    # The survivors of a dead rank end by themselves; torch would kill them only after 30 s.
    assert time.monotonic() - killed < 15, job.text()
    return f"{target} after step {step}{', inside a save' if inside_a_save else ''} ({time.monotonic() - killed:.1f} s)"


@pytest.mark.integration
def test_twenty_random_kills_end_with_the_weights_of_the_undisturbed_run(straight: Job) -> None:
    for seed in range(20):
        job = Job(straight.run_dir.parent, f"kill_{seed}").start()
        hit = kill_somewhere(job, random.Random(seed))
        assert job.start().wait() == 0, f"{hit}\n{job.text()}"
        print(f"kill {seed}: {hit}")
        assert_same(job, straight)


@pytest.mark.integration
def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(straight: Job) -> None:
    job = Job(straight.run_dir.parent, "twice").start()
    until(lambda: job.lines() >= 3, 60, "step 3")
    job.process.send_signal(signal.SIGSTOP)
    ranks = job.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    other = Job(straight.run_dir.parent, "twice")
    other.log = other.log.with_name("other.log")
    assert other.start().wait() == 78, other.text()
    assert "is in use by process" in other.text()
    for pid in [*ranks, job.process.pid]:
        os.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    assert_same(job, straight)


@pytest.mark.integration
def test_bare_torchrun_restarts_a_killed_rank_and_the_run_goes_on(straight: Job) -> None:
    job = Job(straight.run_dir.parent, "torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "--max-restarts", "3", "train_pretrain.py", *job.options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(job.log, "ab") as log:
        job.process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    until(lambda: job.lines() >= 14, 60, "step 14")
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.wait() == 0, job.text()
    assert_same(job, straight)


def test_ctrl_c_pressed_again_and_again_still_ends_with_75(tmp_path: Path) -> None:
    job = Job(tmp_path, "impatient")
    write_texts(tmp_path / "texts.jsonl", 64)
    command = [str(part) for part in (sys.executable, "train_pretrain.py", *job.options)]
    with open(job.log, "ab") as log:
        job.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    until(lambda: job.lines() >= 3, 60, "step 3")

    def press_until_it_ends() -> bool:
        job.process.send_signal(signal.SIGINT)
        return job.process.poll() is not None

    until(press_until_it_ends, 30, "the run to end")
    assert job.process.returncode == STOPPED, job.text()
    assert json.loads((job.run_dir / "exit.json").read_text())["code"] == STOPPED
    assert "Traceback" not in job.text()


# train_pretrain.py whose first rank never gets past its tokenizer; the test says what the second does there.
STUCK = """
import os, signal
import train_pretrain
import trainer.run
from trainer.options import parse_options

trainer.run.FIRST_SPEAKS_SECONDS = 0

def stay(folder):
    if os.environ.get("RANK", "0") == "0":
        open(os.environ["PIPE"], "w").close()
        signal.pause()
    {second}

train_pretrain.load_tokenizer = stay
train_pretrain.main(parse_options(train_pretrain.options()))
"""


def stuck(folder: Path, *launcher: object, second: str = "signal.pause()") -> Job:
    """A run that is not training yet; its first rank opens folder/pipe once it is there."""
    job = Job(folder, "stuck")
    write_texts(folder / "texts.jsonl", 4)
    (folder / "stuck.py").write_text(STUCK.format(second=second))
    os.mkfifo(folder / "pipe")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PIPE": str(folder / "pipe")}
    command = [str(part) for part in (sys.executable, *launcher, folder / "stuck.py", *job.options)]
    with open(job.log, "ab") as log:
        job.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_before_training_ends_with_75_in_exit_json_too(tmp_path: Path, number: signal.Signals) -> None:
    job = stuck(tmp_path)
    (tmp_path / "pipe").read_bytes()
    job.process.send_signal(number)
    assert job.wait() == STOPPED, job.text()
    told = json.loads((job.run_dir / "exit.json").read_text())
    assert told == {"code": STOPPED, "reason": f"stopped by {number.name} before the first step"}
    assert "Traceback" not in job.text()


LAUNCHER = ("-m", "scripts.launch", "--nproc_per_node", 2)


@pytest.mark.integration
def test_a_signal_to_the_launcher_before_training_ends_with_75_in_exit_json_too(tmp_path: Path) -> None:
    job = stuck(tmp_path, *LAUNCHER)
    (tmp_path / "pipe").read_bytes()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == STOPPED, job.text()
    assert json.loads((job.run_dir / "exit.json").read_text())["code"] == STOPPED


@pytest.mark.integration
@pytest.mark.parametrize(("failure", "code"), [("raise ValueError('bad data')", 78), ("os._exit(3)", 1)])
def test_a_rank_stopped_because_another_failed_before_training_does_not_hide_that(
    tmp_path: Path, failure: str, code: int
) -> None:
    job = stuck(tmp_path, *LAUNCHER, second=f"open(os.environ['PIPE']).read(); {failure}")
    assert job.wait() == code, job.text()
    told = json.loads((job.run_dir / "exit.json").read_text())
    assert told["code"] == code
    assert "another rank failed" in told["reason"]
    assert "Traceback" not in job.text()
