"""Mixtures: shares exact over any stretch, every row once an epoch, any position at once, and errors that say what."""

import json
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import dataset.mixture
from dataset.loader import StepLoader, shuffled
from dataset.mixture import Mixture, distinct_names, mixed
from model.loss import IGNORE_INDEX
from tests.conftest import TINY, curve, final_bytes, train, write_texts
from tests.test_resume import cut_back
from trainer.checkpoint import step_folders

SEED = 42


class Rows:
    """Samples of given target tokens; a row tells its index and its pass."""

    fingerprint, text_bytes = "rows", 0

    def __init__(self, counts: np.ndarray, name: str = "a") -> None:
        self.target_counts, self.data_sha256 = counts, name

    def __len__(self) -> int:
        return len(self.target_counts)

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, torch.Tensor]:
        targets = np.where(np.arange(100) < self.target_counts[indices][:, None], 0, IGNORE_INDEX)
        return {"index": torch.tensor(indices), "epoch": torch.tensor(epochs), "targets": torch.tensor(targets)}


def uneven(length: int, seed: int = 0) -> Rows:
    return Rows(np.random.default_rng(seed).integers(1, 100, length))


def even(length: int, tokens: int = 64) -> Rows:
    return Rows(np.broadcast_to(np.int64(tokens), length))


def mixture(sources: list[Rows], shares: list[float], seed: int = SEED) -> Mixture:
    return Mixture(sources, [f"s{number}" for number in range(len(sources))], shares, seed)


def merged(sources: list[Rows], shares: list[str], rows: int) -> list[tuple[int, int]]:
    """(source, number of the row) of the first rows, by fractions and a sort over everything that could come."""
    times = []
    for number, (source, share) in enumerate(zip(sources, map(Fraction, shares), strict=True)):
        before = 0
        for row in range(rows):
            index = shuffled(np.array([row]), len(source), SEED + number)[0]
            own = int(source.target_counts[index])
            times.append((Fraction(2 * before + own, 2) / share, number, row))
            before += own
    return [(source, row) for _, source, row in sorted(times)[:rows]]


CASES = [
    ([uneven(37), uneven(11, 1)], ["0.8", "0.2"]),
    ([uneven(37), even(11)], ["0.5", "0.5"]),
    ([even(5), uneven(40, 2)], ["0.99", "0.01"]),
    ([uneven(20), even(9), uneven(4, 3)], ["0.5", "0.3", "0.2"]),
    ([uneven(7), uneven(1, 4)], ["0.6", "0.4"]),
]


@pytest.mark.parametrize(("sources", "shares"), CASES)
def test_order_is_that_of_a_merge_by_virtual_time(sources, shares):
    indices, epochs = mixture(sources, [float(share) for share in shares]).order(0, 300)
    offsets = np.cumsum([0, *map(len, sources)])
    for place, (source, row) in enumerate(merged(sources, shares, 300)):
        assert epochs[place] == row // len(sources[source])
        own = shuffled(np.array([row]), len(sources[source]), SEED + source)[0]
        assert indices[place] == offsets[source] + own


@pytest.mark.parametrize(("sources", "shares"), CASES)
def test_shares_hold_over_every_stretch_of_a_hundred_steps(sources, shares):
    made = mixture(sources, [float(share) for share in shares])
    indices, _ = made.order(0, 3000)
    tokens = np.concatenate([source.target_counts for source in sources])[indices]
    offsets = np.cumsum([0, *map(len, sources)])
    owner = np.searchsorted(offsets, indices, side="right") - 1
    largest = max(source.target_counts.max() for source in sources)
    for number, share in enumerate(made.shares):
        own = np.cumsum([0, *np.where(owner == number, tokens, 0)])
        total = np.cumsum([0, *tokens])
        for rows in (100, 400):
            apart = (own[rows:] - own[:-rows]) - share * (total[rows:] - total[:-rows])
            assert np.abs(apart).max() <= (1 + share * (len(sources) - 2)) * largest


@pytest.mark.parametrize(("sources", "shares"), CASES)
def test_every_position_is_found_at_once(sources, shares):
    made = mixture(sources, [float(share) for share in shares])
    indices, epochs = made.order(0, 1000)
    for first in range(0, 990, 13):
        some, passes = made.order(first, 7)
        assert some.tolist() == indices[first : first + 7].tolist()
        assert passes.tolist() == epochs[first : first + 7].tolist()


def test_a_late_position_lays_out_no_more_epochs_than_an_early_one(monkeypatch):
    asked = []
    monkeypatch.setattr(
        dataset.mixture, "shuffled", lambda positions, *more: asked.append(len(positions)) or shuffled(positions, *more)
    )
    made = mixture([uneven(500), uneven(50, 1)], [0.8, 0.2])
    for first in (0, 10**4, 10**9):
        asked.clear()
        made.order(first, 64)
        assert sum(asked) <= 2 * 2 * 550 + 64


def test_every_row_comes_once_in_each_epoch_of_its_source():
    sources = [uneven(37), uneven(11, 1)]
    indices, epochs = mixture(sources, [0.7, 0.3]).order(0, 1000)
    for low, high in ((0, 37), (37, 48)):
        own = (indices >= low) & (indices < high)
        for epoch in range(epochs[own].max()):
            assert sorted(indices[own & (epochs == epoch)].tolist()) == list(range(low, high))


