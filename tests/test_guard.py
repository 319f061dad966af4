"""The loss guard fires on what stays up and on nothing else, and a run comes back from it the same way every time."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, Peers, curve, final_bytes, on_ranks, train
from trainer import guard
from trainer.checkpoint import read_json, step_folders
from trainer.ddp import DataParallel
from trainer.guard import LOOKBACK, PATIENCE, Spike, Watch, judge
from trainer.snapshots import Snapshots


def run(losses: list[float], threshold: float = 0.1, armed_from: int = 0) -> list[tuple[int, Spike]]:
    """The spikes that the guard sees in a curve, each with the step at which it sees it."""
    watch, found = Watch(), []
    for step, loss in enumerate(losses, 1):
        watch, spike = judge(watch, step, loss, threshold, armed_from)
        found += [(step, spike)] if spike else []
    return found


def noisy(count: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, noise) for _ in range(count)]


def test_a_jump_that_stays_is_seen_after_three_losses_with_the_updates_that_led_to_it() -> None:
    losses = noisy(60) + noisy(10, level=3.6)
    [(step, spike), *_] = run(losses)
    assert step == 60 + PATIENCE
    # The first bad loss is that of update 60 (counted from 0), which was computed before that update.
    assert (spike.first_update, spike.last_update) == (60 - LOOKBACK, 62)
    assert spike.losses == tuple(losses[60:63])
    assert spike.level == pytest.approx(3.0, abs=0.02)


@pytest.mark.parametrize(
    "after",
    [
        [9.0, 9.0, *noisy(20)],  # two odd batches
        [9.0, 3.0, 9.0, 3.0, 9.0, 3.0],
        noisy(20, level=3.28),  # 9 % up
        noisy(20, level=2.0),
    ],
)
def test_single_odd_batches_and_small_rises_are_no_spike(after: list[float]) -> None:
    assert not run(noisy(60) + after)


def test_a_rise_within_the_noise_is_no_spike() -> None:
    assert not run([*noisy(60, noise=0.4), 3.9, 3.9, 3.9])
    assert run([*noisy(60, noise=0.05), 3.9, 3.9, 3.9])


def test_losses_that_are_not_finite_are_bad_ones_and_never_enter_the_level() -> None:
    losses = [*noisy(60), math.nan, math.inf, math.nan]
    [(step, spike)] = run(losses)
    assert (step, spike.losses) == (63, ())
    watch = Watch()
    for number, loss in enumerate(losses, 1):
        watch, _ = judge(watch, number, loss, 0.1, 0)
        assert all(map(math.isfinite, (*watch.recent, *watch.suspects)))


def test_before_it_is_armed_a_jump_becomes_the_new_level() -> None:
    losses = noisy(60) + noisy(60, level=6.0)
    assert not run(losses, armed_from=60)
    assert run(losses, armed_from=60 - LOOKBACK)
    # A jump from the new level is seen again.
    assert run(losses + noisy(5, level=9.0), armed_from=60)


def test_a_checkpoint_of_the_stable_age_holds_no_update_that_a_spike_of_now_undoes() -> None:
    for now in range(70, 80):
        watch = Watch()
        for step, loss in enumerate(noisy(now - PATIENCE) + [9.0] * (PATIENCE + 1), 1):
            watch, spike = judge(watch, step, loss, 0.1, 0)
            if spike:
                assert step + 1 - guard.STABLE_AGE <= spike.first_update  # noticed one step late


def recorded_losses() -> list[float]:
    """Every fifth loss of a real run: 5,000 steps of 4 x 128 tokens, width 128, 2 layers."""
    return read_json(Path(__file__).parent / "recorded_losses.json")


def bootstrapped(length: int, seed: int) -> list[float]:
    """A clean curve: the trend of a recorded real run, stretched, with its own residuals drawn anew."""
    losses, draw, half = recorded_losses(), random.Random(seed), 10
    trend = [sum(part := losses[max(0, place - half) : place + half + 1]) / len(part) for place in range(len(losses))]
    late = [loss / level for loss, level in zip(losses[50:], trend[50:], strict=True)]
    levels = [trend[place * len(trend) // length] for place in range(length)]
    return [level * draw.choice(late) for level in levels]


def test_a_hundred_thousand_clean_steps_raise_no_alarm() -> None:
    for seed in range(20):
        assert not run(bootstrapped(5_000, seed))


def test_fifty_spikes_in_real_noise_are_caught_within_five_steps() -> None:
    draw = random.Random(1)
    for seed in range(50):
        losses, at = bootstrapped(2_000, 100 + seed), draw.randint(200, 1_900)
        size, fall = draw.uniform(0.25, 1.0), draw.uniform(20, 200)
        raised = [
            loss * (1 + size * math.exp(-(step - at) / fall)) if step >= at else loss
            for step, loss in enumerate(losses)
        ]
        found = run(raised)
        assert found, f"seed {seed}: a rise of {size:.0%}"
        first = at + 1  # steps count from 1
        assert first < found[0][0] <= first + 5, f"seed {seed}: a rise of {size:.0%} at {first}, seen at {found[0][0]}"


OPTIONS = [*TINY, "--checkpoint_interval", 10, "--max_steps", 60, "--warmup_steps", 2, "--spike_threshold", "0.1"]


def spoil(monkeypatch: pytest.MonkeyPatch, *data_steps: int, global_batch: int) -> None:
    """Whoever trains on one of these data steps has its weights thrown about, on all ranks alike."""
    batches, update = DataParallel.micro_batches, DataParallel.step

    def micro_batches(self, step):
        self.spoilt = step.first_sequences[0] // global_batch in data_steps
        return batches(self, step)

    def spoiling(self):
        norm = update(self)
        if self.spoilt:
            generator = torch.Generator().manual_seed(0)
            for parameter in self.module.parameters():
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
        return norm

    monkeypatch.setattr(DataParallel, "micro_batches", micro_batches)
    monkeypatch.setattr(DataParallel, "step", spoiling)


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_a_run_goes_back_before_the_spike_and_leaves_its_data_out(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 43, global_batch=2)
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    assert train(*options, "--out_dir", tmp_path / "run") == 0
    [spike], [rollback] = events(tmp_path / "run", "spike"), events(tmp_path / "run", "rollback")
    # Update 43 (from 0) spoils; step 45 has the first bad loss, 47 the third.
    assert spike["step"] == 47
    assert rollback["to_step"] == 30
    assert rollback["skipped"] == list(range(39, 47))
    lines = curve(tmp_path / "run")
    assert [point[0] for point in lines] == list(range(1, 61))
    assert max(point[1] for point in lines[30:]) < spike["level"] * 1.1
    state = read_json(step_folders(tmp_path / "run")[-1] / "state.json")["state"]
    assert (state["rollbacks"], state["skipped"]) == (1, rollback["skipped"])

    # The same again, killed at every checkpoint that it had, and stopped between: the same decisions.
    for step in (30, 40):
        again = tmp_path / f"from_{step}"
        assert train(*options, "--out_dir", again, "--max_steps", step, "--lr_schedule", "constant") == 0
    straight = tmp_path / "constant"
    assert train(*options, "--out_dir", straight, "--lr_schedule", "constant") == 0
    for step in (30, 40):
        again = tmp_path / f"from_{step}"
        assert train(*options, "--out_dir", again, "--lr_schedule", "constant") == 0
        assert curve(again) == curve(straight)
        assert final_bytes(again) == final_bytes(straight)


def test_after_three_rollbacks_the_run_gives_up_with_78(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, *range(40, 200), global_batch=2)
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    assert train(*options, "--out_dir", tmp_path / "run") == 78
    assert len(events(tmp_path / "run", "rollback")) == 3
    ending = read_json(tmp_path / "run" / "exit.json")
    assert ending["code"] == 78
    assert "after 3 rollbacks" in ending["reason"]


def test_without_a_guard_or_a_checkpoint_to_go_back_to_training_goes_on(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 43, global_batch=2)
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    assert train(*options, "--out_dir", tmp_path / "off", "--spike_threshold", 0) == 0
    assert not events(tmp_path / "off", "spike")
    assert train(*options, "--out_dir", tmp_path / "late", "--checkpoint_interval", 50) == 0
    assert not events(tmp_path / "late", "rollback")
    assert final_bytes(tmp_path / "late") == final_bytes(tmp_path / "off")


def test_a_spike_without_a_way_back_does_not_keep_the_last_step_from_being_saved(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 43, global_batch=2)
    monkeypatch.setattr(Snapshots, "newest_before", lambda self, step: 0)  # as if the disk had taken none
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache"]
    for steps in (47, 48):  # the third bad loss is that of step 47, seen at the end of the run or a step before it
        run_dir = tmp_path / f"run_{steps}"
        assert train(*options, "--max_steps", steps, "--out_dir", run_dir) == 0
        assert len(events(run_dir, "spike")) == 1
        assert step_folders(run_dir)[-1].name == f"step_{steps:08d}"
        assert [point[0] for point in curve(run_dir)] == list(range(1, steps + 1))


def roll_back_on_two_ranks(peers: Peers, folder: Path, texts: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        spoil(monkeypatch, 43, global_batch=4)
        peers.new_group()
        options = [*OPTIONS, "--data_path", texts, "--cache_dir", folder / "cache", "--num_workers", 1]
        assert train(*options, "--out_dir", folder / "run") == 0


@pytest.mark.integration
def test_two_ranks_roll_back_together(tmp_path: Path, texts: Path) -> None:
    on_ranks(2, roll_back_on_two_ranks, tmp_path, texts)
    assert len(events(tmp_path / "run", "rollback")) == 1
    assert [point[0] for point in curve(tmp_path / "run")] == list(range(1, 61))


def test_the_memory_of_the_guard_is_in_the_checkpoint(tmp_path: Path, texts: Path) -> None:
    options = [*OPTIONS, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 30]
    assert train(*options, "--out_dir", tmp_path / "run") == 0
    state = read_json(step_folders(tmp_path / "run")[-1] / "state.json")["state"]
    assert state["watch"]["recent"] == [point[1] for point in curve(tmp_path / "run")]
    assert dataclasses.asdict(Watch()).keys() == state["watch"].keys()
