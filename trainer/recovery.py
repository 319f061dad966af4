"""What a run does when it is told to stop."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
# torchrun gives its ranks this long between SIGTERM and SIGKILL unless told otherwise.
TORCHRUN_GRACE_SECONDS = 30.0


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
