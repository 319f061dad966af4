"""A long and a short answer weigh by their tokens, however batch, accumulation and ranks share them, in all scripts."""

import importlib
import json
from pathlib import Path

import pytest
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.gpt import GPT, GPTConfig
from model.lora import open_model
from model.weights import save_model_folder
from tests.conftest import ROOT, TINY, Peers, lively, on_ranks, train, write_texts
from tests.test_resume import cut_back
from trainer.checkpoint import step_folders
from trainer.ddp import DataParallel

CONFIG = GPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SPLITS = {"batch 2": [2, 1], "accumulation 2": [1, 2], "2 ranks": [1, 1]}


def write_two_answers(path: Path) -> Path:
    """Conversations with answers of 30 and of 2 tokens, the end token included; they do not fit into one row of 64."""
    chats = [("river?", "7" * 29), ("stone? " * 12, "7")]  # every digit is a token
    turns = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in chats]
    path.write_text("".join(json.dumps({"conversations": pair}) + "\n" for pair in turns), encoding="utf-8")
    return path


def take_gradients(peers: Peers | None, script: str, options: list, seen: Path) -> None:
    """Run a script on a rank, and keep its last step's gradients, and what it trained on if that was one batch."""
    step, loss_sum, batch = DataParallel.step, DataParallel.loss_sum, {}

    def taking_step(self: DataParallel) -> Tensor:
        if self.ranks.is_first:
            gradients = {name: parameter.grad.clone() for parameter, name in self.names.items()}
            save_file(gradients | {f"batch {key}": value for key, value in batch.items()}, seen)
        return step(self)

    def noting_loss_sum(self: DataParallel, rows: dict[str, Tensor]) -> Tensor:
        batch.update(rows)
        return loss_sum(self, rows)

    if peers:
        peers.new_group()
    DataParallel.step, DataParallel.loss_sum = taking_step, noting_loss_sum
    try:
        assert train(*options, script=importlib.import_module(script)) == 0
    finally:
        DataParallel.step, DataParallel.loss_sum = step, loss_sum


def gradient_of_the_mean(folder: Path, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], list]:
    """The gradient of the mean loss of a batch's target tokens, the plain way; and how many each row has."""
    model, targets = open_model(folder), batch.pop("targets")
    logits = model(**batch)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return gradients, sorted((targets != -100).sum(dim=1).tolist())


# Pretraining's rows are always full, so there the two count the same.
@pytest.mark.parametrize(
    ("script", "counts"), [("train_pretrain", [64, 64]), ("train_sft", [2, 30]), ("train_lora", [2, 30])]
)
def test_a_step_s_gradient_is_that_of_the_mean_over_its_tokens(script: str, counts: list, tmp_path: Path) -> None:
    chats = script != "train_pretrain"
    data = write_two_answers(tmp_path / "a.jsonl") if chats else write_texts(tmp_path / "a.jsonl", 3, seed=1)
    base, begun = tmp_path / "base", tmp_path / "begun"
    save_model_folder(base, CONFIG, lively(GPT(CONFIG)).state_dict(), tokenizer_folder=ROOT / "model" / "tokenizer")
    options = [*TINY, "--max_seq_len", 64, "--data_path", data, "--cache_dir", tmp_path / "cache", "--dtype", "float32"]
    options += ["--from_weight", base, "--learning_rate", 1e-2]
    # From the second step on: an adapter's first gradient is zero in half of its tensors.
    assert train(*options, "--out_dir", begun, "--max_steps", 1, script=importlib.import_module(script)) == 0
    found = {}
    for name, (batch_size, accumulation) in SPLITS.items():
        run, seen = cut_back(begun, tmp_path / name, 1), tmp_path / f"{name}.safetensors"
        split = ["--batch_size", batch_size, "--gradient_accumulation_steps", accumulation]
        arguments = script, [*options, *split, "--out_dir", run, "--max_steps", 2], seen
        if name == "2 ranks":
            on_ranks(2, take_gradients, *arguments)
        else:
            take_gradients(None, *arguments)
        found[name] = load_file(seen)
    batch = {key.removeprefix("batch "): value for key, value in found["batch 2"].items() if key.startswith("batch ")}
    wanted, target_counts = gradient_of_the_mean(step_folders(begun)[-1], batch)
    assert target_counts == counts
    for split, tensors in found.items():
        gradients = {name: tensor for name, tensor in tensors.items() if not name.startswith("batch ")}
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            largest = gradient.abs().max().item()
            assert largest > 0, name
            assert (gradients[name] - gradient).abs().max().item() < 1e-5 * largest, f"{split}: {name}"
