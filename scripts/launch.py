"""torchrun with honest exit codes and signals: python -m scripts.launch [torchrun options] script.py [...]

SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 reach every rank as SIGTERM, and it may finish its step and save.
The launcher leaves with the run's own code: 0 done, 75 stopped and resumable, 78 retrying cannot help, 2 wrong
options, 1 anything else. Ranks that leave with 2, 75 or 78 are not restarted under --max-restarts; others are,
as torchrun does it. On one node a free port is chosen (--standalone).
"""

import argparse
import difflib
import functools
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

from trainer.ownership import HOPELESS, STOPPED

USAGE = 2  # argparse's code
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
# What a rank ends with that a stop signal kills: it had no handler yet, so it had not begun, and nothing is lost.
KILLED_BY_STOP = {-number for number in SIGNALS}
STRANDED_SECONDS = 5.0


class Stop:
    """Whether the launcher was told to stop; the agent asks where it can take an exception."""

    def __init__(self, exit_file: Path):
        self.exit_file = exit_file  # {"code": ...} of local rank 0 when it leaves, or of one that failed before
        self.lock = threading.RLock()
        self.signal: signal.Signals | None = None
        self.has_ranks = False
        self.codes: dict[int, int] = {}  # of the ranks, by rank, once they were stopped
        # Under nohup a hang-up is ignored on purpose.
        hang_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self.signals = [s for s in SIGNALS if not (s == signal.SIGHUP and hang_up_ignored)]

    def listen(self) -> None:
        """Take over the signals, also while the main thread sits in a blocking call of torch's."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self.signals:
            signal.signal(number, self.handle)

        def forward() -> None:
            while True:
                self.handle(os.read(read, 1)[0])

        threading.Thread(target=forward, daemon=True).start()

    def handle(self, number: int, frame: object = None) -> None:
        """Remember the first signal; leave at once while there are no ranks that could lose something."""
        with self.lock:
            self.signal = self.signal or signal.Signals(number)
            if not self.has_ranks:
                self.exit_file.unlink(missing_ok=True)
                os._exit(STOPPED)


def exit_code(codes: Collection[int], stopping: bool) -> int:
    """The run's code out of its ranks' codes, where -15 says that SIGTERM killed a rank, and so on."""
    own = set(codes) - {0} - KILLED_BY_STOP
    killed = not KILLED_BY_STOP.isdisjoint(codes)
    if own and own <= {STOPPED, HOPELESS}:
        return max(own)
    # Whatever befell the others of a run that stops before it has begun is of no account.
    if (killed and not own) or (stopping and (killed or not codes)):
        return STOPPED
    if own == {USAGE}:
        return USAGE
    return 1 if any(codes) else 0


def make_agent(stop: Stop) -> type:
    """torch's agent with safe moments for a signal, time to save, and codes that are final."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    class Agent(LocalElasticAgent):
        def ranks(self):
            return [h.proc for h in self._pcontext.subprocess_handlers.values()] if self._pcontext else []

        def _rendezvous(self, worker_group):
            with stop.lock:
                stop.has_ranks, self._pcontext = False, None
            if stop.signal is not None:
                stop.handle(stop.signal)
            super()._rendezvous(worker_group)

        def _start_workers(self, worker_group):
            with stop.lock:
                stop.has_ranks = True
            stop.exit_file.unlink(missing_ok=True)
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group):
            if stop.signal is not None:
                name = stop.signal.name
                say(f"{name}: the ranks finish their step and save it (to end at once, without: kill -9 {os.getpid()})")
                raise SignalException(name, signal.SIGTERM)
            failed = [rank.poll() for rank in self.ranks() if rank.poll()]
            code = exit_code(failed, stopping=True)
            if code not in (0, STOPPED) and not stop.exit_file.exists():
                # Rank 0 will be told to stop, and shall know why.
                stop.exit_file.write_text(json.dumps({"code": code}))
            if any(code in (STOPPED, HOPELESS) for code in failed):
                # torch would give the others 30 seconds, which may be less than they need for their save.
                self._shutdown(timeout=self._shutdown_timeout)
            result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if codes and exit_code(codes, stopping=False) in (STOPPED, HOPELESS, USAGE):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
            ranks = self.ranks()
            # Only the ranks: torch signals data loading workers too, which the rest of the step may need.
            for rank in ranks:
                rank.send_signal(death_sig)
            deadline = time.monotonic() + timeout
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                if any(rank.poll() == -death_sig for rank in ranks):
                    # That rank had no handler yet; the others would wait for it until their timeout.
                    deadline = min(deadline, time.monotonic() + STRANDED_SECONDS)
                time.sleep(0.02)
            super()._shutdown(death_sig, timeout=1)
            stop.codes = {w.global_rank: r.poll() for w, r in zip(self._worker_group.workers, ranks, strict=False)}

    return Agent


