"""What a run says of its memory: readings against the kernel's own, and a proposal that keeps the global batch."""

import json
import logging
import resource
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, train
from trainer import memory
from trainer.advice import full_memory
from trainer.profiling import combined


def test_resident_memory_follows_what_the_process_takes_and_gives_back() -> None:
    before = memory.resident_bytes()
    assert memory.forget_peak()
    held = torch.ones(100 << 20, dtype=torch.uint8)
    assert memory.resident_bytes() - before == pytest.approx(100 << 20, rel=0.05)
    del held
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
