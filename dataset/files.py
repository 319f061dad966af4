"""What people name with --data_path -> data files, and what each of them is: by its content, whatever its name says."""

import codecs
import contextlib
import glob
import gzip
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

# What a folder is searched for; a file that is named itself may be called anything that its content explains.
JSON_NAMES = (".jsonl", ".ndjson", ".json")
TEXT_NAMES = (".txt", ".text", ".md")
SEARCHED = (*JSON_NAMES, ".txt", ".parquet")

LINES, ARRAY, TEXT, PARQUET = "JSON lines", "JSON array", "plain text", "parquet"
HEAD_BYTES = 1 << 16
# The longer mark first: UTF-32's begins with UTF-16's.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NOT_DATA = {
    b"version https://git-lfs": "a Git-LFS pointer, not the data it stands for; run `git lfs pull` where it came from",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first, or use gzip",
    b"\xfd7zXZ\x00": "compressed with xz; unpack it first, or use gzip",
    b"BZh9": "compressed with bzip2; unpack it first, or use gzip",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"%PDF": "a PDF; convert it to plain text first",
    b"<!doctype html": "a web page; the download went wrong",
    b"<html": "a web page; the download went wrong",
}


class DataError(ValueError):
    """Training data that cannot be used; the message names file, line and reason."""


class Source(NamedTuple):
    """A data file. encoding: of its text, or as its byte order mark says; zipped: with gzip."""

    path: str
    kind: str
    encoding: str
    zipped: bool


def find_files(paths: list[str]) -> list[str]:
    """Replace folders by the data files below them and patterns by what they match, each in the order of names.

    Raises one ValueError for everything that is missing, empty or cannot be read.
    """
    found, problems = [], [] if paths else ["no data file was given"]
    for path in paths:
        if os.path.isdir(path):
            files = _files_below(path, problems)
            problems += [] if files else [f"{path} is a folder without {', '.join(SEARCHED)} files, zipped or not"]
        elif not os.path.exists(path) and glob.has_magic(path):
            files = []
            for match in sorted(glob.glob(path, recursive=True)):
                files += _files_below(match, problems) if os.path.isdir(match) else [match]
            problems += [] if files else [f"{path} matches no file (looked from {os.getcwd()})"]
        else:
            files = [path]
        found += files
    problems += [problem for file in found if (problem := _problem_with(file))]
    if problems:
        raise ValueError("cannot read the data: " + "; ".join(problems))
    for path, times in Counter(map(os.path.realpath, found)).items():
        if times > 1:
            log.info("%s is named %d times and counts as often", path, times)
    return found


def _files_below(folder: str, problems: list[str]) -> list[str]:
    """The data files in a folder and its folders; names beginning with a dot and other files are left out."""
    found, others, seen = [], [], set()

    def complain(error: OSError) -> None:
        problems.append(f"{error.filename} may not be listed ({error.strerror})")

    for place, folders, names in os.walk(folder, onerror=complain, followlinks=True):
        if os.path.realpath(place) in seen:  # links that lead in a circle
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            (found if _extension(name) in SEARCHED else others).append(os.path.join(place, name))
    if others:
        log.info("%s: %d other files are left out, as %s", folder, len(others), others[0])
    return sorted(found)


def _problem_with(path: str) -> str | None:
    if not os.path.exists(path):
        return f"{path} does not exist (looked from {os.getcwd()})"
    if not os.path.isfile(path):
        return f"{path} is not a regular file"
    if os.path.getsize(path) == 0:
        return f"{path} is empty"
    if not os.access(path, os.R_OK):
        return f"{path} may not be read by this user"
    return None


