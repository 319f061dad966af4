"""train_pretrain.py with a fault in its numbers or its clock; scripts.drill starts it in that script's place.

DRILL_FAULT in the environment names a function below and its arguments, as JSON. What strikes is said on stderr, and
the drill counts it there. The trainer itself knows nothing of drills.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trainer.backends import Batch, Step
from trainer.ddp import DataParallel

ROOT = Path(__file__).resolve().parent.parent


def say(backend: DataParallel, what: str) -> None:
    """Tell the drill that the fault has struck."""
    print(f"drill: {what} on rank {backend.ranks.rank}", file=sys.stderr, flush=True)


def gradient_not_finite(step: int, rank: int, value: float) -> None:
    """Spoil the gradient of one weight on one rank, before the ranks add theirs up."""
    micro_batches = DataParallel.micro_batches

    def spoiled(self: DataParallel, now: Step) -> Iterator[Batch]:
        if now.number != step or self.ranks.rank != rank:
            yield from micro_batches(self, now)
            return

        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
            return gradient

        hook = next(iter(self.names)).register_hook(spoil)
        yield from micro_batches(self, now)
        hook.remove()
        say(self, f"gradient made {value}")

    DataParallel.micro_batches = spoiled


def loss_not_finite(step: int, rank: int, value: float) -> None:
    """Spoil the loss on one rank; its gradients may well be finite."""
    micro_batches, backward = DataParallel.micro_batches, DataParallel.backward

    def noting(self: DataParallel, now: Step) -> Iterator[Batch]:
        self.drill_step = now.number
        yield from micro_batches(self, now)

    def spoiled(self: DataParallel, loss: Tensor) -> Tensor:
        if self.drill_step == step and self.ranks.rank == rank:
            say(self, f"loss made {value}")
            loss = loss + value
        return backward(self, loss)

    DataParallel.micro_batches, DataParallel.backward = noting, spoiled


def weights_knocked(data_step: int, global_batch: int, size: float, seed: int) -> None:
    """After the update of one data step add noise to all weights, as large as they are themselves times `size`.

    By the data step, not the time: data that a rollback leaves out do no harm a second time, and the run repeats.
    """
    micro_batches, step = DataParallel.micro_batches, DataParallel.step

    def noting(self: DataParallel, now: Step) -> Iterator[Batch]:
        self.drill_step = now.first_sequences[0] // global_batch
        yield from micro_batches(self, now)

    def knocking(self: DataParallel) -> Tensor:
        norm = step(self)
        if self.drill_step == data_step:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in self.names:
                    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
                    weight.add_(noise * weight.square().mean().sqrt() * size)
            say(self, f"weights knocked by {size:.2f} in data step {data_step}")
        return norm

    DataParallel.micro_batches, DataParallel.step = noting, knocking


def clock_jumps(start: float, jumps: dict[str, float]) -> None:
    """Let the wall clock be wrong by `start` seconds, and from some steps on by others."""
    real, micro_batches, wrong = time.time, DataParallel.micro_batches, [start]
    time.time = lambda: real() + wrong[0]

    def jumping(self: DataParallel, now: Step) -> Iterator[Batch]:
        if str(now.number) in jumps:
            wrong[0] = jumps[str(now.number)]
            say(self, f"clock set {wrong[0]:+.0f} s at step {now.number}")
        yield from micro_batches(self, now)

    DataParallel.micro_batches = jumping


FAULTS = {
    function.__name__: function for function in (gradient_not_finite, loss_not_finite, weights_knocked, clock_jumps)
}


def main() -> None:
    """Put the fault in, and train."""
    fault = json.loads(os.environ["DRILL_FAULT"])
    FAULTS[fault.pop("kind")](**fault)
    runpy.run_path(str(ROOT / "train_pretrain.py"), run_name="__main__")


if __name__ == "__main__":
    main()
