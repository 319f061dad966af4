"""start_run(): composes the parts of trainer/ into the handful of verbs that a training script reads like."""

import argparse
import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer import advice, guard, lineage
from trainer.attempts import BETWEEN_STEPS, MOST_POISONED, Attempts, gave_up_before, is_automatic
from trainer.backends import Backend, Loader, Step, StepBatch, build_backend
from trainer.checkpoint import checkpoint_step, newest_valid, resolve_weights, step_folder, step_folders, write_json
from trainer.ddp import Ranks, find_ranks
from trainer.evaluation import Validation
from trainer.lineage import TrainState
from trainer.monitor import Jsonl, Monitor, open_console
from trainer.ownership import (
    DONE,
    HOPELESS,
    STOPPED,
    Owner,
    OwnershipLost,
    begin_anew,
    begun_by_this_launch,
    claim,
    die_with_parent,
    failure_elsewhere,
    leave,
)
from trainer.plan import Plan, data_step, is_due
from trainer.profiling import Meters, Pending, combined
from trainer.recovery import StopFlag, Watchdog
from trainer.snapshots import Snapshots, find_newest, read_weights
from trainer.trackers import TensorBoard, Wandb, wandb_mode
from trainer.validator import Validator

log = logging.getLogger(__name__)

FIRST_SPEAKS_SECONDS = 5.0
MANY_SKIPS = 20


class GivenUp(RuntimeError):
    """Training cannot go on, and another start would not help."""


@contextlib.contextmanager
def start_run(args: argparse.Namespace, stage: str) -> Iterator["Run"]:
    """Own out_dir, set up logging, seeds and ranks; in the end leave with the code that says what happened.

    0: all steps are done. 75: stopped by a signal and saved, start again to go on. 78: trying again cannot help
    (a wrong option, bad data, a folder in use, three rollbacks). 1: the last checkpoint could not be written. Rank 0
    writes the code to out_dir/exit.json. An error of ours ends with its traceback and code 1, without meeting the
    other ranks: they may be inside a collective.
    """
    die_with_parent()
    rank = os.environ.get("RANK", "0")
    errors = get_error_handler()  # torchrun shows what it records as the cause of a failed job
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format="%(asctime)s %(message)s" if rank == "0" else f"%(asctime)s rank {rank}: %(message)s",
        datefmt="%H:%M:%S",
    )
    run, code, reason = None, 1, "ended by an error; its traceback is on stderr"
    stop, interrupted = StopFlag(), False
    stop.arm()
    try:
        run = _kind_of_run(args)(args, stage, stop)
        yield run
        code, reason = run.outcome()
        run.ranks.disconnect()
        if run.ranks.is_first:
            log.log(logging.INFO if code in (DONE, STOPPED) else logging.ERROR, "%s", _ending(reason, code))
    except OwnershipLost as problem:
        run.owner, code, reason = None, HOPELESS, str(problem)
        log.error("%s", _ending(reason, code))
    except GivenUp as problem:
        code, reason = HOPELESS, str(problem)
        if rank == "0":
            log.error("%s", _ending(reason, code))
    except KeyboardInterrupt:
        # Before training there is nothing to save.
        interrupted, (code, reason) = True, _stopped_early(stop)
        log.warning("%s", _ending(reason, code))
    except (ValueError, OSError) as problem:
        if run is not None and run.training:
            errors.record_exception(problem)
            raise
        if rank != "0":
            # Often all ranks find the same error, and the launcher ends the others as soon as one has left. Rank 0 has
            # to be that one, because it says the reason and writes exit.json.
            stop.disarm()
            time.sleep(FIRST_SPEAKS_SECONDS)
        code, reason = HOPELESS if isinstance(problem, ValueError) else 1, str(problem)
        if run is not None:
            reason = run.with_problems(reason)
        log.error("%s", _ending(reason, code))
    except Exception as problem:
        if stop.received is None or (run is not None and run.training):
            errors.record_exception(problem)
            raise
        # Inside an import Python may make an error of its own out of the interruption.
        interrupted, (code, reason) = True, _stopped_early(stop)
        log.warning("%s", _ending(reason, code))
    finally:
        # Another signal must not undo what is saved and said.
        stop.ignore()
        if run is not None:
            run.close(code, reason)
    leave(code, interrupted)
    if code:
        raise SystemExit(code)


