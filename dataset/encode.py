"""Records -> token ids of their texts, in order and on all cores, and an account of what was found on the way."""

import hashlib
import logging
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np
from tqdm import tqdm

from dataset.files import DataError
from dataset.records import BadRecord, Chunk, text_of
from dataset.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

# Three chunks at a time keep the tokenizer's own threads busy while Python parses and packs another chunk.
CHUNKS_IN_FLIGHT = 3
BAD_RECORDS_SHOWN = 20


@dataclass
class Encoded:
    """What one chunk became, per split: ids, documents, UTF-8 bytes; and the records that were no text."""

    ids: tuple[array, ...]
    documents: list[int]
    text_bytes: list[int]
    read_bytes: int
    blank_lines: int = 0
    text_hashes: array = field(default_factory=lambda: array("Q"))
    bad: list[tuple[str, str]] = field(default_factory=list)  # (kind, "file:line: reason")


@dataclass
class Report:
    """What the sources held beside good records. bad: number of bad records by kind; duplicates: of other texts."""

    records: int = 0
    duplicates: int = 0
    blank_lines: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count one chunk."""
        self.records += sum(encoded.documents)
        self.blank_lines += encoded.blank_lines
        self.bad = dict(Counter(self.bad) + Counter(kind for kind, _ in encoded.bad))
        self.first_bad += [line for _, line in encoded.bad[: BAD_RECORDS_SHOWN - len(self.first_bad)]]

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
        if self.duplicates:
            log.info("%d of %d texts are duplicates of another; all are kept", self.duplicates, self.records)
        if self.blank_lines:
            log.info("%d blank lines skipped", self.blank_lines)

    def counts(self) -> str:
        """How many records were bad, by kind."""
        bad = sum(self.bad.values())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.bad.items(), key=lambda kind: -kind[1]))
        return f"{bad:,} bad of {self.records + bad:,} records" + (f": {kinds}" if kinds else "")

    def as_dict(self) -> dict[str, object]:
        """For a JSON file; Report(**...) reads it back."""
        return asdict(self)


def text_hash(utf8: bytes) -> int:
    """64 bits that identify a text: its place in [0, 1) for a validation share, and how duplicates are found."""
    return int.from_bytes(hashlib.sha256(utf8).digest()[:8], "big")


def encode_chunk(
    chunk: Chunk, tokenizer: TextTokenizer, text_key: str, val_fraction: float, typecode: str, parse_only: bool
) -> Encoded:
    """Turn a chunk's texts into documents BOS ids EOS, split by their hash into training and validation.

    typecode: of the id arrays. parse_only: only count and find bad records.
    """
    encoded = Encoded((array(typecode), array(typecode)), [0, 0], [0, 0], chunk.read_bytes)
    texts, splits = [], []
    for place, record in chunk.records(text_key):
        if record is None:
            encoded.blank_lines += 1
            continue
        try:
            text = text_of(record, text_key)
        except BadRecord as bad:
            encoded.bad.append((bad.kind, f"{place}: {bad}"))
            continue
        utf8 = text.encode("utf-8")
        hashed = text_hash(utf8)
        split = int(hashed / 2**64 < val_fraction)
        texts.append(text)
        splits.append(split)
        encoded.text_hashes.append(hashed)
        encoded.documents[split] += 1
        encoded.text_bytes[split] += len(utf8)
    if not parse_only:
        for split, ids in zip(splits, tokenizer.encode_texts(texts), strict=True):
            encoded.ids[split].append(tokenizer.bos_id)
            encoded.ids[split].fromlist(ids)
            encoded.ids[split].append(tokenizer.eos_id)
    return encoded


def in_order(work: Callable[[Chunk], Encoded], chunks: Iterable[Chunk]) -> Iterator[Encoded]:
    """Work on a few chunks at a time and yield the results in the order of the chunks."""
    # Threads are enough: the tokenizer encodes outside the GIL on all cores.
    with ThreadPoolExecutor(CHUNKS_IN_FLIGHT) as pool:
        pending = deque()
        for chunk in chunks:
            pending.append(pool.submit(work, chunk))
            if len(pending) > CHUNKS_IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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
