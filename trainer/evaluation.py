"""Validation: the same number on any number of ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Validation(Protocol):
    """The validation samples as this rank's share of fixed batches."""

    name: str  # of these samples among several sets
    share: float  # of this set's loss in that of all
    batch_count: int  # over all ranks
    target_tokens: int  # over all batches
    text_bytes: int  # UTF-8 bytes of the texts behind them; 0 where that means nothing
    fingerprint: str  # of the samples

    def batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (number of the batch, batch) for every batch of this rank."""
        ...


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loss_sum: Callable[[dict[str, Tensor]], Tensor],
    validation: Validation,
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
) -> dict[str, float]:
    """Loss per target token in nats and, where text_bytes is known, bits per byte. A collective.

    Bits per byte: the nats of every predicted token, document marks included, over ln 2 and the bytes of the texts;
    comparable across tokenizers. Each batch is summed by one rank and the batches are added in their order, so the
    result has the same bits on any number of ranks.
    """
    module.eval()
    sums = [0.0] * validation.batch_count
    for number, batch in validation.batches():
        sums[number] = loss_sum(batch).item()
    module.train()
    nats = math.fsum(sum_over_ranks(sums))
    result = {"val_loss": nats / validation.target_tokens}
    if validation.text_bytes:
        result["val_bits_per_byte"] = nats / math.log(2) / validation.text_bytes
    return result


def evaluate_all(
    module: nn.Module,
    loss_sum: Callable[[dict[str, Tensor]], Tensor],
    validations: Sequence[Validation],
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
) -> dict[str, float]:
    """One set as `evaluate`; of several each under "<metric>/<name>", and as val_loss their mean, weighted by share."""
    results = [evaluate(module, loss_sum, validation, sum_over_ranks) for validation in validations]
    if len(validations) == 1:
        return results[0]
    named = zip(validations, results, strict=True)
    mean = math.fsum(validation.share * result["val_loss"] for validation, result in named)
    mean /= math.fsum(validation.share for validation in validations)
    each = zip(validations, results, strict=True)
    return {"val_loss": mean} | {f"{key}/{v.name}": value for v, result in each for key, value in result.items()}
