"""Validation counts every token once and gives the same number on any number of ranks."""

import json
import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dataset.loader import EvalLoader
from dataset.text import text_windows
from dataset.tokenizer import load_tokenizer
from model.gpt import GPT
from model.weights import load_model_folder
from tests.conftest import TINY, Peers, curve, final_bytes, on_ranks, train, write_texts
from tests.test_resume import cut_back
from trainer.evaluation import evaluate


def validations(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_loss" in line]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """A short run with validation texts, and those texts."""
    texts, val = write_texts(tmp_path / "texts.jsonl", 40), write_texts(tmp_path / "val.jsonl", 9, seed=5)
    options = [*TINY, "--data_path", texts, "--val_path", val, "--cache_dir", tmp_path / "cache"]
    options += ["--dtype", "float32", "--max_steps", 6, "--eval_interval", 3, "--checkpoint_interval", 6]
    assert train(*options, "--out_dir", tmp_path / "run") == 0
    return tmp_path / "run", val


def test_logged_validation_is_the_loss_of_every_token_but_the_first(trained: tuple[Path, Path]) -> None:
    run_dir, val = trained
    *_, last = validations(run_dir)
    tokenizer = load_tokenizer("model/tokenizer")
    texts = [json.loads(line)["text"] for line in val.read_text(encoding="utf-8").splitlines()]
    stream = torch.tensor(
        [i for ids in tokenizer.encode_texts(texts) for i in (tokenizer.bos_id, *ids, tokenizer.eos_id)]
    )
    model: GPT = load_model_folder(run_dir / "step_00000006").eval()
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(stream) - 1, 32):
            window = stream[start : start + 33]
            nats += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    assert last["val_loss"] == pytest.approx(nats / (len(stream) - 1), abs=1e-5)
    text_bytes = sum(len(text.encode()) for text in texts)
    assert last["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, abs=1e-5)


def test_validation_runs_at_its_interval_and_at_the_end(trained: tuple[Path, Path]) -> None:
    assert [line["step"] for line in validations(trained[0])] == [3, 6]


def evaluate_on(peers: Peers, folder: Path, val: Path, results: Path) -> None:
    ranks = peers.connect()
    tokenizer = load_tokenizer("model/tokenizer")
    windows, _ = text_windows(
        [str(val)], None, val_fraction=0.0, tokenizer=tokenizer, max_seq_len=32, cache_dir=results / "cache"
    )
    loader = EvalLoader(windows, batch_size=2, rank=peers.rank, world_size=peers.world_size)
    model = load_model_folder(folder)
    result = evaluate(model, lambda batch: model(**batch), loader, ranks.sum)
    if peers.rank == 0:
        (results / f"{peers.world_size}.json").write_text(json.dumps(result))
    ranks.disconnect()


def test_validation_has_the_same_bits_on_one_two_and_three_ranks(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, val = trained
    for world_size in (1, 2, 3):
        on_ranks(world_size, evaluate_on, run_dir / "step_00000006", val, tmp_path)
    one, two, three = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2, 3))
    assert one == two == three


def test_a_fraction_of_the_texts_is_held_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 64)
    tokenizer = load_tokenizer("model/tokenizer")
    windows, held_out = text_windows(
        [str(texts)], None, val_fraction=0.25, tokenizer=tokenizer, max_seq_len=32, cache_dir=tmp_path / "cache"
    )

    def first_words(one) -> set[str]:
        text = tokenizer.decode([int(i) for i in one.tokens])
        return {word.split("|>")[-1] for word in text.split() if "line" in word}

    train_lines, val_lines = first_words(windows), first_words(held_out)
    assert len(train_lines) + len(val_lines) == 64
    assert not train_lines & val_lines
    assert 6 <= len(val_lines) <= 26


def test_the_checkpoint_of_the_best_validation_is_kept(tmp_path: Path) -> None:
    texts, val = write_texts(tmp_path / "texts.jsonl", 40), write_texts(tmp_path / "val.jsonl", 9, seed=5)
    options = [*TINY, "--data_path", texts, "--val_path", val, "--cache_dir", tmp_path / "cache"]
    options += ["--eval_interval", 3, "--checkpoint_interval", 2, "--keep_checkpoints", 2, "--lr_schedule", "constant"]
    options += ["--warmup_steps", 0, "--out_dir", tmp_path / "run"]
    assert train(*options, "--max_steps", 9) == 0
    assert train(*options, "--max_steps", 24, "--learning_rate", 1.0) == 0  # from here on it gets worse
    best = min(validations(tmp_path / "run"), key=lambda line: line["val_loss"])["step"]
    assert best == 9
    kept = sorted(path.name for path in (tmp_path / "run").glob("step_*"))
    assert kept == ["step_00000009", "step_00000022", "step_00000024"]


def test_a_resumed_run_has_the_same_validations_and_the_same_best(tmp_path: Path) -> None:
    texts, val = write_texts(tmp_path / "texts.jsonl", 40), write_texts(tmp_path / "val.jsonl", 9, seed=5)
    options = [*TINY, "--data_path", texts, "--val_path", val, "--cache_dir", tmp_path / "cache", "--max_steps", 12]
    options += ["--eval_interval", 4, "--checkpoint_interval", 3, "--keep_checkpoints", 99]
    assert train(*options, "--out_dir", tmp_path / "straight") == 0
    expected = [(line["step"], line["val_loss"]) for line in validations(tmp_path / "straight")]
    assert [step for step, _ in expected] == [4, 8, 12]
    for step in (3, 4, 6, 8):
        resumed = cut_back(tmp_path / "straight", tmp_path / f"from_{step}", step)
        assert train(*options, "--out_dir", resumed) == 0
        assert [(line["step"], line["val_loss"]) for line in validations(resumed)][-2:] == expected[-2:]
        states = [
            json.loads((run / "step_00000012" / "state.json").read_text()) for run in (tmp_path / "straight", resumed)
        ]
        assert states[0]["state"] == states[1]["state"]


def test_a_stop_leaves_the_validation_out_and_the_next_start_makes_up_for_it(tmp_path: Path) -> None:
    texts, val = write_texts(tmp_path / "texts.jsonl", 40), write_texts(tmp_path / "val.jsonl", 9, seed=5)
    options = [*TINY, "--data_path", texts, "--val_path", val, "--cache_dir", tmp_path / "cache"]
    options += ["--max_steps", 40, "--eval_interval", 1]  # so that every step one may stop at is to be validated
    assert train(*options, "--out_dir", tmp_path / "straight") == 0
    metrics = tmp_path / "stopped" / "metrics.jsonl"

    def press_ctrl_c() -> None:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 10:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_ctrl_c, daemon=True).start()
    assert train(*options, "--out_dir", tmp_path / "stopped") == 75
    stopped = curve(tmp_path / "stopped")[-1][0]
    assert stopped < 40
    assert [line["step"] for line in validations(tmp_path / "stopped")] == list(range(1, stopped))
    assert train(*options, "--out_dir", tmp_path / "stopped") == 0
    assert validations(tmp_path / "stopped") == validations(tmp_path / "straight")
    assert final_bytes(tmp_path / "stopped") == final_bytes(tmp_path / "straight")
