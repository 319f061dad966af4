"""Command lines: MiniMind's names work, mistakes are told in one message, nothing is guessed."""

import argparse
import importlib.util
import math

import pytest

from train_pretrain import options
from trainer.options import given_options, parse_options, validate


def parsed(*argv: str):
    return parse_options(options(), argv)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parsed(*argv)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_the_defaults() -> None:
    args = parsed()
    expected = {
        "out_dir": "out/pretrain", "epochs": None, "max_steps": None, "batch_size": 64,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-4, "base_batch_size": 256, "lr_scaling": "linear", "lr_schedule": "cosine",
        "weight_decay": 0.1, "grad_clip": 1.0, "max_seq_len": 512, "hidden_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": None, "qk_norm": False,
        "tie_word_embeddings": True, "dropout": 0, "activation_checkpointing": False, "dtype": "bfloat16",
        "device": None, "compile": False, "deterministic": False, "seed": 42, "num_workers": 4, "pin_memory": True,
        "log_interval": 10, "checkpoint_interval": 100, "keep_checkpoints": 3, "resume_from_checkpoint": True,
        "ddp_timeout": 1800, "ddp_bucket_cap_mb": 25, "find_unused_parameters": False, "from_weight": "none",
        "val_fraction": 0, "val_path": None, "use_wandb": False, "wandb_project": "MiniMind-Pretrain",
        "wandb_mode": "online", "use_tensorboard": False,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("alias", "value", "name", "expected"),
    [
        ("--save_interval", "7", "checkpoint_interval", 7),
        ("--from_resume", "0", "resume_from_checkpoint", False),
        ("--from_resume", "1", "resume_from_checkpoint", True),
        ("--resume_from_checkpoint", "True", "resume_from_checkpoint", True),
        ("--accumulation_steps", "8", "gradient_accumulation_steps", 8),
        ("--local_batch_size", "16", "batch_size", 16),
        ("--base_lr", "1e-3", "learning_rate", 1e-3),
        ("--dim", "256", "hidden_size", 256),
        ("--n_layers", "4", "num_hidden_layers", 4),
        ("--timeout", "60", "ddp_timeout", 60),
        ("--warmup_iters", "5", "warmup_steps", 5),
        ("--use_compile", "1", "compile", True),
        ("--use_wandb", "1", "use_wandb", True),
        ("--wandb_project", "mine", "wandb_project", "mine"),
    ],
)
def test_minimind_names_are_aliases(alias: str, value: str, name: str, expected: object) -> None:
    assert getattr(parsed(alias, value), name) == expected


def test_save_dir_and_save_weight_name_the_run_folder() -> None:
    assert parsed("--save_dir", "../out", "--save_weight", "mine").out_dir == "../out/mine"
    assert parsed("--save_dir", "elsewhere").out_dir == "elsewhere/pretrain"
    assert parsed("--save_weight", "mine").out_dir == "out/mine"


def test_stage_names_of_weights_mean_their_folders() -> None:
    assert parsed("--from_weight", "pretrain").from_weight == "out/pretrain"
    assert parsed("--from_weight", "full_sft").from_weight == "out/sft"
    assert parsed("--from_weight", "none").from_weight == "none"


def test_dead_options_are_noted_once_and_dropped() -> None:
    args = parsed("--ddp", "--local_rank", "0", "--use_moe", "0")
    assert len(args.notes) == 1
    assert "--ddp, --local_rank" in args.notes[0]
    assert parsed().notes == []


def test_switches_work_bare_and_with_a_value() -> None:
    assert parsed("--compile").compile is True
    assert parsed("--use_wandb").use_wandb is True
    assert parsed("--use_wandb", "false").use_wandb is False
    assert parsed("--compile", "false").compile is False
    assert parsed("--tie_word_embeddings", "0").tie_word_embeddings is False


def test_given_options_are_told_from_defaults() -> None:
    assert given_options(options(), ["--hidden_size", "512", "--compile"]) == {"hidden_size", "compile"}


def test_chat_mixture_and_lora_options_are_judged_with_the_others() -> None:
    good = vars(parse_options(options(), []))
    bad = {
        "lora_rank": 0, "lora_alpha": 0.0, "lora_dropout": 1.0, "system_prompt_share": 1.5, "empty_think_share": -0.1,
        "show_samples": -1, "data_weights": [0.5, math.inf],
    }  # fmt: skip
    with pytest.raises(ValueError, match="lora_rank") as refused:
        validate(argparse.Namespace(**(good | bad)))
    for name in bad:
        assert f"--{name} " in str(refused.value)


def test_all_problems_come_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--batch_size", "0", "--dropout", "1.5", "--learning_rate", "nan", "--use_moe", "1")
    for part in ("--batch_size 0", "--dropout 1.5", "--learning_rate nan", "--use_moe 1"):
        assert part in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--out_dir", "out"], "out/pretrain"),
        (["--out_dir", ""], "out/pretrain"),
        (["--out_dir", "."], "out/pretrain"),
        (["--out_dir", "../out"], "out/pretrain"),
        (["--save_dir", "a", "--out_dir", "b"], "give only --out_dir"),
        (["--val_path", "x", "--val_fraction", "0.1"], "give one"),
        (["--checkpoint", "5"], "unrecognized arguments"),
        (["--learning_rat", "1e-3"], "did you mean --learning_rate?"),
        (["--compile", "maybe"], "neither true nor false"),
        (["--dtype", "int8"], "bfloat16"),
        (["--compile", "--ddp_bucket_cap_mb", "0.5"], "use 1 or more"),
    ],
)
def test_contradictions_are_refused(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *argv)


@pytest.mark.parametrize(("switch", "package"), [("--use_wandb", "wandb"), ("--use_tensorboard", "tensorboard")])
def test_a_dashboard_whose_package_is_missing_is_one_line_with_its_pip_command(
    switch: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    assert f"{switch}: its package is not installed; pip install {package}" in refusal(capsys, switch)
    assert parsed().use_wandb is False