def _kind_of_run(args: argparse.Namespace) -> type["Run"]:
    if not args.dry_run:
        return Run
    from trainer.preflight import DryRun  # builds on this module

    return DryRun


def _stopped_early(stop: StopFlag) -> tuple[int, str]:
    """Code and reason of a run that was interrupted before its first step."""
    if failed := failure_elsewhere():
        return failed, "stopped before the first step because another rank failed; stderr has its message"
    return STOPPED, f"stopped by {stop.received or 'SIGINT'} before the first step"


def _ending(reason: str, code: int) -> str:
    """The last thing a run says; the lines after the first are a list of details."""
    first, *details = reason.split("\n")
    return "\n".join([f"{first} (exit code {code})", *details])


class Run:
    """One training run as this rank takes part in it."""

    def __init__(self, args: argparse.Namespace, stage: str, stop: StopFlag) -> None:
        self.args, self.stage, self.stop, self.dir = args, stage, stop, Path(args.out_dir)
        self.training = self._stopping = self._unsaved = False
        self._given_weights: Path | None = None
        self._whole_passes: dict[str, int] = {}
        self._spike: guard.Spike | None = None  # noticed, and not answered yet
        self._save_again_at: int | None = None
        self._skipped = 0  # updates
        self._warned_of_memory = False
        self._skips = ""  # what the end of the run has to say about them
        self._batches: Generator[StepBatch, None, None] | None = None
        self.ranks: Ranks = find_ranks(args.device)
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        # Whether to do what one process per machine has to do for all.
        self.first_here = self.ranks.local_rank == 0
        self.on_gpu = self.ranks.device.type == "cuda"
        # A rank that torchrun restarts must not set aside what its predecessor has just saved.
        self.resumes = args.resume_from_checkpoint or begun_by_this_launch(self.dir)
        self.owner: Owner | None = None
        self.attempts: Attempts | None = None
        self.snapshots: Snapshots | None = None
        self.watchdog = Watchdog(args.ddp_timeout, args.step_timeout)
        if reason := gave_up_before(self.dir, HOPELESS):
            raise ValueError(f"an earlier attempt of this launch has given up: {reason}")
        if self.ranks.is_first:
            for note in args.notes:
                log.warning("%s", note)
        self._own_folder()
        self.monitor = Monitor(self.dir if self.owner else None)
        torch.manual_seed(args.seed)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _own_folder(self) -> None:
        """Become the one who writes into the run folder; for the first rank."""
        if self.ranks.is_first:
            self.owner = claim(self.dir)
            (self.dir / "exit.json").unlink(missing_ok=True)  # that of an earlier start

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Where a training script prepares something that can be wrong. A dry run goes on behind it, to find more."""
        return contextlib.nullcontext()

    def with_problems(self, reason: str) -> str:
        """Why the run ends, with whatever a dry run has found before."""
        return reason

    def require_parts(self) -> None:
        """After the last part: a dry run ends here where one is missing."""

    def starting_folder(self) -> Path | None:
        """Where the model's architecture and first weights come from: --from_weight's folder; None for "none".

        Once the run has a checkpoint it is that one: a resumed run must not miss a folder that was moved since.
        """
        if self.args.from_weight.lower() == "none":
            return None
        own = newest_valid(self.dir, owner=False) if self.resumes else None
        folder = own or resolve_weights(self.args.from_weight)
        unread = f", not from --from_weight {self.args.from_weight}: the run has begun already" if own else ""
        log.info("architecture and weights come from %s%s", folder, unread)
        self._given_weights = folder
        return folder

    def wrap(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], grad_clip: float
    ) -> Backend:
        """Start the process group and put the model behind the back end.

        The group starts here, not earlier, so that building a token cache for an hour trips no timeout. The optimizer
        comes as a function, because a back end may replace the parameters first.
        """
        args = self.args
        if self.stop.received:
            # Python drops what is raised in a callback, as in logging's own after a fork: the interrupt was lost there.
            raise KeyboardInterrupt
        if self.world_size > 1:
            self.stop.disarm()
        self.ranks.connect(args.ddp_timeout)
        model.activation_checkpointing = args.activation_checkpointing
        self.backend = build_backend(
            "ddp",
            model,
            make_optimizer,
            self.ranks,
            dtype=args.dtype,
            grad_clip=grad_clip,
            seed=args.seed,
            compile=args.compile,
            bucket_cap_mb=args.ddp_bucket_cap_mb,
            find_unused_parameters=args.find_unused_parameters,
        )
        return self.backend

    def resume(
        self,
        loader: Loader,
        validations: Sequence[Validation],
        *,
        fingerprint: dict[str, object],
        write_model: Callable[[Path, dict[str, Tensor]], None],
        read_model: Callable[[Path], dict[str, Tensor]] = read_weights,
    ) -> TrainState:
        """Go on from the newest valid checkpoint of out_dir, or start at step 0; print what the run will be.

        fingerprint: what must not change over the life of the run (data, tokenizer, model, ...); the seed and the
        global batch join it here. write_model(folder, weights) writes the model's part of a checkpoint and
        read_model(folder) returns the weights that it holds.
        """
        args = self.args
        self.loader = loader
        self.validator = Validator(
            validations,
            self.ranks,
            self.monitor,
            self.backend,
            interval=args.eval_interval,
            given_weights=self._given_weights is not None,
        )
        options = {k: v for k, v in vars(args).items() if k not in ("given", "notes", "command", "dry_run")}
        names = ("max_seq_len", "epochs", "max_steps", "learning_rate", "base_batch_size", "lr_scaling", "lr_schedule")
        # Ranks that disagree on what comes when would wait for one another for ever, or mix two data sets.
        rhythm = ("warmup_steps", "eval_interval", "checkpoint_interval", "log_interval", "spike_threshold")
        agreed = [options[name] for name in (*names, *rhythm, "dtype", "seed")]
        sizes = (loader.batch_size, loader.accumulation, len(loader), loader.tokens_per_epoch)
        self.ranks.require_same([fingerprint, self.validator.parts, sizes, agreed])
        if self.owner is not None and not self.resumes:
            self.owner = begin_anew(self.owner)
        if self.owner is not None:
            newest = max(map(checkpoint_step, step_folders(self.dir)), default=0)
            self.attempts = Attempts(self.dir, newest, is_automatic())
        found = self._find_newest()
        if found:
            saved = lineage.read_saved(step_folder(self.dir, found))
            loader.global_batch = lineage.global_batch(saved, options, loader.global_batch)
        self.plan = Plan(
            samples=len(loader),
            tokens_per_epoch=loader.tokens_per_epoch,
            world_size=self.world_size,
            batch_size=loader.batch_size,
            accumulation=loader.accumulation,
            global_batch=loader.global_batch,
            warmup_steps=args.warmup_steps,
            **{name: getattr(args, name) for name in names},
        )
        fingerprint = {
            "stage": self.stage,
            "seed": args.seed,
            "global_batch": self.plan.global_batch,
            "max_seq_len": args.max_seq_len,
            **fingerprint,
        }
        self.snapshots = Snapshots(
            self.dir,
            self.ranks,
            self.owner,
            self.monitor,
            last_step=found,
            keep=args.keep_checkpoints,
            background=args.async_save,
            fingerprint=fingerprint,
            options=options,
            environment=lineage.environment(self.ranks, options),
            write_model=write_model,
            read_model=read_model,
        )
        state = self._leave_out_poison(self.snapshots.restore(self.backend))
        if self.ranks.is_first:
            self._announce(state)
            self._open_sinks(state)
        return self._begin(state)

    def _find_newest(self) -> int:
        """Step of the checkpoint to go on from; 0 without one. A collective."""
        return find_newest(self.dir, self.ranks)

    def _announce(self, state: TrainState) -> None:
        """Say what is about to happen."""
        args, plan, snapshots = self.args, self.plan, self.snapshots
        advice.announce(
            self.dir,
            self.ranks,
            plan,
            snapshots.environment,
            step=state.step,
            parameters=self.backend.parameter_count,
            trained=self.backend.trained_count,
            workers=args.num_workers,
            checkpoint_interval=args.checkpoint_interval,
            keep=args.keep_checkpoints,
        )

    def _open_sinks(self, state: TrainState) -> None:
        """Write down the options, and open whatever takes the run's numbers."""
        args, plan, snapshots = self.args, self.plan, self.snapshots
        write_json(self.dir / "options.json", snapshots.options)
        kind = "resumed" if state.step else "started"
        self.monitor.event(kind, step=state.step, command=args.command, environment=snapshots.environment)
        self.monitor.sinks = [Jsonl(self.dir / "metrics.jsonl")]
        if args.use_wandb and (mode := wandb_mode(args.wandb_mode)) != "disabled":
            size = f"Epoch-{plan.epochs:g}-BatchSize-{args.batch_size}-LearningRate-{args.learning_rate:g}"
            names = {"project": args.wandb_project, "name": f"{args.wandb_project}-{size}", "mode": mode}
            config = {**snapshots.options, "run": snapshots.fingerprint, "environment": snapshots.environment}
            steps = {"first_step": state.step, "total_steps": plan.total_steps}
            self.monitor.join("wandb", partial(Wandb, self.dir, config=config, **names, **steps))
        if args.use_tensorboard:
            self.monitor.join("TensorBoard", partial(TensorBoard, self.dir, first_step=state.step))
        # Last, so that no dashboard writes into the progress bar or brings the log up to date.
        self.monitor.show(open_console(plan.total_steps, state.step, plan.epoch_of))

    def _leave_out_poison(self, state: TrainState) -> TrainState:
        """Skip the data steps in which starts in a row have died; the first rank knows them."""
        mine = self.attempts.record.poisoned if self.attempts else ()
        count, *poisoned = self.ranks.sum([len(mine), *mine, *[0] * (MOST_POISONED - len(mine))])
        skipped = {*state.skipped, *map(int, poisoned[: int(count)])}
        if self.attempts and self.attempts.new_poison is not None:
            step = self.attempts.new_poison
            log.warning("the last two starts died in data step %d; its samples are left out from now on", step)
            self.monitor.event("poison", data_step=step, sample_ids=self.loader.sample_ids(step))
        return dataclasses.replace(state, skipped=tuple(sorted(skipped)))

    def _begin(self, state: TrainState) -> TrainState:
        """Arm the signals, make up for a validation that a stop left out, fetch the first step, prove given weights."""
        self.stop.install()
        self.training = True
        # What an earlier start has said is not said again.
        passes = self.loader.epochs_of(data_step(state.step, state.skipped))
        self._whole_passes = {name: int(now) for name, now in passes.items()}
        if self.validator.is_due(state, self.plan.total_steps):
            state = self.validator.validate(state)
        self._serve(state)
        if self.continues(state) and self._given_weights and not state.step:
            vocab_size = self.snapshots.fingerprint["model"]["vocab_size"]
            loss = self.validator.prove_weights(self._batch.micro_batches, self._target_tokens, vocab_size)
            if not math.isfinite(loss):
                raise GivenUp(f"the given weights have a loss of {loss}; they are damaged, give others: --from_weight")
        self.meters = Meters(self.backend.work)
        self.watchdog.start()
        return state

    def _serve(self, state: TrainState) -> None:
        """Let the loader begin with the step that comes next, and fetch that."""
        if self._batches is not None:
            self._batches.close()
        self._step, self._pending = state.step, None
        steps = range(state.step, self.plan.total_steps)
        self._batches = self.loader.iterate(data_step(step, state.skipped) for step in steps)
        if self.continues(state):
            self._batch = next(self._batches)
            (self._target_tokens,) = self.ranks.sum([self._batch.target_tokens])

    def continues(self, state: TrainState) -> bool:
        """Whether steps remain and no rank was told to stop."""
        return state.step < self.plan.total_steps and not self._stopping

    def next_step(self, state: TrainState) -> Step:
        """This rank's part of the next step; its target tokens are those of all ranks."""
        batch = self._batch
        if self.attempts:
            self.attempts.enter(data_step(state.step, state.skipped))
        return Step(state.step, batch.micro_batches, batch.first_sequences, int(self._target_tokens))

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return self.plan.rate(step)

    def after_step(self, state: TrainState, *, loss: Tensor, grad_norm: Tensor, rate: float) -> TrainState:
        """Count the step and agree with the other ranks; log, validate and save where that is due.

        The one small all-reduce carries the next step's tokens, the stop flag, and the numbers of the step *before*
        this one, which have reached the host by now: the loop never waits for the device, except to save.
        """
        tokens = int(self._target_tokens)
        self.meters.clock.count(tokens)
        state = dataclasses.replace(state, step=state.step + 1, tokens=state.tokens + tokens)
        numbers = {"learning_rate": rate, "tokens": state.tokens}
        done = Pending(state.step, numbers, loss, grad_norm)
        with self.meters.waiting_for_data():
            self._batch = next(self._batches, None)
        coming = self._batch.target_tokens if self._batch else 0
        stopped = float(self.stop.received is not None)
        mine = self.meters.read() if self._is_logged(state.step) else {}
        shared = self.ranks.slots(mine.values())
        state, (self._target_tokens, stops, *shared) = self._agree(state, [coming, stopped, *shared])
        if mine:
            everyones = {name: shared[index :: len(mine)] for index, name in enumerate(mine)}
            numbers |= combined(everyones) | self._passes(state)
            self._watch_memory(state.step, numbers)
        self._pending, self._step, self._stopping = done, state.step, stops > 0
        self.monitor.tick(state.step)
        self.watchdog.step_done()

        ends = self._stopping or state.step == self.plan.total_steps
        # A stop has only so many seconds: the validation is made up for at the next start.
        validates = self.validator.is_due(state, self.plan.total_steps) and not self._stopping
        saves = ends or is_due(state.step, self.args.checkpoint_interval) or state.step == self._save_again_at
        if validates or saves:
            # The curve up to here must be on the disk before a checkpoint says that it is.
            state, _ = self._agree(state, [])
        if self._spike and (back := self._roll_back(state, self._spike)):
            return back
        if validates or saves:
            if self.attempts:
                self.attempts.enter(BETWEEN_STEPS)
            with self.meters.clock.paused(), self.watchdog.patient():
                before, state = state, self.validator.validate(state) if validates else state
                if saves or state.best_step == state.step:
                    state = self._save(state, before, ends)
        return state

    def _roll_back(self, state: TrainState, spike: guard.Spike) -> TrainState | None:
        """Return to the newest checkpoint before a spike, and leave out the data that led to it; None without one."""
        self._spike = None
        first, last = spike.first_update, spike.last_update
        losses = ", ".join(f"{loss:.3f}" for loss in spike.losses) or "not finite"
        # Of two runs one may have been stopped and have a checkpoint more: both come to `first` with the same bits.
        target = self.snapshots.newest_before(first)
        self.monitor.event("spike", step=last + 1, level=spike.level, losses=spike.losses, stable_step=target)
        what = f"step {last + 1}: the loss left its level of {spike.level:.3f} ({losses})"
        if not target:
            if self.ranks.is_first:
                log.warning("%s; no checkpoint before step %d is left to go back to, so training goes on", what, first)
            return None
        if state.rollbacks == guard.MOST_ROLLBACKS:
            raise GivenUp(
                f"{what} once more after {state.rollbacks} rollbacks; the newest stable checkpoint is that of step "
                f"{target}; lower --learning_rate or look at the data (events.jsonl has their sample ids)"
            )
        window = [data_step(update, state.skipped) for update in range(first, last + 1)]
        with self.meters.clock.paused(), self.watchdog.patient():
            back = self.snapshots.return_to(target, self.backend)
        back = dataclasses.replace(
            back, skipped=tuple(sorted({*state.skipped, *window})), rollbacks=state.rollbacks + 1
        )
        if self.ranks.is_first:
            log.warning("%s; back to step %d, without the data of steps %d to %d", what, target, first + 1, last + 1)
        ids = [self.loader.sample_ids(number) for number in window]
        self.monitor.event("rollback", from_step=state.step, to_step=target, skipped=window, sample_ids=ids)
        self._serve(back)
        return back

    def _passes(self, state: TrainState) -> dict[str, float]:
        """How often each source of a mixture was passed through; a further pass is said."""
        passes = self.loader.epochs_of(data_step(state.step, state.skipped))
        for name, now in passes.items():
            if int(now) > self._whole_passes.get(name, 0) and self.ranks.is_first:
                log.info("step %d: source %s ran out and begins pass %d", state.step, name, int(now) + 1)
        self._whole_passes = {name: int(now) for name, now in passes.items()}
        return {f"epochs/{name}": now for name, now in passes.items()}

    def _watch_memory(self, step: int, numbers: dict[str, float]) -> None:
        """Warn once where the memory that the run lives in is nearly full."""
        args, name = self.args, "gpu_memory_share" if self.on_gpu else "host_memory_share"
        what = "a GPU's memory" if self.on_gpu else "the machine's memory (by all processes on it)"
        split = args.batch_size, args.gradient_accumulation_steps, args.activation_checkpointing
        warning = advice.full_memory(numbers.get(name, 0.0), what, *split)
        if warning and self.ranks.is_first and not self._warned_of_memory:
            log.warning("step %d: %s", step, warning)
            self._warned_of_memory = True

    def _save(self, state: TrainState, before: TrainState, ends: bool) -> TrainState:
        """Save, twice if need be at the end of a run; a best validation counts only with its checkpoint."""
        for _ in range(2 if ends else 1):
            if self.snapshots.save(self.backend, state, self.meters.clock.step_seconds, waits=ends):
                return state
        self._unsaved = ends
        # Sooner than at the next regular save: until then a crash costs what was trained since the last one.
        self._save_again_at = state.step + max(1, self.args.checkpoint_interval // 10)
        best = {name: getattr(before, name) for name in ("best_step", "best_val_loss", "best_val_set")}
        return dataclasses.replace(state, **best)

    def _agree(self, state: TrainState, values: list[float]) -> tuple[TrainState, list[float]]:
        """Sum values over the ranks, and settle the pending step with the same collective."""
        pending, self._pending = self._pending, None
        loss, grad_norm = pending.read() if pending else (0.0, 0.0)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # A loss that is not finite is sent as zero: the flag beside it says enough.
        *values, loss, unfinite = self.ranks.sum([*values, loss if finite else 0.0, float(not finite)])
        if pending is None:
            return state, values
        if unfinite:
            state = dataclasses.replace(state, skipped_updates=state.skipped_updates + 1)
            self._skipped = state.skipped_updates
            self._skips = f"; {state.skipped_updates} updates were skipped, their loss or gradient was not finite"
            ids = self.loader.sample_ids(data_step(pending.step - 1, state.skipped))
            self.monitor.event("skipped_update", step=pending.step, sample_ids=ids)
            if self.ranks.is_first:
                log.warning("step %d: loss or gradient not finite, update skipped; samples %s", pending.step, ids)
        loss = math.nan if unfinite else loss
        if self.ranks.is_first and self._is_logged(pending.step):
            counts = {"skipped_updates": state.skipped_updates, "rollbacks": state.rollbacks}
            counts["failed_saves"] = self.snapshots.failed_saves
            self.monitor.write(pending.step, {"loss": loss, "grad_norm": grad_norm, **pending.numbers, **counts})
        return self._guard(state, pending.step, loss), values

    def _guard(self, state: TrainState, step: int, loss: float) -> TrainState:
        """Show the loss guard the loss of a step."""
        if not self.args.spike_threshold:
            return state
        # Not by what lies on the disk, which depends on where a run was stopped: two runs decide alike.
        armed_from = max(self.plan.warmup_steps, self.args.checkpoint_interval)
        watch, spike = guard.judge(state.watch, step, loss, self.args.spike_threshold, armed_from)
        self._spike = self._spike or spike
        return dataclasses.replace(state, watch=watch)

    def _is_logged(self, step: int) -> bool:
        return is_due(step, self.args.log_interval) or step in (1, self.plan.total_steps)

    def outcome(self) -> tuple[int, str]:
        """Exit code and reason once the loop has ended."""
        if self._unsaved:
            newest = f"the newest checkpoint is that of step {self.snapshots.last_step}"
            return 1, f"step {self._step} could not be saved; {newest}"
        if self._stopping and self._step < self.plan.total_steps:
            signal = self.stop.received or "a signal to another rank"
            return STOPPED, f"stopped by {signal} after step {self._step}{self._skips}"
        # Not the few with which float16 finds its scale.
        if self._skipped > max(MANY_SKIPS, self._step / 2):
            return HOPELESS, f"the run has diverged{self._skips}; lower --learning_rate"
        return DONE, f"all {max(self._step, self.plan.total_steps)} steps are done{self._skips}"

    def close(self, code: int, reason: str) -> None:
        """End the loader's workers, write exit.json, close the sinks and give the folder back.

        In this order: a dashboard may take seconds, in which we may be killed, and a sink writes into the folder.
        """
        self.watchdog.stop()
        if self.snapshots is not None:
            with contextlib.suppress(OwnershipLost):
                self.snapshots.finish()
        if self._batches is not None:
            # By hand: after an error its traceback keeps the loader alive, and Python waits for the workers at exit.
            self._batches.close()
        if self.owner is not None:
            with contextlib.suppress(OSError):
                write_json(self.dir / "exit.json", {"code": code, "reason": reason})
            self.monitor.event("ended", code=code, reason=reason)
            if self.attempts:
                self.attempts.close(orderly=code in (DONE, STOPPED))
        self.monitor.close()
        if self.owner is not None:
            self.owner.release()
