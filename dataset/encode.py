"""Records -> token ids, in order and on all cores, and an account of what was found on the way."""

import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from tqdm import tqdm

from dataset.files import DataError
from dataset.records import CHUNK_BYTES, BadRecord, Chunk, text_of
from dataset.tokenizer import TextTokenizer
from dataset.workers import live_and_die_with

log = logging.getLogger(__name__)

# Reading, hashing and writing in the main process keep up with about as many.
MOST_PROCESSES = 32
BAD_RECORDS_SHOWN = 20
NEEDS_STEP = 64  # an advised --max_seq_len is a multiple of it


@dataclass
class Encoded:
    """What one chunk became, per split: streams by name, documents, UTF-8 bytes; and the records that are not used.

    bad: no record of this kind; dropped: good ones that a rule leaves out; both (kind, "file:line: reason").
    notes: what was odd about used ones.
    """

    path: str  # of the file
    streams: tuple[dict[str, array], ...]
    documents: list[int]
    text_bytes: list[int]
    read_bytes: int
    blank_lines: int = 0
    text_hashes: array = field(default_factory=lambda: array("Q"))
    bad: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    needs: list[int] = field(default_factory=list)  # of each that was too long, the --max_seq_len that would keep it


@dataclass
class Report:
    """What the sources held. records: used ones; bad, dropped, notes: how many by kind; duplicates: of other texts.

    needs: of those that were too long, how many a --max_seq_len of this multiple of NEEDS_STEP would keep.
    """

    records: int = 0
    duplicates: int = 0
    blank_lines: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    first_dropped: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)  # JSON's keys are strings

    def add(self, encoded: Encoded) -> None:
        """Count one chunk."""
        self.records += sum(encoded.documents)
        self.blank_lines += encoded.blank_lines
        self.bad = dict(Counter(self.bad) + Counter(kind for kind, _ in encoded.bad))
        self.first_bad += [line for _, line in encoded.bad[: BAD_RECORDS_SHOWN - len(self.first_bad)]]
        self.dropped = dict(Counter(self.dropped) + Counter(kind for kind, _ in encoded.dropped))
        self.first_dropped += [line for _, line in encoded.dropped[: BAD_RECORDS_SHOWN - len(self.first_dropped)]]
        self.notes = dict(Counter(self.notes) + encoded.notes)
        rounded = Counter(str(-(-length // NEEDS_STEP) * NEEDS_STEP) for length in encoded.needs)
        self.needs = dict(Counter(self.needs) + rounded)

    def rename(self, names: dict[str, str]) -> None:
        """Call the files of the first bad and dropped ones by the names they have now."""

        def renamed(line: str) -> str:
            old = max((name for name in names if line.startswith(f"{name}:")), key=len)
            return names[old] + line.removeprefix(old)

        self.first_bad, self.first_dropped = (
            [renamed(line) for line in lines] for lines in (self.first_bad, self.first_dropped)
        )

    def refuse_bad(self) -> None:
        """Raise DataError if there is a bad record, with the counts by kind and the first 20."""
        if self.bad:
            lines = [f"{self.counts()}. Repair or remove them, or leave them out with --skip_bad_lines"]
            lines += self.first_bad
            if more := sum(self.bad.values()) - len(self.first_bad):
                lines.append(f"... and {more} more")
            raise DataError("\n  ".join(lines))

    def say(self) -> None:
        """Log what a reader of the run should know of its data."""
        # Not as warnings: those are heard from every rank, and all have read the same.
        if self.bad:
            log.info("left out %s; the first: %s", self.counts(), self.first_bad[0])
        if self.dropped or self.notes:
            dropped, bad = sum(self.dropped.values()), sum(self.bad.values())
            log.info(
                "%d conversations = %d used + %d dropped + %d bad",
                self.records + dropped + bad,
                self.records,
                dropped,
                bad,
            )
        if self.dropped:
            more = sum(self.dropped.values()) - len(self.first_dropped)
            share = sum(self.dropped.values()) / (self.records + dropped + bad)
            lines = [f"dropped ({share:.1%}): {_kinds(self.dropped)}{self._what_would_keep_them()}"]
            lines += [*self.first_dropped, *[f"... and {more} more"] * (more > 0)]
            log.info("%s", "\n  ".join(lines))
        if self.notes:
            log.info("of the used: %s", _kinds(self.notes))
        if self.duplicates:
            log.info("%d of %d texts are duplicates of another; all are kept", self.duplicates, self.records)
        if self.blank_lines:
            log.info("%d blank lines skipped", self.blank_lines)

    def _what_would_keep_them(self) -> str:
        """Advice: the --max_seq_len that would keep nine of ten that were too long, because one may be endless."""
        left = sum(self.needs.values())
        most_left = left // 10
        for length, count in sorted((int(length), count) for length, count in self.needs.items()):
            left -= count
            if left <= most_left:
                return f"; of those too long, --max_seq_len {length} would keep all" + (
                    f" but {left:,}" if left else ""
                )
        return ""

    def counts(self) -> str:
        """How many records were bad, by kind."""
        bad, dropped = sum(self.bad.values()), sum(self.dropped.values())
        counts = f"{bad:,} bad of {self.records + dropped + bad:,} records" + (f": {_kinds(self.bad)}" if bad else "")
        return counts + (f", {dropped:,} dropped: {_kinds(self.dropped)}" if dropped else "")

    def as_dict(self) -> dict[str, object]:
        """For a JSON file; Report(**...) reads it back."""
        return asdict(self)


def _kinds(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=lambda kind: -kind[1]))


def text_hash(utf8: bytes) -> int:
    """64 bits that identify a text: its place in [0, 1) for a validation share, and how duplicates are found."""
    return int.from_bytes(hashlib.sha256(utf8).digest()[:8], "big")


class Encoder(Protocol):
    """Turns chunks into streams of numbers, each record into training or validation by its hash."""

    tokenizer: TextTokenizer
    val_fraction: float

    @property
    def columns(self) -> list[str] | None:
        """What is read of a parquet file; None: all."""
        ...

    @property
    def key(self) -> list[object]:
        """All that decides the result beside the files; JSON's types."""
        ...

    def encode(self, chunk: Chunk, parse_only: bool) -> Encoded:
        """Encode one chunk. parse_only: only count and find bad records."""
        ...


def typecode(tokenizer: TextTokenizer) -> str:
    """Of an array of ids: two bytes where they are enough, else four."""
    return "H" if tokenizer.vocab_size <= 1 << 16 else "I"


@dataclass(frozen=True)
class TextEncoder:
    """Turns texts into one stream of documents BOS ids EOS."""

    tokenizer: TextTokenizer
    text_key: str
    val_fraction: float

    @property
    def columns(self) -> list[str]:
        """The one with the text."""
        return [self.text_key]

    @property
    def key(self) -> list[object]:
        """See Encoder."""
        return [self.tokenizer.bos_id, self.tokenizer.eos_id, self.text_key]

    def encode(self, chunk: Chunk, parse_only: bool) -> Encoded:
        """See Encoder."""
        ids_of = (array(typecode(self.tokenizer)), array(typecode(self.tokenizer)))
        streams = tuple({"bin": ids} for ids in ids_of)
        encoded = Encoded(chunk.source.path, streams, [0, 0], [0, 0], chunk.read_bytes)
        texts, splits = [], []
        for place, record in chunk.records(self.text_key):
            if record is None:
                encoded.blank_lines += 1
                continue
            try:
                text = text_of(record, self.text_key)
            except BadRecord as bad:
                encoded.bad.append((bad.kind, f"{place}: {bad}"))
                continue
            utf8 = text.encode("utf-8")
            hashed = text_hash(utf8)
            split = int(hashed / 2**64 < self.val_fraction)
            texts.append(text)
            splits.append(split)
            encoded.text_hashes.append(hashed)
            encoded.documents[split] += 1
            encoded.text_bytes[split] += len(utf8)
        if not parse_only:
            for split, ids in zip(splits, self.tokenizer.encode_texts(texts), strict=True):
                ids_of[split].append(self.tokenizer.bos_id)
                ids_of[split].fromlist(ids)
                ids_of[split].append(self.tokenizer.eos_id)
        return encoded


def encode_all(
    encoder: Encoder, chunks: Iterable[Chunk], total_bytes: int, parse_only: Callable[[], bool]
) -> Iterator[Encoded]:
    """Encode a chunk on every core at a time and yield the results in the order of the chunks.

    total_bytes: of the files, so that a small one starts no more processes than it has chunks.
    """
    # Processes, each with one thread: 11.3 MB/s where the library's own threads and Python's lock gave 10.0. They
    # are forked, before any other thread exists, because starting afresh would cost each a second of imports.
    # macOS does not say on which CPUs a process may run.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cpus, MOST_PROCESSES, 1 + total_bytes // CHUNK_BYTES)
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=(os.getpid(), encoder)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode, chunk, parse_only()))
            if len(pending) > 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError("a tokenizing process was killed; the system does that when memory is short") from error
    finally:
        pool.shutdown(cancel_futures=True)


