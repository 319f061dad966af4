"""Data files -> records: the one place that knows file formats, and says what is wrong with a record."""

import codecs
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import BinaryIO, NamedTuple

from dataset.files import ARRAY, PARQUET, TEXT, DataError, Source, guess_encoding, naming
from dataset.json_array import JSON, ArrayReader
from dataset.streams import Hashed, NotUtf8, Utf8, read_text

LINE_END = b"\n"
CHAT_KEYS = {"conversations", "messages", "instruction"}
# Measured: 1 MiB costs 10 % more CPU time than 256 KiB, 64 KiB no less. Memory grows by 100 bytes per byte in flight.
CHUNK_BYTES = 1 << 18
# Read, decoded, parsed and encoded, such a line takes about 1 GB.
MAX_LINE_BYTES = 64 << 20
# Plain text has no records: a document ends at the first blank line after the first, or at the first line end after the
# second number of bytes, so that a book can be larger than memory and a share of it can be held out.
TEXT_DOCUMENT_BYTES, TEXT_DOCUMENT_LIMIT = 16 << 10, 64 << 10


class BadRecord(ValueError):
    """A record that cannot be used. `kind` is what such records are counted by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


class Chunk(NamedTuple):
    """Consecutive records of one source: lines still to be parsed, or what its format gave as (place, value).

    first_line counts from 1; read_bytes: how far the file was read for it; last: whether the file ends with it.
    """

    source: Source
    first_line: int
    content: bytes | list[tuple[int | str, object]]
    read_bytes: int
    last: bool = False

    def records(self, text_key: str) -> Iterator[tuple[str, object]]:
        """Yield (place, value) of every record, as ("a.jsonl:7", {...}); None for a blank line.

        A value that could not be parsed comes as the BadRecord that says why. Plain text documents come as objects
        with their text under `text_key`.
        """
        path, kind, encoding, _ = self.source
        if isinstance(self.content, list):
            for place, value in self.content:
                if kind == ARRAY:
                    value = _value_of_line(value, encoding)
                elif kind == TEXT:
                    value = _document(value, encoding, text_key)
                yield f"{path}:{place}", value
            return
        lines = self.content.removesuffix(LINE_END).split(LINE_END)
        cut = self.last and not self.content.endswith(LINE_END)
        for number, line in enumerate(lines, self.first_line):
            value = _value_of_line(line, encoding)
            if cut and number == self.first_line + len(lines) - 1 and isinstance(value, BadRecord):
                value = BadRecord(value.kind, f"{value.detail}; the file ends within this line: a broken download?")
            yield f"{path}:{number}", value


def read_chunks(source: Source, digest: "hashlib._Hash", columns: list[str] | None = None) -> Iterator[Chunk]:
    """Yield a file in chunks of whole records; `digest` sees every byte of it.

    columns: those a parquet file must have, and all that is read of it (None: all there are). Lines end at LF alone;
    a CR before it is white space. Raises DataError where the file itself is damaged: a gzip or parquet file, a JSON
    array, text in two-byte units. Nothing after the damage could be trusted.
    """
    path = source.path
    with naming(path):
        if source.kind == PARQUET:
            yield from _parquet_chunks(source, digest, columns)
            return
        with open(path, "rb", buffering=0) as file:
            raw = io.BufferedReader(Hashed(file, digest), CHUNK_BYTES)
            stream = gzip.GzipFile(fileobj=raw) if source.zipped else raw
            if source.encoding != "utf-8":
                stream = io.BufferedReader(NotUtf8(source, stream), CHUNK_BYTES)
            # Only in these does the byte of LF occur within other characters.
            if source.encoding.startswith(("utf-16", "utf-32")):
                stream = io.BufferedReader(
                    Utf8(path, CHUNK_BYTES, io.TextIOWrapper(stream, source.encoding, newline=""))
                )
                source = source._replace(encoding="utf-8")
            read = {ARRAY: _array_chunks, TEXT: _text_chunks}.get(source.kind, _line_chunks)
            before = 0
            for chunk in read(source, stream):
                yield chunk._replace(read_bytes=file.tell() - before)
                before = file.tell()


def text_of(record: object, text_key: str) -> str:
    """Return the text of a record {"text": "..."} where the key is called `text_key`. Raises BadRecord."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"{_JSON_TYPES[type(record)]}, not an object")
    if text_key not in record:
        keys = names(record) or "none"
        hint = "chats are for train_sft.py" if CHAT_KEYS & record.keys() else "--text_key names another"
        raise BadRecord(f'no "{text_key}" key', f"its keys: {keys}; {hint}")
    text = record[text_key]
    if not isinstance(text, str):
        raise BadRecord(f'"{text_key}" is {_JSON_TYPES.get(type(text), type(text).__name__)}, not a string')
    if not text.strip():
        raise BadRecord(f'"{text_key}" is empty')
    if "\0" in text:
        raise BadRecord(f'"{text_key}" holds a NUL character', f"at character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(f'"{text_key}" holds a lone surrogate', f"\\u{ord(text[error.start]):04x}") from None
    return text


def names(keys: Iterable[str]) -> str:
    """The first of some names that come from a data file, fit for a message: short, and without control characters."""
    return ", ".join(repr(key)[1:-1][:40] for key in islice(keys, 5))


def _line_chunks(source: Source, stream: BinaryIO) -> Iterator[Chunk]:
    line_number = 1
    block = stream.read(CHUNK_BYTES)
    while block:
        if not block.endswith(LINE_END):
            block += _rest_of_line(source, stream, line_number + block.count(LINE_END))
        coming = stream.read(CHUNK_BYTES)
        yield Chunk(source, line_number, block, 0, last=not coming)
        line_number += block.count(LINE_END)
        block = coming


def _rest_of_line(source: Source, stream: BinaryIO, line_number: int) -> bytes:
    rest = stream.readline(MAX_LINE_BYTES)
    if len(rest) == MAX_LINE_BYTES and not rest.endswith(LINE_END):
        raise DataError(
            f"{source.path}:{line_number}: a line of over {MAX_LINE_BYTES:,} bytes; give each document its own line"
        )
    return rest


def _text_chunks(source: Source, stream: BinaryIO) -> Iterator[Chunk]:
    documents, held, lines, size, first_line, line_number = [], 0, [], 0, 1, 0
    while line := _rest_of_line(source, stream, line_number + 1):
        line_number += 1
        if line.strip() or lines:
            lines.append(line)
            size += len(line)
        else:
            first_line = line_number + 1
        if size >= TEXT_DOCUMENT_BYTES and (size >= TEXT_DOCUMENT_LIMIT or not line.strip()):
            documents.append((first_line, b"".join(lines)))
            held, lines, size, first_line = held + size, [], 0, line_number + 1
            if held >= CHUNK_BYTES:
                yield Chunk(source, 0, documents, 0)
                documents, held = [], 0
    if lines:
        documents.append((first_line, b"".join(lines)))
    yield Chunk(source, 0, documents, 0, last=True)


def _document(content: bytes, encoding: str, text_key: str) -> object:
    """Plain text as a record; its line ends become LF, marks at the start of lines go."""
    try:
        text = _decode(content.removeprefix(codecs.BOM_UTF8), encoding)
    except BadRecord as bad:
        return bad
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\n\ufeff", "\n")
    return {text_key: text.strip("\n")}


def _decode(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(LINE_END, 0, error.start)
        column = error.start - (content.rfind(LINE_END, 0, error.start) + 1) + 1
        where = f"byte 0x{content[error.start]:02x} at column {column}" + (f" of its line {line + 1}" if line else "")
        guess = guess_encoding(content) if encoding == "utf-8" else None
        hint = f"; it could be {guess}: --encoding {guess}" if guess else ""
        raise BadRecord(f"not {encoding.upper()}", where + hint) from None


def _value_of_line(line: bytes, encoding: str) -> object:
    # Also in the middle of a file: several may have been joined.
    line = line.removeprefix(codecs.BOM_UTF8)
    if not line.strip():
        return None
    try:
        value = JSON.decode(_decode(line, encoding))
    except BadRecord as bad:
        return bad
    except json.JSONDecodeError as error:
        return BadRecord("not JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return BadRecord("not JSON", "nested too deeply")
    return _not_null(value)


def _not_null(value: object) -> object:
    """None means a blank line."""
    return BadRecord("null, not an object") if value is None else value


def _array_chunks(source: Source, stream: BinaryIO) -> Iterator[Chunk]:
    encoding = "utf-8-sig" if source.encoding == "utf-8" else source.encoding
    text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
    reader = ArrayReader(source.path, partial(read_text, source.path, text), CHUNK_BYTES, MAX_LINE_BYTES)
    content, held = [], 0
    for number, element in enumerate(reader.elements(), start=1):
        # As text, to be parsed again where it is used: a nested value may be too deep to be handed to a process.
        written = element.text.encode(source.encoding, errors="surrogateescape")
        content.append((f"{element.line} (element {number})", written))
        held += len(written)
        if held >= CHUNK_BYTES:
            yield Chunk(source, 0, content, 0)
            content, held = [], 0
    yield Chunk(source, 0, content, 0, last=True)


def _parquet_chunks(source: Source, digest: "hashlib._Hash", columns: list[str] | None) -> Iterator[Chunk]:
    path = source.path
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; pip install pyarrow") from error
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        size = file.tell()
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            found, rows, row = table.schema_arrow.names, table.metadata.num_rows, 0
            if missing := [name for name in columns or () if name not in found]:
                raise DataError(f'{path}: no column "{missing[0]}"; it has {names(found)} (--text_key names one)')
            for batch in table.iter_batches(256, columns=columns):
                values = batch.to_pylist()
                content = [(f"row {row + number}", value) for number, value in enumerate(values, 1)]
                before, row = row, row + len(values)
                yield Chunk(source, 0, content, size * row // rows - size * before // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged parquet file ({error}); fetch it again") from error


_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
