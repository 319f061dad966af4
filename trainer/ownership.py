"""Who may write into a run folder, and how a rank hangs together with its launcher."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.1
# How a run ends, as sysexits.h has it: EX_OK, EX_TEMPFAIL (stopped, start again), EX_CONFIG (trying again cannot help).
DONE, STOPPED, HOPELESS = 0, 75, 78
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
PR_SET_PDEATHSIG = 1
LAUNCH_MARK = "owner.launch"  # which launch began this folder anew


class RunInUse(ValueError):
    """Another live process owns the run folder."""


class OwnershipLost(RuntimeError):
    """Another process took the run folder over: this one must not write into it any more."""


class Owner:
    """The right to write into one run folder, from `claim` until `release`."""

    def __init__(self, run_dir: Path, lock: int, heartbeat_seconds: float = HEARTBEAT_SECONDS):
        self.record = run_dir / "owner.json"
        self.generation = uuid.uuid4().hex
        self._lock = lock
        self._beats = 0
        self._since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._released = threading.Event()
        fresh = self.record.with_name(f".owner.json.{self.generation}")
        self._file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._write()
            fresh.replace(self.record)
        except OSError:
            os.close(self._file)
            fresh.unlink(missing_ok=True)
            raise
        # A daemon: a run that ends without release() must not wait for it.
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_seconds,), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise OwnershipLost unless the folder is still ours; call it right before every commit."""
        record = _read_record(self.record)
        if record is None or record["generation"] != self.generation:
            by = f"process {record['pid']} on {record['host']}" if record else "a run that has ended since"
            raise OwnershipLost(f"{self.record.parent} was taken over by {by}; this process stops writing to it")

    def release(self) -> None:
        """Give the folder up, so that a successor need not wait. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join(timeout=HEARTBEAT_SECONDS)
        try:
            self.check()
            self.record.unlink()
        except (OwnershipLost, OSError) as error:
            log.warning("the owner record stays: %s", error)
        os.close(self._file)
        # Not only closed: forked children share this lock and would keep it.
        _unlock(self._lock)

    def _beat(self, seconds: float) -> None:
        warned = False
        while not self._released.wait(seconds):
            self._beats += 1
            try:
                self._write()
            except OSError as error:
                if not warned:
                    log.warning("cannot renew the heartbeat in %s: %s; training goes on", self.record, error)
                warned = True

    def _write(self) -> None:
        """Write the record in place, always of the same length.

        In place, because a full disk has no room for a second file, and because once a successor has put its
        own record there, a late heartbeat then lands in a file that nobody sees.
        """
        value = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "since": self._since,
            "generation": self.generation,
            "heartbeat": f"{self._beats:012d}",
        }
        os.pwrite(self._file, (json.dumps(value, indent=1) + "\n").encode(), 0)
        os.fsync(self._file)


def claim(run_dir: Path, wait_seconds: float = 15.0, stale_seconds: float = 60.0) -> Owner:
    """Become the one process that writes into `run_dir` (created if absent).

    On one machine a lock decides; it is free as soon as its owner is dead, and `wait_seconds` are for the
    ranks of a predecessor that is just being killed. An owner on another machine, or on a file system without
    flock, is watched: it is alive if its heartbeat advances, dead if it stands still for `stale_seconds`.
    Raises RunInUse, naming the owner, or ValueError when the folder cannot be used.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    try:
        locked = _lock(lock, run_dir, wait_seconds)
        record = _read_record(run_dir / "owner.json")
        if record and not (locked and record["machine"] == _machine()):
            _wait_until_dead(run_dir, record, stale_seconds)
        return Owner(run_dir, lock)
    except RunInUse:
        _unlock(lock)
        raise
    except OSError as error:
        _unlock(lock)
        raise _unusable(run_dir, error) from error


def in_use_by(run_dir: Path) -> str | None:
    """Who owns a run folder now, without asking for it; None where nobody does, as far as this machine can tell."""
    record = _read_record(run_dir / "owner.json")
    if record is None:
        return None
    if record["machine"] == _machine() and not os.path.exists(f"/proc/{record['pid']}"):
        return None
    return f"process {record['pid']} on {record['host']}, since {record['since']}"


def begin_anew(owner: Owner) -> Owner:
    """Rename the owned folder to `<run_dir>.old-N` if it holds a run; return the owner of the folder to use.

    Remembers there which launch began it, for `begun_by_this_launch`. Raises ValueError where the folder cannot be
    renamed, as a mount point cannot.
    """
    run_dir = owner.record.parent
    if any(path.name == "metrics.jsonl" or path.name.startswith("step_") for path in run_dir.iterdir()):
        number = 1
        while os.path.lexists(aside := run_dir.with_name(f"{run_dir.name}.old-{number}")):
            number += 1
        try:
            run_dir.rename(aside)
        except OSError as error:
            raise ValueError(f"{run_dir} holds a run and cannot become {aside.name}: {error.strerror}") from error
        log.warning("%s held a run; it is now %s", run_dir, aside)
        anew = claim(run_dir)
        owner.record = aside / owner.record.name
        owner.release()
        owner = anew
    (run_dir / LAUNCH_MARK).write_text(_this_launch())
    return owner


