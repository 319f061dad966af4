"""Several sources: a loss each, forgetting is told, given weights are proved before step 1, passes are counted."""

import json
import logging
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.gpt import GPT
from model.weights import load_config, save_model_folder
from tests.conftest import TINY, Peers, final_bytes, lively, on_ranks, train, write_texts
from tests.test_evaluation import validations
from tests.test_resume import cut_back
from trainer import advice, evaluation
from trainer.checkpoint import load_tensors, step_folders
from trainer.validator import Validator


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Two sources in the shares 3:1, with validation texts each; every step is logged, every second saved."""
    data = [write_texts(tmp_path / f"{name}.jsonl", n, seed=n) for name, n in (("general", 40), ("domain", 12))]
    val = [write_texts(tmp_path / f"val_{name}.jsonl", n, seed=n) for name, n in (("general", 7), ("domain", 5))]
    sources = ["--data_path", *data, "--data_weights", 3, 1, "--val_path", *val, "--cache_dir", tmp_path / "cache"]
    return [*TINY, *sources, "--log_interval", 1, "--checkpoint_interval", 2, "--keep_checkpoints", 99]


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.fixture
def given(tmp_path: Path, options: list[object]) -> list[object]:
    """Options that start from trained weights."""
    assert train(*options, "--max_steps", 4, "--eval_interval", 0, "--out_dir", tmp_path / "base") == 0
    return [*options, "--from_weight", tmp_path / "base"]


def test_the_loss_of_several_sources_is_their_mean_by_share(tmp_path: Path, options: list[object]) -> None:
    assert train(*options, "--max_steps", 4, "--eval_interval", 2, "--out_dir", tmp_path / "run") == 0
    lines = validations(tmp_path / "run")
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert line["val_loss"] == pytest.approx(0.75 * line["val_loss/general"] + 0.25 * line["val_loss/domain"])


def test_given_weights_are_validated_before_step_1_once_also_after_a_kill(tmp_path: Path, given, caplog) -> None:
    caplog.set_level(logging.INFO)
    run_dir, arguments = tmp_path / "run", ["--max_steps", 4, "--eval_interval", 2]
    assert train(*given, *arguments, "--out_dir", run_dir) == 0
    assert [line["step"] for line in validations(run_dir)] == [0, 2, 4]
    first = validations(run_dir)[0]["val_loss"]
    assert f"loss before step 1: {first:.4f}" in caplog.text
    for folder in run_dir.glob("step_*"):  # as if it had been killed before its first checkpoint
        shutil.rmtree(folder)
    assert train(*given, *arguments, "--out_dir", run_dir) == 0
    assert [line["step"] for line in validations(run_dir)] == [0, 2, 4]


def test_the_loss_before_step_1_leaves_no_trace_in_the_weights(tmp_path: Path, given, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    at = given.index("--val_path")
    arguments = [*given[:at], *given[at + 3 :], "--max_steps", 4, "--dropout", 0.1]
    assert train(*arguments, "--out_dir", tmp_path / "proved") == 0
    assert "loss before step 1" in caplog.text
    resumed = cut_back(tmp_path / "proved", tmp_path / "resumed", 2)
    assert train(*arguments, "--out_dir", resumed) == 0
    monkeypatch.setattr(Validator, "prove_weights", lambda *arguments: 0.0)
    assert train(*arguments, "--out_dir", tmp_path / "unproved") == 0
    assert final_bytes(tmp_path / "proved") == final_bytes(tmp_path / "unproved") == final_bytes(resumed)


def test_the_loss_before_step_1_is_without_dropout(tmp_path: Path, given, caplog) -> None:
    caplog.set_level(logging.INFO)
    at = given.index("--val_path")
    for share in (0.0, 0.5):
        out_dir = tmp_path / f"dropout_{share}"
        assert train(*given[:at], *given[at + 3 :], "--max_steps", 1, "--dropout", share, "--out_dir", out_dir) == 0
    plain, dropping = (r.getMessage() for r in caplog.records if r.getMessage().startswith("loss before step 1"))
    assert plain == dropping


def test_a_run_from_weights_that_only_guess_says_so_and_goes_on(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options, "--max_steps", 1, "--out_dir", tmp_path / "base") == 0
    weights = step_folders(tmp_path / "base")[-1]
    config = load_config(weights)
    torch.manual_seed(5)
    save_model_folder(weights, config, lively(GPT(config), seed=5).state_dict())
    (weights / "manifest.json").unlink()
    assert train(*options, "--from_weight", weights, "--max_steps", 1, "--out_dir", tmp_path / "run") == 0
    assert "no better than guessing among 6,400 tokens" in caplog.text


def test_given_weights_that_are_not_finite_are_refused(tmp_path: Path, options: list, caplog) -> None:
    assert train(*options, "--max_steps", 1, "--out_dir", tmp_path / "base") == 0
    weights = step_folders(tmp_path / "base")[-1]
    tensors = load_tensors(weights / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((64,), torch.nan)
    save_model_folder(weights, load_config(weights), tensors)
    (weights / "manifest.json").unlink()
    assert train(*options, "--from_weight", weights, "--max_steps", 3, "--out_dir", tmp_path / "run") == 78
    assert "the given weights have a loss of nan" in caplog.text


def prove_on_two_ranks(peers: Peers, arguments: list[object]) -> None:
    peers.new_group()
    assert train(*arguments) == 0


def test_the_loss_before_step_1_is_that_of_the_whole_step_on_two_ranks_too(
    tmp_path: Path, given: list, caplog, capfd
) -> None:
    caplog.set_level(logging.INFO)
    at = given.index("--val_path")
    arguments = [*given[:at], *given[at + 3 :], "--max_steps", 1, "--dtype", "float32"]
    assert train(*arguments, "--batch_size", 4, "--out_dir", tmp_path / "one") == 0
    (alone,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("loss before step 1"))
    on_ranks(2, prove_on_two_ranks, [*arguments, "--out_dir", tmp_path / "two"])
    assert alone in capfd.readouterr().err


def test_forgetting_begins_above_five_percent() -> None:
    assert advice.forgetting(2.0, 2.0999, "general") is None
    assert advice.forgetting(2.0, 1.0, "general") is None
    assert "the validation loss on general, the general data, was 2.0000 and is 2.1010" in advice.forgetting(
        2.0, 2.101, "general"
    )


def test_shares_of_several_sets_need_not_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [SimpleNamespace(name=name, share=share) for name, share in (("a", 3.0), ("b", 1.0))]
    losses = {"a": 2.0, "b": 6.0}
    monkeypatch.setattr(evaluation, "evaluate", lambda module, loss_sum, part, sum_: {"val_loss": losses[part.name]})
    result = evaluation.evaluate_all(None, None, sets, None)
    assert result == {"val_loss": 3.0, "val_loss/a": 2.0, "val_loss/b": 6.0}


def test_weights_that_only_guess_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert advice.no_better_than_guessing(math.log(100) - 0.01, 100) is None
    assert "tokenizer" in advice.no_better_than_guessing(math.log(100), 100)


def test_forgetting_is_told_once_a_start_and_again_after_a_resume(tmp_path: Path, given, caplog) -> None:
    run_dir = tmp_path / "run"
    worse = ["--learning_rate", 1.0, "--lr_scaling", "none", "--lr_schedule", "constant", "--warmup_steps", 0]
    arguments = [*given, *worse, "--max_steps", 6, "--eval_interval", 1]
    assert train(*arguments, "--out_dir", run_dir) == 0
    first = validations(run_dir)[0]["val_loss/general"]
    (event,) = events(run_dir, "forgetting")
    assert event["first"] == first
    assert event["now"] > 1.05 * first
    assert sum("forgetting: " in record.message for record in caplog.records) == 1
    assert "--data_weights" in caplog.text
    resumed = cut_back(run_dir, tmp_path / "resumed", 4)
    before = len(events(resumed, "forgetting")) if (resumed / "events.jsonl").exists() else 0
    assert train(*arguments, "--out_dir", resumed) == 0
    again = events(resumed, "forgetting")[before:]
    assert [line["first"] for line in again] == [first]
    assert final_bytes(resumed) == final_bytes(run_dir)


def test_a_further_pass_is_told_once_also_over_a_resume(tmp_path: Path, options: list[object], caplog) -> None:
    caplog.set_level(logging.INFO)
    run_dir = tmp_path / "run"
    arguments = [*options, "--max_steps", 60, "--eval_interval", 0]
    assert train(*arguments, "--out_dir", run_dir) == 0

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "ran out and begins pass" in record.getMessage()]

    straight = told()
    assert straight
    assert all(line.startswith("step ") for line in straight)
    caplog.clear()
    assert train(*arguments, "--out_dir", cut_back(run_dir, tmp_path / "resumed", 58)) == 0
    later = [line for line in straight if int(line.split()[1].rstrip(":")) > 58]
    assert told() == later
