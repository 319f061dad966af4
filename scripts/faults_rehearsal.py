"""Training processes that stop at a save, so that strace can inject a fault at any one of its system calls."""

import atexit
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int
from dataclasses import dataclass
from pathlib import Path

from scripts.faults import OPTIONS, ROOT, Bench, Job
from scripts.faults_processes import Broken, wait_for

# One process trains from the checkpoint of BASE to END; the save of SAVE is what the faults hit.
BASE, SAVE, END = 5, 10, 15
WAITING, GO, SAVED, ON = 1, 2, 3, 4


@dataclass(frozen=True)
class Point:
    """The n-th call of one name, in the thread that writes or in those that hash for it."""

    thread: str  # "writer" or "hasher"
    call: str
    n: int
    line: str  # what strace showed of it


class Gate:
    """Where a training process waits, at the save, for strace to get hold of one of its threads.

    Shared memory and sleeping only: no call that is counted.
    """

    def __init__(self, thread: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.thread, self.state, self.tid = thread, context.RawValue(c_int, 0), context.RawValue(c_int, 0)

    def stop_here(self) -> None:
        """In the training process: say which thread this is, and wait for GO."""
        self.tid.value = threading.get_native_id()
        self.state.value = WAITING
        self._sleep_until(GO)

    def leave(self) -> None:
        """In the training process: the save is over; wait for ON."""
        if self.state.value == GO:
            self.state.value = SAVED
            self._sleep_until(ON)

    def _sleep_until(self, state: int) -> None:
        pause = threading.Event()
        while self.state.value != state:
            pause.wait(0.005)


def train(options: Sequence[str], log: Path, gate: Gate | None) -> None:
    """Run train_pretrain.py in this process, which is a fresh fork of one that has imported everything."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if gate is not None:
        _put_gate(gate)
    sys.argv = ["train_pretrain.py", *options]
    runpy.run_path(str(ROOT / "train_pretrain.py"), run_name="__main__")


def _put_gate(gate: Gate) -> None:
    """Make the save of step SAVE stop at the gate: in the thread that writes, or in the one that hashes."""
    from trainer import checkpoint, snapshots

    save, sync, prune, pool = snapshots.Snapshots.save, snapshots.sync_metrics, snapshots.prune, ThreadPoolExecutor
    armed = threading.Event()

    def arm(self, backend, state, *rest, **named):
        if state.step == SAVE and gate.state.value == 0:
            armed.set()
        return save(self, backend, state, *rest, **named)

    def first_of_a_save(path: Path) -> None:
        if armed.is_set() and gate.thread == "writer":
            armed.clear()
            gate.stop_here()
        sync(path)

    def last_of_a_save(*arguments, **named) -> None:
        prune(*arguments, **named)
        gate.leave()

    def one_thread(workers: int) -> ThreadPoolExecutor:
        # One thread instead of four, so that its n-th call is always the same.
        if not armed.is_set() or gate.thread != "hasher":
            return pool(workers)
        armed.clear()
        return pool(1, initializer=gate.stop_here)

    snapshots.Snapshots.save, snapshots.sync_metrics, snapshots.prune = arm, first_of_a_save, last_of_a_save
    checkpoint.ThreadPoolExecutor = lambda max_workers: one_thread(max_workers)


class Rehearsal:
    """Training processes that take a second instead of six, because they are forked with everything imported."""

    def __init__(self, bench: Bench) -> None:
        self.folder = bench.path("rehearsal")
        self.folder.mkdir()
        self.options = [*OPTIONS, "--num_workers", 0, "--keep_checkpoints", 1, "--max_steps", END]
        self.options += ["--eval_interval", 0, "--data_path", bench.texts, "--cache_dir", bench.cache]
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["trainer.run", "dataset.text", "dataset.mixture", "model.weights"])
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.straight = self.job("straight")
        if (code := self.finish(self.straight)) != 0:
            raise Broken(f"the undisturbed run ended with {code}: {self.straight.last_words()}")
        self.base = self.job("base")
        process, _ = self.to_gate(self.base, "writer")
        process.kill()
        process.join()
        self.points = [*self._points("writer"), *self._points("hasher")]

    def job(self, name: str) -> Job:
        """A run folder; `start` is not used, the commands go through `finish` and `to_gate`."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        return Job(self.folder / name, [*self.options, "--out_dir", self.folder / name], {})

    def copy(self, name: str) -> Job:
        """A run that has the checkpoint of BASE and nothing else."""
        job = self.job(name)
        shutil.copytree(self.base.run_dir, job.run_dir)
        return job

    def finish(self, job: Job, seconds: float = 60) -> int:
        """Train to the end; the exit code."""
        process = self._process(job, None)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise Broken(f"the run did not end within {seconds:g} s: {job.last_words()}")
        return process.exitcode

    def to_gate(self, job: Job, thread: str) -> tuple[multiprocessing.Process, Gate]:
        """Train up to the save; the process that waits there, and its gate."""
        gate = Gate(thread)
        process = self._process(job, gate)
        wait_for(lambda: gate.state.value == WAITING or not process.is_alive(), 60, "a run to come to its save")
        if not process.is_alive():
            raise Broken(f"the run ended with {process.exitcode} before its save: {job.last_words()}")
        return process, gate

    def inject(self, job: Job, point: Point, what: str) -> tuple[int, bool]:
        """Let `what` ("signal=KILL", "error=ENOSPC") befall a run at a point of its save; exit code, and if it did."""
        process, gate = self.to_gate(job, point.thread)
        fault, trace = f"inject={point.call}:{what}:when={point.n}", self.folder / "trace"
        tracer = attach(gate, ["-e", f"trace={point.call}", "-e", fault, "-o", str(trace)])
        gate.state.value = GO
        wait_for(lambda: gate.state.value == SAVED or not process.is_alive(), 60, "the save to end")
        detach(tracer)
        gate.state.value = ON
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise Broken(f"the run did not end after {what} at {point.line}: {job.last_words()}")
        text = trace.read_text(errors="replace")
        return process.exitcode, "(INJECTED)" in text or "killed by SIGKILL" in text

    def _process(self, job: Job, gate: Gate | None) -> multiprocessing.Process:
        process = self.context.Process(target=train, args=(job.command, job.log, gate))
        process.start()
        # Not a daemon, which could have no loader workers; so it must not keep a drill that is cut short from ending.
        atexit.register(process.kill)
        return process

    def _points(self, thread: str) -> list[Point]:
        """Every call of an undisturbed save, as strace shows it."""
        job, trace = self.copy("reference"), self.folder / "trace"
        process, gate = self.to_gate(job, thread)
        tracer = attach(gate, ["-y", "-e", "trace=%file,%desc", "-o", str(trace)])
        gate.state.value = GO
        wait_for(lambda: gate.state.value == SAVED, 60, "the save to end")
        detach(tracer)
        gate.state.value = ON
        process.join(60)
        # Python may import something on the way; the files of the run are what a crash can harm.
        return [p for p in parse_trace(trace.read_text(errors="replace"), thread) if f"{job.run_dir}" in p.line]


def attach(gate: Gate, arguments: Sequence[str]) -> subprocess.Popen:
    """Trace the thread that waits at the gate."""
    command = ["strace", "-p", str(gate.tid.value), *arguments]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        raise Broken(f"strace does not attach: {said.strip()}")
    # Should it have more to say, it must not wait for a reader.
    threading.Thread(target=tracer.stderr.read, daemon=True).start()
    return tracer


def detach(tracer: subprocess.Popen) -> None:
    """Let the traced thread go."""
    tracer.terminate()
    tracer.wait()


def parse_trace(text: str, thread: str) -> list[Point]:
    """The calls of a trace, each with its number among those of its name. Memory and the gate's sleep are left out."""
    counts: Counter[str] = Counter()
    points = []
    for line in text.splitlines():
        match = re.match(r"(?:\[pid +\d+\] |\d+ +)?(\w+)\(", line)
        if match and match[1] not in ("mmap", "munmap", "mremap", "restart_syscall"):
            counts[match[1]] += 1
            points.append(Point(thread, match[1], counts[match[1]], line))
    return points


def rehearsal(bench: Bench) -> Rehearsal:
    """The bench's rehearsal, made once."""
    if "rehearsal" not in bench.made_once:
        bench.made_once["rehearsal"] = Rehearsal(bench)
    return bench.made_once["rehearsal"]


def no_strace() -> str:
    """What this machine lacks to inject faults at system calls."""
    return "" if shutil.which("strace") else "strace is not installed (apt-get install strace)"
