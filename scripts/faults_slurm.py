"""A real Slurm on this machine: jobs that are preempted, requeued, cancelled, and that lose a worker.

The cluster and its runs are those of tests/test_slurm.py, which needs no cluster of yours; a case is one of its tests.
"""

import importlib.util
import re
import shutil
import subprocess
import sys

from scripts.faults import ROOT, Bench, Case, Fault
from scripts.faults_processes import Broken

TESTS = ROOT / "tests" / "test_slurm.py"
GOES_ON = "a job that Slurm stops, requeues or injures goes on with the same curve and weights"
TEST_SECONDS = 600


def slurm(bench: Bench, case: Case) -> None:
    """Run the test of this seed."""
    tests = [line for line in _pytest("--collect-only", "-m", "integration", str(TESTS)).splitlines() if "::" in line]
    if not tests:
        raise Broken(f"{TESTS} has no tests")
    test = tests[case.seed % len(tests)]
    said = _pytest("-rs", test)
    if re.search(r"^\d+ passed", said, re.MULTILINE):
        case.strike(test.split("::")[1])
    elif "failed" in said or "error" in said:
        case.expect(GOES_ON, False, f"{test}: {' | '.join(said.splitlines()[-4:])}")


def _pytest(*arguments: str) -> str:
    # Without the -q of .pytest.ini: a second one would hide the names of the tests.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired as problem:
        raise Broken(f"{' '.join(arguments)} took longer than {TEST_SECONDS} s") from problem
    return done.stdout + done.stderr


def lacks() -> str:
    """What this machine lacks for a Slurm of its own."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    if not TESTS.exists():
        return "this copy has no tests/test_slurm.py"
    return "" if importlib.util.find_spec("pytest") else "pytest is not installed"


FAULTS = {"slurm": Fault((GOES_ON,), slurm, lacks, enough=5)}  # as many tests as there are
