"""The rate is a pure function of the step, and weight decay acts on matrices only."""

import math
from dataclasses import replace

import pytest
import torch

from model.gpt import GPT, GPTConfig
from trainer.optim import adamw, default_warmup, rate_share, scaled_rate
from trainer.plan import Plan

PLAN = Plan(
    samples=1000,
    tokens_per_epoch=512_000,
    max_seq_len=512,
    world_size=8,
    batch_size=64,
    accumulation=1,
    global_batch=512,
    epochs=2,
    max_steps=None,
    learning_rate=5e-4,
    base_batch_size=256,
    lr_scaling="linear",
    lr_schedule="cosine",
    warmup_steps=None,
)


def test_decay_is_on_matrices_only() -> None:
    model = GPT(GPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, qk_norm=True))
    decayed, plain = adamw(model, 0.1).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimized = [p for group in adamw(model, 0.1).param_groups for p in group["params"]]
    assert {id(p) for p in optimized} == {id(p) for p in model[1].parameters()}


@pytest.mark.parametrize(("scaling", "expected"), [("linear", 1e-3), ("sqrt", 5e-4 * math.sqrt(2)), ("none", 5e-4)])
def test_rate_scales_with_the_global_batch(scaling: str, expected: float) -> None:
    assert scaled_rate(5e-4, 512, 256, scaling) == pytest.approx(expected)


def test_cosine_rises_to_the_peak_and_ends_at_a_tenth() -> None:
    shares = [rate_share(step, 100, 10, "cosine") for step in range(100)]
    assert shares[:10] == sorted(shares[:10])
    assert 0 < shares[0] < 0.1
    assert shares[10] == max(shares) == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == pytest.approx(0.1)


def test_wsd_is_flat_and_then_falls_towards_zero() -> None:
    shares = [rate_share(step, 100, 10, "wsd") for step in range(100)]
    assert set(shares[10:80]) == {1.0}
    assert shares[79:] == sorted(shares[79:], reverse=True)
    assert 0 < shares[-1] < 0.06


def test_constant_stays() -> None:
    assert {rate_share(step, 100, 0, "constant") for step in range(100)} == {1.0}


def test_minimind_schedule_is_its_formula_without_warm_up() -> None:
    assert default_warmup(1000, "minimind") == 0
    for step in range(0, 100, 7):
        expected = 0.1 + 0.45 * (1 + math.cos(math.pi * step / 100))
        assert rate_share(step, 100, 0, "minimind") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant", "minimind"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_shortest_runs_have_a_usable_rate(schedule: str, total: int) -> None:
    warmup = default_warmup(total, schedule)
    assert all(0 < rate_share(step, total, warmup, schedule) <= 1 for step in range(total))


def test_plan_covers_every_sample_of_every_epoch() -> None:
    assert PLAN.global_batch == 512
    assert PLAN.total_steps == 4  # 2000 sequences need 3.9 steps of 512
    assert PLAN.peak_rate == pytest.approx(1e-3)
    # The last step runs into a third epoch, which is none of the two that were asked for.
    assert [PLAN.epoch_of(step) for step in (1, 2, 4)] == [(1, 2), (2, 2), (2, 2)]
    assert replace(PLAN, max_steps=7).total_steps == 7


def test_plan_refuses_data_that_do_not_fill_a_step() -> None:
    with pytest.raises(ValueError, match=r"200 sequences .* one step of 512 .*--batch_size"):
        replace(PLAN, samples=200, epochs=1)


@pytest.mark.parametrize(
    ("samples", "steps", "epochs"), [(512, 20, 20), (1310, 21, 8), (10_240, 20, 1), (99_999, 196, 1)]
)
def test_epochs_left_to_the_plan_are_one_or_make_twenty_steps(samples: int, steps: int, epochs: int) -> None:
    plan = replace(PLAN, samples=samples, epochs=None)
    assert (plan.total_steps, plan.epochs) == (steps, epochs)
    with pytest.raises(ValueError, match=r"511 sequences .*times 1 epochs less than one step of 512"):
        replace(PLAN, samples=511, epochs=None)


def test_plan_says_how_batch_and_rate_came_about() -> None:
    text = "\n".join(PLAN.lines())
    assert "global batch 512 sequences = 64 per micro-batch x 8 ranks x 1 accumulated" in text
    assert "peak rate 0.001 = 0.0005 scaled 'linear' from 256 to 512 sequences" in text
    assert "4 steps" in text
    assert "note:" not in text


def test_plan_says_how_a_batch_is_shared_that_does_not_divide() -> None:
    text = "\n".join(replace(PLAN, world_size=7).lines())
    assert "512 sequences, as the run began with; each of 7 ranks takes 73 or one more, at most 64 per" in text


def test_a_rate_that_scaling_made_tiny_is_pointed_out() -> None:
    small = replace(PLAN, world_size=1, batch_size=2, global_batch=2)
    assert "128 times below --learning_rate" in "\n".join(small.lines())
