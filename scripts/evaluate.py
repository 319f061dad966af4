"""Measure a model on data: `python -m scripts.evaluate FOLDER DATA...`

FOLDER: a run's, a checkpoint's or any transformers Llama or Qwen3 folder, a LoRA adapter's, or a MiniMind .pth. What is
measured follows from the data: of texts and of chats the loss per target token, perplexity and bits per byte, the same
numbers as training's own validation; of questions with accepted answers (dataset/starter/questions.jsonl) how many the
model answers rightly, greedily, and how many answers end by themselves.
"""

import argparse
import hashlib
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from dataset.chat import prompt_ids
from dataset.conversations import USER, Conversation, Turn
from dataset.files import find_files, identify_all
from dataset.loader import EvalLoader
from dataset.packing import evaluation_chats
from dataset.records import CHAT_KEYS, read_chunks
from dataset.text import evaluation_windows
from dataset.tokenizer import TextTokenizer, load_tokenizer, require_matching, tokenizer_folder
from dataset.tokens import Reading
from model.generation import STOP, Sampling, generate
from model.gpt import GPT
from model.lora import open_model
from trainer.checkpoint import resolve_weights
from trainer.ddp import COMPUTE_DTYPES, choose_device
from trainer.evaluation import evaluate
from trainer.options import add_switch, new_parser

TEXT, CHATS, QUESTIONS = "texts", "chats", "questions"
ROW_TOKENS = {TEXT: 512, CHATS: 768}  # the training scripts' defaults
LEAST = {"max_seq_len": 2, "batch_size": 1, "max_new_tokens": 1}  # values of the options
NUMBER = r"(?:(?<!\d)-)?\d+(?:[.,]\d+)*"  # in 34-9 the sign is no part of the 9
LATIN = "A-Za-z0-9\u00c0-\u024f"


def options() -> argparse.ArgumentParser:
    """What to measure, and how."""
    parser = new_parser(__doc__.splitlines()[0])
    parser.add_argument("folder", help="a run's, checkpoint's, transformers or adapter folder, or a MiniMind .pth")
    parser.add_argument("data", nargs="+", help="files, folders or patterns of one kind: texts, chats or questions")
    parser.add_argument("--tokenizer_path", default=None, help="folder with tokenizer.json, if not the model's own")
    parser.add_argument(
        "--num_attention_heads", type=int, default=None, help="of a MiniMind .pth without QK-norm (none given: 8)"
    )
    parser.add_argument(
        "--max_seq_len", type=int, default=None, help="tokens per row (none given: 512 of texts, 768 of chats)"
    )
    parser.add_argument("--batch_size", type=int, default=16, help="rows, or questions, at once")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens of an answer, at most")
    parser.add_argument("--text_key", default="text", help="key or parquet column of a record that holds its text")
    parser.add_argument("--encoding", default="utf-8", help="of files without a byte order mark, as gb18030")
    add_switch(parser, "--skip_bad_lines", default=False, help="leave bad records out and count them, or refuse them")
    parser.add_argument("--cache_dir", default="out/cache", help="where the tokens of the data files are kept")
    parser.add_argument("--device", default=None, help="cuda, cpu or mps (found by itself)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the matrix products")
    return parser


def kind_of(records: Iterable[object]) -> str:
    """What a file's first records are."""
    keys = next((record.keys() for record in records if isinstance(record, dict)), set())
    if {"question", "answers"} <= keys:
        return QUESTIONS
    return CHATS if CHAT_KEYS & keys else TEXT


def records_of(paths: list[str], encoding: str) -> Iterator[tuple[str, object]]:
    """Yield place and value of every record of the files."""
    for source in identify_all(find_files(paths), encoding):
        for chunk in read_chunks(source, hashlib.sha256()):
            yield from chunk.records("text")


