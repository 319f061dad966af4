"""What a run says of its memory: readings against the kernel's own, and a proposal that keeps the global batch."""

import json
import logging
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.gpt import GPT, GPTConfig
from tests.conftest import ROOT, TINY, train
from trainer import memory
from trainer.advice import full_memory
from trainer.estimate import block_bytes
from trainer.profiling import combined

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_resident_memory_follows_what_the_process_takes_and_gives_back() -> None:
    before = memory.resident_bytes()
    assert memory.forget_peak()
    held = mmap.mmap(-1, 100 << 20)  # not from the heap, which may hold as much that earlier tests have freed
    for _ in range(100):
        held.write(b"1" * (1 << 20))
    assert memory.resident_bytes() - before == pytest.approx(100 << 20, rel=0.05)
    held.close()
    assert memory.resident_bytes() - before < 20 << 20
    assert memory.peak_resident_bytes() - before == pytest.approx(100 << 20, rel=0.05)


def test_the_peak_without_the_kernels_file_is_that_of_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> int:
        raise FileNotFoundError(name)

    monkeypatch.setattr(memory, "status_bytes", absent)
    assert memory.peak_resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_numbers(root: Path, available: int, **cgroup: str) -> None:
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal:  1000 kB\nMemAvailable: {available} kB\nHugePages_Total:  0\n")
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, text in cgroup.items():
        (folder / f"memory.{name}").write_text(text)


def test_a_machine_without_a_container_counts_what_is_not_available(tmp_path: Path) -> None:
    write_numbers(tmp_path, 400, max="max\n", current="900\n", stat="inactive_file 0\n")
    assert memory.host_memory_share(tmp_path) == pytest.approx(0.6)


def test_a_container_counts_without_the_files_that_were_only_read(tmp_path: Path) -> None:
    write_numbers(tmp_path, 900, max="1000\n", current="950\n", stat="anon 700\ninactive_file 200\n")
    assert memory.host_memory_share(tmp_path) == pytest.approx(0.75)


def test_a_system_that_says_nothing_gives_no_share(tmp_path: Path) -> None:
    assert memory.host_memory_share(tmp_path) is None


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "checkpointing", "proposal"),
    [
        (64, 1, False, "--batch_size 32 --gradient_accumulation_steps 2 "),
        (64, 3, True, "--batch_size 48 --gradient_accumulation_steps 4 "),
        (7, 1, False, "--batch_size 1 --gradient_accumulation_steps 7 "),
        (2, 2, False, "--batch_size 1 --gradient_accumulation_steps 4 "),
        (1, 8, False, "--activation_checkpointing "),
        (1, 8, True, "smaller model"),
    ],
)
def test_a_full_memory_gets_a_proposal_that_keeps_the_global_batch(
    batch_size: int, accumulation: int, checkpointing: bool, proposal: str
) -> None:
    assert full_memory(0.8, "a GPU's memory", batch_size, accumulation, checkpointing) is None
    line = full_memory(0.813, "a GPU's memory", batch_size, accumulation, checkpointing)
    assert line.startswith("81% of a GPU's memory is in use")
    assert proposal in line
    words = line.split()
    if "--batch_size" in words:
        numbers = [int(words[words.index(name) + 1]) for name in ("--batch_size", "--gradient_accumulation_steps")]
        assert numbers[0] * numbers[1] == batch_size * accumulation
        assert numbers[0] < batch_size


def test_of_several_ranks_the_fullest_is_shown() -> None:
    counts = {"seconds": [1.0, 1.0], "steps": [1, 1], "tokens": [8, 8], "work": [1.0, 1.0], "data_wait": [0.0, 0.0]}
    metrics = combined({**counts, "gpu_memory_share": [0.2, 0.9], "resident_memory_gb": [1.5, 0.5]})
    assert metrics["gpu_memory_share"] == 0.9
    assert metrics["resident_memory_gb"] == 1.5


def test_a_run_logs_its_memory_and_warns_once(tmp_path: Path, texts: Path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 3]
    assert train(*options, "--out_dir", tmp_path / "roomy") == 0
    assert "memory (by all processes on it) is in use" not in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "roomy" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 0.05 < line["resident_memory_gb"] <= line["resident_memory_peak_gb"] < 16
        assert 0 < line["host_memory_share"] < 1
    monkeypatch.setattr(memory, "host_memory_share", lambda: 0.85)
    assert train(*options, "--out_dir", tmp_path / "full") == 0
    (warning,) = [message for message in caplog.messages if "85% of the machine's memory" in message]
    assert "--batch_size 1 --gradient_accumulation_steps 2 keeps the global batch" in warning


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, {"qk_norm": True}, {"num_key_value_heads": 4}, {"dropout": 0.1}])
def test_the_activations_of_a_layer_are_those_that_autograd_keeps(dtype: str, more: dict) -> None:
    def kept(layers: int) -> tuple[int, GPT]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(hidden_size=64, num_hidden_layers=layers, **HEADS | more))
        weights, storages = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Copies of weights in half precision are counted apart.
            if tensor.untyped_storage().data_ptr() not in weights and tensor.numel() >= tokens.numel():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
        ):
            model(tokens, tokens)
        return sum(storage.nbytes() for storage in storages.values()), model

    tokens = torch.zeros(64, 512, dtype=torch.long)
    (one, _), (two, model) = kept(1), kept(2)
    element = 4 if dtype == "float32" else 2
    assert two - one == tokens.numel() * block_bytes(model.config, element)


MEASURE = """
import json, sys
from functools import partial
import torch
from model.gpt import GPT, GPTConfig
from trainer import estimate, memory
from trainer.backends import Step
from trainer.ddp import DataParallel, Ranks, choose_device
from trainer.optim import adamw

hidden, layers, batch, time, accumulation, dtype = json.loads(sys.argv[1])
torch.set_num_threads(1)
ranks = Ranks(0, 0, 1, choose_device("cpu", 0))
memory.forget_peak()
before = memory.resident_bytes()
model = GPT(GPTConfig(hidden_size=hidden, num_hidden_layers=layers))
settings = dict(dtype=dtype, grad_clip=1.0, seed=0, compile=False, bucket_cap_mb=25, find_unused_parameters=False)
backend = DataParallel(model, partial(adamw, weight_decay=0.1), ranks, **settings)
for number in range(4):
    rows = [torch.randint(0, 6400, (batch, time)) for _ in range(accumulation)]
    step = Step(number, [{"input_ids": row, "targets": row} for row in rows], [0] * accumulation, 1)
    for micro_batch in backend.micro_batches(step):
        backend.backward(backend.loss_sum(micro_batch))
    backend.step()
count = backend.parameter_count
guess = estimate.estimate_memory(
    model.config, parameters=count, trained=count, batch_size=batch, seq_len=time, accumulation=accumulation,
    world_size=1, dtype=dtype, activation_checkpointing=False, packed=False, on_gpu=False,
)
print(json.dumps([guess.total + estimate.FIRST_USE, memory.peak_resident_bytes() - before]))
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "case",
    [[128, 4, 8, 256, 1, "float32"], [256, 4, 16, 256, 2, "bfloat16"], [512, 8, 2, 256, 1, "float32"]],
    ids=["1.6M", "4.5M", "26M"],
)
def test_the_estimate_is_within_15_percent_of_what_training_adds_to_the_process(case: list) -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(case)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    guess, measured = json.loads(result.stdout)
    assert guess == pytest.approx(measured, rel=0.15)
