"""Which samples a step trains on: permutations, splits over ranks, workers, and evaluation."""

import multiprocessing
import os
import resource
import select
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dataset.loader import StepBatch, StepLoader, eval_batches, num_eval_batches, shuffled
from dataset.mixture import Mixture
from model.loss import IGNORE_INDEX

fork = multiprocessing.get_context("fork")


class Numbers:
    """Samples whose rows hold their own index and the process that read them; index i has i % 5 target tokens."""

    data_sha256 = "numbers"

    def __init__(self, length: int):
        self.length, self.rows_read = length, 0
        self.target_counts = np.arange(length) % 5

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, torch.Tensor]:
        self.rows_read += len(indices)
        targets = np.where(np.arange(4) < indices[:, None] % 5, 0, IGNORE_INDEX)
        index, process = torch.from_numpy(indices.copy()), torch.full((len(indices),), os.getpid())
        return {"index": index, "process": process, "targets": torch.from_numpy(targets)}


class Broken(Numbers):
    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, torch.Tensor]:
        raise OSError("the disk is gone")


def loader(samples: Numbers, *, rank=0, ranks=1, batch=2, accumulation=2, workers=0, seed=7) -> StepLoader:
    return StepLoader(
        Mixture([samples], [""], [1], seed),
        rank=rank,
        world_size=ranks,
        batch_size=batch,
        accumulation=accumulation,
        num_workers=workers,
    )


def indices_of(batch: StepBatch) -> list[list[int]]:
    return [micro_batch["index"].tolist() for micro_batch in batch.micro_batches]


def epoch_order(length: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return shuffled(np.arange(length) + epoch * length, length, seed)


@pytest.mark.parametrize("length", [*range(1, 71), 10_007, 65_536])
def test_every_epoch_shows_every_sample_once(length):
    for epoch in (0, 1, 2, 10**6):
        assert np.array_equal(np.sort(epoch_order(length, epoch)), np.arange(length))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_order(1000, epoch, seed) for epoch in range(3) for seed in (0, 1, -1, 2**63)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert (order == other).sum() < 10


def test_all_orders_of_three_samples_come_up_equally_often():
    orders = shuffled(np.arange(3 * 6000), 3, 5).reshape(-1, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize("length", [1000, 1024, 1025, 40_000])
def test_order_is_as_random_as_a_random_permutation(length):
    """A random permutation moves an index by length / 3 on average and keeps about 2 pairs of neighbours."""
    order = epoch_order(length)
    positions = np.arange(length)
    assert np.abs(order - positions).mean() == pytest.approx(length / 3, rel=0.08)
    assert abs(np.corrcoef(order, positions)[0, 1]) < 4 / length**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / length**0.5
    assert (np.abs(np.diff(order)) == 1).sum() < 12
    assert abs(np.corrcoef(order, epoch_order(length, epoch=1))[0, 1]) < 4 / length**0.5


def test_order_is_the_one_that_older_checkpoints_were_trained_with():
    assert shuffled(np.arange(12), 10, 42).tolist() == [0, 9, 3, 1, 4, 7, 8, 6, 5, 2, 8, 6]
    assert shuffled(np.array([0, 5, 10**15]), 10**12, 42).tolist() == [605021489879, 256789619389, 779875175601]


def test_a_sample_depends_on_its_position_alone():
    positions = np.arange(95, 215)
    together = shuffled(positions, 100, 3)
    assert [shuffled(positions[i : i + 1], 100, 3).item() for i in range(len(positions))] == together.tolist()


def test_one_step_may_span_many_short_epochs():
    seen = np.array([loader(Numbers(3), batch=5).sample_ids(step) for step in range(3)]).flatten()
    assert len(seen) == 30
    assert all(sorted(epoch) == [0, 1, 2] for epoch in seen.reshape(-1, 3).tolist())


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8), (8, 1, 1)])
def test_split_of_the_global_batch_changes_neither_samples_nor_order(ranks, batch, accumulation):
    samples = Numbers(29)
    for step in (0, 3, 1000):
        parts = [
            loader(samples, rank=rank, ranks=ranks, batch=batch, accumulation=accumulation).step_batch(step)
            for rank in range(ranks)
        ]
        expected = shuffled(np.arange(step * 8, step * 8 + 8), 29, 7)
        micro_batches = [indices for part in parts for indices in indices_of(part)]
        assert np.concatenate(micro_batches).tolist() == expected.tolist()
        whole = loader(samples, rank=0, ranks=ranks, batch=batch, accumulation=accumulation)
        assert whole.sample_ids(step) == expected.tolist()
        assert {len(indices) for indices in micro_batches} == {batch}
        firsts = [first for part in parts for first in part.first_sequences]
        assert firsts == list(range(step * 8, step * 8 + 8, batch))
        assert sum(part.target_tokens for part in parts) == (expected % 5).sum()


