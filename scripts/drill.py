"""Failure drills: python -m scripts.drill --faults all --n 50 --seed 1

Starts small runs, injects real faults into them, and compares each with a run that nothing disturbed: the curve (step,
loss, gradient norm, rate) and the SHA-256 of the final weights and optimizer state. One line per promise says PASS,
FAIL with the command that repeats the failure, or SKIP with what this machine lacks. Exits with 1 on any FAIL.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts import (
    faults_corrupt,
    faults_disk,
    faults_kill,
    faults_network,
    faults_numbers,
    faults_save,
    faults_signals,
    faults_slurm,
)
from scripts.faults import Bench, Case, Fault
from scripts.faults_processes import Broken
from trainer.options import new_parser

FAULTS: dict[str, Fault] = {
    **faults_kill.FAULTS,
    **faults_save.FAULTS,
    **faults_corrupt.FAULTS,
    **faults_disk.FAULTS,
    **faults_signals.FAULTS,
    **faults_network.FAULTS,
    **faults_numbers.FAULTS,
    **faults_slurm.FAULTS,
}
COMES_THROUGH = "every run comes to its end"
TRIES = 3  # a fault that came too late to strike is tried again


@dataclasses.dataclass
class Line:
    """The verdict on one promise."""

    fault: str
    promise: str
    verdict: str  # PASS, FAIL or SKIP
    cases: int = 0
    struck: int = 0
    detail: str = ""


def options() -> argparse.ArgumentParser:
    """What to drill, and how often."""
    parser = new_parser(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    parser.add_argument("--faults", default="all", help=f"of {','.join(FAULTS)}, separated by commas")
    parser.add_argument("--n", type=int, default=50, help="cases per kind of fault")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the next ones count up from it")
    parser.add_argument("--ranks", type=int, default=2, help="processes per run")
    parser.add_argument("--work_dir", default="out/drill", help="for texts, runs and the table")
    return parser


def chosen(names: str) -> list[str]:
    """The kinds of faults that --faults names. Raises ValueError for one that there is not."""
    kinds = list(FAULTS) if names == "all" else [name for name in names.split(",") if name]
    unknown = [name for name in kinds if name not in FAULTS]
    if unknown or not kinds:
        raise ValueError(f"--faults {names}: unknown {', '.join(unknown) or 'names'}; there are {', '.join(FAULTS)}")
    return list(dict.fromkeys(kinds))


def run_case(fault: Fault, bench: Bench, seed: int) -> Case:
    """One case; whatever goes wrong in it is a broken promise, never the end of the drill."""
    for _ in range(TRIES):
        case = Case(seed)
        try:
            fault.run(bench, case)
        except Broken as problem:
            case.broken[COMES_THROUGH] = str(problem)
        except Exception as problem:
            traceback.print_exc()
            case.broken[COMES_THROUGH] = f"{type(problem).__name__}: {problem}"
        finally:
            bench.clean_up(keep=bool(case.broken))
        if case.struck or case.broken:
            break
    return case


def judge(name: str, fault: Fault, cases: Sequence[Case]) -> list[Line]:
    """One line per promise. A case in which no fault struck counts for nothing; without any other that is a FAIL."""
    counted = [case for case in cases if case.struck or case.broken]
    struck = sum(case.struck for case in cases)
    lines = []
    for promise in (*fault.promises, COMES_THROUGH):
        failed = [case for case in counted if promise in case.broken]
        line = Line(name, promise, "FAIL" if failed or not struck else "PASS", len(counted), struck)
        if failed:
            first = failed[0]
            replay = f"python -m scripts.drill --faults {name} --n 1 --seed {first.seed}"
            line.detail = f"{len(failed)} of {len(counted)} cases; {replay}: {first.broken[promise]}"
        elif not struck:
            line.detail = "no fault struck"
        lines.append(line)
    return lines


def summary(cases: Sequence[Case]) -> str:
    """Median and largest of every figure in seconds or percent; the sum of every count."""
    figures: dict[str, list[float]] = {}
    for case in cases:
        for key, values in case.figures.items():
            figures.setdefault(key, []).extend(values)
    parts = []
    for key, values in figures.items():
        if key.startswith(("seconds", "percent")):
            parts.append(f"{key}: median {statistics.median(values):.2g}, at most {max(values):.2g}")
        else:
            parts.append(f"{key}: {sum(values):g}")
    return "; ".join(parts)


def said(line: Line) -> str:
    """A verdict as it is printed."""
    counts = f"{line.promise} ({line.struck} faults in {line.cases} cases)" if line.promise else ""
    return f"{line.verdict} {line.fault}: " + ": ".join(part for part in (counts, line.detail) if part)


def table(lines: Sequence[Line], figures: Mapping[str, str]) -> str:
    """The verdicts as Markdown."""
    rows = ["| fault | promise | faults | cases | verdict |", "|---|---|---:|---:|---|"]
    for line in lines:
        detail = line.detail.replace("|", "/")
        verdict = f"{line.verdict}: {detail}" if detail else line.verdict
        rows.append(f"| {line.fault} | {line.promise} | {line.struck} | {line.cases} | {verdict} |")
    notes = [f"- {name}: {text}" for name, text in figures.items() if text]
    return "\n".join([*rows, "", *notes]) + "\n"


def drill(names: Sequence[str], bench: Bench, n: int, seed: int) -> list[Line]:
    """Run all cases, print a line for each promise, and leave drill.md and drill.json in the work folder."""
    lines: list[Line] = []
    figures: dict[str, str] = {}
    record: dict[str, object] = {"seed": seed, "n": n, "ranks": bench.ranks}
    for name in names:
        fault, started = FAULTS[name], time.monotonic()
        reason = fault.lacks()
        count = 0 if reason else min(n, fault.enough or n)
        cases: list[Case] = []
        for number in range(count):
            cases.append(run_case(fault, bench, seed + number))
            note = f"{name} {number + 1} of {count}: {cases[-1].note[:200] or 'nothing struck'}"
            print(f"  {note}{', BROKEN' if cases[-1].broken else ''}", file=sys.stderr, flush=True)
        mine = judge(name, fault, cases) if not reason else [Line(name, "", "SKIP", detail=reason)]
        figures[name] = "; ".join(part for part in (summary(cases), f"{time.monotonic() - started:.0f} s") if part)
        for line in mine:
            print(said(line), flush=True)
        if not reason:
            print(f"     {name}: {figures[name]}", flush=True)
        lines += mine
        record[name] = {"seconds": time.monotonic() - started, "cases": [dataclasses.asdict(case) for case in cases]}
        # After every kind, so that a drill of hours that is cut short leaves what it has found.
        record["lines"] = [dataclasses.asdict(line) for line in lines]
        (bench.folder / "drill.md").write_text(table(lines, figures), encoding="utf-8")
        (bench.folder / "drill.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return lines


def main(args: argparse.Namespace) -> int:
    """Drill; 1 if a promise was broken."""
    bench = Bench(Path(args.work_dir), args.ranks)
    try:
        lines = drill(chosen(args.faults), bench, args.n, args.seed)
    finally:
        bench.clean_up(keep=True)
    failed = sum(line.verdict == "FAIL" for line in lines)
    print(f"{failed} of {len(lines)} promises broken; the table is in {bench.folder / 'drill.md'}")
    return int(failed > 0)


if __name__ == "__main__":
    parser = options()
    args = parser.parse_args()
    try:
        chosen(args.faults)
    except ValueError as problem:
        parser.error(str(problem))
    sys.exit(main(args))
