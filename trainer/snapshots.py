"""The checkpoints of one run: what goes into one, and what comes back out."""

import dataclasses
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trainer import guard, lineage
from trainer.backends import Backend
from trainer.checkpoint import (
    checkpoint_step,
    discard,
    load_tensors,
    newest_valid,
    prune,
    save_tensors,
    step_folder,
    step_folders,
    verify,
    write_checkpoint,
)
from trainer.ddp import Ranks
from trainer.lineage import TrainState
from trainer.monitor import Monitor, cut_metrics, sync_metrics
from trainer.ownership import Owner
from trainer.recovery import stop_budget

ALL_DAMAGED = -1

log = logging.getLogger(__name__)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint that holds a whole model."""
    return load_tensors(folder / "model.safetensors")


def find_newest(run_dir: Path, ranks: Ranks) -> int:
    """Step of the newest valid checkpoint; 0 where the run has none yet. A collective.

    Raises ValueError where there are only damaged ones.
    """
    # The first rank alone decides, and the others hear it as a number: a shared disk may show each another list.
    (found,) = ranks.sum([_newest_of(run_dir) if ranks.is_first else 0])
    if found == ALL_DAMAGED:
        raise ValueError(
            f"every checkpoint in {run_dir} is damaged (its step_*.damaged folders); put a good copy back, or "
            "start anew with --resume_from_checkpoint false, which sets the whole folder aside"
        )
    return int(found)


def _newest_of(run_dir: Path) -> int:
    newest = newest_valid(run_dir, owner=True)
    if newest is not None:
        return checkpoint_step(newest)
    return ALL_DAMAGED if list(run_dir.glob("step_*.damaged*")) else 0


@dataclasses.dataclass
class Snapshots:
    """Saves and restores a run's whole state. Every rank has one; rank 0's, which owns the folder, does the writing."""

    run_dir: Path
    ranks: Ranks
    owner: Owner | None
    monitor: Monitor
    keep: int
    background: bool  # a save costs the step only a copy in memory
    fingerprint: dict[str, object]  # what must not change over the life of the run
    options: dict[str, object]
    environment: dict[str, object]
    write_model: Callable[[Path, dict[str, Tensor]], None]
    read_model: Callable[[Path], dict[str, Tensor]]
    last_step: int  # of the newest checkpoint; 0: none
    save_seconds: float = 0.0  # of the last save
    failed_saves: int = 0  # since this start; counted on the first rank
    _writer: threading.Thread | None = None
    _problem: BaseException | None = None  # of the writer, where it ended with an error of its own
    _written: bool = True  # whether the last write succeeded

    def restore(self, backend: Backend) -> TrainState:
        """Load the newest checkpoint into the back end; step 0 where there is none.

        Raises ValueError where the checkpoint belongs to a run with another fingerprint.
        """
        state = TrainState()
        if self.last_step:
            saved = self._load(self.last_step, backend)
            state, self.save_seconds = saved.state, saved.save_seconds
            if self.ranks.is_first:
                for line in lineage.changes_to_mention(saved, self.options, self.environment):
                    log.warning("%s", line)
                self._report_budget(saved.step_seconds, saved.save_seconds)
        if self.owner is not None:
            cut_metrics(self.run_dir / "metrics.jsonl", state.step, state.validated_step)
            # Also here: a full disk may have no room for the next save before the old ones are gone.
            prune(self.run_dir, self.keep, self._pinned(state))
        return state

    def _load(self, step: int, backend: Backend) -> lineage.Saved:
        folder = step_folder(self.run_dir, step)
        saved = lineage.read_saved(folder)
        lineage.refuse_changes(saved, self.fingerprint, self.options, folder)
        backend.load(self.read_model(folder), load_tensors(folder / "optimizer.safetensors"))
        return saved

    def newest_before(self, step: int) -> int:
        """The newest valid checkpoint of this step or an earlier one; 0 where there is none. A collective."""
        self.finish()
        found = 0
        if self.ranks.is_first:
            earlier = [folder for folder in step_folders(self.run_dir) if checkpoint_step(folder) <= step]
            found = next((checkpoint_step(folder) for folder in reversed(earlier) if not verify(folder)), 0)
        return int(self.ranks.sum([found])[0])

    def return_to(self, step: int, backend: Backend) -> TrainState:
        """Load an older checkpoint and forget what came after it, checkpoints and curve. A collective."""
        state = self._load(step, backend).state
        (_,) = self.ranks.sum([0.0])  # nothing is deleted before all have read
        if self.ranks.is_first:
            discard([folder for folder in step_folders(self.run_dir) if checkpoint_step(folder) > step])
            self.monitor.rewind(state.step, state.validated_step)
        self.last_step = step
        return state

    def save(self, backend: Backend, state: TrainState, step_seconds: float, waits: bool) -> bool:
        """Commit a checkpoint; False where the disk did not take it, which costs this one only. A collective.

        In the background the answer is that of the save before, unless it `waits` for its own. Raises OwnershipLost
        where another process has taken the folder over.
        """
        started, first = time.perf_counter(), not self.save_seconds
        weights, optimizer = backend.save()
        if self.background:
            # On a CPU these are the tensors that the next step changes.
            weights, optimizer = ({n: t.clone() for n, t in part.items()} for part in (weights, optimizer))
        saved = self.finish()
        if self.ranks.is_first:
            self._writer = threading.Thread(target=self._guarded_write, args=(weights, optimizer, state, step_seconds))
            self._writer.start()
            saved = self.finish() if waits or not self.background else saved
        (failures,) = self.ranks.sum([float(not saved)])
        if failures:
            return False
        self.last_step, self.save_seconds = state.step, time.perf_counter() - started
        if self.ranks.is_first:
            what = "saving" if self._writer else "saved"
            log.info("%s %s; training waited %.1f s", what, step_folder(self.run_dir, state.step), self.save_seconds)
            if first:
                self._report_budget(step_seconds, self.save_seconds)
        return True

    def finish(self) -> bool:
        """Wait for a save that is being written; whether the last one succeeded."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
            if self._problem is not None:
                raise self._problem
        return self._written

    def _guarded_write(self, *what: object) -> None:
        try:
            self._written = self._write(*what)
        except BaseException as problem:  # raised again by who waits for us
            self._problem, self._written = problem, False

    def _write(
        self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainState, step_seconds: float
    ) -> bool:
        tensors = {**weights, **{f"optimizer {name}": tensor for name, tensor in optimizer.items()}}

        def write_files(folder: Path) -> None:
            self.write_model(folder, weights)
            save_tensors(folder / "optimizer.safetensors", optimizer)
            lineage.write_saved(folder, saved)

        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            log.error("step %d is not saved: %d tensors are not finite, as %s", state.step, len(broken), broken[0])
            return self._failed(state.step, f"not finite: {broken}")
        saved = lineage.Saved(state, self.fingerprint, self.options, self.environment, step_seconds, self.save_seconds)
        try:
            sync_metrics(self.run_dir / "metrics.jsonl")
            self._make_room(sum(tensor.nbytes for tensor in tensors.values()), state)
            write_checkpoint(self.run_dir, state.step, write_files, self.fingerprint, self.owner.check)
        except OSError as problem:
            log.warning(
                "the checkpoint of step %d failed (%s); training goes on and tries again soon; until then the newest "
                "is that of step %d", state.step, problem, self.last_step,
            )  # fmt: skip
            return self._failed(state.step, str(problem))
        prune(self.run_dir, self.keep, self._pinned(state))
        return True

    def _failed(self, step: int, reason: str) -> bool:
        self.failed_saves += 1
        self.monitor.event("save_failed", step=step, reason=reason, failed_saves=self.failed_saves)
        return False

    def _make_room(self, size: int, state: TrainState) -> None:
        """Delete old checkpoints where the disk lacks room for `size` bytes. Raises OSError if that is not enough."""
        if shutil.disk_usage(self.run_dir).free >= size:
            return
        log.warning("the disk is full: of the older checkpoints only those of best loss and of the loss guard stay")
        prune(self.run_dir, 1, self._pinned(state))
        free = shutil.disk_usage(self.run_dir).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size:,} bytes are needed, {free:,} are free")

    def _pinned(self, state: TrainState) -> set[int | None]:
        """Steps whose checkpoints stay: this one, the best, and one that no spike of now can have spoiled."""
        stable = (n for n in map(checkpoint_step, step_folders(self.run_dir)) if n <= state.step - guard.STABLE_AGE)
        return {state.step, state.best_step, max(stable, default=None)}

    @staticmethod
    def _report_budget(step_seconds: float, save_seconds: float) -> None:
        if (budget := stop_budget(step_seconds, save_seconds)) is not None:
            line, tight = budget
            log.log(logging.WARNING if tight else logging.INFO, "%s", line)