def begun_by_this_launch(run_dir: Path) -> bool:
    """Whether an earlier attempt of the same torchrun has set the old run aside and begun `run_dir` anew."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
        return False
    try:
        return (run_dir / LAUNCH_MARK).read_text() == _this_launch()
    except OSError:
        return False


def _this_launch() -> str:
    """Names the torchrun above this rank: its process id with the time it started, on this boot of this machine."""
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        started = "?"
    return f"{_machine()} {os.getppid()} {started}"


def die_with_parent() -> None:
    """Let the kernel kill this rank when its launcher dies; does nothing unless torch elastic started it.

    A launcher that died before the call is noticed too, when it left its process id in LAUNCH_PID. Call it
    from the main thread: the signal follows the parent's thread that started this process.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.get("LAUNCH_PID", os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("PR_SET_PDEATHSIG failed: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        print(f"the launcher (process {parent}) is gone; this rank ends too", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int, interrupted: bool = False) -> None:
    """Tell the launcher how this rank ends; the caller then raises SystemExit(code) at once.

    Local rank 0 writes the code into LAUNCH_EXIT_FILE, which scripts.launch sets. A bare torchrun restarts ranks
    that leave with 75 or 78; it is stopped by a SIGTERM from the rank. Not by one that was interrupted before training:
    torchrun may have done that itself, to restart all ranks because of another.
    """
    path = os.environ.get("LAUNCH_EXIT_FILE")
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            fresh = Path(f"{path}.{os.getpid()}")
            fresh.write_text(json.dumps({"code": code}))
            fresh.replace(path)
        except OSError as error:
            log.warning("cannot tell the launcher the exit code %s: %s", code, error)
    bare = "TORCHELASTIC_RUN_ID" in os.environ and "LAUNCH_PID" not in os.environ
    if bare and code in (STOPPED, HOPELESS) and not interrupted:
        # torchrun answers with SIGTERM to every rank; this one is on its way out already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)


def failure_elsewhere() -> int | None:
    """The code of the rank that failed and made scripts.launch stop this one; None where that is not why."""
    try:
        code = json.loads(Path(os.environ["LAUNCH_EXIT_FILE"]).read_bytes())["code"]
    except (KeyError, OSError, ValueError):
        return None
    return None if code in (DONE, STOPPED) else code


def _lock(lock: int, run_dir: Path, wait_seconds: float) -> bool:
    """True when the lock is ours, False when the file system has no locks."""
    deadline, told = time.monotonic() + wait_seconds, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RunInUse(_in_use(run_dir, _read_record(run_dir / "owner.json"))) from None
            if not told:
                log.warning("%s is in use; waiting up to %g s for it to become free", run_dir, wait_seconds)
            told = True
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            return False
        time.sleep(POLL_SECONDS)


def _unlock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            log.warning("cannot unlock the run folder: %s", error)
    os.close(lock)


def _wait_until_dead(run_dir: Path, record: dict[str, Any], stale_seconds: float) -> None:
    """Return when the owner is gone or its heartbeat stood still; RunInUse when the heartbeat advances."""
    log.warning("%s; waiting up to %g s for a sign of life", _in_use(run_dir, record), stale_seconds)
    deadline = time.monotonic() + stale_seconds
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        now = _read_record(run_dir / "owner.json")
        if now is None:
            return
        if now != record:
            raise RunInUse(_in_use(run_dir, now))
    log.warning("no heartbeat from its owner for %g s: taking %s over", stale_seconds, run_dir)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    names = {"host", "machine", "pid", "since", "generation", "heartbeat"}
    return record if isinstance(record, dict) and names <= record.keys() else None


def _machine() -> str:
    """One running kernel: locks on a local disk are shared within it, also by containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _in_use(run_dir: Path, record: dict[str, Any] | None) -> str:
    by = "another process"
    if record:
        by = f"process {record['pid']} on {record['host']}, since {record['since']}"
    return f"{run_dir} is in use by {by}; stop that run first, or choose another --out_dir"


def _unusable(run_dir: Path, error: OSError) -> Exception:
    """What to raise: a full or failing disk may recover, and a retry help; anything else is a wrong --out_dir."""
    message = f"cannot use {run_dir} as a run folder: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return OSError(error.errno, f"{message}; make room and start again")
    return ValueError(f"{message}; choose another --out_dir")
