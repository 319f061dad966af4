"""Killed anywhere and started again, a run has the same curve and the same weights, bit for bit."""

import shutil
from pathlib import Path

import pytest

from dataset.text import text_windows
from dataset.tokenizer import load_tokenizer
from tests.conftest import TINY, Peers, curve, final_bytes, on_ranks, train, write_texts
from trainer.checkpoint import load_tensors

# Dropout on purpose: its masks must not depend on where a run was interrupted.
EXACT = ["--dropout", 0.1, "--gradient_accumulation_steps", 2, "--checkpoint_interval", 1, "--keep_checkpoints", 999]


def cut_back(finished: Path, to: Path, step: int) -> Path:
    """A run folder as a SIGKILL right after the save of `step` leaves it: later lines logged, later saves lost."""
    to.mkdir()
    if step:
        shutil.copytree(finished / f"step_{step:08d}", to / f"step_{step:08d}")
    shutil.copy(finished / "metrics.jsonl", to)
    return to


def run_and_resume(
    peers: Peers | None, folder: Path, texts: Path, dtype: str, points: list[int] | None, *more: str
) -> None:
    """Run straight through, then once from every point; each must give the same curve and final state."""
    options = [
        *TINY,
        *EXACT,
        "--data_path",
        texts,
        "--cache_dir",
        folder / "cache",
        "--dtype",
        dtype,
        "--epochs",
        3,
        *more,
    ]
    first = peers is None or peers.rank == 0

    def run(out_dir: Path) -> None:
        if peers:
            peers.new_group()
        assert train(*options, "--out_dir", out_dir) == 0

    run(folder / "straight")
    straight = curve(folder / "straight")
    assert [point[0] for point in straight] == list(range(1, len(straight) + 1))
    for step in range(len(straight)) if points is None else points:
        resumed = folder / f"from_{step}"
        if first:
            cut_back(folder / "straight", resumed, step)
        run(resumed)
        if first:
            assert curve(resumed) == straight, f"interrupted after step {step}"
            assert final_bytes(resumed) == final_bytes(folder / "straight"), f"interrupted after step {step}"
            shutil.rmtree(resumed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_of_three_epochs_is_a_point_to_resume_from(tmp_path: Path, dtype: str) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 21)
    run_and_resume(None, tmp_path, texts, dtype, points=None)


def texts_of_whole_steps(folder: Path, global_batch: int) -> tuple[Path, int]:
    """Texts whose sequences fill whole steps, so that an epoch ends with a step; and how many steps that is."""
    tokenizer = load_tokenizer("model/tokenizer")
    for count in range(30, 90):
        texts = write_texts(folder / f"texts_{count}.jsonl", count)
        windows, _ = text_windows(
            [str(texts)], None, val_fraction=0.0, tokenizer=tokenizer, max_seq_len=32, cache_dir=folder / "cache"
        )
        if len(windows) % global_batch == 0:
            return texts, len(windows) // global_batch
    raise AssertionError("no number of texts fills whole steps")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_resume_exactly_in_mid_epoch_at_its_end_and_between(tmp_path: Path, world_size: int, dtype: str) -> None:
    texts, epoch = texts_of_whole_steps(tmp_path, global_batch=world_size * 2 * 2)
    assert epoch >= 3
    on_ranks(world_size, run_and_resume, tmp_path, texts, dtype, [1, epoch, epoch + 2, 2 * epoch])


def test_torchrun_with_one_rank_equals_plain_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 21)
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 5]
    assert train(*options, "--out_dir", tmp_path / "python") == 0
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert train(*options, "--out_dir", tmp_path / "torchrun", "--num_workers", 2) == 0
    assert curve(tmp_path / "torchrun") == curve(tmp_path / "python")
    assert final_bytes(tmp_path / "torchrun") == final_bytes(tmp_path / "python")


@pytest.mark.integration
def test_compiled_ranks_resume_exactly_and_save_plain_names(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 21)
    on_ranks(2, compile_and_resume, tmp_path, texts)


def compile_and_resume(peers: Peers, folder: Path, texts: Path) -> None:
    run_and_resume(peers, folder, texts, "bfloat16", [2], "--compile")
    names = set(load_tensors(folder / "straight" / "step_00000002" / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if "module" in name or "_orig_mod" in name]
