"""Two hosts as network namespaces, and the link between them cut while they train."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.faults import EQUAL, OPTIONS, ROOT, STEPS, Bench, Case, Fault, Job
from scripts.faults_processes import Broken, alive, wait_for

# Of a step, and of a save or an evaluation; the long cut is longer than both.
STEP_TIMEOUT, OTHER_TIMEOUT = 8, 20
SHORT_SECONDS, LONG_SECONDS = 2.0, 30.0
ENDS_SECONDS = 180
NOTHING_HANGS = f"the run ends within {ENDS_SECONDS} s after the link is back, no process is left"
NETWORK = "10.213.77"
PORT = 29_451


class Pair:
    """One run over two hosts: a launcher in each namespace, both on the same run folder."""

    def __init__(self, bench: Bench, name: str, hosts: list[str]) -> None:
        run_dir = bench.path(name)
        self.jobs = [Job(run_dir, self._command(bench, run_dir, hosts, number), {}) for number in (0, 1)]
        self.jobs[1].log = run_dir.with_name(f"{name}-host1.log")
        for job in self.jobs:
            job.log.unlink(missing_ok=True)
            # gloo asks for the address of the host's name, which belongs to neither namespace.
            job.environment["GLOO_SOCKET_IFNAME"] = "drill"

    @staticmethod
    def _command(bench: Bench, run_dir: Path, hosts: list[str], number: int) -> list[object]:
        command = ["ip", "netns", "exec", hosts[number], sys.executable, "-m", "scripts.launch", "--nnodes", 2]
        command += ["--nproc_per_node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", run_dir.name]
        command += ["--rdzv-endpoint", f"{NETWORK}.1:{PORT}", "--rdzv-conf", f"is_host={1 - number}"]
        command += ["--local-addr", f"{NETWORK}.{number + 1}", ROOT / "train_pretrain.py", *OPTIONS]
        command += ["--max_steps", STEPS, "--data_path", bench.texts, "--cache_dir", bench.cache]
        return [*command, "--step_timeout", STEP_TIMEOUT, "--ddp_timeout", OTHER_TIMEOUT, "--out_dir", run_dir]

    def __enter__(self) -> "Pair":
        for job in self.jobs:
            job.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.end()

    def finish(self, seconds: float) -> None:
        """Wait for both launchers; Broken unless both say that all is done."""
        deadline = time.monotonic() + seconds
        for job in self.jobs:
            code = job.wait(max(1.0, deadline - time.monotonic()))
            if code != 0:
                raise Broken(f"host {self.jobs.index(job)} ended with {code}: {job.last_words()}")


def network(bench: Bench, case: Case) -> None:
    """Cut the link for a moment that a run sits out, or for longer than its limits."""
    draw = random.Random(case.seed)
    with two_hosts() as hosts:
        straight = _straight(bench, hosts)
        with Pair(bench, f"network-{case.seed}", hosts) as pair:
            job = pair.jobs[0]
            step, seconds = draw.randint(4, STEPS - 12), draw.choice([SHORT_SECONDS, LONG_SECONDS])
            if not job.reaches(lambda: job.step() >= step, 180, f"step {step}"):
                raise Broken(f"the run ended before step {step}: {job.last_words()}")
            below = [pid for one in pair.jobs for pid in one.below()]
            _link(hosts[1], "down")
            before = job.step()
            time.sleep(seconds)
            stood_still = job.step() < STEPS
            _link(hosts[1], "up")
            if not stood_still:
                return
            case.strike(f"link down for {seconds:.0f} s at step {before}")
            back = time.monotonic()
            try:
                pair.finish(ENDS_SECONDS)
            except Broken as problem:
                case.expect(NOTHING_HANGS, False, f"{case.note}: {problem}")
                return
            case.measure("restarts", float(len(job.events("resumed"))))
            case.measure(f"seconds to the end after {seconds:.0f} s without a link", time.monotonic() - back)
            with contextlib.suppress(Broken):
                wait_for(lambda: not alive(below), 5, "the processes to end")
            case.expect(NOTHING_HANGS, not alive(below), f"{case.note}: {len(alive(below))} processes are left")
            difference = job.difference(straight)
            case.expect(EQUAL, not difference, f"{case.note}: {difference}")


def _straight(bench: Bench, hosts: list[str]) -> Job:
    """The undisturbed run over two hosts, made once."""
    if "network" not in bench.references:
        with Pair(bench, "straight-network", hosts) as pair:
            pair.finish(180)
        bench.references["network"] = pair.jobs[0]
    return bench.references["network"]


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two namespaces with a link between them; gone afterwards."""
    names = [f"drill-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            if number == 0:
                _ip("-n", name, "link", "add", "drill", "type", "veth", "peer", "name", "drillpeer")
            else:
                _ip("-n", names[0], "link", "set", "drillpeer", "netns", name, "name", "drill")
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "drill")
            _link(name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def _link(host: str, state: str) -> None:
    _ip("-n", host, "link", "set", "drill", state)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Broken(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def lacks() -> str:
    """What this machine lacks for network namespaces."""
    if not shutil.which("ip"):
        return "ip is not installed (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts():
            return ""
    except Broken as problem:
        return f"no network namespaces here ({problem})"


FAULTS = {"network": Fault((NOTHING_HANGS, EQUAL), network, lacks)}
