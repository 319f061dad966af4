"""Processes that work for this one, and live and die with it alone."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def live_and_die_with(parent: int) -> None:
    """Called in a new process: leave signals to process `parent`, and end when it ends (on Linux)."""
    # A signal to the whole group is the main process's to answer: it still needs the workers to finish its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
