"""Saving under bad conditions: a full or failing disk, broken numbers, hostile folders, and saves in the background."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from model.weights import load_model_folder
from tests.conftest import TINY, curve, final_bytes, train
from trainer import checkpoint, snapshots
from trainer.checkpoint import step_folders
from trainer.ddp import DataParallel


@pytest.fixture
def options(tmp_path: Path, texts: Path) -> list:
    """A tiny run with a checkpoint every five of 30 steps."""
    data = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    return [*data, "--max_steps", 30, "--checkpoint_interval", 10, "--out_dir", tmp_path / "run"]


@pytest.fixture
def clean(tmp_path: Path, options: list) -> Path:
    """The same run where nothing fails."""
    assert train(*options, "--out_dir", tmp_path / "clean") == 0
    return tmp_path / "clean"


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def failing(monkeypatch: pytest.MonkeyPatch, number: int, fails: set[int]) -> list[int]:
    """Let saves of these steps fail once each; returns the steps of all attempts, as they come."""
    write, attempts = snapshots.write_checkpoint, []

    def write_checkpoint(run_dir, step, *more):
        attempts.append(step)
        if step in fails:
            raise OSError(number, os.strerror(number))
        return write(run_dir, step, *more)

    monkeypatch.setattr(snapshots, "write_checkpoint", write_checkpoint)
    return attempts


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_save_that_fails_costs_no_step_is_counted_and_tried_again_soon(
    tmp_path: Path, options: list, clean: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    attempts = failing(monkeypatch, number, {10, 11, 12})
    assert train(*options) == 0
    assert attempts == [10, 11, 12, 13, 20, 30]
    assert [line["failed_saves"] for line in events(tmp_path / "run", "save_failed")] == [1, 2, 3]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["failed_saves"] for line in metrics][8:14] == [0, 0, 1, 2, 3, 3]
    assert curve(tmp_path / "run") == curve(clean)
    assert final_bytes(tmp_path / "run") == final_bytes(clean)
    assert not list((tmp_path / "run").glob("*.tmp-*"))


def test_a_last_save_that_fails_is_tried_once_more_and_then_exits_1(
    options: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = failing(monkeypatch, errno.ENOSPC, {30})
    assert train(*options) == 1
    assert attempts == [10, 20, 30, 30]


def test_a_full_disk_loses_its_older_checkpoints_first_and_then_takes_the_new_one(
    tmp_path: Path, options: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = checkpoint.shutil.disk_usage

    def full(path: Path) -> object:
        crowded = len(step_folders(tmp_path / "run")) > 1
        return usage(path)._replace(free=1000) if crowded else usage(path)

    monkeypatch.setattr(snapshots.shutil, "disk_usage", full)
    assert train(*options, "--checkpoint_interval", 2, "--spike_threshold", 0) == 0
    assert not events(tmp_path / "run", "save_failed")
    assert len(step_folders(tmp_path / "run")) <= 3


def test_a_disk_without_room_says_how_much_is_needed_and_training_goes_on(
    tmp_path: Path, options: list, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = checkpoint.shutil.disk_usage
    monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    assert train(*options) == 1  # not even the last one
    told = events(tmp_path / "run", "save_failed")[0]["reason"]
    assert "6,098,768 bytes are needed, 1,000 are free" in told
    assert curve(tmp_path / "run") == curve(clean)


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_what_is_not_finite_is_never_committed(
    tmp_path: Path, options: list, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    save, calls = DataParallel.save, []

    def broken(self):
        weights, optimizer = save(self)
        calls.append(1)
        if len(calls) == 2:
            tensors = weights if part == "weights" else optimizer
            name = list(tensors)[-1]
            tensors[name] = torch.full_like(tensors[name], torch.nan)
        return weights, optimizer

    monkeypatch.setattr(DataParallel, "save", broken)
    assert train(*options) == 0
    [told] = events(tmp_path / "run", "save_failed")
    assert told["step"] == 20
    assert "not finite" in told["reason"]
    assert [folder.name for folder in step_folders(tmp_path / "run")] == [
        "step_00000010", "step_00000021", "step_00000030",
    ]  # fmt: skip


def test_background_saves_hold_the_same_bytes_and_let_training_go_on(
    tmp_path: Path, options: list, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, update, log, going = snapshots.write_checkpoint, DataParallel.step, [], threading.Event()

    def slow_write(run_dir, step, *more):
        log.append(f"writing {step}")
        if step == 10:
            assert going.wait(20), "training did not go on while the checkpoint was written"
        write(run_dir, step, *more)
        log.append(f"written {step}")

    def step(self):
        if log == ["writing 10"]:
            going.set()
        return update(self)

    monkeypatch.setattr(snapshots, "write_checkpoint", slow_write)
    monkeypatch.setattr(DataParallel, "step", step)
    assert train(*options, "--async_save") == 0
    assert log == [f"{what} {number}" for number in (10, 20, 30) for what in ("writing", "written")]
    for number in (10, 20, 30):
        for name in ("model.safetensors", "optimizer.safetensors"):
            place = Path(f"step_{number:08d}") / name
            assert (tmp_path / "run" / place).read_bytes() == (clean / place).read_bytes()
    assert curve(tmp_path / "run") == curve(clean)


def test_a_background_save_that_fails_is_told_with_the_next_one_and_tried_again(
    tmp_path: Path, options: list, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = failing(monkeypatch, errno.EIO, {10})
    assert train(*options, "--async_save") == 0
    # The failure of step 10 comes to light when step 20 is saved.
    assert attempts == [10, 20, 21, 30]
    assert final_bytes(tmp_path / "run") == final_bytes(clean)


def hostile(folder: Path, kind: str) -> None:
    """A folder that pretends to be a model or a checkpoint."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "huge header":
        weights.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    elif kind == "long header":
        weights.write_bytes((99_000_000).to_bytes(8, "little") + b" " * 99_000_000)
    elif kind == "a pickle":
        torch.save({"weight": torch.zeros(3)}, weights)
    elif kind == "weights are a pipe":
        weights.unlink()
        os.mkfifo(weights)
    elif kind == "config is a pipe":
        config.unlink()
        os.mkfifo(config)
    elif kind == "config is a device":
        config.unlink()
        config.symlink_to("/dev/zero")
    elif kind == "shard outside":
        weights.rename(folder.parent / "secret.safetensors")
        index = {"weight_map": {"lm_head.weight": "../secret.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "no folder":
        os.rename(folder, folder.with_name("elsewhere"))
        torch.save({"weight": torch.zeros(3)}, folder)


KINDS = [
    "huge header", "long header", "a pickle", "weights are a pipe", "config is a pipe", "config is a device",
    "shard outside", "no folder",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_model_folder_is_refused_within_two_seconds(
    tmp_path: Path, options: list, clean: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = tmp_path / "model"
    step_folders(clean)[-1].rename(folder)
    (folder / "manifest.json").unlink()
    hostile(folder, kind)
    began = time.monotonic()
    assert train(*options, "--from_weight", folder) == 78
    assert time.monotonic() - began < 2
    assert "Traceback" not in caplog.text
    if kind != "no folder":
        with pytest.raises(ValueError, match=str(folder)):
            load_model_folder(folder)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_hostile_checkpoint_is_set_aside_within_two_seconds(
    tmp_path: Path, options: list, clean: Path, kind: str
) -> None:
    newest = step_folders(clean)[-1]
    hostile(newest, kind)
    began = time.monotonic()
    assert checkpoint.newest_valid(clean, owner=True) == clean / "step_00000020"
    assert time.monotonic() - began < 2
    assert (clean / "step_00000030.damaged").exists()
