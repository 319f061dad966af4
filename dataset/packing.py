"""Conversations -> packed rows: several in a row of fixed length, each as if it stood alone.

Positions count from 0 in every conversation, and none looks at another (`segments`), so a packed row has the loss and
the gradients of its conversations one by one. What shares a row is decided once, by best fit from the longest down, and
stays so over the epochs; the order of the rows does not.
"""

import hashlib
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataset.chat import LEARNED, TAKES_SYSTEM, TAKES_THINK, ChatEncoder, Row, show, system_ids, think_ids
from dataset.tokenizer import TextTokenizer
from dataset.tokens import DEFAULT_READING, Reading, TokenStream, open_cache
from dataset.variation import SYSTEM_PROMPTS, Variation
from model.loss import IGNORE_INDEX

log = logging.getLogger(__name__)

PADDING = -1  # segment of the positions that hold nothing


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items into as few bins of `capacity` as best fit from the longest down finds.

    lengths: (n,), none above capacity. Returns (items, starts): bin b holds items[starts[b]:starts[b + 1]].
    """
    bin_of = np.empty(len(lengths), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the room they have left
    rooms = 0  # bit r: some bin has room r left; finds the smallest that is enough without a search
    bins = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        if enough := rooms >> length << length:
            room = (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen, bins = capacity, bins, bins + 1
        bin_of[item] = chosen
        with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return np.argsort(bin_of, kind="stable"), np.searchsorted(np.sort(bin_of), np.arange(bins + 1))


@dataclass(frozen=True)
class Parts:
    """What a conversation can be varied with, as ids."""

    think: list[int]
    systems: dict[str, list[int]]


class PackedChats:
    """Packed rows over a cache of chats; a Samples of dataset/loader.py.

    A conversation that has no room in a row for its longest variation is never varied. target_counts: without the
    empty think blocks, which are learned where they stand.
    """

    def __init__(
        self,
        stream: TokenStream,
        max_seq_len: int,
        tokenizer: TextTokenizer,
        variation: Variation | None = None,
    ) -> None:
        self.stream, self.max_seq_len, self.tokenizer = stream, max_seq_len, tokenizer
        self.variation = (
            variation if variation and (variation.system_prompt_share or variation.empty_think_share) else None
        )
        self.data_sha256, self.text_bytes, self.documents = stream.sha256, stream.text_bytes, stream.documents
        lengths, learned, thinks, systems = stream.rows.astype(np.int64).T
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._rows, self._bins = pack(lengths - 1 + self._reserve(lengths - 1, thinks, systems), max_seq_len)
        self.target_counts = np.add.reduceat(learned[self._rows], self._bins[:-1])
        self.filled = float((lengths - 1).sum() / (len(self) * max_seq_len))  # share of positions that hold a token
        described = ["chats", stream.sha256, max_seq_len, repr(self.variation)]
        self.fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._bins) - 1

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        """Return `input_ids`, `targets`, `positions` and `segments` of these rows, each (n, max_seq_len) int64."""
        shape = (len(indices), self.max_seq_len)
        input_ids, positions = np.zeros((2, *shape), dtype=np.int64)
        targets, segments = np.full(shape, IGNORE_INDEX), np.full(shape, PADDING)
        for number, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            end = 0
            for segment, row in enumerate(self._rows[self._bins[index] : self._bins[index + 1]].tolist()):
                ids, learned = self._conversation(row, epoch)
                start, end = end, end + len(ids) - 1
                place = number, slice(start, end)
                input_ids[place] = ids[:-1]
                targets[place] = np.where(learned[1:], ids[1:], IGNORE_INDEX)
                positions[place] = np.arange(end - start)
                segments[place] = segment
        for array in (self.stream.tokens, self.stream.marks):
            # Touched pages of a file count as resident memory until they are let go (they stay cached).
            array._mmap.madvise(mmap.MADV_DONTNEED)
        arrays = {"input_ids": input_ids, "targets": targets, "positions": positions, "segments": segments}
        return {key: torch.from_numpy(array) for key, array in arrays.items()}

    def show(self, index: int, epoch: int = 0) -> list[str]:
        """Return the text of every conversation in a row, with what is learned in ⟦ ⟧."""
        rows = self._rows[self._bins[index] : self._bins[index + 1]].tolist()
        conversations = [self._conversation(row, epoch) for row in rows]
        return [show(Row(ids.tolist(), learned.tolist()), self.tokenizer) for ids, learned in conversations]

    def _conversation(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a conversation in this epoch, and which of them are learned."""
        place = slice(self._starts[row], self._ends[row])
        ids, marks = self.stream.tokens[place].astype(np.int64), self.stream.marks[place]
        if self.variation is None or not self._varies[row]:
            return ids, (marks & LEARNED).astype(bool)
        system, empty_think = self.variation.draw(epoch, row)
        learned = (marks & LEARNED).astype(bool)
        if empty_think:
            at = np.flatnonzero(marks & TAKES_THINK).repeat(len(self._parts.think))
            ids, learned = (
                np.insert(ids, at, np.resize(self._parts.think, len(at))),
                np.insert(learned, at, learned[at]),
            )
        if system and marks[0] & TAKES_SYSTEM:
            turn = self._parts.systems[system]
            ids, learned = np.concatenate([turn, ids]), np.concatenate([np.zeros(len(turn), dtype=bool), learned])
        return ids, learned

    def _reserve(self, lengths: np.ndarray, thinks: np.ndarray, systems: np.ndarray) -> np.ndarray:
        """Positions to keep free for the longest variation of each conversation."""
        reserve = np.zeros_like(lengths)
        if self.variation is None:
            return reserve
        turns = {text: system_ids(text, self.tokenizer) for text in SYSTEM_PROMPTS}
        self._parts = Parts(think_ids(self.tokenizer), turns)
        if self.variation.empty_think_share:
            reserve += thinks * len(self._parts.think)
        if self.variation.system_prompt_share:
            reserve += systems * max(map(len, turns.values()))
        self._varies = lengths + reserve <= self.max_seq_len
        return reserve * self._varies


