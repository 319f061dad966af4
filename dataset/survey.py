"""Everything that is odd about data files, told before a run: each is read to its end, nothing stops at the first."""

import codecs
import csv
import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataset.encode import Encoded, Encoder, count_duplicates, encode_all
from dataset.files import PARQUET, DataError, Source, find_files, guess_encoding, identify
from dataset.records import LINE_END, Chunk, read_chunks
from dataset.tokenizer import TextTokenizer
from dataset.tokens import Reading, TokenStream

MOST_LISTED = 1000  # bad records that are named; more are counted
TABLE_NAMES = (".csv", ".tsv")
SCANNED_TOKENS = 1 << 24
BAR_WIDTH = 40


@dataclass
class Findings:
    """What was found. lines: for a reader; problems: what refuses the data, each with its file and line.

    unusable: files of which nothing can be trained on; sha256: of every file that was read whole.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Surveyor:
    """An encoder that also notes what is odd about a chunk, and keeps no ids."""

    inner: Encoder
    text_key: str

    @property
    def columns(self) -> list[str] | None:
        """See Encoder."""
        return self.inner.columns

    def encode(self, chunk: Chunk, parse_only: bool) -> Encoded:
        """See Encoder."""
        encoded = self.inner.encode(chunk, True)
        encoded.streams = ()
        encoded.notes.update(odd_bytes(chunk))
        for _, record in chunk.records(self.text_key):
            if isinstance(record, dict):
                encoded.notes.update(odd_keys(record))
        return encoded


def survey(paths: Sequence[str], encoder: Encoder, reading: Reading, refuses: bool = True) -> Findings:
    """Read every record of these files, folders and patterns, and say what each file is and what is wrong with it.

    refuses: whether a bad record is a problem, or left out and counted.
    """
    found, hashes, bad = Findings(), array("Q"), 0
    for path in _files_of(paths, found):
        try:
            source = identify(path, reading.encoding)
            digest, notes, seen, used, blank = hashlib.sha256(), Counter(), array("Q"), 0, 0
            chunks = read_chunks(source, digest, encoder.columns)
            size = Path(path).stat().st_size
            for encoded in encode_all(Surveyor(encoder, reading.text_key), chunks, size, lambda: True):
                used, blank = used + sum(encoded.documents), blank + encoded.blank_lines
                seen.extend(encoded.text_hashes)
                notes += encoded.notes + Counter(kind for kind, _ in encoded.bad + encoded.dropped)
                if refuses:
                    found.problems += [line for _, line in encoded.bad[: max(0, MOST_LISTED - bad)]]
                    bad += len(encoded.bad)
        except DataError as problem:
            found.problems.append(f"{problem}{_table(path)}")
            found.unusable.append(path)
            continue
        if blank:
            notes["blank lines"] = blank
        if repeated := count_duplicates(seen):
            notes["texts that are duplicates of another in it"] = repeated
        hashes.extend(seen)
        found.sha256[path] = digest.hexdigest()
        odd = "".join(f"; {count:,} {what}" for what, count in notes.items())
        found.lines.append(f"{path}: {_what(source)}, {used:,} records used{odd}; SHA-256 {digest.hexdigest()[:12]}")
        if not used:
            found.unusable.append(path)
            found.problems.append(f"{path}: nothing to train on in it")
    if bad > MOST_LISTED:
        found.problems.append(f"... and {bad - MOST_LISTED:,} more bad records")
    duplicates = count_duplicates(hashes)
    found.lines.append(f"{len(hashes):,} texts in all, {duplicates:,} of them duplicates of another")
    return found


def odd_bytes(chunk: Chunk) -> Counter[str]:
    """What is odd about the lines of a chunk as they lie in the file."""
    odd: Counter[str] = Counter()
    if isinstance(chunk.content, bytes):
        odd["CRLF line ends"] = chunk.content.count(b"\r\n")
        marks = chunk.content.count(LINE_END + codecs.BOM_UTF8) + chunk.content.startswith(codecs.BOM_UTF8)
        odd["byte order marks before a line"] = marks
        odd["last line without a line end"] = int(chunk.last and not chunk.content.endswith(LINE_END))
    return +odd


def odd_keys(record: dict) -> Iterator[str]:
    """Which format of conversations a record has, and what in it comes in more than one form."""
    messages = record.get("conversations") or record.get("messages")
    if isinstance(messages, list):
        turns = [turn for turn in messages if isinstance(turn, dict)]
        keys = {key for turn in turns for key in turn}
        roles = {str(turn.get("from") or turn.get("role")) for turn in turns}
        kind = "ShareGPT (from, value)" if "from" in keys else "OpenAI" if "messages" in record else "MiniMind"
        yield f"{kind} conversations"
        if roles & {"function_call", "tool_call"} or any(turn.get("tool_calls") for turn in turns):
            yield "with tool calls"
        if roles & {"observation", "tool", "function"}:
            yield "with results of tools"
        if any(turn.get("tool_call_id") for turn in turns):
            yield "with tool_call_id"
        if any(
            isinstance(call, dict) and "function" in call for turn in turns for call in turn.get("tool_calls") or []
        ):
            yield "with calls nested in function"
        if any("content" in turn and turn["content"] is None for turn in turns):
            yield "with content null"
        if sum(turn.get("from", turn.get("role")) in ("human", "user") for turn in turns) > 1:
            yield "of several questions"
    elif "instruction" in record:
        yield "Alpaca conversations"
        if not record.get("input"):
            yield "with an empty input"
        if record.get("history"):
            yield "with a history"
    else:
        return
    if isinstance(record.get("tools"), str):
        yield "with tools as a JSON string"
    if record.get("system"):
        yield "with a system text"


def profile(stream: TokenStream, tokenizer: TextTokenizer, max_seq_len: int, found: Findings) -> Findings:
    """Say how long the texts of a token cache are, and whether it was built of what the files hold now.

    found: the survey of those files.
    """
    told, lengths = Findings(), lengths_of(stream, tokenizer)
    of_chats = stream.rows is not None
    told.lines = [
        f"tokens of {'a conversation' if of_chats else 'a text'}, start and end included:",
        *histogram(lengths),
    ]
    if not of_chats:
        longer = int((lengths > max_seq_len).sum())
        told.lines.append(
            f"nothing is cut: {longer:,} of {len(lengths):,} texts are longer than --max_seq_len {max_seq_len} and go "
            "on in the next window"
        )
    if missing := set(stream.source_sha256) - set(found.sha256.values()):
        told.problems.append(
            f"{len(missing)} data files have another content than the token cache was built of, with the same size and "
            "time: remove the cache folder in --cache_dir"
        )
    return told


def lengths_of(stream: TokenStream, tokenizer: TextTokenizer) -> np.ndarray:
    """Tokens of every text or conversation of a cache, (n,)."""
    if stream.rows is not None:
        return np.asarray(stream.rows[:, 0], dtype=np.int64)
    # No text becomes a control id, so each of these ends one.
    starts = range(0, len(stream.tokens), SCANNED_TOKENS)
    ends = [np.flatnonzero(stream.tokens[at : at + SCANNED_TOKENS] == tokenizer.eos_id) + at for at in starts]
    return np.diff(np.concatenate(ends), prepend=-1)


def histogram(lengths: np.ndarray) -> list[str]:
    """A line for every power of two that lengths reach: "  65 -   128      40 ####"."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    rows = [(power, int(counts[power])) for power in range(int(powers.min()), len(counts))]
    return [
        f"{2**power // 2 + 1:8,} - {2**power:8,} {count:12,} {'#' * -(-BAR_WIDTH * count // int(counts.max()))}"
        for power, count in rows
    ]


