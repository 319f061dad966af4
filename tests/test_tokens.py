"""The token cache: what it holds, when it is built again, and what it says of files it cannot use."""

import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import resource
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dataset import records, tokens
from dataset.files import DataError
from dataset.tokenizer import TextTokenizer, load_tokenizer
from dataset.tokens import open_token_cache
from tests.conftest import ROOT

TEXTS = [
    "a river",
    "山水之间",
    "line one\nline two",
    "u2028 \u2028 and u0085 \x85 stay",
    "emoji 🙂",
    "<|im_end|> is text",
]
fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(ROOT / "model" / "tokenizer")


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def expected_ids(texts: list[str], tokenizer: TextTokenizer) -> list[int]:
    """Every document alone, through the tokenizer alone."""
    ids = []
    for text in texts:
        ids += [tokenizer.bos_id, *tokenizer.encode_texts([text])[0], tokenizer.eos_id]
    return ids


def decoded_documents(ids: np.ndarray, tokenizer: TextTokenizer) -> list[str]:
    """Cut a stream at its BOS ids and decode each document."""
    starts = [*np.flatnonzero(ids == tokenizer.bos_id), len(ids)]
    documents = [ids[start:end] for start, end in pairwise(starts)]
    assert all(document[-1] == tokenizer.eos_id for document in documents)
    return [tokenizer.decode(document[1:-1].tolist()) for document in documents]


def test_a_cached_report_names_the_files_as_they_are_called_now(tmp_path, tokenizer):
    paths = [Path(write_jsonl(tmp_path / f"{name}.jsonl", [name])) for name in "ab"]
    for path in paths:
        path.write_text(path.read_text() + "{\n")
    skipping = tokens.Reading(skip_bad_lines=True)
    open_token_cache([str(path) for path in paths], tokenizer, tmp_path / "cache", reading=skipping)
    named = [path.rename(tmp_path / new) for path, new in zip(paths, ("b.jsonl.old", "c"), strict=True)]
    with pytest.raises(DataError) as refusal:
        open_token_cache([str(path) for path in named], tokenizer, tmp_path / "cache")
    assert [line.strip().split(": ")[0] for line in str(refusal.value).splitlines()[1:]] == [f"{p}:2" for p in named]
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_each_document_becomes_bos_ids_eos_whatever_the_chunk_size(tmp_path, tokenizer, monkeypatch, chunk_bytes):
    texts = TEXTS * 5
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    cache = open_token_cache([path], tokenizer, tmp_path / "cache")
    assert cache.train.tokens.tolist() == expected_ids(texts, tokenizer)
    assert cache.train.tokens.dtype == np.uint16
    assert cache.train.documents == len(texts)
    assert cache.train.text_bytes == sum(len(text.encode()) for text in texts)
    assert cache.val is None
    assert decoded_documents(cache.train.tokens, tokenizer) == texts


def test_files_follow_in_the_given_order_and_their_hashes_are_kept(tmp_path, tokenizer):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name * 3]) for name in "ba"]
    cache = open_token_cache(paths, tokenizer, tmp_path / "cache")
    assert decoded_documents(cache.train.tokens, tokenizer) == ["bbb", "aaa"]
    assert cache.source_sha256 == tuple(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths)
    assert cache.train.sha256 == hashlib.sha256(cache.train.tokens.tobytes()).hexdigest()
    assert open_token_cache(paths[::-1], tokenizer, tmp_path / "cache").train.sha256 != cache.train.sha256