def parse(argv: list[str], signals: list[signal.Signals]) -> argparse.Namespace:
    """torchrun's arguments, with our help text and defaults."""
    import torch.distributed.run as torchrun

    from trainer.advice import cpus
    from trainer.options import new_parser

    parser = torchrun.get_args_parser()
    # Torch's parser with the words of ours: one line, and the option that was meant.
    parser.error = functools.partial(type(new_parser("")).error, parser)
    parser.usage = "python -m scripts.launch [torchrun options] script.py [script options]"
    parser.description = __doc__.split("\n\n", 1)[1]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args(argv)
    try:
        ranks = torchrun.determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        parser.error(f"--nproc-per-node {args.nproc_per_node}: {error}")
    script = Path(args.training_script)
    if not (args.module or args.no_python or script.exists()):
        close = difflib.get_close_matches(script.name, [path.name for path in script.parent.glob("*.py")], n=1)
        hint = f"did you mean {script.with_name(close[0])}?" if close else "name the script after torchrun's options"
        parser.error(f"{script}: no such script (looked from {Path.cwd()}); {hint}")
    remote = args.rdzv_endpoint or args.rdzv_backend != "static" or args.master_port is not None
    if args.nnodes in ("1", "1:1") and args.node_rank == 0 and not remote:
        args.standalone = True
    args.signals_to_handle = ",".join(number.name for number in signals)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus() // max(1, ranks))))
    return args


def launch(argv: list[str], stop: Stop) -> int:
    """Run torch's launcher in this process; return the run's exit code."""
    import torch.distributed.launcher.api as api
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    args = parse(argv, stop.signals)
    api.LocalElasticAgent = make_agent(stop)
    # torch sets its handlers again with every start of ranks, and they raise wherever the agent is.
    multiprocessing.api._terminate_process_handler = stop.handle
    logging.getLogger(multiprocessing.api.__name__).setLevel(logging.CRITICAL)  # we say it in one line
    try:
        run(args)
        return 0
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except multiprocessing.SignalException:
        codes = stop.codes
    for rank, code in sorted(codes.items()):
        by_us = code == -signal.SIGTERM and (stop.signal is not None or len(set(codes.values())) > 1)
        if code not in (0, STOPPED, HOPELESS) and not by_us:
            say(f"rank {rank} " + (f"exited with {code}" if code > 0 else f"died of {signal.Signals(-code).name}"))
    # A rank on its way out may still die of a second SIGTERM; the code that it left behind is the truth.
    stopped = stop.signal is not None or set(codes.values()) <= {0, -signal.SIGTERM}
    if stopped and stop.exit_file.exists():
        return json.loads(stop.exit_file.read_text())["code"]
    return exit_code(codes.values(), stopping=stop.signal is not None)


def say(message: str) -> None:
    print(f"launch: {message}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Listen to signals from the first moment on, then let torch work."""
    stop = Stop(Path(tempfile.gettempdir()) / f"launch-{os.getpid()}-{secrets.token_hex(8)}.json")
    stop.listen()
    os.environ.update(LAUNCH_PID=str(os.getpid()), LAUNCH_EXIT_FILE=str(stop.exit_file))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        code = launch(argv, stop)
    finally:
        stop.exit_file.unlink(missing_ok=True)
    endings = {
        STOPPED: "stopped; the same command goes on from here",
        HOPELESS: "gave up; retrying cannot help",
    }
    if code:
        say(f"{endings.get(code, 'failed')} (exit code {code})")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
