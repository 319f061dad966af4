"""Time the token cache on a large JSONL file, beside the tokenizers library alone, and a start on the finished cache.

    python -m scripts.benchmark_data --data_path file.jsonl --megabytes 1000

The file is made of the given texts, each with its number in front, over and over. Rounds alternate between the library
(`encode_batch_fast` on all cores, texts already in memory, ids not even read) and the whole way from JSON to a cache
on the disk, on the same part of the file; then the whole file is built once more, for its time and memory.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice
from pathlib import Path

from tokenizers import Tokenizer

from dataset.tokenizer import load_tokenizer
from dataset.tokens import open_token_cache
from trainer.advice import cpus
from trainer.options import new_parser

LIBRARY_BATCH = 1000  # texts a call; 300 and 20,000 were slower
SMALL_MODEL = (
    *("--hidden_size", "64", "--num_hidden_layers", "2", "--num_attention_heads", "4", "--batch_size", "8"),
    *("--lr_scaling", "none", "--num_workers", "0", "--device", "cpu", "--max_steps", "2", "--log_interval", "1"),
)


def make_file(path: Path, texts: list[str], megabytes: int) -> None:
    """Write at least that many megabytes of JSON lines, no two texts the same."""
    with path.open("w", encoding="utf-8") as file:
        for number in count():
            if file.tell() >= megabytes * 1e6:
                break
            text = f"{number} {texts[number % len(texts)]}"
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def library_rate(path: Path, tokenizer_path: str) -> float:
    """MB of the file a second that the library alone encodes, everything it needs being in memory."""
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_path) / "tokenizer.json"))
    with path.open(encoding="utf-8") as file:
        texts = iter([json.loads(line)["text"] for line in file])
    started = time.perf_counter()
    while batch := list(islice(texts, LIBRARY_BATCH)):
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return path.stat().st_size / 1e6 / (time.perf_counter() - started)


def cache_rate(path: Path, tokenizer_path: str) -> float:
    """MB of the file a second that become a token cache beside it, JSON, hashes and disk included."""
    tokenizer, cache_dir = load_tokenizer(tokenizer_path), path.with_suffix(".cache")
    shutil.rmtree(cache_dir, ignore_errors=True)
    started = time.perf_counter()
    open_token_cache([str(path)], tokenizer, cache_dir)
    return path.stat().st_size / 1e6 / (time.perf_counter() - started)


def apart(function: Callable[..., float], *arguments: object) -> tuple[float, float]:
    """Run it in a fresh process; return its value and the largest resident memory, MiB, of it and of its children."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_memory, function, arguments).result()


def _with_memory(function: Callable[..., float], arguments: tuple) -> tuple[float, float]:
    value = function(*arguments)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return value, max(resource.getrusage(which).ru_maxrss for which in who) / 1024


def start_seconds(path: Path, tokenizer_path: str, run_dir: Path) -> Iterator[float]:
    """Seconds from the command to the end of step 1, cache and all modules on the disk; first a start to warm up."""
    command = [sys.executable, "train_pretrain.py", "--data_path", str(path), "--tokenizer_path", tokenizer_path]
    command += ["--cache_dir", str(path.with_suffix(".cache")), "--out_dir", str(run_dir), *SMALL_MODEL]
    for _ in range(4):
        shutil.rmtree(run_dir, ignore_errors=True)
        started = time.perf_counter()
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if "](1/" in line:
                    yield time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")


def main() -> None:
    parser = new_parser(__doc__.splitlines()[0])
    parser.add_argument("--data_path", type=Path, default=Path("dataset/starter/pretrain.jsonl"), help="JSON lines")
    parser.add_argument("--tokenizer_path", default="model/tokenizer")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the whole file, MB")
    parser.add_argument("--part_megabytes", type=int, default=100, help="size of the part that rounds work on, MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work_dir", type=Path, default=Path("out/benchmark_data"), help="needs twice --megabytes")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    try:
        with args.data_path.open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        parser.error(f'--data_path {args.data_path}: not lines of {{"text": "..."}} ({problem!r})')
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work_dir:
        measure(args, texts, Path(work_dir))


def measure(args: argparse.Namespace, texts: list[str], work_dir: Path) -> None:
    """Make the files, time everything, print it."""
    part, whole = work_dir / "part.jsonl", work_dir / "whole.jsonl"
    make_file(part, texts, min(args.part_megabytes, args.megabytes))
    make_file(whole, texts, args.megabytes)

    rates = []
    for number in range(1, args.rounds + 1):
        library, _ = apart(library_rate, part, args.tokenizer_path)
        ours, _ = apart(cache_rate, part, args.tokenizer_path)
        rates.append((library, ours))
        print(f"round {number}: library {library:.2f} MB/s, cache {ours:.2f} MB/s, {ours / library:.0%}", flush=True)
    ratios = [ours / library for library, ours in rates]
    rate, memory = apart(cache_rate, whole, args.tokenizer_path)
    size = whole.stat().st_size / 1e6
    library = statistics.median(library for library, _ in rates)
    _, *starts = start_seconds(whole, args.tokenizer_path, work_dir / "run")

    print(f"cores: {cpus()}")
    print(f"library alone: {library:.2f} MB/s; cache, same part: median {statistics.median(ratios):.0%} of it", end=" ")
    print(f"({min(ratios):.0%} - {max(ratios):.0%})")
    print(f"cache of {size:.0f} MB: {size / rate:.0f} s, {rate:.2f} MB/s, largest process {memory:.0f} MiB")
    print(f"start on that cache to the end of step 1: {statistics.median(starts):.1f} s (longest {max(starts):.1f} s)")


if __name__ == "__main__":
    main()
