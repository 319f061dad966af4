"""When a run validates, what that makes of its state, and what is said of it."""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Sequence

import torch

from trainer import advice
from trainer.backends import Backend, Batch
from trainer.ddp import Ranks
from trainer.evaluation import Validation, evaluate_all
from trainer.lineage import TrainState
from trainer.monitor import Monitor
from trainer.plan import is_due

log = logging.getLogger(__name__)


class Validator:
    """The validation sets of one run."""

    def __init__(
        self,
        validations: Sequence[Validation],
        ranks: Ranks,
        monitor: Monitor,
        backend: Backend,
        *,
        interval: int,
        given_weights: bool,
    ) -> None:
        """interval: in steps; 0: only at the end. given_weights: whether those of step 0 are worth a validation."""
        self.validations, self.ranks, self.monitor, self.backend = list(validations), ranks, monitor, backend
        self.interval, self.given_weights = interval, given_weights
        # What must be equal on all ranks.
        self.parts = [(part.name, part.share, part.fingerprint, part.batch_count) for part in validations]
        whole = hashlib.sha256(repr(self.parts).encode()).hexdigest()
        self.fingerprint = self.parts[0][2] if len(self.parts) == 1 else whole
        self.last_loss: float | None = None
        self._told_of_forgetting = False

    def is_due(self, state: TrainState, total_steps: int) -> bool:
        """Whether the weights of this state are to be validated, and have not been yet."""
        due = is_due(state.step, self.interval) or state.step == total_steps
        if not state.step:
            due = self.given_weights
        return bool(self.validations) and due and state.validated_step < state.step

    def validate(self, state: TrainState) -> TrainState:
        """Validate and log; the state says what is best now. A collective."""
        result = evaluate_all(self.backend.module, self.backend.loss_sum, self.validations, self.ranks.sum)
        if self.ranks.is_first:
            self.monitor.write(state.step, result)
        state = dataclasses.replace(state, validated_step=state.step)
        self._warn_of_forgetting(state, result)
        loss, data = result["val_loss"], self.fingerprint
        self.last_loss = loss
        if len(self.validations) > 1 and state.general_val_set != data:
            general = result[f"val_loss/{self.validations[0].name}"]
            state = dataclasses.replace(state, general_val_loss=general, general_val_set=data)
        if not state.step:
            return state  # the best is one of the checkpoints
        if math.isfinite(loss) and (state.best_val_set != data or loss < state.best_val_loss):
            state = dataclasses.replace(state, best_step=state.step, best_val_loss=loss, best_val_set=data)
        return state

    def prove_weights(self, micro_batches: Sequence[Batch], target_tokens: float, vocab_size: int) -> float:
        """Say which loss the given weights begin with: the validation's, or else that of the first step. A collective.

        target_tokens: of the whole step, whose part of this rank are the micro-batches.
        """
        loss = self.last_loss
        if loss is None:
            self.backend.module.eval()
            # A compiled model would be compiled once more for a single use.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                mine = math.fsum(self.backend.loss_sum(batch).item() for batch in micro_batches)
            self.backend.module.train()
            (total,) = self.ranks.sum([mine])
            loss = total / target_tokens
        if self.ranks.is_first:
            log.info("loss before step 1: %.4f (guessing: %.4f)", loss, math.log(vocab_size))
            if warning := advice.no_better_than_guessing(loss, vocab_size):
                log.warning("%s", warning)
        return loss

    def _warn_of_forgetting(self, state: TrainState, result: dict[str, float]) -> None:
        """Say, once, that the loss on the first source has risen since the first validation."""
        if self._told_of_forgetting or len(self.validations) < 2 or state.general_val_set != self.fingerprint:
            return
        name = self.validations[0].name
        now = result[f"val_loss/{name}"]
        if (warning := advice.forgetting(state.general_val_loss, now, name)) and self.ranks.is_first:
            log.warning("step %d: %s", state.step, warning)
            self.monitor.event("forgetting", step=state.step, source=name, first=state.general_val_loss, now=now)
        self._told_of_forgetting = warning is not None
