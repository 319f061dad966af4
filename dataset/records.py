"""Data files -> records: the one place that knows file formats, and says what is wrong with a line."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

LINE_END = b"\n"
# Measured: 1 MiB costs 10 % more CPU time than 256 KiB, 64 KiB no less. Memory grows by 100 bytes per byte in flight.
CHUNK_BYTES = 1 << 18
# Three such lines at once still fit into 1.5 GB of memory.
MAX_LINE_BYTES = 4 << 20


class DataError(ValueError):
    """Training data that cannot be used; the message names file, line and reason."""


class Chunk(NamedTuple):
    """Whole lines of one source; `first_line` counts from 1, `read_bytes` includes what was dropped (a BOM)."""

    path: str
    first_line: int
    lines: bytes
    read_bytes: int


def read_chunks(path: str, digest: "hashlib._Hash") -> Iterator[Chunk]:
    """Yield a JSONL file in blocks of whole lines (split at LF alone), without a BOM; `digest` sees every byte."""
    line_number = 1
    try:
        with open(path, "rb") as file:
            while block := file.read(CHUNK_BYTES):
                if not block.endswith(LINE_END):
                    rest = file.readline(MAX_LINE_BYTES)
                    block += rest
                    if len(rest) == MAX_LINE_BYTES and not rest.endswith(LINE_END):
                        raise DataError(
                            f"{path}:{line_number + block.count(LINE_END)}: a line of over {MAX_LINE_BYTES:,} bytes; "
                            "give each document its own line (is this one JSON array instead of JSON lines?)"
                        )
                digest.update(block)
                lines = block.removeprefix(codecs.BOM_UTF8) if line_number == 1 else block
                yield Chunk(path, line_number, lines, len(block))
                line_number += block.count(LINE_END)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def text_of_line(line: bytes) -> str:
    """Return the text of one JSONL record `{"text": "..."}`; ValueError says what is wrong with the line."""
    try:
        record = _JSON.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError(f"{_JSON_TYPES[type(record)]}, not an object with a text")
    if "text" not in record:
        raise ValueError('no "text" key')
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f'"text" is {_JSON_TYPES[type(text)]}, not a string')
    if not text.strip():
        raise ValueError('"text" is empty')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'"text" holds a lone surrogate (\\u{ord(text[error.start]):04x})') from None
    return text


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is not JSON", "", 0)


# Numbers are of no use here; as floats they may have any number of digits.
_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=float)
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
