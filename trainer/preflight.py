"""--dry_run: everything that a start would check, and a few steps, with all problems in one list and no trace left."""

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer import advice, estimate
from trainer.backends import Step
from trainer.checkpoint import checkpoint_step, newest_valid
from trainer.lineage import TrainState
from trainer.memory import available_bytes, forget_peak, peak_resident_bytes, resident_bytes
from trainer.ownership import DONE, HOPELESS, STOPPED, in_use_by
from trainer.plan import data_step
from trainer.run import Run

log = logging.getLogger(__name__)

TIMED_STEPS = 3  # after one that is slower: it makes the optimizer's state, and compiles


class Found(Protocol):
    """What a look at something has found. lines: to tell; problems: what would refuse a start."""

    lines: Sequence[str]
    problems: Sequence[str]
    unusable: Sequence[str]


class DryRun(Run):
    """A run that finds out what would become of it. It owns no folder, so nothing in one is written or removed."""

    def __init__(self, args: argparse.Namespace, *rest: object) -> None:
        self.problems: list[str] = []
        self._unchecked: list[str] = []
        self._seconds: list[float] = []
        self._done = 0
        self._estimate: estimate.Estimate | None = None
        super().__init__(args, *rest)

    def _own_folder(self) -> None:
        if not self.ranks.is_first:
            return
        log.info("dry run: nothing is written but the token cache, which the run will use")
        if user := in_use_by(self.dir):
            log.info("%s is in use by %s; a start would be refused while it lasts", self.dir, user)
        if self.dir.exists() and not self.dir.is_dir():
            self.problems.append(f"--out_dir {self.dir}: is not a folder; choose another")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note what is wrong inside, and go on. What needs a part that failed is told as not checked."""
        try:
            yield
        except UnboundLocalError:
            # The script names a thing that an earlier part was to make.
            if not self.problems:
                raise
            self._unchecked.append(name)
        except (ValueError, OSError) as problem:
            self.problems.append(str(problem))
            self._unchecked.append(f"what needs the {name}")

    def found(self, what: Found) -> None:
        """Tell what was found in the data; raises ValueError where some of them cannot be used at all."""
        for line in what.lines:
            log.info("%s", line)
        self.problems += what.problems
        if what.unusable:
            raise ValueError(f"nothing can be trained on in {', '.join(what.unusable)}")

    def require_parts(self) -> None:
        """Raise ValueError where a part is missing that the steps need."""
        if self._unchecked:
            raise ValueError(
                f"not checked, because of these: {', '.join(dict.fromkeys(self._unchecked))}, memory, steps"
            )

    def with_problems(self, reason: str) -> str:
        """All that was found, this last."""
        return self._all([*self.problems, reason])

    def wrap(self, model: nn.Module, *rest: object) -> object:
        """As a run does; then what the process takes without its model is known."""
        count = sum(parameter.numel() for parameter in model.parameters())
        self._resident = resident_bytes() - (0 if self.on_gpu else 4 * count)
        forget_peak()
        return super().wrap(model, *rest)

    def _find_newest(self) -> int:
        newest = newest_valid(self.dir, owner=False) if self.ranks.is_first and self.resumes else None
        return int(self.ranks.sum([checkpoint_step(newest) if newest else 0])[0])

    def _open_sinks(self, state: TrainState) -> None:
        """None: a dashboard must not show what is not a run."""

    def _begin(self, state: TrainState) -> TrainState:
        args, module = self.args, self.backend.module
        self.stop.install()
        self._estimate = estimate.estimate_memory(
            module.config,
            parameters=self.backend.parameter_count,
            trained=self.backend.trained_count,
            batch_size=min(args.batch_size, -(-self.plan.global_batch // self.world_size)),
            seq_len=args.max_seq_len,
            accumulation=args.gradient_accumulation_steps,
            world_size=self.world_size,
            dtype=args.dtype,
            activation_checkpointing=args.activation_checkpointing,
            packed=self.stage != "pretrain",
            on_gpu=self.on_gpu,
        )
        if self.ranks.is_first:
            for line in estimate.lines(self._estimate, self._resident, self.on_gpu):
                log.info("%s", line)
        self._judge_fit()
        self._step = state.step
        steps = range(state.step, state.step + 1 + TIMED_STEPS)
        self._batches = self.loader.iterate(data_step(step, state.skipped) for step in steps)
        self._batch = next(self._batches)
        (self._target_tokens,) = self.ranks.sum([self._batch.target_tokens])
        self._began = time.perf_counter()
        return state

    def _judge_fit(self) -> None:
        """Steps that do not fit would end in a kill by the system: they are not tried."""
        available = available_bytes(self.ranks.device)
        # The weights are there already.
        needed = self._estimate.total - self._estimate.weights
        neighbours = 1 if self.on_gpu else self.ranks.local_world_size
        fits = available is None or needed * neighbours <= available
        (unfit,) = self.ranks.sum([float(not fits)])
        if not fits:
            args = self.args
            split = args.batch_size, args.gradient_accumulation_steps, args.activation_checkpointing
            advised = advice.full_memory(needed * neighbours / max(available, 1), "the memory that is free", *split)
            self.problems.append(f"the run needs more memory than there is: {advised}")
        self._stopping = unfit > 0

    def continues(self, state: TrainState) -> bool:
        """Whether steps to time remain."""
        return self._done <= TIMED_STEPS and not self._stopping

    def next_step(self, state: TrainState) -> Step:
        """As in a run."""
        batch = self._batch
        return Step(state.step + self._done, batch.micro_batches, batch.first_sequences, int(self._target_tokens))

    def rate(self, step: int) -> float:
        """None: the steps are for their time."""
        return 0.0

    def after_step(self, state: TrainState, *, loss: Tensor, grad_norm: Tensor, rate: float) -> TrainState:
        """Time the step; after the last one tell what they took."""
        value = float(loss)  # waits for the device, as a measurement has to
        if self.on_gpu:
            torch.cuda.synchronize(self.ranks.device)
        self._batch = next(self._batches, None)
        coming = self._batch.target_tokens if self._batch else 0
        tokens, stops, value = self.ranks.sum([coming, float(self.stop.received is not None), value])
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began, self._done, self._stopping = now, self._done + 1, stops > 0
        if not self.continues(state) and not self._stopping:
            self._tell(state, int(self._target_tokens), value)
        self._target_tokens = tokens
        return state

    def _tell(self, state: TrainState, tokens: int, loss: float) -> None:
        if loss != loss or abs(loss) == float("inf"):
            self.problems.append(f"the loss of a step is {loss}: the weights are damaged, or --dtype {self.args.dtype}")
        timed = self._seconds[1:]
        mean, left = sum(timed) / len(timed), max(0, self.plan.total_steps - state.step)
        if self.on_gpu:
            peak, what = torch.cuda.max_memory_allocated(self.ranks.device), "tensors on the GPU"
            guess = self._estimate.total
        else:
            peak, what = peak_resident_bytes(), "memory"
            guess = self._estimate.total + self._resident + estimate.FIRST_USE
        # Every rank has its own.
        peaks = self.ranks.sum(self.ranks.slots([float(peak), guess / peak - 1]))
        if not self.ranks.is_first:
            return
        worst = max(range(0, len(peaks), 2), key=peaks.__getitem__)
        log.info(
            "%s, measured: at most %.2f GiB a rank in %d steps; the estimate is %+.0f %% off",
            what, peaks[worst] / estimate.GIB, self._done, 100 * peaks[worst + 1],
        )  # fmt: skip
        log.info(
            "steps: %s s each, %.0f tokens/s; the %d steps that are left take about %s, validation and saving aside",
            ", ".join(f"{seconds:.2f}" for seconds in timed), tokens / mean, left, duration(mean * left),
        )  # fmt: skip

    def outcome(self) -> tuple[int, str]:
        """Exit code and reason: with a problem on any rank that of a run that cannot start."""
        (count,) = self.ranks.sum([len(self.problems)])
        if self.stop.received:
            return STOPPED, f"dry run stopped by {self.stop.received}"
        if not count:
            return DONE, "dry run: no problem found"
        if self.problems and not self.ranks.is_first:
            log.error("%s", self._all(self.problems))
        return HOPELESS, self._all(self.problems) if self.problems else "dry run: another rank has found problems"

    @staticmethod
    def _all(problems: Sequence[str]) -> str:
        """One list, each problem once."""
        once = list(dict.fromkeys(problems))
        return "\n  ".join([f"dry run: {len(once)} problem{'s' * (len(once) > 1)} found", *once])


def duration(seconds: float) -> str:
    """Seconds as people say them: "3 min", "2 h 10 min"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
