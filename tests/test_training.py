"""A step's gradient is that of one process on the whole global batch, however ranks and accumulation share it."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.gpt import GPT, GPTConfig
from tests.conftest import TINY, Peers, curve, final_bytes, on_ranks, train, write_texts
from trainer.backends import Step, build_backend
from trainer.checkpoint import load_tensors
from trainer.ddp import Ranks, dropout_seed
from trainer.optim import adamw

RATE = 1e-3
SIZES = GPTConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def backend_for(model: nn.Module, ranks: Ranks, dtype: str = "float32", **changes: object):
    settings = {"dtype": dtype, "grad_clip": 1.0, "seed": 3, "compile": False}
    settings |= {"bucket_cap_mb": 25, "find_unused_parameters": False}
    return build_backend("ddp", model, lambda m: adamw(m, 0.1), ranks, **(settings | changes))


def one_process() -> Ranks:
    return Ranks(0, 0, 1, torch.device("cpu"))


def unequal_rows(step: int, vocab: int = 97) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows of 24 with 24, 2, 0 and 9 targets: ids, targets, and how many targets each row has."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab, (4, 24), generator=draw)
    targets = torch.randint(vocab, (4, 24), generator=draw)
    counts = torch.tensor([24, 2, 0, 9]).roll(step)
    for row, count in enumerate(counts.tolist()):
        targets[row, count:] = -100
    return ids, targets, counts


def train_shared(model: nn.Module, ranks: Ranks, accumulation: int, steps: int, dtype: str = "float32"):
    """Take `steps` updates on unequal rows, a row per micro-batch; return the first gradients and the backend."""
    backend = backend_for(model, ranks, dtype)
    first_gradients = {}
    for number in range(steps):
        ids, targets, counts = unequal_rows(number)
        per_rank = 4 // ranks.world_size
        rows = range(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)
        assert accumulation == len(rows)
        batches = [{"input_ids": ids[row : row + 1], "targets": targets[row : row + 1]} for row in rows]
        step = Step(number, batches, list(rows), int(counts.sum()))
        backend.set_rate(RATE)
        for batch in backend.micro_batches(step):
            backend.backward(backend.loss_sum(batch) / step.target_tokens)
        if number == 0:
            first_gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        backend.step()
    return first_gradients, backend


def compare_two_ranks_with_one(peers: Peers) -> None:
    ranks = peers.connect()
    torch.manual_seed(1)
    shared = GPT(SIZES)
    shared_gradients, _ = train_shared(shared, ranks, accumulation=2, steps=10)
    torch.manual_seed(1)
    alone = GPT(SIZES)
    alone_gradients, _ = train_shared(alone, one_process(), accumulation=4, steps=10)
    for name, gradient in alone_gradients.items():
        torch.testing.assert_close(
            shared_gradients[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name
        )
    for (name, mine), (_, theirs) in zip(shared.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.05 * RATE, msg=name)
    ranks.disconnect()


def test_two_ranks_accumulating_two_equal_one_process_accumulating_four() -> None:
    on_ranks(2, compare_two_ranks_with_one)


class Bigram(nn.Module):
    """A model in float64, so that only a wrong weighting can make a difference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Parameter(torch.randn(97, 97, dtype=torch.float64))

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.table[input_ids].flatten(0, 1), targets.flatten(), reduction="sum")


