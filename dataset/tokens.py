"""Data files -> a memory-mapped cache of token ids, built once and shared by all processes.

A cache is a folder `<cache_dir>/<key>/` with `train.bin`, perhaps `val.bin` (raw little-endian ids, every document
as BOS ids EOS) and `meta.json`. The key covers the sources, how they are read, the tokenizer and the validation share,
so a change of any of them leads to another folder and a folder never has to be updated.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset.encode import Encoder, Report, count_duplicates, with_progress
from dataset.files import DataError, Source, find_files, identify_all
from dataset.records import read_chunks
from dataset.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

CACHE_FORMAT = 2
SAMPLED_BLOCKS, SAMPLED_BYTES = 16, 1 << 16
SPLITS = ("train", "val")
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
    """Documents as one run of ids. tokens: uint16, or uint32 from a vocabulary above 65,536; sha256: of its bytes."""

    tokens: np.memmap
    documents: int
    text_bytes: int
    sha256: str


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
    """Open the token cache of these files, folders and patterns, building it first where there is none.

    Of several processes the one that gets the lock builds; one without `builds` lets others go first. Call it before a
    process group exists, because a build may take longer than the group's timeout. Whether a cache fits is decided by
    size, mtime and sampled blocks of each file: an edit that keeps size and mtime and misses the samples goes
    unnoticed.
    Raises DataError for bad records, unless they are skipped, and for data without any text; ValueError for bad paths,
    a bad `val_fraction` or an unusable `cache_dir`.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"--val_fraction {val_fraction} must be at least 0 and below 1")
    sources = identify_all(find_files(paths), reading.encoding)
    folder = cache_dir / _cache_key(sources, tokenizer, reading.text_key, val_fraction)
    cache = _load(folder, tokenizer)
    waited = time.monotonic()
    # After a while without a builder it is due to differing data or a slow first process, and waiting may be in vain.
    while cache is None and not (builds or time.monotonic() > waited + BUILDER_COMES_SECONDS):
        time.sleep(0.05)
        if _is_locked(folder.with_suffix(".lock")):
            waited = time.monotonic()
        cache = _load(folder, tokenizer, aloud=False)
    if cache is None:
        with _naming_cache_dir(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _build_lock(folder.with_suffix(".lock")):
                if (cache := _load(folder, tokenizer)) is None:
                    _build(folder, sources, tokenizer, reading, val_fraction)
                    cache = _load(folder, tokenizer)
    if cache is None:
        raise ValueError(f"--cache_dir {cache_dir}: {folder.name} was removed while it was in use; start again")
    # One cache for both: a start without --skip_bad_lines is refused by what an earlier one with it had left out.
    if not reading.skip_bad_lines:
        cache.report.refuse_bad()
    cache.report.say()
    return cache


def _cache_key(sources: list[Source], tokenizer: TextTokenizer, text_key: str, val_fraction: float) -> str:
    parts = [CACHE_FORMAT, tokenizer.fingerprint, tokenizer.bos_id, tokenizer.eos_id, text_key, float(val_fraction)]
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


def _dtype(tokenizer: TextTokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _load(folder: Path, tokenizer: TextTokenizer, aloud: bool = True) -> TokenCache | None:
    """Open a finished cache; None where there is none, or a damaged one, which is said where `aloud`."""
    dtype = _dtype(tokenizer)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        streams = {}
        for split, stored in meta["streams"].items():
            tokens = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
            if len(tokens) != stored.pop("tokens"):
                raise ValueError(f"{split}.bin has the wrong size")
            streams[split] = TokenStream(tokens, **stored)
        sources = tuple(source["sha256"] for source in meta["sources"])
        return TokenCache(folder, streams["train"], streams.get("val"), sources, Report(**meta["report"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _build(
    folder: Path, sources: list[Source], tokenizer: TextTokenizer, reading: Reading, val_fraction: float
) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    _remove_leftovers(folder.parent)
    for leftover in (temporary, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir()
    try:
        meta = _write_streams(temporary, sources, tokenizer, reading, val_fraction)
        if _cache_key(sources, tokenizer, reading.text_key, val_fraction) != folder.name:
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


def _write_streams(
    folder: Path, sources: list[Source], tokenizer: TextTokenizer, reading: Reading, val_fraction: float
) -> dict:
    """Encode all sources into `<split>.bin`, in order, and return the meta data."""
    splits = SPLITS if val_fraction > 0 else SPLITS[:1]
    streams = {split: dict(tokens=0, documents=0, text_bytes=0) for split in splits}
    hashes = [hashlib.sha256() for _ in sources]
    token_hashes = [hashlib.sha256() for _ in splits]
    report, text_hashes = Report(), array("Q")
    typecode = {2: "H", 4: "I"}[_dtype(tokenizer).itemsize]
    started = time.monotonic()
    encoder = Encoder(tokenizer, reading.text_key, val_fraction, typecode)

    def hopeless() -> bool:
        # After the first bad record no cache will come of it: the rest is only parsed, for the full count.
        return bool(report.bad) and not reading.skip_bad_lines

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in splits]
        chunks = (
            chunk
            for source, digest in zip(sources, hashes, strict=True)
            for chunk in read_chunks(source, digest, [reading.text_key])
        )
        total_bytes = sum(os.path.getsize(source.path) for source in sources)
        for encoded in with_progress(encoder.encode_all(chunks, total_bytes, hopeless), total_bytes):
            report.add(encoded)
            text_hashes.extend(encoded.text_hashes)
            for number, (file, stored) in enumerate(zip(files, streams.values(), strict=True)):
                ids = encoded.ids[number]
                file.write(ids)
                token_hashes[number].update(ids)
                stored["tokens"] += len(ids)
                stored["documents"] += encoded.documents[number]
                stored["text_bytes"] += encoded.text_bytes[number]
        for file in files:
            _to_disk(file)
    if not reading.skip_bad_lines:
        report.refuse_bad()
    for split, stored in streams.items():
        if not stored["documents"]:
            names = ", ".join(source.path for source in sources)
            share = f"; --val_fraction {val_fraction} leaves none there" if report.records else ""
            raise DataError(f"no text for {split} in {names} ({report.counts()}, {report.blank_lines} blank){share}")
    report.duplicates = count_duplicates(text_hashes)
    for stored, digest in zip(streams.values(), token_hashes, strict=True):
        stored["sha256"] = digest.hexdigest()
    log.info(
        "token cache: %s in %.1f s",
        ", ".join(f"{split} {s['documents']:,} documents {s['tokens']:,} tokens" for split, s in streams.items()),
        time.monotonic() - started,
    )
    named = [dict(path=source.path, sha256=digest.hexdigest()) for source, digest in zip(sources, hashes, strict=True)]
    return dict(
        format=CACHE_FORMAT,
        tokenizer=tokenizer.fingerprint,
        sources=named,
        streams=streams,
        report=report.as_dict(),
    )
