"""Dashboards as sinks of the monitor: Weights & Biases, and TensorBoard for who cannot or will not reach it.

A run that was killed at step 17 and goes on from its checkpoint of step 10 computes the steps 11 to 17 again. A
dashboard must show them once, and it must be live, so lines are not held back until a checkpoint has them. Instead the
run folder remembers the last step that was sent of every metric (`Sent`). wandb cannot take back what it has, so there
the steps that it has seen are not sent again: a resumed run computes the same numbers. (Where it does not, because a
resume was announced as not bit-exact or changed the rate, the curve in wandb keeps the numbers of the first time and
metrics.jsonl has those of the second.) TensorBoard can take back, so there everything past the checkpoint is replaced.

What was sent is noted right after it was handed over: a kill exactly in between sends one line twice. wandb's own
process takes the line over, and a killed training process does not take it along; a machine that loses power loses
what the dashboard had not written yet, while metrics.jsonl still has it.
"""

import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

# What a start may wait for the server, and what an end may wait for the last uploads; torchrun kills after 30 s.
INIT_SECONDS, CLOSE_SECONDS = 20.0, 10.0
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


class Sent:
    """What a dashboard has of this run: its id there, and the last step of every metric. Kept in a file."""

    def __init__(self, path: Path, first_step: int) -> None:
        """first_step: steps done already. A run that begins at 0 is a new one, whatever the file says."""
        self.path, self.id, self.steps = path, secrets.token_hex(4), {}
        if first_step:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text(encoding="utf-8"))
                self.id, self.steps = str(record["id"]), dict(record["steps"])

    def new(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Those of the values that the dashboard does not have."""
        return {name: value for name, value in values.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, values: dict[str, float]) -> None:
        """Remember that the dashboard has them."""
        self.steps |= dict.fromkeys(values, step)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps({"id": self.id, "steps": self.steps}), encoding="utf-8")
        temporary.replace(self.path)


class Wandb:
    """A run at Weights & Biases, or its files in out_dir/wandb for `wandb sync`.

    Its x axis is our `step`; wandb's own counter, which only ever rises, is left to itself. The names are those of
    metrics.jsonl (`loss` and `learning_rate` are MiniMind's, too), with MiniMind's `epoch_time` beside them.
    """

    def __init__(
        self, run_dir: Path, *, project: str, name: str, mode: str, first_step: int, total_steps: int, config: dict
    ) -> None:
        """Without a key or a server that answers the run is kept offline, with one warning; nothing is ever asked.

        first_step: steps done already. Raises whatever wandb raises.
        """
        self.total_steps = total_steps
        self._sent = Sent(run_dir / "wandb.json", first_step)
        # Else wandb also reports on its own use of itself, to a server of its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        if mode == "online" and (problem := _why_not_online(wandb)):
            log.warning("wandb is offline (%s); later: wandb sync %s/wandb/offline-run-*", problem, run_dir)
            mode = "offline"
        with _own_exit():
            self._run = wandb.init(
                project=project,
                name=name,
                id=self._sent.id,
                dir=run_dir,
                mode=mode,
                resume="allow",
                config=config,
                allow_val_change=True,
                settings=wandb.Settings(**QUIET, init_timeout=INIT_SECONDS, finish_timeout=CLOSE_SECONDS),
            )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand over what wandb does not have yet; returns at once, whatever the network does."""
        if new := self._sent.new(step, values):
            extra = {}
            if "step_seconds" in new:
                extra["epoch_time"] = (self.total_steps - step) * new["step_seconds"] / 60  # minutes left
            self._run.log({"step": step, **new, **extra})
            self._sent.note(step, new)

    def close(self) -> None:
        """Wait CLOSE_SECONDS at the most for what is not uploaded yet; the rest stays in out_dir/wandb."""
        try:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
        finally:
            # Here and not when Python ends, where wandb would wait for its process after we have said our exit code.
            self._wandb.teardown()


def _why_not_online(wandb: ModuleType) -> str | None:
    """What keeps us from the server; None where a key is there and the server takes it."""
    quick = {"x_graphql_retry_max": 1, "x_graphql_timeout_seconds": 5, "x_graphql_retry_wait_max_seconds": 1}
    try:
        with _own_exit():
            wandb.setup(settings=wandb.Settings(**QUIET, **quick))
            has_key = wandb.login(prompt=False, verify=True)
    except Exception as problem:
        return " ".join(str(problem).split())
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

        self._sent = Sent(run_dir / "tensorboard.json", first_step)
        self._sent.steps = {name: min(step, first_step) for name, step in self._sent.steps.items()}
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write what the files do not have yet, to the disk: a killed run leaves no gap."""
        if new := self._sent.new(step, values):
            for name, value in new.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
            self._sent.note(step, new)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
