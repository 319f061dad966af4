"""What a run remembers of its starts, so that restarting by itself never becomes a loop.

Two guards, for restarts that nobody has looked at: by torchrun, by Slurm, by Kubernetes. A start by hand begins the
counts anew. No progress: MOST_STARTS starts from the same checkpoint are enough. Poison: where two starts in a row
died in the same step on the same samples, these are left out, at most MOST_POISONED times in a run's life.
"""

import contextlib
import dataclasses
import logging
import os
from pathlib import Path

from trainer.checkpoint import read_json, write_json

log = logging.getLogger(__name__)

MOST_STARTS = 3
MOST_POISONED = 3
BETWEEN_STEPS = -1


@dataclasses.dataclass(frozen=True)
class Record:
    """attempts.json. The data steps count as the loader does, the skipped ones included."""

    checkpoint: int = 0  # step of the newest checkpoint when the last start began
    starts: int = 0  # from that checkpoint
    died_in: int | None = None  # data step in which the start before the last died
    poisoned: tuple[int, ...] = ()  # data steps that are left out


class Attempts:
    """The record of one run folder, as its owner keeps it. Raises ValueError where another start cannot help."""

    def __init__(self, run_dir: Path, newest: int, automatic: bool) -> None:
        """newest: step of the newest checkpoint, 0 for none. automatic: nobody has looked since the last end."""
        self._path = run_dir / "attempts.json"
        self.new_poison: int | None = None  # what this start adds to the poisoned
        place = run_dir / "in_step"
        was, died_in = self._read(), _read_place(place)
        if not automatic:
            was, died_in = Record(poisoned=was.poisoned if newest else ()), None
        starts, poisoned = was.starts + 1 if was.checkpoint == newest else 1, was.poisoned
        if died_in is not None and died_in == was.died_in and len(poisoned) < MOST_POISONED:
            self.new_poison, poisoned, starts, died_in = died_in, (*poisoned, died_in), 1, None
        self.record = Record(newest, starts, died_in, poisoned)
        if automatic and starts > MOST_STARTS:
            # Who starts it again by hand, or with another job, gets as many tries again.
            self._write(Record(poisoned=poisoned))
            raise ValueError(
                f"{run_dir}: {MOST_STARTS} starts from {f'step {newest}' if newest else 'the beginning'} ended without "
                "a newer checkpoint; find out from the log what ended them, then start the same command by hand"
            )
        self._write(self.record)
        # One number of one width, always overwritten in place: no disk is too full for it.
        self._place = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.enter(BETWEEN_STEPS)

    def enter(self, data_step: int) -> None:
        """Note what is being trained on; BETWEEN_STEPS for saving and validating."""
        with contextlib.suppress(OSError):
            os.pwrite(self._place, f"{data_step:20d}\n".encode(), 0)

    def close(self, orderly: bool) -> None:
        """The process ends; orderly: it is done or was told to stop, so that this start does not count."""
        os.close(self._place)
        if orderly:
            self._write(Record(poisoned=self.record.poisoned))
            with contextlib.suppress(OSError):
                self._path.with_name("in_step").unlink()

    def _read(self) -> Record:
        try:
            values = read_json(self._path)
            return Record(**{**values, "poisoned": tuple(values["poisoned"])})
        except FileNotFoundError:
            return Record()
        except (OSError, ValueError, TypeError, KeyError) as problem:
            log.warning("%s cannot be read, earlier starts are forgotten: %s", self._path, problem)
            return Record()

    def _write(self, record: Record) -> None:
        try:
            write_json(self._path, dataclasses.asdict(record))
        except OSError as problem:
            log.warning("%s cannot be written; this start will not be counted: %s", self._path, problem)


def is_automatic() -> bool:
    """Whether torchrun, Slurm or Kubernetes made this start."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts) or "KUBERNETES_SERVICE_HOST" in os.environ


def gave_up_before(run_dir: Path, hopeless: int) -> str | None:
    """The reason with which an earlier attempt of this launch left with the code `hopeless`; None where none did."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    try:
        ending = read_json(run_dir / "exit.json")
    except (OSError, ValueError):
        return None
    return str(ending.get("reason")) if isinstance(ending, dict) and ending.get("code") == hopeless else None


def _read_place(path: Path) -> int | None:
    """The data step that the last start died in; None where it ended orderly, or between steps."""
    try:
        place = int(path.read_bytes())
    except (OSError, ValueError):
        return None
    return None if place == BETWEEN_STEPS else place
