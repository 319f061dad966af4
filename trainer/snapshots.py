"""The checkpoints of one run: what goes into one, and what comes back out."""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trainer import lineage
from trainer.backends import Backend
from trainer.checkpoint import (
    checkpoint_step,
    load_tensors,
    newest_valid,
    prune,
    save_tensors,
    step_folder,
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


@dataclasses.dataclass
class Snapshots:
    """Saves and restores a run's whole state. Every rank has one; rank 0's, which owns the folder, does the writing."""

    run_dir: Path
    ranks: Ranks
    owner: Owner | None
    monitor: Monitor
    keep: int
    fingerprint: dict[str, object]  # what must not change over the life of the run
    options: dict[str, object]
    environment: dict[str, object]
    write_model: Callable[[Path, dict[str, Tensor]], None]
    read_model: Callable[[Path], dict[str, Tensor]]
    save_seconds: float = 0.0  # of the last save
    last_step: int = 0  # of the newest checkpoint

    def restore(self, backend: Backend) -> TrainState:
        """Load the newest valid checkpoint into the back end; step 0 where there is none. A collective.

        Raises ValueError where the checkpoint belongs to a run with another fingerprint.
        """
        # The first rank alone decides, and the others hear it as a number: a shared disk may show each another list.
        (found,) = self.ranks.sum([self._find_newest() if self.ranks.is_first else 0])
        if found == ALL_DAMAGED:
            raise ValueError(
                f"every checkpoint in {self.run_dir} is damaged (its step_*.damaged folders); put a good copy back, or "
                "start anew with --resume_from_checkpoint false, which sets the whole folder aside"
            )
        self.last_step = int(found)
        state = self._load(backend) if self.last_step else TrainState()
        if self.ranks.is_first:
            cut_metrics(self.run_dir / "metrics.jsonl", state.step, state.validated_step)
            # Also here: a full disk may have no room for the next save before the old ones are gone.
            prune(self.run_dir, self.keep, pinned={state.step, state.best_step})
        return state

    def _load(self, backend: Backend) -> TrainState:
        folder = step_folder(self.run_dir, self.last_step)
        saved = lineage.read_saved(folder)
        lineage.refuse_changes(saved.fingerprint, self.fingerprint, folder)
        backend.load(self.read_model(folder), load_tensors(folder / "optimizer.safetensors"))
        if self.ranks.is_first:
            for line in lineage.changes_to_mention(saved, self.options, self.environment):
                log.warning("%s", line)
            self._report_budget(saved.step_seconds, saved.save_seconds)
        self.save_seconds = saved.save_seconds
        return saved.state

    def _find_newest(self) -> int:
        """Step of the newest valid checkpoint; 0 where the run has none yet."""
        newest = newest_valid(self.run_dir, owner=True)
        if newest is not None:
            return checkpoint_step(newest)
        return ALL_DAMAGED if list(self.run_dir.glob("step_*.damaged*")) else 0

    def save(self, backend: Backend, state: TrainState, step_seconds: float) -> bool:
        """Commit a checkpoint; False where the disk did not take it, which costs this one only. A collective.

        Raises OwnershipLost where another process has taken the folder over.
        """
        started, first = time.perf_counter(), not self.save_seconds
        weights, optimizer = backend.save()
        saved = not self.ranks.is_first or self._write(weights, optimizer, state, step_seconds)
        (failures,) = self.ranks.sum([float(not saved)])
        if failures:
            return False
        self.last_step, self.save_seconds = state.step, time.perf_counter() - started
        if self.ranks.is_first:
            log.info("saved %s in %.1f s", step_folder(self.run_dir, state.step), self.save_seconds)
            if first:
                self._report_budget(step_seconds, self.save_seconds)
        return True

    def _write(
        self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainState, step_seconds: float
    ) -> bool:

        def write_files(folder: Path) -> None:
            self.write_model(folder, weights)
            save_tensors(folder / "optimizer.safetensors", optimizer)
            lineage.write_saved(folder, saved)

        broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
        if broken:
            log.error("step %d is not saved: %d tensors are not finite, as %s", state.step, len(broken), broken[0])
            self.monitor.event("save_failed", step=state.step, reason=f"not finite: {broken}")
            return False
        saved = lineage.Saved(state, self.fingerprint, self.options, self.environment, step_seconds, self.save_seconds)
        try:
            sync_metrics(self.run_dir / "metrics.jsonl")
            write_checkpoint(self.run_dir, state.step, write_files, self.fingerprint, self.owner.check)
        except OSError as problem:
            log.warning(
                "the checkpoint of step %d failed (%s); training goes on and tries again at the next one; until then "
                "the newest is that of step %d", state.step, problem, self.last_step,
            )  # fmt: skip
            self.monitor.event("save_failed", step=state.step, reason=str(problem))
            return False
        prune(self.run_dir, self.keep, pinned={state.step, state.best_step})
        return True

    @staticmethod
    def _report_budget(step_seconds: float, save_seconds: float) -> None:
        if (budget := stop_budget(step_seconds, save_seconds)) is not None:
            line, tight = budget
            log.log(logging.WARNING if tight else logging.INFO, "%s", line)