def test_large_vocabulary_is_stored_in_four_bytes(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    wide = open_token_cache([path], dataclasses.replace(tokenizer, vocab_size=65537), tmp_path / "wide")
    assert wide.train.tokens.dtype == np.uint32
    assert wide.train.tokens.tolist() == expected_ids(TEXTS, tokenizer)


def test_bom_crlf_and_blank_lines_leave_no_trace(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"text": "first"}\r\n \t\r\n\n{"text": "second"}\r\n\n{"text": "last"}')
    cache = open_token_cache([str(path)], tokenizer, tmp_path / "cache")
    assert decoded_documents(cache.train.tokens, tokenizer) == ["first", "second", "last"]


def test_error_counts_all_bad_lines_and_shows_the_first_twenty(tmp_path, tokenizer, monkeypatch):
    good, bad = b'{"text": "good"}\n', b'{"text": null}\n'
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lone_cr = good.replace(b"\n", b"\r") + good
    first.write_bytes(b"\n" + good * 10 + bad + lone_cr + good)
    second.write_bytes(good + bad * 30)
    monkeypatch.setattr(records, "CHUNK_BYTES", 40)
    with pytest.raises(DataError) as error:
        open_token_cache([str(first), str(second)], tokenizer, tmp_path / "cache")
    heading, *lines, more = str(error.value).splitlines()
    assert more == "  ... and 12 more"
    assert heading.startswith('32 bad of 44 records: 31 "text" is null, not a string, 1 not JSON. Repair')
    where = [line.split(": ")[0].strip() for line in lines]
    assert where == [f"{first}:12", f"{first}:13", *(f"{second}:{number}" for number in range(2, 20))]
    assert not list((tmp_path / "cache").glob("*/"))


def test_all_bad_paths_are_named_at_once(tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").touch()
    paths = [str(tmp_path / "none.jsonl"), str(tmp_path / "*.txt"), str(tmp_path / "empty.jsonl")]
    with pytest.raises(ValueError, match=r"txt matches no file.*none.jsonl does not exist.*empty.jsonl is empty"):
        open_token_cache(paths, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="no data file"):
        open_token_cache([], tokenizer, tmp_path)


def test_file_of_blank_lines_is_an_error(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("\n \n\n")
    with pytest.raises(DataError, match=r"no text for train in .*0 bad of 0 records, 3 blank"):
        open_token_cache([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "cache")


def test_a_finished_cache_is_opened_without_being_touched(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = open_token_cache([path], tokenizer, tmp_path / "cache", 0.5)

    def written() -> dict[Path, tuple[int, int, int]]:
        status = {file: file.stat() for file in (tmp_path / "cache").rglob("*")}
        return {file: (found.st_ino, found.st_size, found.st_mtime_ns) for file, found in status.items()}

    before = written()
    second = open_token_cache([path], tokenizer, tmp_path / "cache", 0.5)
    assert written() == before
    assert (second.folder, second.train.sha256, second.val.sha256) == (
        first.folder,
        first.train.sha256,
        first.val.sha256,
    )


def test_change_of_size_time_sampled_bytes_tokenizer_or_share_is_noticed(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "six"] * 100)
    folders = [open_token_cache([path], tokenizer, tmp_path / "cache").folder]
    times = os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns

    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-6] + b"ten" + content[-3:])
    os.utime(path, ns=times)
    folders.append(open_token_cache([path], tokenizer, tmp_path / "cache").folder)
    os.utime(path, ns=(times[0], times[1] + 1))
    folders.append(open_token_cache([path], tokenizer, tmp_path / "cache").folder)
    Path(path).write_bytes(content + b'{"text": "new"}\n')
    os.utime(path, ns=times)
    folders.append(open_token_cache([path], tokenizer, tmp_path / "cache").folder)
    folders.append(open_token_cache([path], tokenizer, tmp_path / "cache", 0.25).folder)
    other = dataclasses.replace(tokenizer, fingerprint="0" * 64)
    folders.append(open_token_cache([path], other, tmp_path / "cache").folder)
    assert len(set(folders)) == 6


def test_blank_lines_added_between_the_samples_are_noticed_by_the_size(tmp_path, tokenizer):
    path, line = tmp_path / "a.jsonl", b'{"text": "a"}\n'
    folders = set()
    for blank_lines in (500_000, 500_001):
        path.write_bytes(line + b"\n" * blank_lines + line)
        os.utime(path, ns=(0, 0))
        folders.add(open_token_cache([str(path)], tokenizer, tmp_path / "cache").folder)
    assert len(folders) == 2


def test_a_truncated_cache_is_built_again(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    cache = open_token_cache([path], tokenizer, tmp_path / "cache")
    expected = cache.train.tokens.tolist()
    os.truncate(cache.folder / "train.bin", 10)
    assert open_token_cache([path], tokenizer, tmp_path / "cache").train.tokens.tolist() == expected


def test_validation_share_depends_on_the_text_alone(tmp_path, tokenizer):
    texts = [f"document {number}" for number in range(2000)]
    forward = open_token_cache([write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer, tmp_path / "cache", 0.2)
    backward = open_token_cache([write_jsonl(tmp_path / "b.jsonl", texts[::-1])], tokenizer, tmp_path / "cache", 0.2)
    held_out = decoded_documents(forward.val.tokens, tokenizer)
    threshold = 0.2 * 2**64
    assert held_out == [t for t in texts if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) < threshold]
    assert decoded_documents(backward.val.tokens, tokenizer) == held_out[::-1]
    assert set(held_out) | set(decoded_documents(forward.train.tokens, tokenizer)) == set(texts)
    assert forward.train.documents + forward.val.documents == len(texts)
    assert forward.val.text_bytes == sum(len(text) for text in held_out)
    assert 320 < len(held_out) < 480


@pytest.mark.parametrize(("share", "side"), [(1e-9, "val"), (1 - 1e-9, "train")])
def test_a_share_that_leaves_one_side_empty_is_an_error(tmp_path, tokenizer, share, side):
    with pytest.raises(DataError, match=f"no text for {side} .*leaves none"):
        open_token_cache([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tokenizer, tmp_path / "cache", share)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_an_impossible_share_is_refused(tmp_path, tokenizer, share):
    with pytest.raises(ValueError, match="--val_fraction"):
        open_token_cache([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tokenizer, tmp_path / "cache", share)


class Watched:
    """A tokenizer that calls `seen` before it encodes."""

    def __init__(self, tokenizer: TextTokenizer, seen):
        self._tokenizer, self._seen = tokenizer, seen

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        self._seen()
        return self._tokenizer.encode_texts(texts)


def test_a_source_that_changes_during_the_build_is_an_error(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def grow() -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        open_token_cache([path], Watched(tokenizer, grow), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/"))


def test_of_several_processes_one_builds_and_all_read_the_same(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    builds, results, ready = fork.Value("i", 0), fork.Queue(), fork.Barrier(4)

    def count() -> None:
        with builds.get_lock():
            builds.value += 1

    def open_it() -> None:
        ready.wait()
        results.put(open_token_cache([path], Watched(tokenizer, count), tmp_path / "cache").train.sha256)

    processes = [fork.Process(target=open_it) for _ in range(4)]
    for process in processes:
        process.start()
    hashes = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert len(hashes) == 1
    assert builds.value == 1


def test_a_process_that_may_not_build_waits_for_one_that_does(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    found = fork.Queue()
    arguments = ([path], tokenizer, tmp_path / "cache")
    waiting = fork.Process(target=lambda: found.put(open_token_cache(*arguments, builds=False).train.sha256))
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive()
    assert not (tmp_path / "cache").exists()
    built = open_token_cache(*arguments).train.sha256
    assert found.get(timeout=30) == built
    waiting.join()


def test_a_process_that_waits_in_vain_builds_after_a_while(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "BUILDER_COMES_SECONDS", 0.1)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert open_token_cache([path], tokenizer, tmp_path / "cache", builds=False).train.documents == len(TEXTS)


def test_a_killed_tokenizing_process_ends_the_build_with_a_reason(tmp_path, tokenizer):
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 9000)
    assert os.path.getsize(path) > 2 * records.CHUNK_BYTES
    with pytest.raises(RuntimeError, match=r"a tokenizing process was killed; .*memory"):
        open_token_cache([path], Watched(tokenizer, die), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/"))


def test_a_build_removes_what_killed_builders_of_other_data_left(tmp_path, tokenizer):
    left, held = tmp_path / "cache" / "a.tmp", tmp_path / "cache" / "b.tmp"
    left.mkdir(parents=True)
    held.mkdir()
    with open(held.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        open_token_cache([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tokenizer, tmp_path / "cache")
    assert not left.exists()
    assert held.exists()


def test_a_killed_builder_leaves_nothing_in_the_way(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    building = fork.Event()

    def stall() -> None:
        building.set()
        signal.pause()

    builder = fork.Process(target=open_token_cache, args=([path], Watched(tokenizer, stall), tmp_path / "cache"))
    builder.start()
    assert building.wait(30)
    assert list((tmp_path / "cache").glob("*.tmp"))
    builder.kill()
    builder.join()
    cache = open_token_cache([path], tokenizer, tmp_path / "cache")
    assert cache.train.tokens.tolist() == expected_ids(TEXTS, tokenizer)
    assert [folder.name for folder in (tmp_path / "cache").glob("*/")] == [cache.folder.name]


def test_a_cache_dir_that_cannot_be_used_is_named(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"--cache_dir .*a.jsonl"):
        open_token_cache([path], tokenizer, Path(path))


def test_a_full_disk_is_one_error_and_leaves_no_half_cache(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"--cache_dir .*File too large"):
            open_token_cache([path], tokenizer, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "cache").glob("*/"))
