"""The checkpoints of one run: what goes into one, and what comes back out."""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trainer import lineage
from trainer.backends import Backend
from trainer.checkpoint import checkpoint_step, load_tensors, newest_valid, prune, save_tensors, write_checkpoint
from trainer.ddp import Ranks
from trainer.lineage import TrainState
from trainer.monitor import Monitor, cut_metrics, sync_metrics
from trainer.ownership import Owner
from trainer.recovery import stop_budget

ALL_DAMAGED = -1

log = logging.getLogger(__name__)


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
            cut_metrics(self.run_dir / "metrics.jsonl", state.step)
        return state

    def _load(self, backend: Backend) -> TrainState:
        folder = self.run_dir / f"step_{self.last_step:08d}"
        saved = lineage.read_saved(folder)
        lineage.refuse_changes(saved.fingerprint, self.fingerprint, folder)
        backend.load(load_tensors(folder / "model.safetensors"), load_tensors(folder / "optimizer.safetensors"))
        if self.ranks.is_first:
            for line in lineage.changes_to_mention(saved, self.options, self.environment):
                log.warning("%s", line)
            if saved.save_seconds:
                log.info("%s", stop_budget(saved.step_seconds, saved.save_seconds)[0])
        self.save_seconds = saved.save_seconds
        return saved.state

    def _find_newest(self) -> int:
        """Step of the newest valid checkpoint; 0 where the run has none yet."""
        newest = newest_valid(self.run_dir, owner=True)
        if newest is not None:
            return checkpoint_step(newest)
        return ALL_DAMAGED if list(self.run_dir.glob("step_*.damaged*")) else 0

    def save(self, backend: Backend, state: TrainState, step_seconds: float) -> None:
        """Commit a checkpoint. A disk that fails costs this one only: training goes on, the next one is tried.

        All ranks call it. Raises OwnershipLost where another process has taken the folder over.
        """
        weights, optimizer = backend.save()
        if not self.ranks.is_first:
            return
        started, first = time.perf_counter(), not self.save_seconds

        def write_files(folder: Path) -> None:
            self.write_model(folder, weights)
            save_tensors(folder / "optimizer.safetensors", optimizer)
            lineage.write_saved(folder, saved)

        saved = lineage.Saved(state, self.fingerprint, self.options, self.environment, step_seconds, self.save_seconds)
        try:
            sync_metrics(self.run_dir / "metrics.jsonl")
            folder = write_checkpoint(self.run_dir, state.step, write_files, self.fingerprint, self.owner.check)
        except OSError as problem:
            log.warning(
                "the checkpoint of step %d failed (%s); training goes on and tries again at the next one; until then "
                "the newest is that of step %d", state.step, problem, self.last_step,
            )  # fmt: skip
            self.monitor.event("save_failed", step=state.step, reason=str(problem))
            return
        prune(self.run_dir, self.keep, pinned=[] if state.best_step is None else [state.best_step])
        self.last_step, self.save_seconds = state.step, time.perf_counter() - started
        log.info("saved %s in %.1f s", folder, self.save_seconds)
        if first:
            line, tight = stop_budget(step_seconds, self.save_seconds)
            log.log(logging.WARNING if tight else logging.INFO, "%s", line)
