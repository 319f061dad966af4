"""Where the time goes: throughput between log lines."""

import contextlib
import time
from collections.abc import Iterator


class StepClock:
    """Measures steps and tokens per second between laps, leaving out validation and saving."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._steps = self._tokens = 0
        self.step_seconds = 0.0  # of the last lap

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

    def lap(self) -> dict[str, float]:
        """Rates since the last lap: tokens_per_second and step_seconds; empty when no step was counted."""
        now = time.perf_counter()
        seconds, steps, tokens = max(now - self._start, 1e-9), self._steps, self._tokens
        self._start, self._steps, self._tokens = now, 0, 0
        if not steps:
            return {}
        self.step_seconds = seconds / steps
        return {"tokens_per_second": tokens / seconds, "step_seconds": self.step_seconds}
