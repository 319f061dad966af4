"""What a step did and how long it took, without making the device wait."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.memory import MEMORY, memory_readings


class StepClock:
    """Measures steps and tokens per second between laps, leaving out validation and saving."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._steps = self._tokens = 0
        self._last_step_seconds = 0.0

    def count(self, tokens: int) -> None:
        """Note one finished step."""
        self._steps += 1
        self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for what is not training."""
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step in this lap, or in the last one; 0 before the first step."""
        if not self._steps:
            return self._last_step_seconds
        return (time.perf_counter() - self._start) / self._steps

    def lap(self) -> dict[str, float]:
        """What was done since the last lap: seconds, steps, tokens (of all ranks)."""
        now = time.perf_counter()
        done = {"seconds": max(now - self._start, 1e-9), "steps": self._steps, "tokens": self._tokens}
        self._start, self._steps, self._tokens = now, 0, 0
        self._last_step_seconds = done["seconds"] / max(done["steps"], 1)
        return done


class WorkClock:
    """Measures this rank's own work: from a step's begin to its last backward pass, in which it waits for the others.

    On a GPU by events of the device, so that the host never waits: what is not finished yet counts for the next lap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._waited = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def end(self) -> None:
        """From here on the step waits for other ranks."""
        self._spans.append((self._began, self._now()))

    def add(self, seconds: float) -> None:
        """Count work on the host beside it, as waiting for the data loader."""
        self._waited += seconds

    def lap(self) -> float:
        """Seconds of work since the last lap."""
        if self._on_gpu:
            done = [span for span in self._spans if span[1].query()]
            seconds = sum(began.elapsed_time(ended) for began, ended in done) / 1000
        else:
            done = self._spans
            seconds = sum(ended - began for began, ended in done)
        seconds += self._waited
        self._spans, self._waited = self._spans[len(done) :], 0.0
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Meters:
    """What a rank measures of its own training between two log steps."""

    def __init__(self, work: WorkClock) -> None:
        """work: the back end's clock, read from here on."""
        self.clock, self.work = StepClock(), work
        self._data_wait = 0.0
        work.lap()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as waiting for the loader."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._data_wait += seconds
        self.work.add(seconds)

    def read(self) -> dict[str, float]:
        """This rank's readings since the last call: seconds, counts, memory; the same names on every rank."""
        readings = {**self.clock.lap(), "work": self.work.lap(), "data_wait": self._data_wait}
        self._data_wait = 0.0
        return readings | memory_readings(self.work.device)


def combined(readings: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The metrics of a log step, made of what `Meters.read` gave on every rank, in the order of the ranks."""
    seconds, steps, tokens = (readings[name][0] for name in ("seconds", "steps", "tokens"))
    return {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds / max(steps, 1),
        "data_wait_share": max(readings["data_wait"]) / seconds,
        **{name: max(values) for name, values in readings.items() if name in MEMORY},
        **balance(readings["work"]),
    }


def balance(seconds: Sequence[float]) -> dict[str, float]:
    """Which rank's own work took longest, and by which share it exceeds the median; {} for a single rank."""
    if len(seconds) < 2:
        return {}
    slowest, median = max(seconds), statistics.median_low(seconds)
    return {"slowest_rank": float(seconds.index(slowest)), "slowest_rank_lag": slowest / max(median, 1e-9) - 1}


class Pending:
    """A finished step whose numbers are on their way to the host."""

    def __init__(self, step: int, numbers: dict[str, float], loss: Tensor, grad_norm: Tensor) -> None:
        """numbers: the metrics that the host knows already."""
        self.step, self.numbers = step, numbers
        values = torch.stack([loss, grad_norm])
        on_gpu = values.device.type == "cuda"
        self._values = values.to("cpu", non_blocking=on_gpu)
        self._ready = torch.cuda.Event() if on_gpu else None
        if self._ready:
            self._ready.record()

    def read(self) -> tuple[float, float]:
        """This rank's part of the loss, and the gradient norm; waits where the device is more than a step behind."""
        if self._ready:
            self._ready.synchronize()
        loss, grad_norm = self._values.tolist()
        return loss, grad_norm