@pytest.mark.parametrize("workers", [0, 2])
def test_iteration_gives_the_batches_of_its_steps_in_order(workers):
    made = loader(Numbers(23), rank=1, ranks=2, workers=workers)
    batches = list(made.iterate(range(4, 15)))
    assert len(batches) == 11
    for step, batch in zip(range(4, 15), batches, strict=True):
        expected = made.step_batch(step)
        assert isinstance(batch, StepBatch)
        assert indices_of(batch) == indices_of(expected)
        assert batch[1:] == expected[1:]
    readers = {micro["process"][0].item() for batch in batches for micro in batch.micro_batches}
    assert (os.getpid() in readers, len(readers)) == ((False, 2) if workers else (True, 1))


def test_a_late_start_reads_no_earlier_step():
    samples = Numbers(1000)
    assert len(list(loader(samples).iterate(range(1_000_000, 1_000_003)))) == 3
    assert samples.rows_read == 3 * 4


def test_iteration_leaves_the_global_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    list(loader(Numbers(10), workers=1).iterate(range(0, 2)))
    assert torch.equal(torch.rand(4), expected)


def test_an_error_in_a_worker_reaches_the_main_process():
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader(Broken(10), workers=1).iterate(range(0, 2)))


def test_workers_go_on_when_the_whole_process_group_is_signalled():
    batches = loader(Numbers(10), workers=1).iterate(range(0, 20))
    worker = next(batches).micro_batches[0]["process"][0].item()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker, number)
    assert {batch.micro_batches[0]["process"][0].item() for batch in batches} == {worker}


def _iterate_and_tell(pipe) -> None:
    batches: Iterator[StepBatch] = loader(Numbers(10), workers=2).iterate(range(0, 1000))
    pipe.send([next(batches).micro_batches[0]["process"][0].item() for _ in range(2)])
    signal.pause()


def test_workers_die_with_a_killed_main_process():
    here, there = fork.Pipe()
    main = fork.Process(target=_iterate_and_tell, args=(there,))
    main.start()
    assert here.poll(20)
    workers = [os.pidfd_open(process) for process in here.recv()]
    main.kill()
    main.join()
    for worker in workers:
        # A process file becomes readable when its process ends; without the kernel's help workers need 5 s.
        assert select.select([worker], [], [], 2)[0]
        os.close(worker)


def test_many_tensors_in_flight_do_not_run_out_of_open_files():
    def run() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        kept = list(loader(Numbers(10), batch=1, accumulation=100, workers=1).iterate(range(0, 4)))
        os._exit(0 if len(kept) == 4 else 1)

    process = fork.Process(target=run)
    process.start()
    process.join(20)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(ranks, length):
    samples = Numbers(length)
    batches = {}
    for rank in range(ranks):
        for number, rows in eval_batches(samples, 4, rank, ranks):
            assert number % ranks == rank
            batches[number] = rows["index"].tolist()
    assert sorted(batches) == list(range(num_eval_batches(samples, 4)))
    assert np.concatenate([batches[number] for number in sorted(batches)]).tolist() == list(range(length))


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        loader(Numbers(0))


def test_a_global_batch_that_does_not_divide_is_shared_within_one_sequence() -> None:
    whole = loader(Numbers(50), batch=16, accumulation=1)
    for ranks in (3, 5, 7):
        shares = []
        for rank in range(ranks):
            part = loader(Numbers(50), rank=rank, ranks=ranks, batch=3, accumulation=1)
            part.global_batch = 16
            batch = part.step_batch(4)
            assert max(map(len, indices_of(batch))) <= 3
            shares.append([index for micro_batch in indices_of(batch) for index in micro_batch])
            assert batch.first_sequences[0] == 4 * 16 + sum(map(len, shares[:-1]))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [index for share in shares for index in share] == indices_of(whole.step_batch(4))[0]
