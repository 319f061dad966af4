"""Processes: which run, which are below another, and waiting for what they do."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path


class Broken(Exception):
    """A run did not come to the point that it had to reach; the message says which."""


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that still run; a zombie does not."""
    return [pid for pid in pids if (stat := _stat(pid)) and stat[0] not in "ZX"]


def descendants(pid: int) -> list[list[int]]:
    """Running processes below one: its children, their children, and so on, lowest id first."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    levels, above = [], {pid}
    while above:
        below = sorted(p for p, stat in parents.items() if stat and stat[0] not in "ZX" and int(stat[1]) in above)
        levels.append(below)
        above = set(below)
    return levels[:-1] or [[]]


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until the condition holds; Broken after that many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:g} s for {what}")
        time.sleep(0.002)
