"""JSONL files -> a memory-mapped cache of token ids, built once and shared by all processes.

A cache is a folder `<cache_dir>/<key>/` with `train.bin`, perhaps `val.bin` (raw little-endian ids, every document
as BOS ids EOS) and `meta.json`. The key covers the sources, the tokenizer and the validation share, so a change of
any of them leads to another folder and a folder never has to be updated.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.records import LINE_END, Chunk, DataError, read_chunks, text_of_line
from dataset.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

CACHE_FORMAT = 1
SAMPLED_BLOCKS, SAMPLED_BYTES = 16, 1 << 16
# Three chunks at a time keep the tokenizer's own threads busy while Python parses and packs another chunk.
CHUNKS_IN_FLIGHT = 3
BAD_LINES_SHOWN = 20
SPLITS = ("train", "val")


@dataclass(frozen=True)
class TokenStream:
    """Documents as one run of ids. tokens: uint16, or uint32 from a vocabulary above 65,536; sha256: of its bytes."""

    tokens: np.memmap
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenCache:
    """An opened cache; `val` is None without a validation share. source_sha256: of the files, in the given order."""

    folder: Path
    train: TokenStream
    val: TokenStream | None
    source_sha256: tuple[str, ...]


@dataclass
class Encoded:
    """What one chunk became: ids, documents and UTF-8 text bytes per split, and the lines that were no record."""

    ids: tuple[array, ...]
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])
    read_bytes: int = 0
    blank_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)


def open_token_cache(
    paths: list[str], tokenizer: TextTokenizer, cache_dir: Path, val_fraction: float = 0.0
) -> TokenCache:
    """Open the token cache of these JSONL files, building it first where there is none.

    The process that gets the lock builds, the others wait; call it before a process group exists, because a build
    may take longer than the group's timeout. Whether a cache fits is decided by size, mtime and sampled blocks of
    each file: an edit that keeps size and mtime and misses the samples goes unnoticed.
    Raises DataError for bad lines, ValueError for bad paths, a bad `val_fraction` or an unusable `cache_dir`.
    """
    _check_inputs(paths, val_fraction)
    folder = cache_dir / _cache_key(paths, tokenizer, val_fraction)
    if cache := _load(folder, tokenizer):
        return cache
    with _naming_cache_dir(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _build_lock(folder.with_suffix(".lock")):
            if not (cache := _load(folder, tokenizer)):
                _build(folder, paths, tokenizer, val_fraction)
                cache = _load(folder, tokenizer)
    if cache is None:
        raise ValueError(f"--cache_dir {cache_dir}: {folder.name} was removed while it was in use; start again")
    return cache


def in_validation(utf8: bytes, val_fraction: float) -> bool:
    """Whether a text belongs to the validation share: a pure function of its bytes, uniform over texts."""
    return int.from_bytes(hashlib.sha256(utf8).digest()[:8], "big") / 2**64 < val_fraction


def _check_inputs(paths: list[str], val_fraction: float) -> None:
    problems = [] if paths else ["no data file was given"]
    for path in paths:
        if os.path.isdir(path):
            problems.append(f"{path} is a folder; name the JSONL files in it")
        elif not os.path.exists(path):
            problems.append(f"{path} does not exist (looked from {os.getcwd()})")
        elif not os.path.isfile(path):
            problems.append(f"{path} is not a regular file")
        elif os.path.getsize(path) == 0:
            problems.append(f"{path} is empty")
        elif not os.access(path, os.R_OK):
            problems.append(f"{path} may not be read by this user")
    if not 0 <= val_fraction < 1:
        problems.append(f"--val_fraction {val_fraction} must be at least 0 and below 1")
    if problems:
        raise ValueError("cannot read the data: " + "; ".join(problems))


def _cache_key(paths: list[str], tokenizer: TextTokenizer, val_fraction: float) -> str:
    parts = [CACHE_FORMAT, tokenizer.fingerprint, tokenizer.bos_id, tokenizer.eos_id, float(val_fraction)]
    for path in paths:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            samples = hashlib.sha256()
            last = max(0, status.st_size - SAMPLED_BYTES)
            for number in range(SAMPLED_BLOCKS):
                file.seek(last * number // (SAMPLED_BLOCKS - 1))
                samples.update(file.read(SAMPLED_BYTES))
        parts.append([status.st_size, status.st_mtime_ns, samples.hexdigest()])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _dtype(tokenizer: TextTokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _load(folder: Path, tokenizer: TextTokenizer) -> TokenCache | None:
    """Open a finished cache; None where there is none or it is damaged."""
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
        return TokenCache(folder, streams["train"], streams.get("val"), sources)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
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
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _build(folder: Path, paths: list[str], tokenizer: TextTokenizer, val_fraction: float) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    for leftover in (temporary, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir()
    try:
        meta = _write_streams(temporary, paths, tokenizer, val_fraction)
        if _cache_key(paths, tokenizer, val_fraction) != folder.name:
            raise DataError(f"a data file changed while it was read ({', '.join(paths)}); start again")
        with open(temporary / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _to_disk(file)
        _folder_to_disk(temporary)
        temporary.rename(folder)
        _folder_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_streams(folder: Path, paths: list[str], tokenizer: TextTokenizer, val_fraction: float) -> dict:
    """Encode all sources into `<split>.bin`, in order, and return the meta data."""
    splits = SPLITS if val_fraction > 0 else SPLITS[:1]
    streams = {split: dict(tokens=0, documents=0, text_bytes=0) for split in splits}
    hashes = [hashlib.sha256() for _ in paths]
    token_hashes = [hashlib.sha256() for _ in splits]
    bad_lines, blank_lines, bad_shown = 0, 0, []
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in splits]
        chunks = (chunk for path, digest in zip(paths, hashes, strict=True) for chunk in read_chunks(path, digest))

        def work(chunk: Chunk) -> Encoded:
            # After the first bad line no cache will come of it: the rest is only parsed, for the full count.
            return _encode_chunk(chunk, tokenizer, val_fraction, parse_only=bad_lines > 0)

        for encoded in _with_progress(_in_order(work, chunks), sum(map(os.path.getsize, paths))):
            bad_lines += len(encoded.bad_lines)
            bad_shown += encoded.bad_lines[: BAD_LINES_SHOWN - len(bad_shown)]
            blank_lines += encoded.blank_lines
            for number, (file, stored) in enumerate(zip(files, streams.values(), strict=True)):
                ids = encoded.ids[number]
                file.write(ids)
                token_hashes[number].update(ids)
                stored["tokens"] += len(ids)
                stored["documents"] += encoded.documents[number]
                stored["text_bytes"] += encoded.text_bytes[number]
        for file in files:
            _to_disk(file)
    if bad_lines:
        shown = "\n  ".join(bad_shown)
        raise DataError(f"{bad_lines} bad lines; repair or remove them. The first {len(bad_shown)}:\n  {shown}")
    for split, stored in streams.items():
        if not stored["documents"]:
            raise DataError(f"no document for {split} in {', '.join(paths)} (--val_fraction {val_fraction})")
    for stored, digest in zip(streams.values(), token_hashes, strict=True):
        stored["sha256"] = digest.hexdigest()
    log.info(
        "token cache: %s in %.1f s, %d blank lines skipped",
        ", ".join(f"{split} {s['documents']:,} documents {s['tokens']:,} tokens" for split, s in streams.items()),
        time.monotonic() - started,
        blank_lines,
    )
    sources = [dict(path=path, sha256=digest.hexdigest()) for path, digest in zip(paths, hashes, strict=True)]
    return dict(format=CACHE_FORMAT, tokenizer=tokenizer.fingerprint, sources=sources, streams=streams)


def _encode_chunk(chunk: Chunk, tokenizer: TextTokenizer, val_fraction: float, parse_only: bool) -> Encoded:
    typecode = {2: "H", 4: "I"}[_dtype(tokenizer).itemsize]
    encoded = Encoded(tuple(array(typecode) for _ in SPLITS), read_bytes=chunk.read_bytes)
    texts, splits = [], []
    for number, line in enumerate(chunk.lines.removesuffix(LINE_END).split(LINE_END), chunk.first_line):
        if not line.strip():
            encoded.blank_lines += 1
            continue
        try:
            text = text_of_line(line)
        except ValueError as error:
            encoded.bad_lines.append(f"{chunk.path}:{number}: {error}")
            continue
        utf8 = text.encode("utf-8")
        split = int(val_fraction > 0 and in_validation(utf8, val_fraction))
        texts.append(text)
        splits.append(split)
        encoded.documents[split] += 1
        encoded.text_bytes[split] += len(utf8)
    if not parse_only and not encoded.bad_lines:
        for split, ids in zip(splits, tokenizer.encode_texts(texts), strict=True):
            encoded.ids[split].append(tokenizer.bos_id)
            encoded.ids[split].fromlist(ids)
            encoded.ids[split].append(tokenizer.eos_id)
    return encoded


def _in_order(work: Callable[[Chunk], Encoded], chunks: Iterable[Chunk]) -> Iterator[Encoded]:
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


def _with_progress(results: Iterable[Encoded], total_bytes: int) -> Iterator[Encoded]:
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
