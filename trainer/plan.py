"""How many steps, on which batch, at which rate: all that is known before the first step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.optim import default_warmup, rate_share, scaled_rate

FEW_STEPS = 20


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run. Raises ValueError where the data do not fill one step."""

    samples: int  # sequences in the data
    tokens_per_epoch: int  # target tokens in the data
    max_seq_len: int
    world_size: int
    batch_size: int  # sequences per rank and micro-batch
    accumulation: int  # micro-batches per step
    global_batch: int  # sequences per optimizer step, over all ranks
    epochs: float | None  # None: one, or as many as make FEW_STEPS steps
    max_steps: int | None
    learning_rate: float
    base_batch_size: int
    lr_scaling: str
    lr_schedule: str
    warmup_steps: int | None

    def __post_init__(self) -> None:
        if self.world_size > self.global_batch:
            raise ValueError(
                f"{self.world_size} ranks cannot share a global batch of {self.global_batch} sequences; start at most "
                f"{self.global_batch}"
            )
        epochs = 1 if self.epochs is None else self.epochs
        if self.max_steps is None and self.samples * epochs < self.global_batch:
            raise ValueError(
                f"the data give {self.samples} sequences of {self.max_seq_len} tokens, times {epochs:g} epochs "
                f"less than one step of {self.global_batch} sequences; lower --batch_size or "
                "--gradient_accumulation_steps, raise --epochs, or set --max_steps"
            )
        if self.epochs is None:
            # A small text on many ranks gives a handful of steps an epoch, and nothing is learnt in those.
            object.__setattr__(self, "epochs", max(1, math.ceil(FEW_STEPS * self.global_batch / self.samples)))
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", default_warmup(self.total_steps, self.lr_schedule))

    @property
    def total_steps(self) -> int:
        """max_steps, or enough to see every sample `epochs` times: the last step runs into the next epoch."""
        return self.max_steps or math.ceil(self.samples * self.epochs / self.global_batch)

    @property
    def peak_rate(self) -> float:
        """The rate after warm-up, scaled to the global batch."""
        return scaled_rate(self.learning_rate, self.global_batch, self.base_batch_size, self.lr_scaling)

    def rate(self, step: int) -> float:
        """Learning rate of a step: a function of its number, the total and the options."""
        return self.peak_rate * rate_share(step, self.total_steps, self.warmup_steps, self.lr_schedule)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """(epoch that the step ends in, epochs of the run), counted from 1."""
        seen = self.total_steps * self.global_batch
        epochs = math.ceil(self.epochs if self.max_steps is None else seen / self.samples)
        return min(epochs, (max(step, 1) * self.global_batch - 1) // self.samples + 1), epochs

    def lines(self) -> Iterator[str]:
        """The derivations, for the start of a log."""
        if self.global_batch == self.batch_size * self.world_size * self.accumulation:
            yield (
                f"global batch {self.global_batch} sequences = {self.batch_size} per micro-batch x {self.world_size} "
                f"ranks x {self.accumulation} accumulated"
            )
        else:
            yield (
                f"global batch {self.global_batch} sequences, as the run began with; each of {self.world_size} ranks "
                f"takes {self.global_batch // self.world_size} or one more, at most {self.batch_size} per micro-batch"
            )
        yield (
            f"peak rate {self.peak_rate:.6g} = {self.learning_rate:.6g} scaled '{self.lr_scaling}' from "
            f"{self.base_batch_size} to {self.global_batch} sequences; {self.lr_schedule} schedule, "
            f"{self.warmup_steps} warm-up steps"
        )
        if self.peak_rate < self.learning_rate / 8:
            yield (
                f"note: that is {self.learning_rate / self.peak_rate:.0f} times below --learning_rate; batches this "
                "small often do better with --lr_scaling sqrt or none"
            )
        useful = self.tokens_per_epoch / (self.samples * self.max_seq_len)
        yield (
            f"{self.samples:,} sequences with {self.tokens_per_epoch:,} target tokens an epoch "
            f"({useful:.1%} of the positions); "
            f"{self.total_steps:,} steps = {self.total_steps * self.global_batch / self.samples:.2f} epochs"
        )


def data_step(step: int, skipped: Sequence[int]) -> int:
    """Which data step the optimizer step `step` trains on, both counted from 0: the step-th that is not skipped.

    skipped: in ascending order.
    """
    for number in skipped:
        if number > step:
            break
        step += 1
    return step


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after this one; 0 means never."""
    return interval > 0 and step % interval == 0