def questions_in(paths: list[str], encoding: str) -> list[dict]:
    """The questions of the files. Raises ValueError for a record that is none."""
    questions = []
    for place, record in records_of(paths, encoding):
        if record is None:
            continue
        answers = record.get("answers") if isinstance(record, dict) else None
        listed = (
            isinstance(answers, list)
            and answers
            and all(isinstance(answer, str) and answer.strip() for answer in answers)
        )
        if not listed or not isinstance(record.get("question"), str):
            raise ValueError(f'{place}: no question; {{"question": "...", "answers": ["..."]}} is one')
        if isinstance(record.get("topic"), list | dict):
            raise ValueError(f"{place}: the topic is {record['topic']!s:.40}; give a string")
        questions.append(record)
    return questions


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted answers stands in an answer.

    A number has to be the answer's last one, whole: who counts 46, 47, 48 has not said 47, and 12 is neither 112 nor
    12.5, but the number of 共有12个. A word of Latin letters counts whole, in either case; Chinese wherever it stands.
    """
    # Full-width digits and letters are digits and letters.
    answer = unicodedata.normalize("NFKC", answer)
    return any(_stands_in(unicodedata.normalize("NFKC", wanted.strip()), answer) for wanted in accepted)


def _stands_in(wanted: str, answer: str) -> bool:
    if re.fullmatch(NUMBER, wanted):
        return re.findall(NUMBER, answer)[-1:] == [wanted]
    if re.search(f"[{LATIN}]", wanted):
        return re.search(rf"(?<![{LATIN}]){re.escape(wanted)}(?![{LATIN}])", answer, re.IGNORECASE) is not None
    return wanted in answer


def ask(model: GPT, tokenizer: TextTokenizer, questions: list[dict], batch_size: int, max_new_tokens: int) -> None:
    """Print every question with the model's answer, then how many are right and how many ended by themselves."""
    how = Sampling(max_new_tokens=max_new_tokens, temperature=0, stop_ids=frozenset([tokenizer.eos_id]))
    right, asked, ended = Counter(), Counter(), 0
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        prompts = [prompt_ids(Conversation((Turn(USER, one["question"]),)), tokenizer) for one in batch]
        for one, answer in zip(batch, generate(model, prompts, how), strict=True):
            text = tokenizer.decode(answer.ids)
            good = is_right(text, one["answers"])
            asked[one.get("topic", "all")] += 1
            right[one.get("topic", "all")] += good
            ended += answer.ending == STOP
            print(f"{'right' if good else 'WRONG'}  {one['question']}  ->  {' '.join(text.split())}")
    if len(asked) > 1:
        print("by topic: " + ", ".join(f"{topic} {right[topic]}/{count}" for topic, count in asked.items()))
    total = sum(asked.values())
    print(f"{sum(right.values())} of {total} right; {ended} of {total} answers ended by themselves")


def measure(model: GPT, tokenizer: TextTokenizer, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Print loss, perplexity and bits per byte of texts or chats; return what `trainer.evaluation.evaluate` does."""
    max_seq_len = args.max_seq_len or ROW_TOKENS[kind]
    open_samples = evaluation_windows if kind == TEXT else evaluation_chats
    reading = Reading(args.text_key, args.encoding, args.skip_bad_lines)
    samples = open_samples(args.data, tokenizer, max_seq_len, Path(args.cache_dir), reading)
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, COMPUTE_DTYPES[args.dtype], enabled=args.dtype != "float32")

    def loss_sum(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast:
            return model(**{key: value.to(device) for key, value in batch.items()})

    loader = EvalLoader(samples, batch_size=args.batch_size, rank=0, world_size=1)
    result = evaluate(model, loss_sum, loader, list)
    loss = result["val_loss"]
    print(
        f"{kind}: {loader.target_tokens:,} target tokens in {len(samples):,} rows of {max_seq_len}; "
        f"loss {loss:.6f} nats per target token, perplexity {math.exp(min(loss, 700)):.4g}, "
        f"{result['val_bits_per_byte']:.6f} bits per byte"
    )
    return result


def evaluate_folder(args: argparse.Namespace) -> dict[str, float] | None:
    """Open the model and the data, and measure; what `measure` returns, None of questions.

    Raises ValueError or OSError for options, a model, a tokenizer or data that cannot be used.
    """
    wrong = [
        f"--{name} {value}: must be at least {least}"
        for name, least in LEAST.items()
        if (value := getattr(args, name)) is not None and value < least
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    source = resolve_weights(args.folder, "FOLDER")
    tokenizer = load_tokenizer(tokenizer_folder(args.tokenizer_path, source))
    model = open_model(source, args.num_attention_heads).eval().to(choose_device(args.device, 0))
    require_matching(tokenizer, model.config.vocab_size, source if source.is_dir() else None)
    kind = kind_of(record for _, record in islice(records_of(args.data, args.encoding), 100))
    if kind != QUESTIONS:
        return measure(model, tokenizer, kind, args)
    ask(model, tokenizer, questions_in(args.data, args.encoding), args.batch_size, args.max_new_tokens)
    return None


def main() -> None:
    """Measure what the command line names."""
    parser = options()
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        evaluate_folder(args)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")  # as a shell counts it


if __name__ == "__main__":
    main()
