"""Data files -> a memory-mapped cache of token ids, built once and shared by all processes.

A cache is a folder `<cache_dir>/<key>/` with `train.bin`, perhaps `val.bin` (raw little-endian ids, every document as
BOS ids EOS), of chats also `train.marks` and `train.rows` (see packing.py), and `meta.json`. The key covers the
sources, how they are read and encoded, the tokenizer and the validation share, so a change of any of them leads to
another folder and a folder never has to be updated.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dataset.encode import (
    BAD_RECORDS_SHOWN,
    Encoder,
    Report,
    TextEncoder,
    count_duplicates,
    encode_all,
    typecode,
    with_progress,
)
from dataset.files import DataError, Source, find_files, identify_all
from dataset.records import read_chunks
from dataset.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

CACHE_FORMAT = 3
SAMPLED_BLOCKS, SAMPLED_BYTES = 16, 1 << 16
SPLITS = ("train", "val")
# Streams that a cache of chats has beside the ids, and the numbers of a row: ids, learned ones, places for an empty
# think block, and for a system turn.
MARKS, ROWS = "marks", "rows"
ROW_NUMBERS = 4
BUILDER_COMES_SECONDS = 10.0


@dataclass(frozen=True)
class Reading:
    """How texts are found in data files: under which key or column, in which encoding, and what bad records do."""

    text_key: str = "text"
    encoding: str = "utf-8"
    skip_bad_lines: bool = False


DEFAULT_READING = Reading()


@dataclass(frozen=True)
class TokenStream:
    """Documents as one run of ids. tokens: uint16, or uint32 from a vocabulary above 65,536; sha256: of its bytes.

    Of chats: marks, a byte an id, and rows, (n, ROW_NUMBERS), both covered by sha256; packing.py reads them.
    """

    tokens: np.memmap
    documents: int
    text_bytes: int
    sha256: str
    marks: np.memmap | None = None
    rows: np.ndarray | None = None
    source_sha256: tuple[str, ...] = ()  # of the files, in their order


@dataclass(frozen=True)
class TokenCache:
    """An opened cache; `val` is None without a validation share. source_sha256: of the files, in their order."""

    folder: Path
    train: TokenStream
    val: TokenStream | None
    source_sha256: tuple[str, ...]
    report: Report


def open_token_cache(
    paths: list[str],
    tokenizer: TextTokenizer,
    cache_dir: Path,
    val_fraction: float = 0.0,
    reading: Reading = DEFAULT_READING,
    builds: bool = True,
) -> TokenCache:
    """Open the token cache of texts; see `open_cache`."""
    return open_cache(paths, TextEncoder(tokenizer, reading.text_key, val_fraction), cache_dir, reading, builds)


def open_cache(
    paths: list[str], encoder: Encoder, cache_dir: Path, reading: Reading = DEFAULT_READING, builds: bool = True
) -> TokenCache:
    """Open the cache of these files, folders and patterns, building it first where there is none.

    Of several processes the one that gets the lock builds; one without `builds` lets others go first. Call it before a
    process group exists, because a build may take longer than the group's timeout. Whether a cache fits is decided by
    size, mtime and sampled blocks of each file: an edit that keeps size and mtime and misses the samples goes
    unnoticed.
    Raises DataError for bad records, unless they are skipped, and for data without any text; ValueError for bad paths,
    a bad `val_fraction` or an unusable `cache_dir`.
    """
    if not 0 <= encoder.val_fraction < 1:
        raise ValueError(f"--val_fraction {encoder.val_fraction} must be at least 0 and below 1")
    sources = identify_all(find_files(paths), reading.encoding)
    folder = cache_dir / _cache_key(sources, encoder)
    cache = _load(folder, encoder, sources)
    waited = time.monotonic()
    # After a while without a builder it is due to differing data or a slow first process, and waiting may be in vain.
    while cache is None and not (builds or time.monotonic() > waited + BUILDER_COMES_SECONDS):
        time.sleep(0.05)
        if _is_locked(folder.with_suffix(".lock")):
            waited = time.monotonic()
        cache = _load(folder, encoder, sources, aloud=False)
    if cache is None:
        with _naming_cache_dir(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _build_lock(folder.with_suffix(".lock")):
                if (cache := _load(folder, encoder, sources)) is None:
                    _build(folder, sources, encoder, reading)
                    cache = _load(folder, encoder, sources)
    if cache is None:
        raise ValueError(f"--cache_dir {cache_dir}: {folder.name} was removed while it was in use; start again")
    # One cache for both: a start without --skip_bad_lines is refused by what an earlier one with it had left out.
    if not reading.skip_bad_lines:
        cache.report.refuse_bad()
    cache.report.say()
    return cache


def _cache_key(sources: list[Source], encoder: Encoder) -> str:
    parts: list[object] = [CACHE_FORMAT, encoder.tokenizer.fingerprint, float(encoder.val_fraction), *encoder.key]
    for path, *read_as in sources:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            samples = hashlib.sha256()
            last = max(0, status.st_size - SAMPLED_BYTES)
            for number in range(SAMPLED_BLOCKS):
                file.seek(last * number // (SAMPLED_BLOCKS - 1))
                samples.update(file.read(SAMPLED_BYTES))
        parts.append([*read_as, status.st_size, status.st_mtime_ns, samples.hexdigest()])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load(folder: Path, encoder: Encoder, sources: list[Source], aloud: bool = True) -> TokenCache | None:
    """Open a finished cache; None where there is none, or a damaged one, which is said where `aloud`.

    sources: as the files are called now; when it was built, the same content may have had other names.
    """
    dtype = {"H": "<u2", "I": "<u4"}[typecode(encoder.tokenizer)]
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        hashes = tuple(source["sha256"] for source in meta["sources"])
        streams = {}
        for split, stored in meta["streams"].items():
            tokens = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
            if len(tokens) != stored.pop("tokens"):
                raise ValueError(f"{split}.bin has the wrong size")
            marks = rows = None
            if (row_count := stored.pop(ROWS)) is not None:
                marks = np.memmap(folder / f"{split}.{MARKS}", dtype="u1", mode="r")
                rows = np.memmap(folder / f"{split}.{ROWS}", dtype="<u4", mode="r").reshape(-1, ROW_NUMBERS)
                if len(marks) != len(tokens) or len(rows) != row_count:
                    raise ValueError(f"{split}.{MARKS} or {split}.{ROWS} has the wrong size")
            streams[split] = TokenStream(tokens, **stored, marks=marks, rows=rows, source_sha256=hashes)
        report = Report(**meta["report"])
        report.rename({old["path"]: now.path for old, now in zip(meta["sources"], sources, strict=True)})
        return TokenCache(folder, streams["train"], streams.get("val"), hashes, report)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if aloud:
            log.warning("the token cache %s is damaged (%s) and has to be built again", folder, error)
        return None


@contextlib.contextmanager
def _naming_cache_dir(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--cache_dir {cache_dir}: the token cache cannot be written ({error}); name a local folder that is "
            "writable and has room for about the size of the data files"
        ) from error


def _is_locked(path: Path) -> bool:
    """Whether somebody builds now."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel frees it the moment its holder dies, so nothing stale can block."""
    with open(path, "a+", encoding="utf-8") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    file.seek(0)
                    log.info("waiting while %s builds the token cache", file.read().strip() or "another process")
                    told = True
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _build(folder: Path, sources: list[Source], encoder: Encoder, reading: Reading) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    _remove_leftovers(folder.parent)
    for leftover in (temporary, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir()
    try:
        meta = _write_streams(temporary, sources, encoder, reading)
        if _cache_key(sources, encoder) != folder.name:
            names = ", ".join(source.path for source in sources)
            raise DataError(f"a data file changed while it was read ({names}); start again")
        with open(temporary / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _to_disk(file)
        _folder_to_disk(temporary)
        temporary.rename(folder)
        _folder_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_leftovers(cache_dir: Path) -> None:
    """Remove what killed builders left, of any data: whoever still builds holds the lock."""
    for folder in cache_dir.glob("*.tmp"):
        with open(folder.with_suffix(".lock"), "a", encoding="utf-8") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_streams(folder: Path, sources: list[Source], encoder: Encoder, reading: Reading) -> dict:
    """Encode all sources into `<split>.<stream>` files, in order, and return the meta data."""
    splits = SPLITS if encoder.val_fraction > 0 else SPLITS[:1]
    streams = {split: dict(tokens=0, rows=None, documents=0, text_bytes=0) for split in splits}
    hashes = [hashlib.sha256() for _ in sources]
    files: dict[str, Written] = {}
    report, text_hashes = Report(), array("Q")
    used, unused = Counter(), Counter()
    started = time.monotonic()

    def hopeless() -> bool:
        # After the first bad record no cache will come of it: the rest is only parsed, for the full count.
        return bool(report.bad) and not reading.skip_bad_lines

    with contextlib.ExitStack() as stack:
        chunks = (
            chunk
            for source, digest in zip(sources, hashes, strict=True)
            for chunk in read_chunks(source, digest, encoder.columns)
        )
        total_bytes = sum(os.path.getsize(source.path) for source in sources)
        for encoded in with_progress(encode_all(encoder, chunks, total_bytes, hopeless), total_bytes):
            report.add(encoded)
            text_hashes.extend(encoded.text_hashes)
            used[encoded.path] += sum(encoded.documents)
            unused[encoded.path] += len(encoded.bad) + len(encoded.dropped)
            for number, (split, stored) in enumerate(streams.items()):
                for name, values in encoded.streams[number].items():
                    path = folder / f"{split}.{name}"
                    if path.name not in files:
                        files[path.name] = Written(stack.enter_context(open(path, "wb")))
                    files[path.name].write(values)
                stored["tokens"] += len(encoded.streams[number]["bin"])
                if ROWS in encoded.streams[number]:
                    stored["rows"] = (stored["rows"] or 0) + len(encoded.streams[number][ROWS]) // ROW_NUMBERS
                stored["documents"] += encoded.documents[number]
                stored["text_bytes"] += encoded.text_bytes[number]
        for file in files.values():
            _to_disk(file.file)
    if not reading.skip_bad_lines:
        report.refuse_bad()
    _require_use(streams, [path for path in unused if unused[path] and not used[path]], sources, encoder, report)
    report.duplicates = count_duplicates(text_hashes)
    for split, stored in streams.items():
        stored["sha256"] = sha256_of([file.digest for name, file in files.items() if name.startswith(f"{split}.")])
    log.info(
        "token cache: %s in %.1f s",
        ", ".join(f"{split} {s['documents']:,} documents {s['tokens']:,} tokens" for split, s in streams.items()),
        time.monotonic() - started,
    )
    named = [dict(path=source.path, sha256=digest.hexdigest()) for source, digest in zip(sources, hashes, strict=True)]
    return dict(
        format=CACHE_FORMAT,
        tokenizer=encoder.tokenizer.fingerprint,
        sources=named,
        streams=streams,
        report=report.as_dict(),
    )


class Written:
    """A file being written and the hash of what is in it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, values: array) -> None:
        """Append the values' bytes."""
        self.file.write(values)
        self.digest.update(values)


def sha256_of(digests: list["hashlib._Hash"]) -> str:
    """Of one stream its own hash; of several, which belong together, a hash of theirs."""
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _require_use(
    streams: dict[str, dict], unused: list[str], sources: list[Source], encoder: Encoder, report: Report
) -> None:
    """Raise DataError for a file of which no record can be used, and for a split without any."""
    if unused:
        named = "\n  ".join([*report.first_bad, *report.first_dropped][:BAD_RECORDS_SHOWN])
        raise DataError(f"nothing to train on in {', '.join(unused)} ({report.counts()})\n  {named}")
    for split, stored in streams.items():
        if not stored["documents"]:
            names = ", ".join(source.path for source in sources)
            share = f"; --val_fraction {encoder.val_fraction} leaves none there" if report.records else ""
            raise DataError(f"no text for {split} in {names} ({report.counts()}, {report.blank_lines} blank){share}")
