"""What can be foreseen is said before the first step, with the numbers and what to do; what fits is not mentioned."""

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, train
from trainer import advice
from trainer.advice import cpus, crowded_cpus, few_steps, idle_gpus, short_disk, slow_bfloat16


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers", "proposal"),
    [
        (2, 1, 4, "--num_workers 1 "),  # the default on a small machine
        (2, 2, 4, "--num_workers 0 "),
        (32, 8, 4, "--num_workers 3 "),
        (5, 1, 4, None),
        (40, 8, 4, None),
        (4, 4, 0, None),
    ],
)
def test_more_ranks_and_workers_than_cpus_get_a_number_that_fits(
    cpus: int, ranks: int, workers: int, proposal: str | None
) -> None:
    line = crowded_cpus(cpus, ranks, workers)
    assert (line is None) == (proposal is None)
    if proposal:
        assert proposal in line
        assert f"{ranks + ranks * workers} processes share {cpus} CPUs" in line


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers", "start"),
    [
        (1, 4, 0, "4 ranks share 1 CPUs; "),
        (2, 8, 4, "8 x (1 rank + 4 loader workers) = 40 processes share 2 CPUs; --num_workers 0 and "),
    ],
)
def test_more_ranks_alone_than_cpus_need_fewer_of_them_or_more_cpus(
    cpus: int, ranks: int, workers: int, start: str
) -> None:
    line = crowded_cpus(cpus, ranks, workers)
    assert line == f"{start}--nproc_per_node {cpus} would fit; where every rank has its GPU, give them more CPUs"


def test_idle_gpus_are_counted_and_the_command_for_all_is_given() -> None:
    assert "7 of 8 GPUs are idle" in idle_gpus(8, 1)
    assert "scripts.launch --nproc_per_node 8" in idle_gpus(8, 1)
    assert idle_gpus(1, 1) is None
    assert idle_gpus(0, 1) is None


@pytest.mark.parametrize(
    ("free", "there", "saves", "coming"),
    [
        (4_000, 0, 100, 5),  # three to keep, the best, the one being written
        (1_999, 3, 100, 2),
        (100, 0, 1, 1),
        (5_000, 0, 100, None),
        (0, 5, 100, None),  # all there are ever going to be
        (0, 3, 0, None),
    ],
)
def test_a_disk_that_the_checkpoints_will_fill_is_named(free: int, there: int, saves: int, coming: int | None) -> None:
    line = short_disk(free * 10**6, 1000 * 10**6, keep=3, there=there, saves=saves)
    if coming is None:
        assert line is None
    else:
        assert f"{coming} more checkpoints of 1.00 GB" in line
        assert "--keep_checkpoints (now 3)" in line


def test_few_steps_are_told_with_what_they_come_from() -> None:
    line = few_steps(steps=19, samples=4864, epochs=1, global_batch=256)
    for part in ("only 19 steps", "4,864 sequences x 1 epochs", "256 sequences a step", "--batch_size"):
        assert part in line
    assert few_steps(steps=20, samples=5120, epochs=1, global_batch=256) is None


def test_cpus_are_those_that_the_process_may_use() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no process to CPUs")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_bfloat16_on_a_cpu_without_it_is_pointed_out() -> None:
    assert "--dtype float32" in slow_bfloat16("cpu", "bfloat16", has_bfloat16=False)
    assert slow_bfloat16("cpu", "bfloat16", has_bfloat16=True) is None
    assert slow_bfloat16("cpu", "float32", has_bfloat16=False) is None
    assert slow_bfloat16("cuda", "bfloat16", has_bfloat16=False) is None


def test_a_run_warns_once_of_what_it_can_foresee(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "cpu_has_bfloat16", lambda: True)  # here and on any other machine
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # no advice: this run is told to use the CPU
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--batch_size", 16, "--epochs", 1]
    assert train(*options, "--out_dir", tmp_path / "crowded", "--num_workers", 2 * cpus()) == 0
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2, warnings
    assert "loader workers" in warnings[0]
    assert "steps: " in warnings[1]
    caplog.clear()
    assert train(*options, "--out_dir", tmp_path / "modest", "--num_workers", 0, "--max_steps", 1) == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