def compare_in_float64(peers: Peers) -> None:
    ranks = peers.connect()
    gradients, _ = train_shared(Bigram(), ranks, accumulation=4 // peers.world_size, steps=1)
    ids, targets, _ = unequal_rows(0)
    whole = Bigram()
    F.cross_entropy(whole.table[ids].flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(gradients["table"], whole.table.grad, rtol=0, atol=1e-10)
    ranks.disconnect()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradient_is_the_mean_over_all_target_tokens_in_float64(world_size: int) -> None:
    on_ranks(world_size, compare_in_float64)


def count_reductions(peers: Peers) -> None:
    ranks = peers.connect()
    model = GPT(SIZES)
    backend = backend_for(model, ranks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(4):
            ids, targets, counts = unequal_rows(number)
            mine = range(2 * peers.rank, 2 * peers.rank + 2)
            batches = [{"input_ids": ids[row : row + 1], "targets": targets[row : row + 1]} for row in mine]
            step = Step(number, batches, list(mine), int(counts.sum()))
            backend.set_rate(RATE)
            for batch in backend.micro_batches(step):
                backend.backward(backend.loss_sum(batch) / step.target_tokens)
            # Ranks that reduced at the wrong moment drift apart.
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            total = flat.clone()
            torch.distributed.broadcast(total, 0)
            assert torch.equal(flat, total)
            backend.step()
    reductions = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
    # One bucket holds the tiny model; the first step has one more, discarded, to settle the buckets.
    assert reductions == 4 + 1
    ranks.disconnect()


def test_one_reduction_per_step_whatever_the_accumulation() -> None:
    on_ranks(2, count_reductions)


def sum_equals_averaging(peers: Peers) -> None:
    """The hook's sum against ReduceOp.AVG over gradients that each rank divides by its own share."""
    ranks = peers.connect()
    torch.manual_seed(1)
    gradients, _ = train_shared(GPT(SIZES), ranks, accumulation=2, steps=1)
    torch.manual_seed(1)
    plain = GPT(SIZES)
    ids, targets, counts = unequal_rows(0)
    mine = slice(2 * peers.rank, 2 * peers.rank + 2)
    (plain(ids[mine], targets[mine]) * peers.world_size / counts.sum()).backward()
    for name, parameter in plain.named_parameters():
        torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
        atol = 1e-5 * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=atol, msg=name)
    ranks.disconnect()


def test_summed_gradients_equal_averaging() -> None:
    on_ranks(2, sum_equals_averaging)


def nan_on_one_rank(peers: Peers) -> None:
    ranks = peers.connect()
    torch.manual_seed(1)
    model = GPT(SIZES)
    backend = backend_for(model, ranks)

    def update(poison: float) -> float:
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        ids, targets, counts = unequal_rows(0)
        rows = slice(2 * peers.rank, 2 * peers.rank + 2)
        step = Step(0, [{"input_ids": ids[rows], "targets": targets[rows]}], [0], int(counts.sum()))
        backend.set_rate(RATE)
        for batch in backend.micro_batches(step):
            factor = poison if peers.rank == 1 else 1.0
            backend.backward(backend.loss_sum(batch) / step.target_tokens + (factor - 1.0))
        backend.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return (after - before).abs().max().item()

    assert update(1.0) > 0
    moments = {name: value.clone() for name, value in backend.save()[1].items()}  # empty but on rank 0
    # A loss that is infinite while its gradients are finite is as bad as NaN, and only rank 1 knows of it.
    for poison in (math.nan, math.inf):
        assert update(poison) == 0
        for name, value in backend.save()[1].items():
            assert torch.equal(value, moments[name]), name
    assert update(1.0) > 0
    ranks.disconnect()


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_update_on_all() -> None:
    on_ranks(2, nan_on_one_rank)


def test_constant_inputs_and_targets_without_any_target_leave_finite_weights() -> None:
    model = GPT(SIZES)
    backend = backend_for(model, one_process())
    backend.set_rate(RATE)
    nothing = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "targets": torch.full((1, 8), -100)}
    some = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "targets": torch.ones(1, 8, dtype=torch.int64)}
    for batch in backend.micro_batches(Step(0, [nothing, some], [0, 1], 8)):
        backend.backward(backend.loss_sum(batch) / 8)
    assert backend.step().isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_float16_scaler_keeps_its_state_over_save_and_load() -> None:
    def trained(steps: range, backend) -> None:
        for number in steps:
            ids, targets, counts = unequal_rows(number)
            backend.set_rate(RATE)
            step = Step(number, [{"input_ids": ids, "targets": targets}], [number], int(counts.sum()))
            for batch in backend.micro_batches(step):
                backend.backward(backend.loss_sum(batch) / step.target_tokens)
            backend.step()

    torch.manual_seed(1)
    first = backend_for(GPT(SIZES), one_process(), "float16")
    # Far too large: the first updates overflow and are skipped, and the scale comes down.
    first.scaler.load_state_dict(first.scaler.state_dict() | {"scale": 2.0**40})
    trained(range(3), first)
    scale = first.scaler.get_scale()
    assert scale < 2.0**40
    second = backend_for(GPT(SIZES), one_process(), "float16")
    second.load(*first.save())
    assert second.scaler.get_scale() == scale
    trained(range(3, 6), first)
    trained(range(3, 6), second)
    for (name, a), (_, b) in zip(first.module.named_parameters(), second.module.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_dropout_masks_do_not_depend_on_the_step_alone() -> None:
    seeds = {dropout_seed(seed, step, first) for seed in (1, 2) for step in range(10) for first in (0, 8, 16)}
    assert len(seeds) == 2 * 10 * 3
    assert max(seeds) < 2**32


def change_ranks(peers: Peers, folder: Path, options: list, batch: int) -> None:
    peers.new_group()
    code = train(*options, "--batch_size", batch, "--out_dir", folder / "shared")
    assert code == 0


def test_one_two_four_and_one_ranks_give_the_same_curve(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 40)
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--dtype", "float32"]
    options += ["--checkpoint_interval", 4, "--lr_schedule", "constant", "--warmup_steps", 0]
    assert train(*options, "--batch_size", 4, "--out_dir", tmp_path / "alone", "--max_steps", 16) == 0
    for until, ranks in ((4, 1), (8, 2), (12, 4), (16, 1)):
        now = [*options, "--max_steps", until]
        if ranks == 1:
            assert train(*now, "--batch_size", 4, "--out_dir", tmp_path / "shared") == 0
        else:
            on_ranks(ranks, change_ranks, tmp_path, now, 4 // ranks)
    alone, shared = curve(tmp_path / "alone"), curve(tmp_path / "shared")
    assert [point[0] for point in alone] == [point[0] for point in shared] == list(range(1, 17))
    for one, other in zip(alone, shared, strict=True):
        assert one[1] == pytest.approx(other[1], abs=1e-5), f"step {one[0]}"


def test_loss_falls_and_the_logged_loss_is_the_models_own(texts: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--dtype", "float32"]
    assert train(*options, "--out_dir", out_dir, "--epochs", 4, "--batch_size", 8, "--learning_rate", 5e-3) == 0
    losses = [point[1] for point in curve(out_dir)]
    assert losses[0] == pytest.approx(math.log(6400), abs=0.2)
    assert losses[-1] < losses[0] - 2
    weights = load_tensors(sorted(out_dir.glob("step_*"))[-1] / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in weights.values())


class Branches(nn.Module):
    """A model of which a step uses one half."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return (self.used(input_ids.float()) - targets).square().sum()


def train_with_unused_parameters(peers: Peers) -> None:
    batch = {"input_ids": torch.ones(2, 4), "targets": torch.ones(2, 1)}
    for allowed in (True, False):
        ranks = peers.connect()
        backend = backend_for(Branches(), ranks, find_unused_parameters=allowed)
        backend.set_rate(RATE)

        def step(number: int, backend=backend) -> None:
            for part in backend.micro_batches(Step(number, [batch], [0], 2)):
                backend.backward(backend.loss_sum(part))
            backend.step()

        if allowed:
            step(0)
            step(1)
            if peers.rank == 0:
                weights, optimizer = backend.save()
                assert optimizer["step.used.weight"] == 2
                assert optimizer["step.unused.weight"] == 0
                backend.load(weights, optimizer)
            step(2)
        else:
            with pytest.raises(RuntimeError, match="find_unused_parameters"):
                step(0)
        ranks.disconnect()


def test_unused_parameters_need_the_option() -> None:
    on_ranks(2, train_with_unused_parameters)


def test_a_save_that_fails_costs_that_checkpoint_only(texts: Path, tmp_path: Path, caplog) -> None:
    """No file may grow beyond 100 KB for a while, which is what a full disk looks like to a save."""
    out_dir = tmp_path / "run"
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--out_dir", out_dir]
    options += ["--checkpoint_interval", 2, "--keep_checkpoints", 9]
    assert train(*options, "--max_steps", 4) == 0
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old_limit[1]))
    try:
        assert train(*options, "--max_steps", 8) == 1, "the last checkpoint failed: that is no success"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
    ended = json.loads((out_dir / "exit.json").read_text())
    assert ended["code"] == 1
    assert "step 8 could not be saved; the newest checkpoint is that of step 4" in ended["reason"]
    assert sorted(path.name for path in out_dir.glob("step_*")) == ["step_00000002", "step_00000004"]
    assert "the checkpoint of step 6 failed" in caplog.text
    assert not list(out_dir.glob("*.tmp-*"))
    assert [point[0] for point in curve(out_dir)] == list(range(1, 9))
    assert train(*options, "--max_steps", 8) == 0
    assert (out_dir / "step_00000008").is_dir()


def start_with_other_data(peers: Peers, folder: Path) -> None:
    texts = write_texts(folder / f"texts_{peers.rank}.jsonl", 40, seed=peers.rank)
    peers.new_group()
    code = train(*TINY, "--data_path", texts, "--cache_dir", folder / "cache", "--out_dir", folder / "run")
    assert code == 78
    torch.distributed.destroy_process_group()


def test_ranks_with_different_data_are_refused_before_the_first_step(tmp_path: Path) -> None:
    on_ranks(2, start_with_other_data, tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "options",
    [["--dtype", "float16"], ["--tie_word_embeddings", "0", "--qk_norm"], ["--activation_checkpointing"]],
    ids=["float16", "untied head and QK-norm", "activation checkpointing"],
)
def test_resume_is_exact_with(texts: Path, tmp_path: Path, options: list[str]) -> None:
    common = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--dropout", 0.1, *options]
    common += ["--max_steps", 6, "--lr_schedule", "constant"]
    assert train(*common, "--out_dir", tmp_path / "straight") == 0
    assert train(*common, "--out_dir", tmp_path / "resumed", "--max_steps", 3) == 0
    assert train(*common, "--out_dir", tmp_path / "resumed") == 0
    assert curve(tmp_path / "resumed") == curve(tmp_path / "straight")
    assert final_bytes(tmp_path / "resumed") == final_bytes(tmp_path / "straight")


def test_a_diverged_run_says_so_and_saves_no_weights_that_are_not_finite(texts: Path, tmp_path: Path, caplog) -> None:
    options = [*TINY, "--data_path", texts, "--cache_dir", tmp_path / "cache", "--max_steps", 8]
    options += ["--lr_schedule", "constant", "--warmup_steps", 0, "--checkpoint_interval", 4]
    assert train(*options, "--out_dir", tmp_path / "skips", "--learning_rate", 1e6) == 0
    reason = json.loads((tmp_path / "skips" / "exit.json").read_text())["reason"]
    assert "updates were skipped" in reason
    # A finite gradient times such a rate overflows the weights themselves.
    assert train(*options, "--out_dir", tmp_path / "overflows", "--learning_rate", 1e38) == 1
    assert "is not saved" in caplog.text
    assert not list((tmp_path / "overflows").glob("step_*"))


def leave_many_groups(peers: Peers) -> None:
    for _ in range(60):
        ranks = peers.connect()
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        ranks.disconnect()
        del model


@pytest.mark.integration
def test_a_rank_that_has_left_its_group_always_ends() -> None:
    """With the last barrier freed by gloo's own thread, about one group in a hundred never went away."""
    on_ranks(2, leave_many_groups)
