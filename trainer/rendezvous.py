"""How the ranks of one attempt find one another in a store that earlier attempts may have written to.

torchrun's default store outlives a restart. Ranks that go on under the old names read the addresses of processes that
are gone, and fail or hang; and a count of restarts cannot make fresh names, because a replaced node's torchrun counts
from 0. So rank 0 draws a name, and every rank answers for itself.
"""

import datetime
import os
import secrets
import time

import torch.distributed as dist

POLL_SECONDS = 0.02


def fresh_store(rank: int, world_size: int, timeout_seconds: float) -> dist.Store:
    """Connect to the store of torchrun's environment and agree on names in it that nobody has used. A collective.

    Raises TimeoutError, naming the ranks that did not come.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun serves it, else rank 0
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not shared,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    table = dist.PrefixStore("handshake", store)
    deadline = time.monotonic() + timeout_seconds
    name = _gather(table, world_size, deadline) if rank == 0 else _join(table, rank, deadline, timeout_seconds)
    return dist.PrefixStore(name, store)


def _gather(table: dist.Store, world_size: int, deadline: float) -> str:
    """Rank 0: invite whoever is there under a fresh name, until exactly those have accepted it."""
    others, invited, name = range(1, world_size), None, ""
    while True:
        there = {rank: _read(table, f"hello {rank}") for rank in others}
        if "" not in there.values() and there != invited:
            # Also when a rank has come anew: what stood there before was of an earlier attempt.
            invited, name = there, secrets.token_hex(8)
            table.set("invitation", " ".join([name, *there.values()]))
        if there == invited and all(_read(table, f"{name} {rank}") for rank in others):
            table.set(f"{name} begins", "yes")
            return name
        if time.monotonic() > deadline:
            absent = [rank for rank in others if not there[rank]]
            absent = absent or [rank for rank in others if not _read(table, f"{name} {rank}")]
            raise TimeoutError(f"ranks {absent} of {world_size} did not come; is every node started, and reachable?")
        time.sleep(POLL_SECONDS)


def _join(table: dist.Store, rank: int, deadline: float, timeout_seconds: float) -> str:
    """Another rank: accept the invitation that names this very process, and wait until rank 0 begins with it."""
    me = secrets.token_hex(8)
    table.set(f"hello {rank}", me)
    while True:
        name, *invited = _read(table, "invitation").split() or [""]
        if me in invited[rank - 1 : rank]:
            table.set(f"{name} {rank}", "yes")
            if _read(table, f"{name} begins"):
                return name
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not invite rank {rank} within {timeout_seconds:g} s; did it start?")
        time.sleep(POLL_SECONDS)


def _read(table: dist.Store, key: str) -> str:
    """The value of a key, "" where it has none: `get` alone would wait for it."""
    return table.get(key).decode() if table.check([key]) else ""
