"""A rank that does not move shows where it is and ends, whatever holds it; one that moves is left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, curve, final_bytes, train, write_texts
from tests.test_survival import Job, until
from trainer import recovery
from trainer.recovery import Watchdog

# A rank that holds the interpreter's lock inside native code: nothing written in Python could notice.
STUCK = """
import ctypes, time
from trainer.recovery import Watchdog
dog = Watchdog(startup_seconds={startup}, step_seconds={step})
dog.start()
for _ in range({steps}):
    dog.step_done()
def where_it_is_stuck():
    ctypes.PyDLL(None).sleep(30)
where_it_is_stuck()
"""


@pytest.mark.parametrize(("startup", "step", "steps"), [(0.5, 60, 0), (60, 0.5, 3)])
def test_a_rank_stuck_in_native_code_shows_its_stack_and_ends(startup: float, step: float, steps: int) -> None:
    code, began = STUCK.format(startup=startup, step=step, steps=steps), time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert "in where_it_is_stuck" in ended.stderr
    assert time.monotonic() - began < 25


def test_the_limit_follows_the_slowest_step_between_a_minute_and_the_start_up_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, armed = [0.0], []
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recovery.faulthandler, "dump_traceback_later", lambda seconds, **how: armed.append(seconds))
    dog = Watchdog(1800, None)
    dog.start()
    for seconds in (500.0, 2.0, 3.0, 20.0, 2.0):  # the first one compiles
        now[0] += seconds
        dog.step_done()
    assert armed == [1800, 1800, 1800, 60, 200, 200]
    for expected in (1800, 1000, 1000):
        with dog.patient():
            assert armed[-1] == expected
            now[0] += 70
    with dog.patient():
        now[0] += 170
    with dog.patient():
        assert armed[-1] == 1700
    assert armed[-1] == 200
    assert Watchdog(1800, 12.0).limit == 1800
    steady = Watchdog(1800, 12.0)
    for _ in range(3):
        steady.step_done()
    assert steady.limit == 12
    with steady.patient():
        assert armed[-1] == 1800
    assert armed[-1] == 12


def test_a_slow_save_and_a_slow_validation_are_no_hang(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import snapshots, validator

    write, evaluate = snapshots.write_checkpoint, validator.evaluate_all

    def slow_write(*arguments):
        time.sleep(1.5)
        return write(*arguments)

    def slow_evaluation(*arguments):
        time.sleep(1.5)
        return evaluate(*arguments)

    monkeypatch.setattr(snapshots, "write_checkpoint", slow_write)
    monkeypatch.setattr(validator, "evaluate_all", slow_evaluation)
    options = [*TINY, "--data_path", texts, "--val_fraction", "0.2", "--cache_dir", tmp_path / "cache"]
    options += ["--max_steps", 8, "--checkpoint_interval", 5, "--eval_interval", 6, "--step_timeout", 1]
    assert train(*options, "--out_dir", tmp_path / "run") == 0


def start(job: Job, *more: object) -> Job:
    """The job under a bare torchrun that restarts its ranks, as a plain command line does it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "--max-restarts", "3", "train_pretrain.py", *job.options, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(job.log, "ab") as log:
        job.process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    return job


@pytest.mark.integration
def test_a_stopped_rank_is_noticed_and_the_run_restarts_and_equals_the_undisturbed_one(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", 64)
    straight, job = Job(tmp_path, "straight"), Job(tmp_path, "stopped")
    for one in (straight, job):
        one.options += ["--checkpoint_interval", 12]
    assert straight.start().wait() == 0, straight.text()
    limit = 8
    start(job, "--step_timeout", limit)
    until(lambda: job.lines() >= 14, 60, "step 14")
    ranks = [pid for pid in job.ranks() if b"multiprocessing" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[1], signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: job.text().count("going on after step") >= 1, limit + 45, "the restart")
    print(f"noticed and restarted {time.monotonic() - stopped:.1f} s after the stop, limit {limit} s")
    assert job.wait() == 0, job.text()
    assert "Timeout (" in job.text()
    assert curve(job.run_dir) == curve(straight.run_dir)
    assert final_bytes(job.run_dir) == final_bytes(straight.run_dir)


# train_pretrain.py whose second rank fails in its eighth step.
FAILING = """
import os
import train_pretrain
from trainer.ddp import DataParallel
from trainer.options import parse_options

batches = DataParallel.micro_batches

def micro_batches(self, step):
    assert (os.environ["RANK"], step.number) != ("1", 7), "a mistake of rank 1"
    return batches(self, step)

DataParallel.micro_batches = micro_batches
train_pretrain.main(parse_options(train_pretrain.options()))
"""


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["scripts.launch", "torch.distributed.run"])
def test_an_exception_on_one_rank_ends_the_job_with_that_ranks_traceback(tmp_path: Path, launcher: str) -> None:
    job = Job(tmp_path, "failing")
    write_texts(tmp_path / "texts.jsonl", 64)
    (tmp_path / "failing.py").write_text(FAILING)
    command = [sys.executable, "-m", launcher, "--nproc_per_node", "2", tmp_path / "failing.py", *job.options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    ended = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "AssertionError: a mistake of rank 1" in ended.stderr
    assert "in micro_batches" in ended.stderr
    # Start-up included; the failure itself has at most 30 s.
    assert time.monotonic() - began < 60
    if launcher == "torch.distributed.run":
        # torchrun's own summary names the cause, not only a code.
        assert "a mistake of rank 1" in ended.stderr.split("Root Cause")[1]
    ending = json.loads((job.run_dir / "exit.json").read_text())
    assert ending["code"] == 1
