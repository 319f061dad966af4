"""A crash at every system call of a save, one after the other, with strace."""

import signal
from collections.abc import Sequence

from scripts.faults import EQUAL, Bench, Case, Fault
from scripts.faults_rehearsal import BASE, SAVE, Point, no_strace, rehearsal

STRIDE = 50  # this many seeds in a row cover every system call
STEP_K = "recovery gives step k or k + interval, never an error"


def share(points: Sequence[Point], seed: int) -> list[Point]:
    """The points of one seed: every STRIDE-th."""
    return list(points[seed % STRIDE :: STRIDE])


def save(bench: Bench, case: Case) -> None:
    """Crash at this seed's share of all calls of a save, and start the run again after each."""
    stage = rehearsal(bench)
    for point in share(stage.points, case.seed):
        job = stage.copy("crashed")
        killed, _ = stage.inject(job, point, "signal=KILL")
        if killed != -signal.SIGKILL:
            continue
        case.strike(f"{point.thread} {point.call} {point.n}")
        where = f"killed at {point.thread} {point.call} {point.n}, {point.line[:120]}"
        begins = len(job.events("resumed"))
        code = stage.finish(job)
        case.expect(STEP_K, code == 0, f"{where}: ended with {code}, {job.last_words()}")
        if code == 0:
            found = [event["step"] for event in job.events("resumed")[begins:]]
            case.expect(STEP_K, found in ([BASE], [SAVE]), f"{where}: went on from step {found}")
            case.expect(STEP_K, not job.saving(), f"{where}: {job.saving()} is left")
            difference = job.difference(stage.straight)
            case.expect(EQUAL, not difference, f"{where}: {difference}")
        if case.broken:
            job.run_dir.rename(bench.path(f"save-{case.seed}"))  # for who wants to look into it
            return
    case.measure("crash points", float(case.struck))


FAULTS: dict[str, Fault] = {"save": Fault((STEP_K, EQUAL), save, no_strace, enough=STRIDE)}
