"""Packed windows: every id in its place, none padded in training, each predicted once in validation."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataset.text import TextWindows, text_windows
from dataset.tokenizer import TextTokenizer, load_tokenizer
from dataset.tokens import TokenStream
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(ROOT / "model" / "tokenizer")


def stream_of(tmp_path: Path, count: int) -> TokenStream:
    """A stream of the ids 7, 8, 9, ... so that each id tells its own place."""
    (tmp_path / "ids.bin").write_bytes(np.arange(7, 7 + count, dtype="<u2").tobytes())
    return TokenStream(np.memmap(tmp_path / "ids.bin", "<u2", "r"), documents=1, text_bytes=count, sha256=str(count))


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def opened(data: list[str], val: list[str] | None, val_fraction: float, tokenizer: TextTokenizer, folder: Path):
    """Windows of 8 tokens for training and validation."""
    where = {"tokenizer": tokenizer, "max_seq_len": 8, "cache_dir": folder / "cache"}
    return text_windows(data, val, val_fraction=val_fraction, **where)


def test_window_predicts_each_id_from_the_one_before_it(tmp_path):
    windows = TextWindows(stream_of(tmp_path, 14), 4)
    rows = windows.rows(np.array([2, 0]), np.zeros(2))
    assert rows["input_ids"].tolist() == [[15, 16, 17, 18], [7, 8, 9, 10]]
    assert rows["targets"].tolist() == [[16, 17, 18, 19], [8, 9, 10, 11]]
    assert rows["input_ids"].dtype == rows["targets"].dtype


@pytest.mark.parametrize(("count", "windows"), [(5, 1), (8, 1), (9, 2), (10, 2), (13, 3)])
def test_training_windows_are_full_and_leave_the_tail_out(tmp_path, count, windows):
    samples = TextWindows(stream_of(tmp_path, count), 4)
    everything = np.arange(len(samples))
    assert len(samples) == windows
    assert samples.rows(everything, everything)["targets"].flatten().tolist() == list(range(8, 8 + 4 * windows))
    assert samples.target_counts.tolist() == [4] * windows


@pytest.mark.parametrize("count", [2, 4, 5, 6, 9, 12, 13])
def test_validation_windows_predict_every_id_but_the_first_exactly_once(tmp_path, count):
    samples = TextWindows(stream_of(tmp_path, count), 4, keep_tail=True)
    everything = np.arange(len(samples))
    rows = samples.rows(everything, everything)
    predicted = rows["targets"] != -100
    assert rows["targets"][predicted].tolist() == list(range(8, 7 + count))
    assert rows["input_ids"][predicted].tolist() == list(range(7, 6 + count))
    assert samples.target_counts.tolist() == predicted.sum(dim=1).tolist()


def test_data_shorter_than_one_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"4 tokens in 1 documents .* --max_seq_len 4"):
        TextWindows(stream_of(tmp_path, 4), 4)


def test_fingerprint_tells_data_and_window_length_apart(tmp_path):
    streams = [stream_of(tmp_path, 20), stream_of(tmp_path, 21)]
    prints = [TextWindows(stream, length).fingerprint for stream in streams for length in (4, 5)]
    assert len(set(prints)) == 4
    assert TextWindows(streams[0], 4).fingerprint == prints[0]


def test_documents_are_packed_back_to_back_with_one_bos_and_eos(tmp_path, tokenizer):
    texts = [f"text number {number}" for number in range(40)]
    train, val = opened([write_jsonl(tmp_path / "a.jsonl", texts)], None, 0.0, tokenizer, tmp_path)
    rows = train.rows(np.arange(len(train)), np.zeros(len(train)))
    ids = [*rows["input_ids"].flatten().tolist(), rows["targets"][-1, -1].item()]
    whole = [one for text in texts for one in (1, *tokenizer.encode_texts([text])[0], 2)]
    assert ids == whole[: len(train) * 8 + 1]
    assert len(whole) - len(ids) < 8
    assert val is None
    assert (train.documents, train.text_bytes) == (40, sum(map(len, texts)))


def test_validation_comes_from_a_file_or_from_a_share_but_not_both(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", [f"text number {number}" for number in range(40)])
    other = write_jsonl(tmp_path / "b.jsonl", ["something else"])
    from_file = opened([data], [other], 0.0, tokenizer, tmp_path)
    assert (from_file[0].documents, from_file[1].documents) == (40, 1)
    from_share = opened([data], None, 0.3, tokenizer, tmp_path)
    assert from_share[0].documents + from_share[1].documents == 40
    with pytest.raises(ValueError, match="--val_path and --val_fraction"):
        opened([data], [other], 0.3, tokenizer, tmp_path)
