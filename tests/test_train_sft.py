"""train_sft.py: starts from weights that it proves, learns answers only, resumes exactly, says what it leaves out."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_pretrain
import train_sft
from model.gpt import GPT, GPTConfig
from model.minimind import minimind_state
from model.weights import load_model_folder, save_model_folder
from tests.conftest import ROOT, SHARED_DATA, Peers, curve, final_bytes, lively, on_ranks, train, write_texts
from tests.test_resume import cut_back
from trainer.checkpoint import step_folders

SFT = [
    "--max_seq_len", "96", "--batch_size", "2", "--num_workers", "0", "--device", "cpu", "--log_interval", "1",
    "--learning_rate", "1e-3",
]  # fmt: skip
TINY_MODEL = GPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of one to three rounds, with answers of 1 to 20 words."""
    draw = random.Random(seed)
    words = ["river", "stone", "green", "seven", "under", "山", "水", "the", "of", "bread", "人民", "window", "quick"]
    lines = []
    for number in range(count):
        turns = []
        for _ in range(draw.randint(1, 3)):
            turns.append(
                {"role": "user", "content": f"{number} " + " ".join(draw.choices(words, k=draw.randint(1, 9)))}
            )
            turns.append({"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 20)))})
        lines.append({"conversations": turns})
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A pretrained folder, with its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "base"
    model = lively(GPT(TINY_MODEL))
    save_model_folder(folder, model.config, model.state_dict(), tokenizer_folder=ROOT / "model" / "tokenizer")
    return folder


def validations(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]


def test_answers_are_learned_from_the_loss_of_the_given_weights_on(tmp_path, base, caplog):
    caplog.set_level(logging.INFO)
    chats = write_chats(tmp_path / "chats.jsonl", 60)
    run = tmp_path / "sft"
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", base]
    assert train(*options, "--val_fraction", 0.2, "--epochs", 6, "--out_dir", run, script=train_sft) == 0
    losses = validations(run)
    assert losses[0][0] == 0
    assert losses[-1][1] < losses[0][1] - 1
    assert str(base) in caplog.text
    folder = step_folders(run)[-1]
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["hidden_size"], saved["num_hidden_layers"]) == (64, 2)
    assert (folder / "chat_template.jinja").is_file()
    load_model_folder(folder)


@pytest.mark.parametrize("more", [[], ["--system_prompt_share", 0.5, "--empty_think_share", 0.5, "--dropout", 0.1]])
def test_interrupted_run_equals_the_uninterrupted_one(tmp_path, base, more):
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", base, *more]
    options += ["--epochs", 3, "--checkpoint_interval", 1, "--keep_checkpoints", 99]
    straight = tmp_path / "straight"
    assert train(*options, "--out_dir", straight, script=train_sft) == 0
    steps = len(curve(straight))
    for step in (0, 1, steps // 2, steps - 1):
        resumed = cut_back(straight, tmp_path / f"from_{step}", step)
        assert train(*options, "--out_dir", resumed, script=train_sft) == 0
        assert curve(resumed) == curve(straight)
        assert final_bytes(resumed) == final_bytes(straight)


def test_ranks_that_share_the_batch_have_the_same_curve(tmp_path, base):
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    on_ranks(2, train_on_two, tmp_path, base, chats)
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", base, "--epochs", 2]
    options += ["--dtype", "float32", "--val_fraction", 0.2]
    alone = tmp_path / "alone"
    assert train(*options, "--gradient_accumulation_steps", 2, "--out_dir", alone, script=train_sft) == 0
    for one, two in zip(curve(alone), curve(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    for one, two in zip(validations(alone), validations(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def train_on_two(peers: Peers, folder: Path, base: Path, chats: Path) -> None:
    peers.new_group()
    options = [*SFT, "--data_path", chats, "--cache_dir", folder / "cache", "--from_weight", base, "--epochs", 2]
    options += ["--dtype", "float32", "--val_fraction", 0.2]
    assert train(*options, "--out_dir", folder / "two", script=train_sft) == 0


def test_shown_samples_mark_what_is_trained(tmp_path, base, capsys):
    chats = write_chats(tmp_path / "chats.jsonl", 20)
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", base, "--max_steps", 1]
    assert train(*options, "--show_samples", "--out_dir", tmp_path / "sft", script=train_sft) == 0  # bare: 3
    shown = capsys.readouterr().out
    assert shown.count("<|im_start|>user\n") >= 3
    assert shown.count("⟦") == shown.count("<|im_end|>⟧") == shown.count("<|im_start|>assistant\n⟦") >= 3


def test_weights_without_a_tokenizer_need_one_named(tmp_path, base, caplog):
    chats = write_chats(tmp_path / "chats.jsonl", 20)
    model = GPT(replace(TINY_MODEL, num_attention_heads=8))
    torch.save(minimind_state(model.config, model.state_dict()), tmp_path / "pretrain_64.pth")
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--max_steps", 1]
    options += ["--from_weight", tmp_path / "pretrain_64.pth"]
    assert train(*options, "--out_dir", tmp_path / "sft", script=train_sft) == 78
    assert "--tokenizer_path" in caplog.text
    options += ["--tokenizer_path", "model/tokenizer"]
    assert train(*options, "--out_dir", tmp_path / "sft", script=train_sft) == 0


def test_pretraining_and_sft_follow_each_other_by_default_folders(tmp_path, base, caplog):
    texts, chats = write_texts(tmp_path / "texts.jsonl", 30), write_chats(tmp_path / "chats.jsonl", 20)
    pretrain = ["--hidden_size", 64, "--num_hidden_layers", 2, "--num_attention_heads", 4, "--max_seq_len", 32]
    pretrain += ["--batch_size", 2, "--num_workers", 0, "--max_steps", 2, "--cache_dir", tmp_path / "cache"]
    assert train(*pretrain, "--data_path", texts, "--out_dir", tmp_path / "pre", script=train_pretrain) == 0
    options = [*SFT, "--data_path", chats, "--cache_dir", tmp_path / "cache", "--from_weight", tmp_path / "pre"]
    assert train(*options, "--hidden_size", 128, "--out_dir", tmp_path / "wrong", script=train_sft) == 78
    assert "hidden_size is 64 there and 128 here" in caplog.text
    assert train(*options, "--max_steps", 2, "--out_dir", tmp_path / "sft", script=train_sft) == 0


def test_text_files_are_refused_with_the_script_that_takes_them(tmp_path, base, caplog):
    texts = write_texts(tmp_path / "texts.jsonl", 5)
    options = [*SFT, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--from_weight", base]
    assert train(*options, "--out_dir", tmp_path / "sft", script=train_sft) == 78
    assert "train_pretrain.py" in caplog.text


@pytest.mark.integration
def test_real_conversations_train_on_two_ranks_without_nan(tmp_path, base):
    if not SHARED_DATA.exists():
        pytest.skip("needs the real conversations in ../shared/data")
    on_ranks(2, train_real, tmp_path, base)
    losses = [point[1] for point in curve(tmp_path / "real")]
    assert len(losses) == 20
    assert all(0 < loss < 12 for loss in losses)


def train_real(peers: Peers, folder: Path, base: Path) -> None:
    peers.new_group()
    paths = [SHARED_DATA / "sft_real.jsonl", SHARED_DATA / "domain_real.jsonl"]
    options = [
        *SFT,
        "--max_seq_len",
        768,
        "--data_path",
        *paths,
        "--cache_dir",
        folder / "cache",
        "--from_weight",
        base,
    ]
    assert train(*options, "--max_steps", 20, "--out_dir", folder / "real", script=train_sft) == 0
