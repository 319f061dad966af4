"""What a step did and how long it took, without making the device wait."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor


class StepClock:
    """Measures steps and tokens per second between laps, leaving out validation and saving."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._steps = self._tokens = 0
        self._last_lap = 0.0

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
            return self._last_lap
        return (time.perf_counter() - self._start) / self._steps

    def lap(self) -> dict[str, float]:
        """Rates since the last lap: tokens_per_second and step_seconds."""
        now = time.perf_counter()
        seconds, steps, tokens = max(now - self._start, 1e-9), self._steps, self._tokens
        self._start, self._steps, self._tokens = now, 0, 0
        self._last_lap = seconds / max(steps, 1)
        return {"tokens_per_second": tokens / seconds, "step_seconds": self._last_lap}


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