def evaluation_chats(
    paths: Sequence[str],
    tokenizer: TextTokenizer,
    max_seq_len: int,
    cache_dir: Path,
    reading: Reading = DEFAULT_READING,
    builds: bool = True,
) -> PackedChats:
    """Return the packed rows of these files, unvaried."""
    encoder = ChatEncoder(tokenizer, max_seq_len, 0.0)
    return PackedChats(open_cache(list(paths), encoder, cache_dir, reading, builds).train, max_seq_len, tokenizer)


def chat_rows(
    data_path: Sequence[str],
    val_path: Sequence[str] | None,
    *,
    val_fraction: float,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    cache_dir: Path,
    reading: Reading = DEFAULT_READING,
    variation: Variation | None = None,
    builds: bool = True,
) -> tuple[PackedChats, PackedChats | None]:
    """Return packed rows for training and, from `val_path` or a share of the conversations, for validation.

    Validation is never varied. builds: whether this process builds a cache at once; others let it go first. Raises
    ValueError (DataError for bad records) when the data cannot be used; see `open_cache`.
    """
    if val_path and val_fraction:
        raise ValueError("--val_path and --val_fraction exclude each other; give one of them")
    encoder = ChatEncoder(tokenizer, max_seq_len, val_fraction)
    cache = open_cache(list(data_path), encoder, cache_dir, reading, builds)
    held_out = PackedChats(cache.val, max_seq_len, tokenizer) if cache.val else None
    if val_path:
        held_out = evaluation_chats(val_path, tokenizer, max_seq_len, cache_dir, reading, builds)
    train = PackedChats(cache.train, max_seq_len, tokenizer, variation)
    log.info(
        "training data: %d conversations in %d rows of %d; %.1f %% of the positions hold a token, %d learn one",
        train.documents,
        len(train),
        max_seq_len,
        100 * train.filled,
        train.target_counts.sum(),
    )
    return train, held_out
