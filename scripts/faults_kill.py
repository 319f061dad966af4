"""SIGKILL, without a warning: a rank, the launcher, a loader worker; in a step, in a save, while starting."""

import os
import random
import signal
import time

from scripts.faults import EQUAL, STEPS, Bench, Case, Fault, Job
from scripts.faults_processes import alive, wait_for

KILLS = 4  # per run: a run costs seconds of imports, so one serves for several
INSIDE_A_SAVE = 0.3
GONE = "no process is left 15 s after a kill, 2 s after the launcher's"
TARGETS = ("rank", "rank 0", "launcher", "worker")
# Every kill has its own stretch of steps, with a checkpoint in between. More at one place is what the guards against
# a run that always dies at the same step are for.
STRETCH, WIDTH = STEPS // KILLS - 1, 8


def kill(bench: Bench, case: Case) -> None:
    """Kill a run several times, restarted by the launcher or by hand, and let it end."""
    draw, seed = random.Random(case.seed), case.seed
    straight = bench.straight()
    by_launcher = draw.random() < 0.5
    background = ["--async_save"] if draw.random() < 0.25 else []
    launcher = ["--max-restarts", 2 * KILLS] if by_launcher else []
    job = bench.job(f"kill-{seed}", background, launcher=launcher).start()
    if not by_launcher and draw.random() < 0.3:
        _kill_while_starting(job, draw, case)
    for number in range(KILLS):
        target = draw.choice(TARGETS)
        first = 1 + number * STRETCH
        step, in_save = draw.randint(first, first + WIDTH), draw.random() < INSIDE_A_SAVE
        pause = draw.uniform(0, 0.03)
        if not job.reaches(lambda step=step: job.step() >= step, 120, f"step {step}"):
            break
        if in_save:
            job.reaches(job.saving, 60, "a save")
            time.sleep(pause if pause < 0.015 else 0)
        _strike(job, target, draw, case, by_launcher and target != "launcher")
    job.finish()
    difference = job.difference(straight)
    case.expect(EQUAL, not difference, difference)


def _victim(job: Job, target: str, draw: random.Random) -> int | None:
    if target == "launcher":
        return job.process.pid
    found = job.workers() if target == "worker" else job.ranks()[: 1 if target == "rank 0" else None]
    return draw.choice(found) if found else None


def _strike(job: Job, target: str, draw: random.Random, case: Case, restarts: bool) -> None:
    """Kill the target; see that all processes go, or that the launcher starts new ones."""
    below, starts, step = job.below(), len(job.events("resumed")), job.step()
    victim = _victim(job, target, draw)
    if victim is None or not alive([victim]) or job.process.poll() is not None:
        return
    os.kill(victim, signal.SIGKILL)
    killed, in_save = time.monotonic(), bool(job.saving())
    case.strike(f"{target} at step {step}{' inside a save' if in_save else ''}")
    case.measure("kills inside a save", float(in_save))
    if restarts:
        # A worker that had done its work already is not missed.
        again = job.reaches(lambda: _goes_on(job, starts) or job.step() >= STEPS, 90, "the launcher to restart the run")
        if again and _goes_on(job, starts):
            case.measure("seconds from a kill to the next step", time.monotonic() - killed)
        return
    if target == "launcher":
        job.process.wait()
    else:
        job.wait()
    limit = 2 if target == "launcher" else 15
    wait_for(lambda: not alive(below) or time.monotonic() > killed + limit, limit + 1, "the processes to end")
    left = alive(below)
    case.expect(GONE, not left, f"{len(left)} processes live on {limit} s after the {target} was killed at step {step}")
    if left:
        wait_for(lambda: not alive(below), 60, "the processes of a killed run to end")
    if job.process.returncode != 0:
        job.start()


def _goes_on(job: Job, starts: int) -> bool:
    """Whether the run was started again and has logged a step since."""
    resumed = job.events("resumed")
    return len(resumed) > starts and job.step() > resumed[-1]["step"]


def _kill_while_starting(job: Job, draw: random.Random, case: Case) -> None:
    """Kill launcher or ranks in the first seconds, in which they import, connect and load."""
    seconds = draw.uniform(0.2, 5)
    time.sleep(seconds)
    below = job.below()
    victim = draw.choice([job.process.pid, *below])
    if job.process.poll() is None and alive([victim]):
        os.kill(victim, signal.SIGKILL)
        case.strike(f"a process {seconds:.1f} s after the start")
        case.measure("kills inside a save", 0.0)
        job.wait()
        # Ranks that still import torch notice the launcher's death when they have.
        wait_for(lambda: not alive(below), 20, "the ranks of a killed start to end")
        job.start()


FAULTS = {"kill": Fault((EQUAL, GONE), kill)}
