"""The slowest rank is named, by its own work and not by its waiting for others."""

import json
import logging
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Peers, on_ranks, train
from trainer.ddp import DataParallel
from trainer.monitor import Console
from trainer.profiling import balance


@pytest.mark.parametrize(
    ("seconds", "rank", "lag"),
    [([1.0, 1.0, 1.5, 1.1], 2, 0.5), ([2.0, 1.0], 0, 1.0), ([1.0, 1.0], 0, 0.0)],
)
def test_the_slowest_rank_is_compared_with_the_median(seconds: list[float], rank: int, lag: float) -> None:
    assert balance(seconds) == {"slowest_rank": rank, "slowest_rank_lag": pytest.approx(lag)}


def test_a_single_rank_has_nobody_to_wait_for() -> None:
    assert balance([1.0]) == {}


def test_the_console_names_it_where_it_holds_the_others_up(caplog: pytest.LogCaptureFixture) -> None:
    values = {"loss": 3.0, "learning_rate": 1e-3, "grad_norm": 1.0, "slowest_rank": 5.0, "slowest_rank_lag": 0.4}
    with caplog.at_level(logging.INFO):
        Console(10, lambda step: (1, 1)).write(1, values)
        Console(10, lambda step: (1, 1)).write(2, values | {"slowest_rank_lag": 0.05})
    told, quiet = caplog.messages
    assert told.endswith("slowest rank:5 (+40%)")
    assert "slowest" not in quiet


def train_with_a_slow_rank(peers: Peers, folder: Path, texts: Path) -> None:
    forward = DataParallel.loss_sum

    def loss_sum(self, batch):
        time.sleep(0.2 * (peers.rank == 1))
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DataParallel, "loss_sum", loss_sum)
        peers.new_group()
        options = [*TINY, "--data_path", texts, "--cache_dir", folder / "cache", "--max_steps", 6]
        assert train(*options, "--out_dir", folder / "run") == 0


def test_the_rank_that_works_longest_is_named_in_the_metrics(tmp_path: Path, texts: Path) -> None:
    on_ranks(2, train_with_a_slow_rank, tmp_path, texts)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # The wait of rank 0 for rank 1 is inside its backward pass and must not count.
    assert [line["slowest_rank"] for line in lines[1:]] == [1.0] * 5
    assert min(line["slowest_rank_lag"] for line in lines[1:]) > 0.5  # the first step builds what all wait for
