"""A run that goes on with another number of ranks: the same global batch, shared as evenly as it can be."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, Peers, curve, on_ranks, train
from trainer.checkpoint import load_tensors, step_folders
from trainer.plan import Plan, data_step

# Global batch 4 x 1 x 1 ranks; on 3 ranks the shares are 1, 1 and 2.
OPTIONS = [*TINY, "--batch_size", 4, "--dtype", "float32", "--checkpoint_interval", 5]


def go_on(peers: Peers, folder: Path, texts: Path, steps: int) -> None:
    peers.new_group()
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", folder / "cache", "--out_dir", folder / "run"]
    assert train(*options, "--max_steps", steps, "--lr_schedule", "constant") == 0


@pytest.mark.integration
def test_a_run_goes_on_with_uneven_shares_of_the_same_global_batch(tmp_path: Path, texts: Path) -> None:
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--lr_schedule", "constant"]
    assert train(*options, "--out_dir", tmp_path / "straight", "--max_steps", 15) == 0
    assert train(*options, "--out_dir", tmp_path / "run", "--max_steps", 5) == 0
    on_ranks(3, go_on, tmp_path, texts, 10)
    on_ranks(2, go_on, tmp_path, texts, 15)
    for was, now in zip(curve(tmp_path / "straight"), curve(tmp_path / "run"), strict=True):
        assert now == pytest.approx(was, abs=1e-5)
    straight, shared = (
        load_tensors(step_folders(tmp_path / name)[-1] / "model.safetensors") for name in ("straight", "run")
    )
    for name, tensor in straight.items():
        # One AdamW update at this rate turns the order of a float32 sum into up to 1e-5.
        assert (tensor - shared[name]).abs().max() < 1e-4
    manifest = json.loads((step_folders(tmp_path / "run")[-1] / "manifest.json").read_text())
    assert manifest["fingerprint"]["global_batch"] == 4


def test_more_ranks_than_sequences_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot share a global batch of 4 sequences; start at most 4"):
        Plan(
            samples=100, tokens_per_epoch=1000, max_seq_len=32, world_size=5, batch_size=4, accumulation=1,
            global_batch=4, epochs=1, max_steps=None, learning_rate=1e-3, base_batch_size=4, lr_scaling="none",
            lr_schedule="cosine", warmup_steps=None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [((), [0, 1, 2, 3]), ((0,), [1, 2, 3, 4]), ((1, 2), [0, 3, 4, 5]), ((0, 2, 3, 9), [1, 4, 5, 6])],
)
def test_a_step_trains_on_the_data_step_that_is_so_many_after_the_skipped_ones(
    skipped: tuple[int, ...], expected: list[int]
) -> None:
    assert [data_step(step, skipped) for step in range(4)] == expected
