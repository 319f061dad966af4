"""Several data sets in given shares of the target tokens: which row comes when is a pure function of (seed, position).

Weighted fair queueing (Demers, Keshav and Shenker 1989): every source is an endless stream of rows, epoch after epoch,
each in an order of its own. A row stands at the virtual time (tokens of its source before it + half its own) / share,
and the mixture is all rows in the order of that time. At any moment each source is then within half a row of its time:
of two sources each is within one row (the largest) of its share of the target tokens, over any stretch of the run; of k
sources, within 1 + share x (k - 2) rows. A source that runs out begins its next epoch. A position is found by
bisection of the time, so step 1,000,000 costs what step 0 does.
"""

import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataset.loader import Samples, shuffled

log = logging.getLogger(__name__)

# A weight in another. An epoch passes through every source, so it is about as many times longer than the larger one.
MOST_TIMES = 10**6


class HeldOut(NamedTuple):
    """A source's validation samples, and the share that its loss has in that of all."""

    samples: Samples
    name: str
    share: float


class Stream:
    """One source's endless rows and the times at which they stand, as whole numbers.

    scale: of the time; in inverse proportion to the source's share. Where rows differ in their target tokens, it keeps
    8 bytes a row for each of the last two epochs.
    """

    def __init__(self, samples: Samples, scale: int, seed: int) -> None:
        self.samples, self.scale, self.seed, self.length = samples, scale, seed, len(samples)
        counts = samples.target_counts
        # Target tokens of a row where all have as many.
        self.even = int(counts[0]) if counts.strides == (0,) else None
        self.tokens = self.even * self.length if self.even else int(counts.sum())
        self._marks = lru_cache(maxsize=2)(self._marks_of)

    def rows_before(self, time: int) -> int:
        """How many rows stand before this time."""
        epoch, mark = divmod(-(-time // self.scale), 2 * self.tokens)
        if self.even:
            return epoch * self.length + (mark + self.even - 1) // (2 * self.even)
        return epoch * self.length + int(np.searchsorted(self._marks(epoch), mark, side="left"))

    def time_of(self, number: int) -> int:
        """When the row of this number stands."""
        epoch, place = divmod(number, self.length)
        mark = (2 * place + 1) * self.even if self.even else int(self._marks(epoch)[place])
        return (epoch * 2 * self.tokens + mark) * self.scale

    def tokens_before(self, number: int) -> int:
        """Target tokens of all rows before this one."""
        epoch, place = divmod(number, self.length)
        if self.even or not place:
            return epoch * self.tokens + place * (self.even or 0)
        indices = self.indices(np.arange(epoch * self.length, number))
        return epoch * self.tokens + int(self.samples.target_counts[indices].sum())

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The samples of these rows."""
        return shuffled(numbers, self.length, self.seed)

    def _marks_of(self, epoch: int) -> np.ndarray:
        """Twice the tokens before each row of an epoch, plus its own."""
        numbers = np.arange(epoch * self.length, (epoch + 1) * self.length)
        counts = self.samples.target_counts[self.indices(numbers)]
        return 2 * np.cumsum(counts, dtype=np.int64) - counts


class Mixture:
    """The rows of all sources in one order. A sample's index is its source's offset and its index there.

    shares: of the target tokens, above 0, in any unit. One epoch ends when every source was seen at least once.
    """

    def __init__(self, sources: Sequence[Samples], names: Sequence[str], shares: Sequence[float], seed: int) -> None:
        if not all(map(len, sources)):
            raise ValueError(f"there is no sample to train on in source {[*map(len, sources)].index(0) + 1}")
        # As written, 0.8 is four fifths; as a double it is not.
        exact = [Fraction(str(share)) for share in shares]
        exact = [share / sum(exact) for share in exact]
        self.sources, self.names, self.shares = list(sources), list(names), [float(share) for share in exact]
        whole = math.lcm(*(share.denominator for share in exact))
        parts = [int(share * whole) for share in exact]
        self._streams = [
            Stream(samples, math.lcm(*parts) // part, seed + number)
            for number, (samples, part) in enumerate(zip(sources, parts, strict=True))
        ]
        self._rows_per_time = sum(Fraction(s.length, 2 * s.tokens * s.scale) for s in self._streams)
        self._offsets = np.cumsum([0, *map(len, sources)])
        end = max(2 * stream.tokens * stream.scale for stream in self._streams)
        rows = [s.length if len(sources) == 1 else s.rows_before(end) for s in self._streams]
        self._length = sum(rows)
        self.tokens_per_epoch = sum(s.tokens_before(number) for s, number in zip(self._streams, rows, strict=True))

    def __len__(self) -> int:
        return self._length

    @property
    def data(self) -> object:
        """What identifies the data and their order, seed aside, as JSON's types."""
        if len(self.sources) == 1:
            return self.sources[0].data_sha256
        parts = enumerate(zip(self.names, self.sources, self.shares, strict=True), 1)
        return {f"{n} {name}": {"share": share, "sha256": part.data_sha256} for n, (name, part, share) in parts}

    def order(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples at positions first .. first + count - 1, and the pass over its source of each."""
        indices, epochs = np.empty((2, count), dtype=np.int64)
        for number, (places, rows) in enumerate(self._walk(first, count)):
            stream = self._streams[number]
            indices[places] = self._offsets[number] + stream.indices(rows)
            epochs[places] = rows // stream.length
        return indices, epochs

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        """Return the rows of these samples, as their sources give them."""
        owner = np.searchsorted(self._offsets, indices, side="right") - 1
        if (owner == owner[0]).all():
            return self.sources[owner[0]].rows(indices - self._offsets[owner[0]], epochs)
        batch: dict[str, Tensor] = {}
        for number in np.unique(owner).tolist():
            places = np.flatnonzero(owner == number)
            part = self.sources[number].rows(indices[places] - self._offsets[number], epochs[places])
            for key, values in part.items():
                whole = batch.setdefault(key, torch.empty(len(indices), *values.shape[1:], dtype=values.dtype))
                whole[torch.from_numpy(places)] = values
        return batch

    def epochs_of(self, position: int) -> dict[str, float]:
        """How often each source was passed through before this position; {} for a single one."""
        if len(self.sources) == 1:
            return {}
        counts = self._counts(position)[0]
        return {n: count / s.length for n, s, count in zip(self.names, self._streams, counts, strict=True)}

    def show(self, count: int) -> list[str]:
        """Return the texts of the first `count` conversations; for sources that can show theirs."""
        texts: list[str] = []
        position = 0
        while len(texts) < count and position < len(self):
            ([index], [epoch]) = self.order(position, 1)
            owner = int(np.searchsorted(self._offsets, index, side="right")) - 1
            texts += self.sources[owner].show(int(index - self._offsets[owner]), int(epoch))
            position += 1
        return texts[:count]

    def _walk(self, first: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each source: at which of the asked places its rows stand, and their numbers."""
        if len(self._streams) == 1:
            return [(np.arange(count), np.arange(first, first + count))]
        counts, skipped = self._counts(first)
        begins, places = list(counts), [[] for _ in self._streams]
        times = [stream.time_of(number) for stream, number in zip(self._streams, counts, strict=True)]
        for place in range(-skipped, count):
            chosen = times.index(min(times))
            if place >= 0:
                places[chosen].append(place)
            else:
                begins[chosen] += 1
            counts[chosen] += 1
            times[chosen] = self._streams[chosen].time_of(counts[chosen])
        return [
            (np.array(own, dtype=np.int64), np.arange(begin, begin + len(own)))
            for own, begin in zip(places, begins, strict=True)
        ]

    def _counts(self, position: int) -> tuple[list[int], int]:
        """Rows of each source before the last time that at most `position` rows stand before; and how many lack."""
        if len(self._streams) == 1:
            return [position], 0
        # From where it should be, so that only the epochs around it are ever laid out.
        low = high = int(position / self._rows_per_time)
        reach = 1
        while self._passed(high) <= position:
            low, high, reach = high, high + reach, 2 * reach
        reach = 1
        while self._passed(low) > position:
            low, high, reach = max(0, low - reach), low, 2 * reach
        while high - low > 1:
            middle = (low + high) // 2
            if self._passed(middle) <= position:
                low = middle
            else:
                high = middle
        counts = [stream.rows_before(low) for stream in self._streams]
        return counts, position - sum(counts)

    def _passed(self, time: int) -> int:
        return sum(stream.rows_before(time) for stream in self._streams)


def mixed(
    open_source: Callable[[list[str], list[str] | None], tuple[Samples, Samples | None]],
    data_path: Sequence[str],
    data_weights: Sequence[float] | None,
    val_path: Sequence[str] | None,
    seed: int,
) -> tuple[Mixture, list[HeldOut]]:
    """Open the data as one source, or with weights as one source a path; returns the mixture and what is held out.

    open_source(paths, val_paths): as text_windows and chat_rows. Raises ValueError where counts or weights do not fit.
    """
    if data_weights is None:
        samples, held_out = open_source(list(data_path), list(val_path) if val_path else None)
        return Mixture([samples], [""], [1], seed), [HeldOut(held_out, "", 1.0)] if held_out else []
    problems = [f"--data_weights {weight}: must be above 0" for weight in data_weights if not 0 < weight < math.inf]
    low, high = min(data_weights), max(data_weights)
    if not problems and high > MOST_TIMES * low:
        problems.append(
            f"--data_weights {low} and {high}: the largest is over {MOST_TIMES:,} times the smallest; leave that out"
        )
    if len(data_weights) != len(data_path):
        problems.append(
            f"--data_weights names {len(data_weights)} weights for {len(data_path)} sources; give one for each of "
            "--data_path (quote a pattern such as 'data/*.jsonl' to make it one source)"
        )
    if val_path and len(val_path) != len(data_path):
        problems.append(
            f"--val_path names {len(val_path)} for {len(data_path)} sources; with --data_weights give one for each of "
            "--data_path, in their order"
        )
    if problems:
        raise ValueError("; ".join(problems))
    names = distinct_names(data_path)
    opened = [open_source([path], [val_path[number]] if val_path else None) for number, path in enumerate(data_path)]
    mixture = Mixture([samples for samples, _ in opened], names, data_weights, seed)
    passes = mixture.epochs_of(len(mixture))
    for name, share, (samples, _) in zip(names, mixture.shares, opened, strict=True):
        log.info(
            "source %s: %.4g of the target tokens; %d rows with %d target tokens, passed through %.2f times an epoch",
            name,
            share,
            len(samples),
            samples.target_counts.sum(),
            passes[name],
        )
    parts = zip([held for _, held in opened], names, mixture.shares, strict=True)
    return mixture, [HeldOut(*part) for part in parts if part[0] is not None]


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The stems of the paths, numbered where two have the same."""
    names: list[str] = []
    for path in paths:
        stem = Path(path).name.split(".")[0] or "source"
        names.append(next(name for name in chain([stem], (f"{stem}_{n}" for n in count(2))) if name not in names))
    return names
