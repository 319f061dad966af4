"""What a training script asks of a parallel back end, and the table that finds one by name."""

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.ddp import Ranks
    from trainer.profiling import WorkClock

Batch = dict[str, Tensor]
BACKENDS = {"ddp": "trainer.ddp:DataParallel"}


class StepBatch(Protocol):
    """One rank's part of a step, on the host."""

    micro_batches: list[Batch]
    first_sequences: list[int]  # position of each micro-batch's first sequence in the whole run
    target_tokens: int


class Loader(Protocol):
    """Gives a rank its part of any data step; what one holds depends on its number and the global batch alone."""

    batch_size: int  # sequences per micro-batch, at the most
    accumulation: int
    global_batch: int  # sequences per step; a resumed run sets its own
    tokens_per_epoch: int

    def __len__(self) -> int:
        """Sequences in the data."""
        ...

    def iterate(self, steps: Iterable[int]) -> Generator[StepBatch, None, None]:
        """Yield this rank's part of these data steps."""
        ...

    def epochs_of(self, step: int) -> dict[str, float]:
        """Source -> passes over it that `step` data steps make; {} where there is one source only."""
        ...

    def sample_ids(self, step: int) -> list[int]:
        """The samples of a whole data step, over all ranks."""
        ...


class Step(NamedTuple):
    """One optimizer update as this rank sees it."""

    number: int  # steps done before it
    micro_batches: list[Batch]
    first_sequences: list[int]  # position of each micro-batch's first sequence in the whole run
    target_tokens: int  # of the whole step, summed over the ranks


class Backend(Protocol):
    """The verbs of a training loop. Every back end is equal to one process at the same global batch."""

    module: nn.Module  # the plain model, for validation
    parameter_count: int
    trained_count: int  # of them those that the optimizer sees
    work: "WorkClock"  # how long this rank works until it meets the others

    def micro_batches(self, step: Step) -> Iterator[Batch]:
        """Yield the step's micro-batches on the device; gradients stay local until the last one."""
        ...

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the batch's token losses, float32, in the run's compute precision."""
        ...

    def backward(self, loss: Tensor) -> Tensor:
        """Add the loss's gradients to those of the step; return its value, detached."""
        ...

    def step(self) -> Tensor:
        """Clip, update (or skip, where anything is not finite) and clear; return the norm before clipping."""
        ...

    def set_rate(self, rate: float) -> float:
        """Use this learning rate from the next update on; return it."""
        ...

    def save(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full float32 weights and optimizer state by parameter name, on the first rank's host. All ranks call it."""
        ...

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Take back what `save` returned, strictly. All ranks call it."""
        ...


def build_backend(
    name: str,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ranks: "Ranks",
    **settings: object,
) -> Backend:
    """Construct the back end called `name` ("ddp"). Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"--parallel {name}: unknown; use one of {', '.join(BACKENDS)}")
    module, _, cls = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), cls)(model, make_optimizer, ranks, **settings)
