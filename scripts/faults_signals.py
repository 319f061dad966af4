"""Runs that are told to stop, that stand still, or that are started twice."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable

from scripts.faults import EQUAL, EVALUATION, INTERVAL, STEPS, Bench, Case, Fault, Job
from scripts.faults_processes import alive, wait_for

STOPPED, HOPELESS = 75, 78
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A step and a save take a second here at the most. The interpreters and torch need more to leave, on busy cores, and
# one that is told to stop while it starts has torch to import first.
SAVED_SECONDS, ENDED_SECONDS = 5, 20
IN_TIME = f"exit code {STOPPED}; saved within {SAVED_SECONDS} s, ended within {ENDED_SECONDS} s"
NOT_REDONE = "the last step that was logged is the one that was saved"
STEP_TIMEOUT, SLACK_SECONDS = 5, 45
NOTICED = f"a stopped rank is noticed within its limit + {SLACK_SECONDS} s, and the run goes on"
ONE_WRITER = "of two launches at once one trains, the other is refused with 78"
NO_ORPHAN = "2 s after the launcher's death none of its processes is left"


def sigterm(bench: Bench, case: Case) -> None:
    """A stop signal at one moment; then the same command again."""
    draw, seed = random.Random(case.seed), case.seed
    straight = bench.straight()
    moment = draw.choice(list(MOMENTS))
    number, alone = draw.choice(SIGNALS), draw.random() < 0.3
    fresh = ["--cache_dir", bench.path(f"cache-{seed}")] if moment == "in the cache build" else []
    job = bench.job(f"sigterm-{seed}", fresh).start()
    try:
        came = MOMENTS[moment](job, draw)
        ranks = job.ranks()
        target = draw.choice(ranks) if alone and ranks else job.process.pid
        begun, sent = job.step() > 0, time.monotonic()
        if not came or job.process.poll() is not None:
            return
        what = case.note = f"{number.name} to {'the launcher' if target == job.process.pid else 'one rank'}, {moment}"
        os.kill(target, number)
        wait_for(
            lambda: job.process.poll() is not None or (job.run_dir / "exit.json").exists(), 60, f"the end after {what}"
        )
        saved = time.monotonic() - sent
        code = job.wait(60)
        ended = time.monotonic() - sent
        if code == 0 and job.step() == STEPS:
            return  # it came when all was done
        case.struck += 1
        case.measure("seconds to the end", ended)
        if begun:
            case.measure("seconds to the saved step", saved)
            case.expect(IN_TIME, saved <= SAVED_SECONDS, f"{what}: saved after {saved:.1f} s")
        case.expect(IN_TIME, code == STOPPED, f"{what}: code {code}; {job.last_words()}")
        case.expect(IN_TIME, ended <= ENDED_SECONDS, f"{what}: ended after {ended:.1f} s")
        _expect_nothing_redone(job, case, what)
        job.start().finish()
        difference = job.difference(straight)
        case.expect(EQUAL, not difference, f"{what}: {difference}")
    finally:
        if fresh:
            job.end()
            shutil.rmtree(fresh[1], ignore_errors=True)


def _expect_nothing_redone(job: Job, case: Case, what: str) -> None:
    curve = job.curve()
    saved = max((int(path.name[5:]) for path in job.run_dir.glob("step_????????")), default=0)
    last = curve[-1][0] if curve else 0
    case.expect(NOT_REDONE, last == saved, f"{what}: step {last} was logged, {saved} saved")


def _while_starting(job: Job, draw: random.Random) -> bool:
    time.sleep(draw.uniform(0, 5))
    return True


def _in_the_cache_build(job: Job, draw: random.Random) -> bool:
    cache = job.command[len(job.command) - 1]
    came = job.reaches(lambda: os.path.isdir(cache), 60, "the token cache")
    time.sleep(draw.uniform(0, 0.3))
    return came


def _in_a_step(job: Job, draw: random.Random) -> bool:
    step = draw.randint(1, STEPS - 12)
    came = job.reaches(lambda: job.step() >= step, 120, f"step {step}")
    time.sleep(draw.uniform(0, 0.02))
    return came


def _in_a_save(job: Job, draw: random.Random) -> bool:
    step = draw.randint(1, STEPS - 12)
    return job.reaches(lambda: job.step() >= step and job.saving(), 120, "a save")


def _in_an_evaluation(job: Job, draw: random.Random) -> bool:
    # The line of its step is written right before an evaluation, so that a checkpoint never runs ahead of the curve.
    step = EVALUATION * draw.randint(1, STEPS // EVALUATION - 2)
    return job.reaches(lambda: job.step() >= step, 120, f"the evaluation after step {step}")


MOMENTS: dict[str, Callable[[Job, random.Random], bool]] = {
    "while starting": _while_starting,
    "in the cache build": _in_the_cache_build,
    "in a step": _in_a_step,
    "in a save": _in_a_save,
    "in an evaluation": _in_an_evaluation,
}


def hang(bench: Bench, case: Case) -> None:
    """SIGSTOP one rank under a short step timeout; the others notice, and the launcher starts all again."""
    draw, seed = random.Random(case.seed), case.seed
    straight = bench.straight()
    limit = ["--step_timeout", STEP_TIMEOUT, "--ddp_timeout", 30]
    job = bench.job(f"hang-{seed}", limit, launcher=["--max-restarts", 3]).start()
    step = draw.randint(INTERVAL + 1, STEPS - 12)
    if not job.reaches(lambda: job.step() >= step, 120, f"step {step}"):
        return
    ranks = job.ranks()
    victim = draw.choice(ranks)
    os.kill(victim, signal.SIGSTOP)
    stopped, starts = time.monotonic(), len(job.events("resumed"))
    case.strike(f"rank {ranks.index(victim)} stopped at step {job.step()}")
    wait_for(lambda: not alive([victim]) or job.process.poll() is not None, 300, "the stopped rank to be ended")
    seconds = time.monotonic() - stopped
    case.measure("seconds from SIGSTOP to the end of the stopped rank", seconds)
    # The limit that was in force is a step's, or in a save or an evaluation the longer one; the rank says which.
    said = re.search(r"^Timeout \((\d+):(\d+):(\d+)", job.text(), re.MULTILINE)
    case.expect(NOTICED, said is not None, f"{case.note}: no rank has shown where it was stuck")
    if said:
        limit = int(said[1]) * 3600 + int(said[2]) * 60 + int(said[3])
        late = seconds - limit
        case.expect(NOTICED, late <= SLACK_SECONDS, f"{case.note}: {seconds:.0f} s under a limit of {limit} s")
        case.measure("seconds of that beyond the limit", late)
    job.reaches(lambda: len(job.events("resumed")) > starts, 120, "a restart")
    case.measure("seconds from SIGSTOP to the restarted run", time.monotonic() - stopped)
    job.finish()
    case.expect(NOTICED, not alive(ranks), f"{case.note}: a rank of before is left")
    difference = job.difference(straight)
    case.expect(EQUAL, not difference, f"{case.note}: {difference}")


def owner(bench: Bench, case: Case) -> None:
    """Two launches in one folder; then a launcher that is killed and started again at once."""
    draw, seed = random.Random(case.seed), case.seed
    straight = bench.straight()
    _launch_twice(bench, seed, draw, case, straight)
    _kill_and_start(bench, seed, draw, case, straight)


def _launch_twice(bench: Bench, seed: int, draw: random.Random, case: Case, straight: Job) -> None:
    one, other = (bench.job(f"owner-{seed}") for _ in range(2))
    other.log = one.log.with_name(f"owner-{seed}-other.log")
    pause = draw.choice([0.0, draw.uniform(0, 2)])
    one.start()
    time.sleep(pause)
    other.start()
    wait_for(lambda: one.step() > 0, 120, "one of two launches to train")
    owner_pid = json.loads((one.run_dir / "owner.json").read_text())["pid"]
    winner, loser = (one, other) if owner_pid in one.below() else (other, one)
    # It stands still so long that it cannot end before the other has given up waiting for it.
    frozen = [*winner.below(), winner.process.pid]
    for pid in reversed(frozen):
        os.kill(pid, signal.SIGSTOP)
    case.strike(f"two launches, {pause:.1f} s apart")
    code = loser.wait(90)
    case.expect(ONE_WRITER, code == HOPELESS, f"{case.note}: the second ended with {code}; {loser.last_words()}")
    case.expect(ONE_WRITER, "is in use by process" in loser.text(), f"{case.note}: {loser.last_words()}")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    winner.finish()
    begun = len(winner.events("started")) + len(winner.events("resumed"))
    case.expect(ONE_WRITER, begun == 1, f"{case.note}: {begun} runs have begun")
    difference = winner.difference(straight)
    case.expect(EQUAL, not difference, f"{case.note}: {difference}")


def _kill_and_start(bench: Bench, seed: int, draw: random.Random, case: Case, straight: Job) -> None:
    job = bench.job(f"owner-{seed}-again").start()
    step = draw.randint(1, STEPS - 12)
    if not job.reaches(lambda: job.step() >= step, 120, f"step {step}"):
        return
    below = job.below()
    job.process.kill()
    killed = time.monotonic()
    job.process.wait()
    job.start()
    case.strike(f"launcher killed at step {step} and started again")
    time.sleep(max(0.0, killed + 2 - time.monotonic()))
    left = alive(below)
    case.expect(NO_ORPHAN, not left, f"{case.note}: {len(left)} are left")
    job.finish()
    difference = job.difference(straight)
    case.expect(EQUAL, not difference, f"{case.note}: {difference}")


FAULTS = {
    "hang": Fault((NOTICED, EQUAL), hang),
    "sigterm": Fault((IN_TIME, NOT_REDONE, EQUAL), sigterm),
    "owner": Fault((ONE_WRITER, NO_ORPHAN, EQUAL), owner),
}
