"""Restarts that nobody looks at: fresh names in an old store, and no loop without progress."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import ROOT, TINY, train
from trainer.attempts import MOST_POISONED, MOST_STARTS, Attempts, gave_up_before
from trainer.checkpoint import read_json, step_folders
from trainer.ddp import DataParallel
from trainer.rendezvous import fresh_store


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """A store as torchrun keeps it over all its attempts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def attempt(ranks: list[int], world_size: int, seconds: float) -> dict[int, object]:
    """What `fresh_store` gives each of these ranks, or the error that it raises there."""
    found: dict[int, object] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = fresh_store(rank, world_size, seconds)
        except TimeoutError as problem:
            found[rank] = problem

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_attempt_meets_under_names_that_no_earlier_one_has_used(agent_store: dist.TCPStore) -> None:
    for number in range(5):
        found = attempt([2, 0, 1], 3, 20)
        for rank, store in found.items():
            assert not store.check([f"address of {rank}"]), f"attempt {number} reads what an earlier one has written"
            store.set(f"address of {rank}", f"{number} {rank}")
        for store in found.values():
            assert [store.get(f"address of {rank}") for rank in range(3)] == [b"%d %d" % (number, r) for r in range(3)]


def test_what_an_attempt_left_half_done_does_not_fool_the_next_one(agent_store: dist.TCPStore) -> None:
    half = attempt([0, 1], 3, 0.3)
    assert "ranks [2] of 3 did not come" in str(half[0])
    assert "rank 0 did not invite rank 1" in str(half[1])
    half = attempt([1, 2], 3, 0.3)  # the old rank 0's invitation still stands there
    assert all(isinstance(problem, TimeoutError) for problem in half.values())
    whole = attempt([0, 1, 2], 3, 20)
    whole[0].set("key", "value")
    assert whole[2].get("key") == b"value"


def test_an_attempt_may_have_fewer_ranks_than_the_one_before(agent_store: dist.TCPStore) -> None:
    attempt([0, 1, 2], 3, 20)
    found = attempt([0, 1], 2, 20)
    found[1].set("key", "value")
    assert found[0].get("key") == b"value"


RANK = """
import os, sys, torch
import torch.distributed as dist
from trainer.ddp import Ranks
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
ranks = Ranks(rank, rank, 2, torch.device("cpu"))
ranks.connect(60)
assert ranks.sum([rank + 1]) == [3]
if rank == 0:
    print("met", attempt, flush=True)
if attempt < 30:
    ranks.sum([0])
    if rank == attempt % 2:
        os.kill(os.getpid(), 9)
    ranks.sum([0])
ranks.disconnect()
"""


@pytest.mark.integration
def test_thirty_restarts_in_a_row_all_meet_again_in_torchruns_own_store(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "--max-restarts", "30", "--monitor-interval", "0.1", str(tmp_path / "rank.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines() == [f"met {number}" for number in range(31)]


def die(run_dir: Path, newest: int, automatic: bool = True, step: int | None = None) -> Attempts:
    """A start that ends by a crash, in a data step or between steps."""
    made = Attempts(run_dir, newest, automatic)
    if step is not None:
        made.enter(step)
    made.close(orderly=False)
    return made


def test_three_starts_without_a_newer_checkpoint_are_enough(tmp_path: Path) -> None:
    for _ in range(MOST_STARTS):
        die(tmp_path, 100)
    with pytest.raises(ValueError, match="3 starts from step 100 ended without a newer checkpoint"):
        Attempts(tmp_path, 100, automatic=True)
    # Who starts the job anew has as many tries again.
    for _ in range(MOST_STARTS):
        die(tmp_path, 100)
    with pytest.raises(ValueError, match="newer checkpoint"):
        Attempts(tmp_path, 100, automatic=True)


@pytest.mark.parametrize("other", ["progress", "by hand", "stopped"])
def test_progress_a_start_by_hand_and_an_orderly_stop_begin_the_count_anew(tmp_path: Path, other: str) -> None:
    for number in range(4 * MOST_STARTS):
        if number % MOST_STARTS == 1:
            if other == "stopped":
                Attempts(tmp_path, 100, automatic=True).close(orderly=True)
            else:
                die(tmp_path, 100 + number * (other == "progress"), automatic=other != "by hand")
        else:
            die(tmp_path, 100 + (number - (number % MOST_STARTS == 0)) * (other == "progress"))


def test_two_deaths_in_the_same_step_in_a_row_poison_it_three_times_at_most(tmp_path: Path) -> None:
    for count in range(MOST_POISONED + 1):
        step = 40 + count
        assert die(tmp_path, 30 + count, step=step).new_poison is None
        assert die(tmp_path, 30 + count, step=step).new_poison is None  # the first death was read; now the second
        third = die(tmp_path, 30 + count)
        assert third.new_poison == (step if count < MOST_POISONED else None)
    assert third.record.poisoned == (40, 41, 42)


def test_deaths_in_different_steps_or_between_steps_poison_nothing(tmp_path: Path) -> None:
    for number, step in enumerate((40, 41, None, None, 43, 44)):
        assert die(tmp_path, number, step=step).new_poison is None
    assert Attempts(tmp_path, 9, automatic=True).record.poisoned == ()


def test_deaths_that_somebody_saw_poison_nothing(tmp_path: Path) -> None:
    for _ in range(5):
        assert die(tmp_path, 30, automatic=False, step=40).new_poison is None


def test_a_record_that_cannot_be_read_is_forgotten_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("{", "[]", '{"poisoned": 3}', '{"poisoned": [], "unknown": 1}'):
        (tmp_path / "attempts.json").write_text(text)
        Attempts(tmp_path, 0, automatic=True).close(orderly=False)
        assert "earlier starts are forgotten" in caplog.text
        caplog.clear()


def test_a_rank_restarted_after_78_leaves_at_once(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text(json.dumps({"code": 78, "reason": "bad data"}))
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 3]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert gave_up_before(tmp_path / "run", 78) == "bad data"
    assert train(*options, "--out_dir", tmp_path / "run") == 78
    assert not (tmp_path / "run" / "owner.json").exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert train(*options, "--out_dir", tmp_path / "run") == 0


def test_samples_that_kill_twice_are_left_out_of_the_run(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison guard in a real run whose sixth data step raises an error."""
    batches = DataParallel.micro_batches

    def micro_batches(self, step):
        assert step.first_sequences[0] // 2 != 5, "poison"
        return batches(self, step)

    monkeypatch.setattr(DataParallel, "micro_batches", micro_batches)
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 12]
    options += ["--checkpoint_interval", 2, "--out_dir", tmp_path / "run"]
    for count in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        with pytest.raises(AssertionError, match="poison"):
            train(*options)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert train(*options) == 0
    assert read_json(step_folders(tmp_path / "run")[-1] / "state.json")["state"]["skipped"] == [5]
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["data_step"] for line in told if line["event"] == "poison"] == [5]
