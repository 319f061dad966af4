"""Dashboards as sinks of the monitor: Weights & Biases, and TensorBoard for who cannot or will not reach it.

A run that was killed at step 17 and goes on from its checkpoint of step 10 computes the steps 11 to 17 again. A
dashboard must show them once, and it must be live, so lines are not held back until a checkpoint has them. Instead a
sink finds out at its start up to which step the dashboard has the curve, and gives it what comes after: first the
lines of metrics.jsonl (the monitor sees to that), then those of the new steps.

- wandb cannot take back what it has, so steps that it has seen are not sent again; a resumed run computes the same
  numbers. (Where it does not, after a resume that was announced as not bit-exact or at another rate, wandb keeps the
  numbers of the first time, and metrics.jsonl has those of the second.) Nor can we count on what was handed over:
  wandb's own process ends at once when ours is killed, and takes up to 15 s of lines with it. So its word counts: the
  summary that the server has when the run is resumed there, or the files that were written offline.
- TensorBoard can take back, so there everything past the checkpoint is replaced. Its lines are flushed one by one.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

# What a start may wait for the server, and what an end may wait for the last uploads; torchrun kills after 30 s.
INIT_SECONDS, CLOSE_SECONDS = 20.0, 10.0
HEADER_BYTES = 7  # at the begin of wandb's files
# Of Weights & Biases we want the numbers, not the console, the code, the packages or the machine.
QUIET = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class Wandb:
    """A run at Weights & Biases, or its files in out_dir/wandb for `wandb sync`.

    Its x axis is our `step`; wandb's own counter, which only ever rises, is left to itself. The names are those of
    metrics.jsonl (`loss` and `learning_rate` are MiniMind's, too), with MiniMind's `epoch_time` beside them.
    """

    def __init__(
        self, run_dir: Path, *, project: str, name: str, mode: str, first_step: int, total_steps: int, config: dict
    ) -> None:
        """Without a key or a server that answers the run is kept offline, with one warning; nothing is ever asked.

        first_step: steps done already; at 0 begins a new run with a new id. Raises whatever wandb raises.
        """
        self.total_steps = total_steps
        # Else wandb also reports on its own use of itself, to a server of its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        if mode == "online" and (problem := _why_not_online(wandb)):
            log.warning("wandb is offline (%s); later: wandb sync %s/wandb/offline-run-*", problem, run_dir)
            mode = "offline"
        identity = _identity(run_dir / "wandb.json", first_step)
        for path in run_dir.glob(f"wandb/offline-run-*-{identity}/*.wandb"):
            if path.stat().st_size <= HEADER_BYTES:
                # Killed before wandb wrote anything; `wandb sync` would refuse all folders because of this one.
                shutil.rmtree(path.parent)
        # What an online run has left on the disk is with the server, as far as it goes: only an offline run counts it.
        files = sorted(run_dir.glob(f"wandb/{'offline-' if mode == 'online' else '*'}run-*-{identity}/*.wandb"))
        seen = [row for path in files for row in _rows(path)]
        with _own_exit():
            self._run = wandb.init(
                project=project,
                name=name,
                id=identity,
                dir=run_dir,
                mode=mode,
                resume="allow",
                config=config,
                allow_val_change=True,
                settings=wandb.Settings(**QUIET, init_timeout=INIT_SECONDS, finish_timeout=CLOSE_SECONDS),
            )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("val_step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        seen.append(dict(self._run.summary))
        self._has = {kind: max(row.get(kind, -1) for row in seen) for kind in ("step", "val_step")}

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand over what wandb does not have yet; returns at once, whatever the network does."""
        kind = "val_step" if "val_loss" in values else "step"
        if step <= self._has[kind]:
            return
        self._has[kind] = step
        extra = {"step": step, kind: step}
        if "step_seconds" in values:
            extra["epoch_time"] = (self.total_steps - step) * values["step_seconds"] / 60  # minutes left
        self._run.log({**values, **extra})

    def close(self) -> None:
        """Wait CLOSE_SECONDS at the most for what is not uploaded yet; the rest stays in out_dir/wandb."""
        try:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
        finally:
            # Here and not when Python ends, where wandb would wait for its process after we have said our exit code.
            self._wandb.teardown()


def wandb_mode(asked: str) -> str:
    """The mode to run in: WANDB_MODE in the environment may keep wandb off the network, or switch it off."""
    there = os.environ.get("WANDB_MODE", "")
    mode = {"dryrun": "offline", "offline": "offline", "disabled": "disabled"}.get(there, asked)
    if mode != asked:
        log.warning("wandb is %s, not %s: the environment has WANDB_MODE=%s", mode, asked, there)
    return mode


def _identity(path: Path, first_step: int) -> str:
    """The id of this run at wandb, kept in a file; a new one where the run begins at step 0."""
    if first_step:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    identity = secrets.token_hex(4)
    path.write_text(json.dumps({"id": identity}), encoding="utf-8")
    return identity


def _rows(path: Path) -> Iterator[dict[str, float]]:
    """Yield the steps in one of wandb's files, as far as it was written and is not damaged.

    They are logs in LevelDB's format: 7 bytes (checksum, length, kind) before every piece, in blocks of 32 KiB; wandb
    0.31 has no reader for Python.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, piece = path.read_bytes(), HEADER_BYTES, b""
    while position + 7 <= len(data):
        rest = 2**15 - position % 2**15
        if rest < 7:
            position += rest
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        begin, position = position + 7, position + 7 + length
        if position > len(data) or zlib.crc32(data[begin - 1 : position]) != checksum:
            return
        piece += data[begin:position]
        if kind in (1, 4):  # a whole record, or its last piece
            items = Record.FromString(piece).history.item
            names = {item.key or item.nested_key[0]: item.value_json for item in items}
            row = {name: json.loads(names[name]) for name in ("step", "val_step") if name in names}
            if row:
                # The step of a validation says nothing about the training line of that step.
                yield row if "val_step" not in row else {"val_step": row["val_step"]}
            piece = b""


def _why_not_online(wandb: ModuleType) -> str | None:
    """What keeps us from the server; None where a key is there and the server takes it."""
    quick = {"x_graphql_retry_max": 1, "x_graphql_timeout_seconds": 5, "x_graphql_retry_wait_max_seconds": 1}
    try:
        with _own_exit():
            wandb.setup(settings=wandb.Settings(**QUIET, **quick))
            has_key = wandb.login(prompt=False, verify=True)
    except Exception as problem:
        return f"the server cannot be reached or does not take the key: {' '.join(str(problem).split())}"
    finally:
        # The hasty settings were for this question only.
        wandb.teardown()
    return None if has_key else "no API key is configured (wandb login)"


@contextlib.contextmanager
def _own_exit() -> Iterator[None]:
    """Take back what wandb puts in the place of sys.exit and sys.excepthook: they say how our run ends."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before


class TensorBoard:
    """Event files in out_dir/tensorboard; look at them with: tensorboard --logdir out."""

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        """first_step: steps done already; later ones that stand in the files are taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self._record = run_dir / "tensorboard.json"  # the last step of every metric that the files have
        self._last: dict[str, int] = {}
        if first_step:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                record = json.loads(self._record.read_text(encoding="utf-8"))
                self._last = {name: min(int(step), first_step) for name, step in record.items()}
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write what the files do not have yet, to the disk: a killed run leaves no gap."""
        new = {name: value for name, value in values.items() if step > self._last.get(name, 0)}
        if not new:
            return
        for name, value in new.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last |= dict.fromkeys(new, step)
        temporary = self._record.with_name(f".{self._record.name}.tmp")
        temporary.write_text(json.dumps(self._last), encoding="utf-8")
        temporary.replace(self._record)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
