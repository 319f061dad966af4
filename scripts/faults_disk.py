"""A disk that takes no more: really full for a while, and refusing one write of a save after the other."""

import contextlib
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from scripts.faults import EQUAL, INTERVAL, STEPS, Bench, Case, Fault, Job
from scripts.faults_rehearsal import Point, no_strace, rehearsal
from scripts.faults_save import share

DISK_MB = 48  # room for the checkpoints that a run keeps, and one more
CHECKPOINT_BYTES = 6_000_000
FILLINGS = 2  # per run
CLEAN = "no temporary file or folder is left"
WRITES = ("write", "pwrite64", "mkdir", "ftruncate", "fallocate", "fsync", "rename", "renameat", "renameat2")


def disk(bench: Bench, case: Case) -> None:
    """Fill the disk under a run twice, and fail this seed's share of the writes of a save."""
    _fill(bench, case.seed, case)
    if not no_strace():
        _refuse(bench, case.seed, case)


def refusals(points: list[Point]) -> list[tuple[Point, str]]:
    """The calls of a save that a disk can refuse, and with which error."""
    found = [p for p in points if p.call in WRITES or (p.call == "openat" and "O_CREAT" in p.line)]
    return [(point, "EIO" if point.call == "fsync" else "ENOSPC") for point in found]


def _refuse(bench: Bench, seed: int, case: Case) -> None:
    stage = rehearsal(bench)
    for point, error in share(refusals(stage.points), seed):
        job = stage.copy("refused")
        code, struck = stage.inject(job, point, f"error={error}")
        if not struck:
            continue
        case.strike(f"{error} at {point.thread} {point.call} {point.n}")
        where = f"{error} at {point.thread} {point.call} {point.n}, {point.line[:120]}"
        difference = job.difference(stage.straight) if code == 0 else f"ended with {code}, {job.last_words()}"
        case.expect(EQUAL, not difference, f"{where}: {difference}")
        _expect_clean(job, case, where)


def _fill(bench: Bench, seed: int, case: Case) -> None:
    draw, straight = random.Random(seed), bench.straight()
    with small_disk(bench.folder / f"disk-{seed}") as folder:
        job = bench.job(f"{folder.name}/run")
        job.log = bench.folder / f"{folder.name}.log"
        job.log.unlink(missing_ok=True)
        try:
            job.start()
            for number in range(FILLINGS):
                first = 3 + number * 25 + draw.randrange(15)
                # Any room that is too small for a checkpoint: each file of it is the one that fails, some time.
                room, last = draw.randrange(CHECKPOINT_BYTES), first + INTERVAL + 1 + draw.randrange(INTERVAL)
                if not job.reaches(lambda first=first: logged_step(job) >= first, 120, f"step {first}"):
                    break
                fill(folder / "filler", room)
                before = logged_step(job)
                job.reaches(lambda last=last: logged_step(job) >= last, 120, f"step {last} on a full disk")
                if logged_step(job) >= before + INTERVAL:
                    case.strike(f"full but for {room} bytes from step {before} to {logged_step(job)}")
                (folder / "filler").unlink()
            job.finish()
            difference = job.difference(straight)
            case.expect(EQUAL, not difference, f"{case.note}: {difference}")
            _expect_clean(job, case, case.note)
        finally:
            job.end()


def _expect_clean(job: Job, case: Case, where: str) -> None:
    left = [str(path.relative_to(job.run_dir)) for path in job.run_dir.rglob("*") if ".tmp" in path.name]
    case.expect(CLEAN, not left, f"{where}: {', '.join(left)}")


def logged_step(job: Job) -> int:
    """The last step on the console, which works on a full disk too."""
    steps = re.findall(rf"\((\d+)/{STEPS}\) loss", job.text())
    return int(steps[-1]) if steps else 0


def fill(path: Path, room: int) -> None:
    """Take all of the disk but `room` bytes."""
    with open(path, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        os.truncate(path, max(0, path.stat().st_size - room))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of DISK_MB at a folder."""
    if folder.is_mount():  # of a drill that was killed
        subprocess.run(["umount", "-l", folder], check=True)
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "drill", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        shutil.rmtree(folder)


def no_mount() -> str:
    """What this machine lacks to mount a small disk."""
    return "" if os.geteuid() == 0 and shutil.which("mount") else "mounting a small disk needs root"


FAULTS = {"disk": Fault((EQUAL, CLEAN), disk, no_mount)}
