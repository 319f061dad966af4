"""Step -> micro-batches: which samples a rank trains on is a pure function of (seed, step, rank)."""

import functools
import os
import resource
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dataset.workers import live_and_die_with
from model.loss import IGNORE_INDEX

FEISTEL_ROUNDS = 8


class Samples(Protocol):
    """What a loader needs of a data set: its rows by index, how many tokens they train, and what identifies it.

    epochs: in which pass over the data each row is drawn, from 0, for what varies from pass to pass.
    """

    data_sha256: str  # of the data alone
    fingerprint: str  # of the rows that are made of them
    text_bytes: int  # UTF-8 bytes of the texts that are learned
    target_counts: np.ndarray  # (n,) int64; of stride 0 where all are equal

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]: ...


class Ordered(Protocol):
    """What StepLoader needs: samples in an endless order."""

    tokens_per_epoch: int

    def __len__(self) -> int: ...

    def order(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]: ...

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]: ...

    def epochs_of(self, position: int) -> dict[str, float]: ...


class StepBatch(NamedTuple):
    """One rank's part of a step. first_sequences: the global position of each micro-batch's first sequence."""

    micro_batches: list[dict[str, Tensor]]
    first_sequences: list[int]
    target_tokens: int


def shuffled(position: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Return the sample index at each position of an endless stream of epochs, each its own permutation.

    position: (n,) int64, >= 0; epoch = position // length. Returns (n,) int64 in [0, length). Nothing is stored: a
    Feistel network permutes the numbers below a power of four, and what falls outside [0, length) is permuted again
    (cycle walking, Black and Rogaway 2002). Integer arithmetic only: the order depends on no library's version.
    """
    position = np.asarray(position, dtype=np.int64)
    half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    keys = _mix(_mix(np.full(position.shape, seed % 2**64, np.uint64)) + (position // length).astype(np.uint64))
    index = (position % length).astype(np.uint64)
    outside = np.arange(len(index))
    while len(outside):
        index[outside] = _feistel(index[outside], keys[outside], half_bits)
        outside = outside[index[outside] >= np.uint64(length)]
    return index.astype(np.int64)


def _mix(value: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (the finaliser of splitmix64, Steele et al. 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _feistel(value: np.ndarray, keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = value >> half_bits, value & mask
    for _ in range(FEISTEL_ROUNDS):
        keys = _mix(keys)
        left, right = right, left ^ (_mix(keys ^ right) & mask)
    return (left << half_bits) | right


class StepLoader(Dataset):
    """Serves one rank's micro-batches of any step.

    A step's global batch is batch_size * world_size * accumulation consecutive positions of the shuffled stream; rank
    r takes the block [r*B*A, (r+1)*B*A) of them, B per micro-batch. So the same samples in the same order make a
    step however the global batch is split, and a step may span epochs: there is no short last one. With another
    `global_batch` (a run that goes on with fewer ranks) the blocks may differ by one sequence, and micro-batches hold
    batch_size at the most.
    """

    def __init__(
        self,
        samples: Ordered,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        accumulation: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self.samples = samples
        self.rank, self.world_size = rank, world_size
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.global_batch = batch_size * world_size * accumulation
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, step: int) -> StepBatch:
        return self.step_batch(step)

    def step_batch(self, step: int) -> StepBatch:
        """Return this rank's micro-batches of data step `step`: rows of `samples`, (B, T) each."""
        begin, end = (rank * self.global_batch // self.world_size for rank in (self.rank, self.rank + 1))
        first, block = step * self.global_batch + begin, end - begin
        indices, epochs = self.samples.order(first, block)
        parts = -(-block // self.batch_size)
        cuts = [slice(part * block // parts, (part + 1) * block // parts) for part in range(parts)]
        batches = [self.samples.rows(indices[cut], epochs[cut]) for cut in cuts]
        return StepBatch(
            micro_batches=batches,
            first_sequences=[first + cut.start for cut in cuts],
            target_tokens=sum(int((batch["targets"] != IGNORE_INDEX).sum()) for batch in batches),
        )

    @property
    def tokens_per_epoch(self) -> int:
        """Target tokens in one pass over the samples."""
        return self.samples.tokens_per_epoch

    def epochs_of(self, step: int) -> dict[str, float]:
        """Source -> passes over it that `step` steps make; {} where there is one source only."""
        return self.samples.epochs_of(step * self.global_batch)

    def sample_ids(self, step: int) -> list[int]:
        """Return the samples of data step `step` over all ranks, in order."""
        first = step * self.global_batch
        return self.samples.order(first, self.global_batch)[0].tolist()

    def iterate(self, steps: Iterable[int]) -> Generator[StepBatch, None, None]:
        """Yield the batches of these data steps, prepared ahead by the workers.

        Start it in the main thread: on Linux the workers are killed when the thread that started them ends.
        """
        if self.num_workers:
            _allow_open_files(65536)
        # How many workers are too many is said once, for all ranks, when the run starts.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield from DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            multiprocessing_context="fork" if self.num_workers else None,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            worker_init_fn=functools.partial(_start_worker, os.getpid()),
            # Its own generator: otherwise the loader draws from the global one and shifts what comes after.
            generator=torch.Generator(),
        )


def _as_it_is(batch: StepBatch) -> StepBatch:
    return batch


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files towards `count`, as far as it may."""
    # Every tensor on its way from a worker holds a descriptor: accumulation 64 passes the usual limit of 1024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _start_worker(parent: int, worker_id: int) -> None:
    live_and_die_with(parent)


def num_eval_batches(samples: Samples, batch_size: int) -> int:
    """Return into how many batches `eval_batches` cuts the samples, over all ranks."""
    return -(-len(samples) // batch_size)


def eval_batches(
    samples: Samples, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (batch index, rows) of this rank: batch b goes to rank b % world_size, every sample exactly once."""
    for batch in range(rank, num_eval_batches(samples, batch_size), world_size):
        indices = np.arange(batch * batch_size, min((batch + 1) * batch_size, len(samples)))
        yield batch, samples.rows(indices, np.zeros_like(indices))


class EvalLoader:
    """One rank's share of the validation batches: every sample exactly once, over all ranks.

    name and share: of these samples among several sets that are validated.
    """

    def __init__(
        self, samples: Samples, name: str = "", share: float = 1.0, *, batch_size: int, rank: int, world_size: int
    ):
        self.samples, self.batch_size, self.rank, self.world_size = samples, batch_size, rank, world_size
        self.name, self.share = name, share
        self.batch_count = num_eval_batches(samples, batch_size)
        self.target_tokens = int(samples.target_counts.sum())
        self.text_bytes, self.fingerprint = samples.text_bytes, samples.fingerprint

    def batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (batch index, rows)."""
        return eval_batches(self.samples, self.batch_size, self.rank, self.world_size)