def _files_of(paths: Sequence[str], found: Findings) -> Iterator[str]:
    for path in paths:
        try:
            yield from find_files([path])
        except ValueError as problem:
            found.problems.append(str(problem))
            found.unusable.append(path)


def _what(source: Source) -> str:
    """What a file is: its kind, packing and encoding."""
    if source.kind != PARQUET:
        with open(source.path, "rb") as file:
            marked = file.read(3) == codecs.BOM_UTF8
        kind = source.kind + (", gzip" if source.zipped else "")
        return f"{kind}, {source.encoding}" + (" with a byte order mark" if marked else "")
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(source.path) as table:
        columns = ", ".join(f"{name} ({kind})" for name, kind in zip(*_schema(table), strict=True))
        packed = table.metadata.row_group(0).column(0).compression if table.metadata.num_row_groups else "none"
    return f"parquet, {packed.lower()}, columns {columns}"


def _schema(table) -> tuple[list[str], list[str]]:
    schema = table.schema_arrow
    return schema.names, [str(kind) for kind in schema.types]


def _table(path: str) -> str:
    """What a CSV or TSV file holds, for the message that refuses it."""
    if not path.lower().endswith(TABLE_NAMES):
        return ""
    content = Path(path).read_bytes()
    marked = content.startswith(codecs.BOM_UTF8)
    encoding = guess_encoding(content) or "utf-8"
    text = content.removeprefix(codecs.BOM_UTF8).decode(encoding, errors="replace")
    try:
        rows = list(
            csv.reader(text.splitlines(keepends=True), delimiter="\t" if path.lower().endswith(".tsv") else ",")
        )
    except csv.Error as problem:
        return f"; as a table it is damaged too: {problem}"
    cells = [cell for row in rows[1:] for cell in row]
    broken = sum("\n" in cell or "\r" in cell for cell in cells)
    quoted = sum("," in cell or '"' in cell for cell in cells)
    return (
        f"; encoding {encoding}{', with a byte order mark' if marked else ''}, {len(rows) - 1:,} rows of columns "
        f"{', '.join(rows[0]) if rows else 'none'}; {broken:,} cells hold line ends, {quoted:,} commas or quotes"
    )
