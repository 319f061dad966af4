"""What a run does when it is told to stop, and when it does not move."""

import contextlib
import faulthandler
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
# torchrun gives its ranks this long between SIGTERM and SIGKILL unless told otherwise.
TORCHRUN_GRACE_SECONDS = 30.0
# The first steps compile, warm up and fill the queues; then a step is stuck when it takes SLOWER times the slowest.
FIRST_STEPS = 3
SLOWER = 10.0
SHORTEST_LIMIT_SECONDS = 60.0
# A file system of a network may stall for minutes, and to end a rank for that would cost more than to wait.
PATIENT = 5.0


class StopFlag:
    """Remembers that a stop signal came; the training loop asks at the end of each step.

    Before the first step there is nothing to save: a signal raises KeyboardInterrupt. Not while ranks connect and
    load: the default action ends a process at once even where it waits for the others inside a native call.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}  # handlers

    def arm(self) -> None:
        """From now on the first stop signal raises KeyboardInterrupt; later ones are remembered only."""
        self._before = self._handle(self._interrupt)

    def disarm(self) -> None:
        """Give back the handlers that `arm` found."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take over the stop signals until the process ends. An ignored SIGHUP (nohup) stays ignored."""
        self._handle(self._remember)

    def ignore(self) -> None:
        """From now on no stop signal ends the process: on its way out, Python would give the default action back."""
        for name in STOP_SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)

    def _handle(self, handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
        numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
        # A shell's background job begins with SIGINT ignored, and its launcher may send one all the same.
        heard = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        return {number: signal.signal(number, handler) for number in heard}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.install()  # another one must not interrupt the way out
        self._remember(number, frame)
        raise KeyboardInterrupt


def stop_budget(step_seconds: float, save_seconds: float) -> tuple[str, bool] | None:
    """What a stop takes, measured, against the grace that the launcher gives it; and whether that is tight.

    Tight is less than twice. None without a launcher: then only a scheduler limits it, and we do not know how.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_GRACE_SECONDS))
    needed = step_seconds + save_seconds
    line = (
        f"to stop takes up to {needed:.1f} s (step {step_seconds:.1f} s + save {save_seconds:.1f} s) of the "
        f"{grace:.0f} s that the launcher waits"
    )
    if needed * 2 > grace:
        return f"{line}: too tight, start with python -m scripts.launch or set TORCH_ELASTIC_SHUTDOWN_TIMEOUT", True
    return line, False


class Watchdog:
    """Ends this rank with code 1 when a step takes too long, after every thread's stack went to stderr.

    A thread of the interpreter's own does it, which needs no lock of Python's: it fires where a rank is stuck in native
    code, as a collective whose peer is gone. torchrun then restarts all ranks, or ends the job.
    """

    def __init__(self, startup_seconds: float, step_seconds: float | None) -> None:
        """startup_seconds: for the first steps, the first save and the first validation.

        step_seconds: limit of a step; None: SLOWER times the slowest step so far, at least SHORTEST_LIMIT_SECONDS.
        """
        self.startup_seconds, self.step_seconds = startup_seconds, step_seconds
        self._slowest = self._slowest_pause = 0.0
        self._steps, self._began = 0, time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds that the next step may take."""
        if self._steps < FIRST_STEPS:
            return self.startup_seconds
        if self.step_seconds is not None:
            return self.step_seconds
        return min(self.startup_seconds, max(SHORTEST_LIMIT_SECONDS, SLOWER * self._slowest))

    def start(self) -> None:
        """Watch from now on."""
        self._arm(self.limit)

    def step_done(self) -> None:
        """Count a step and give the next one its time."""
        now = time.monotonic()
        if self._steps:
            self._slowest = max(self._slowest, now - self._began)
        self._steps += 1
        self._arm(self.limit)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Give what is not a step, a save or a validation, more time; the first one as much as a start."""
        longest = max(PATIENT * self.limit, SLOWER * self._slowest_pause) if self._slowest_pause else math.inf
        self._arm(min(self.startup_seconds, longest))
        yield
        self._slowest_pause = max(self._slowest_pause, time.monotonic() - self._began)
        self._arm(self.limit)

    def stop(self) -> None:
        """Watch no more."""
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds: float) -> None:
        self._began = time.monotonic()
        # To the file descriptor: sys.stderr may be somebody's wrapper by now.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