def test_one_source_is_in_the_order_that_it_has_alone():
    indices, epochs = mixture([uneven(29)], [1]).order(50, 40)
    assert indices.tolist() == shuffled(np.arange(50, 90), 29, SEED).tolist()
    assert epochs.tolist() == [position // 29 for position in range(50, 90)]
    assert mixture([uneven(29)], [1]).data == "a"


def test_an_epoch_shows_every_source_and_a_small_one_runs_out():
    made = mixture([uneven(100), even(5, 50)], [0.5, 0.5])
    passes = made.epochs_of(len(made))
    assert min(passes.values()) == 1
    assert passes["s1"] > 10
    indices, _ = made.order(0, len(made))
    counts = np.concatenate([made.sources[0].target_counts, made.sources[1].target_counts])
    assert made.tokens_per_epoch == counts[indices].sum()


def test_ranks_share_the_rows_of_a_step_and_another_seed_has_another_order():
    sources = [uneven(37), uneven(11, 1)]

    def step(ranks: int, seed: int) -> list[int]:
        loaders = [
            StepLoader(
                mixture(sources, [0.8, 0.2], seed), rank=rank, world_size=ranks, batch_size=8 // ranks, accumulation=1
            )
            for rank in range(ranks)
        ]
        batches = [loader.step_batch(3) for loader in loaders]
        assert sum(batch.target_tokens for batch in batches) == sum(
            (micro["targets"] == 0).sum().item() for batch in batches for micro in batch.micro_batches
        )
        found = [micro["index"].tolist() for batch in batches for micro in batch.micro_batches]
        assert loaders[0].sample_ids(3) == mixture(sources, [0.8, 0.2], seed).order(24, 8)[0].tolist()
        return [index for part in found for index in part]

    assert step(1, SEED) == step(2, SEED) == step(4, SEED)
    assert step(1, SEED) != step(1, 1)


def test_swapped_sources_or_other_shares_are_other_data():
    one, two = uneven(5), Rows(np.array([3, 4]), "b")
    described = [
        mixture(*given).data for given in (([one, two], [0.8, 0.2]), ([two, one], [0.2, 0.8]), ([one, two], [1, 1]))
    ]
    assert len({json.dumps(data, sort_keys=True) for data in described}) == 3


def opened(paths: list[str], val_paths: list[str] | None) -> tuple[Rows, Rows | None]:
    numbers = count(3)
    return uneven(next(numbers)), uneven(4) if val_paths else None


@pytest.mark.parametrize(
    ("weights", "val", "message"),
    [
        ([0.5], None, "names 1 weights for 2 sources"),
        ([0.5, 0], None, "--data_weights 0: must be above 0"),
        ([0.5, float("nan")], None, "--data_weights nan: must be above 0"),
        ([-1, 2], None, "--data_weights -1: must be above 0"),
        ([1e-300, 1], None, "--data_weights 1e-300 and 1: the largest is over 1,000,000 times the smallest"),
        ([1e300, 1], None, "--data_weights 1 and 1e\\+300: the largest"),
        ([1, 1], ["v"], "--val_path names 1 for 2 sources"),
    ],
)
def test_weights_and_validation_that_do_not_fit_are_named(weights, val, message):
    with pytest.raises(ValueError, match=message):
        mixed(opened, ["a.jsonl", "b.jsonl"], weights, val, SEED)


def test_sources_have_distinct_names_and_their_own_validation():
    assert distinct_names(["d/x.jsonl", "e/x.jsonl", "x_2.jsonl", "y.jsonl.gz"]) == ["x", "x_2", "x_2_2", "y"]
    made, held_out = mixed(opened, ["a.jsonl", "b.jsonl"], [3, 1], ["v", "w"], SEED)
    assert made.shares == [0.75, 0.25]
    assert [(part.name, part.share) for part in held_out] == [("a", 0.75), ("b", 0.25)]
    alone, held_out = mixed(opened, ["a.jsonl", "b.jsonl"], None, ["v"], SEED)
    assert len(alone.sources) == len(held_out) == 1


def test_a_mixed_run_resumes_exactly_and_other_weights_are_refused(tmp_path: Path, caplog):
    paths = [write_texts(tmp_path / "general.jsonl", 60), write_texts(tmp_path / "domain.jsonl", 20, seed=1)]
    options = [
        *TINY,
        "--data_path",
        *paths,
        "--val_fraction",
        0.2,
        "--cache_dir",
        tmp_path / "cache",
        "--max_steps",
        12,
    ]
    options += ["--checkpoint_interval", 1, "--keep_checkpoints", 99, "--eval_interval", 4]
    straight = tmp_path / "straight"
    assert train(*options, "--data_weights", 0.6, 0.4, "--out_dir", straight) == 0
    for step in (3, 8):
        resumed = cut_back(straight, tmp_path / f"from_{step}", step)
        assert train(*options, "--data_weights", 0.6, 0.4, "--out_dir", resumed) == 0
        assert curve(resumed) == curve(straight)
        assert final_bytes(resumed) == final_bytes(straight)
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validations] == [4, 8, 12]
    for line in validations:
        parts = 0.6 * line["val_loss/general"] + 0.4 * line["val_loss/domain"]
        assert line["val_loss"] == pytest.approx(parts, rel=1e-12)
    passes = [line["epochs/domain"] for line in lines if "epochs/domain" in line]
    assert passes == sorted(passes)
    assert passes[-1] > 0
    assert train(*options, "--data_weights", 0.5, 0.5, "--out_dir", straight) == 78
    assert "share: 0.6 there, 0.5 here" in caplog.text
    assert len(step_folders(straight)) == 12