# What a tokenizing process works with, put there when it begins: a tokenizer is too large to come with every chunk.
_encoders: list[Encoder] = []


def _begin(parent: int, encoder: Encoder) -> None:
    live_and_die_with(parent)
    # With this the pool ends its workers when one of them was killed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoders.append(encoder)


def _encode(chunk: Chunk, parse_only: bool) -> Encoded:
    return _encoders[0].encode(chunk, parse_only)


def with_progress(results: Iterable[Encoded], total_bytes: int) -> Iterator[Encoded]:
    """Pass results through under a progress bar; without a terminal, log a line every ten seconds."""
    started = said = time.monotonic()
    terminal = sys.stderr.isatty()
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokens", disable=not terminal) as bar:
        done = 0
        for encoded in results:
            yield encoded
            done += encoded.read_bytes
            bar.update(encoded.read_bytes)
            now = time.monotonic()
            if not terminal and now - said >= 10:
                said, rate = now, done / (now - started)
                log.info("tokens: %.0f of %.0f MB, %.1f MB/s", done / 1e6, total_bytes / 1e6, rate / 1e6)


def count_duplicates(hashes: array) -> int:
    """How many texts are equal to one before them."""
    # Eight bytes a text: ten million texts take 160 MB for a moment.
    return len(hashes) - len(np.unique(np.frombuffer(hashes, dtype=np.uint64)))