def _extension(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def identify_all(paths: list[str], encoding: str) -> list[Source]:
    """Identify every file; raises one DataError for all that are no data."""
    sources, problems = [], []
    for path in paths:
        try:
            sources.append(identify(path, encoding))
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("; ".join(problems))
    return sources


def identify(path: str, encoding: str) -> Source:
    """Look at the first bytes of a file: what it is, and in which encoding; `encoding` where no mark says it.

    Raises DataError for what is no data (a Git-LFS pointer, an archive, CSV, ...), ValueError for an unknown encoding.
    """
    encoding = _known(encoding)
    with naming(path):
        head, zipped = _head(path)
    if head.startswith(b"PAR1"):
        if zipped:
            raise DataError(f"{path}: a parquet file inside gzip; unpack it first")
        return Source(path, PARQUET, "", zipped)
    start = head.lstrip()
    for mark, what in _NOT_DATA.items():
        if start.startswith(mark) or (mark.startswith(b"<") and start.lower().startswith(mark)):
            raise DataError(f"{path} is {what}")
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    encoding = marked or encoding
    return Source(path, _kind(path, head.decode(encoding, errors="ignore").removeprefix("\ufeff")), encoding, zipped)


def _known(encoding: str) -> str:
    """The encoding under Python's name for it; utf-8-sig is UTF-8, whose marks are dropped anyway."""
    try:
        if "\n".encode(encoding).decode(encoding) != "\n":
            raise LookupError(encoding)
        return codecs.lookup(encoding).name.removesuffix("-sig")
    except (LookupError, UnicodeError):
        known = "utf-8, gb18030, big5, utf-16, latin-1"
        raise ValueError(f"--encoding {encoding}: no such text encoding; known are {known} and others") from None


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn what goes wrong with reading a file into a DataError that names it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _head(path: str) -> tuple[bytes, bool]:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        if not head.startswith(b"\x1f\x8b"):
            return head, False
        file.seek(0)
        return gzip.GzipFile(fileobj=file).read(HEAD_BYTES), True


def utf8_bytes(content: bytes) -> tuple[int, int]:
    """How many bytes are above ASCII, and how many of them belong to valid UTF-8."""
    return _foreign(content), _foreign(content.decode("utf-8", errors="ignore").encode())


def _foreign(content: bytes) -> int:
    return len(content) - len(content.decode("ascii", errors="ignore"))


def guess_encoding(content: bytes) -> str | None:
    """An encoding in which bytes that are not UTF-8 could be meant; None where none of the usual ones fits."""
    foreign, valid = utf8_bytes(content)
    if valid > foreign / 2:
        return None  # UTF-8 with a damaged place
    for name in ("gb18030", "big5"):
        with contextlib.suppress(UnicodeDecodeError):
            content.decode(name)
            return name
    return None


def _kind(path: str, head: str) -> str:
    lines = [line.strip() for line in head.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    extension = _extension(path)
    named_text = extension in TEXT_NAMES
    # Prose may begin with a bracket as well, so in a file that calls itself text an object has to follow.
    if _begins_array(first, lines[1:2]) and (not named_text or re.match(r'\s*\[\s*\{\s*"', head)):
        return ARRAY
    # Not the first line alone, which may be the bad one, and not any line: prose may show an object, too.
    objects = sum(bool(re.match(r'\{\s*"[^"]*"\s*:', line)) for line in lines[:9])
    if extension in JSON_NAMES or (objects and 2 * objects >= len(lines[:9])):
        return LINES
    if named_text:
        return TEXT
    if extension in (".csv", ".tsv", ".xlsx", ".xls"):
        raise DataError(f'{path} is a table ({extension}); turn its rows into lines of {{"text": "..."}}')
    raise DataError(f"{path}: neither JSON nor named as plain text ({', '.join(TEXT_NAMES)}); rename it if it is text")


def _begins_array(first: str, second: list[str]) -> bool:
    """Whether a first line opens an array of records, and is not a bad line before lines that are objects."""
    if not first.startswith("[") or first.startswith("[["):
        return False
    if first == "[" or first.endswith(",") or not second:
        return True
    return not (_is_json(first) or (second[0].startswith("{") and _is_json(second[0])))


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
