"""Train a byte-level BPE tokenizer and write a folder that transformers and `load_tokenizer` open.

    python -m scripts.train_tokenizer --data_path a.jsonl b.jsonl --out_dir out/tokenizer

The same files in the same order give the same bytes. Records are {"text": "..."} or
{"conversations": [{"role": ..., "content": "...", ...}, ...]}; all strings but the role are read.

model/tokenizer was trained on 15 MB of Chinese and English web, law, poetry and manual text and 8 MB of
conversations: 3.28 bytes per token on either (MiniMind's own vocabulary: 2.86 and 3.01).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dataset.files import DataError, find_files, identify
from dataset.records import BadRecord, read_chunks, text_of
from trainer.options import new_parser

CHAT_TEMPLATE = Path(__file__).parent.parent / "model" / "tokenizer" / "chat_template.jinja"
TEXT_KEY = "text"
# Ids 0-20: never part of a text. The layout is minimind-3's, so that its chat templates and tool
# formats find their markers at the same ids.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
)
# Ids 21-35: one token each, but not "special", because a reader of the answer wants to see them.
MARKER_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *(f"<|buffer{number}|>" for number in range(1, 10)),
)
RESERVED_TOKENS = SPECIAL_TOKENS + MARKER_TOKENS
BYTES = 256

# A merge never crosses these chunks: letters (Han included) with at most one mark or space in front, so that
# "，不" and " the" can be one token; every digit alone, so that a number is written the same way wherever it
# stands and columns line up in arithmetic; punctuation with its line ends; white space. No chunk holds both a
# letter and a mark after it, so no merge can build a reserved token such as "<think>".
CHUNKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_texts(path: str, encoding: str) -> Iterator[str]:
    """Yield the texts of a file of any kind that training reads, a chunk of it in memory at a time.

    Raises DataError naming file, line and reason for a record without a text; blank lines are skipped.
    """
    for chunk in read_chunks(identify(path, encoding), hashlib.sha256()):
        for place, record in chunk.records(TEXT_KEY):
            try:
                yield from texts_of(record) if record is not None else ()
            except ValueError as problem:
                raise DataError(f"{place}: {problem}; repair or remove it") from problem


def texts_of(record: object) -> list[str]:
    """The text of a record, or all strings of a conversation but the roles. Raises BadRecord for what has neither."""
    if not isinstance(record, dict) or "conversations" not in record:
        return [text_of(record, TEXT_KEY)]
    messages = record["conversations"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRecord('"conversations" is not a list of objects')
    fields = [value for message in messages for key, value in message.items() if key != "role"]
    return [text_of({TEXT_KEY: value}, TEXT_KEY) for value in fields if isinstance(value, str) and value.strip()]


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of exactly `vocab_size` entries: 36 reserved tokens, 256 bytes, the rest merges.

    Raises ValueError when the texts hold too few repeated pairs for that many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CHUNKS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(RESERVED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        found = tokenizer.get_vocab_size()
        raise ValueError(f"the text gives {found} entries, --vocab_size asks for {vocab_size}; give more")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, model_max_length: int = 32768) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, which is always ours, into `folder`."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": model_max_length,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", description), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    template = CHAT_TEMPLATE.read_bytes()
    (folder / CHAT_TEMPLATE.name).write_bytes(template)


def count_bytes_and_tokens(tokenizer: Tokenizer, texts: Iterator[str], batch: int = 1000) -> tuple[int, int]:
    """Return UTF-8 bytes and raw tokens of `texts`; `tokenizer` must be as `train` left it."""
    text_bytes = tokens = 0
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        text_bytes += len(text.encode("utf-8"))
        if len(waiting) == batch:
            tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(waiting))
            waiting.clear()
    tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(waiting))
    return text_bytes, tokens


def main() -> None:
    parser = new_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--data_path", nargs="+", required=True, help="files, folders or patterns, of the kinds that training reads"
    )
    parser.add_argument("--encoding", default="utf-8", help="of files without a byte order mark, as gb18030")
    parser.add_argument("--out_dir", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--vocab_size", type=int, default=6400)
    args = parser.parse_args()
    smallest = len(RESERVED_TOKENS) + BYTES
    if args.vocab_size < smallest:
        parser.error(f"--vocab_size {args.vocab_size} is below {smallest} (36 reserved tokens + 256 bytes)")
    try:
        paths = find_files(args.data_path)
        texts = (text for path in paths for text in read_texts(path, args.encoding))
        tokenizer = train(texts, args.vocab_size)
        save(tokenizer, args.out_dir)
    except (ValueError, OSError) as problem:
        parser.error(str(problem))
    for path in paths:
        text_bytes, tokens = count_bytes_and_tokens(tokenizer, read_texts(path, args.encoding))
        ratio = text_bytes / max(tokens, 1)
        print(f"{path}: {text_bytes:,} bytes / {tokens:,} tokens = {ratio:.4f} bytes per token")
    print(f"wrote {args.out_dir}: {args.vocab_size} entries")


if __name__ == "__main__":
    main()
