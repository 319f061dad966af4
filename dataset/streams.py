"""Bytes of a data file on their way to its reader: hashed, checked for the declared encoding, turned into UTF-8."""

import hashlib
import io
from typing import BinaryIO, TextIO

from dataset.files import DataError, Source, utf8_bytes


class Hashed(io.RawIOBase):
    """A file that shows every byte it gives to a digest."""

    def __init__(self, file: BinaryIO, digest: "hashlib._Hash") -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(buffer[:count])
        return count


class Utf8(io.RawIOBase):
    """Text in another encoding as UTF-8 bytes."""

    def __init__(self, path: str, block: int, text: TextIO) -> None:
        """block: characters to read at once."""
        self._path, self._block, self._text, self._waiting = path, block, text, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if not self._waiting:
            self._waiting = read_text(self._path, self._text, self._block).encode()
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count


class NotUtf8(io.RawIOBase):
    """Bytes said to be in another encoding; UTF-8 would often read as that without an error, and be garbled."""

    def __init__(self, source: Source, stream: BinaryIO) -> None:
        self._source, self._stream, self._passed = source, stream, 0
        self._foreign = self._valid = 0  # bytes above ASCII, and those of them that are UTF-8

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        block = self._stream.read(len(buffer))
        foreign, valid = utf8_bytes(block)
        self._foreign, self._valid = self._foreign + foreign, self._valid + valid
        # Two characters in another encoding may look like UTF-8, so a few are judged at the end of the file only.
        few = self._foreign >= 6 and not block
        if (foreign >= 16 and valid > 0.9 * foreign) or (few and self._valid > 0.9 * self._foreign):
            path, _, encoding, _ = self._source
            raise DataError(
                f"{path} is UTF-8 (looked up to byte {self._passed + len(block):,}), but --encoding {encoding} was "
                "given, which would garble it; leave it out"
            )
        buffer[: len(block)] = block
        self._passed += len(block)
        return len(block)


def read_text(path: str, text: TextIO, characters: int) -> str:
    """Read so many characters, "" at the end. Raises DataError for what the encoding has no characters for."""
    try:
        return text.read(characters)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not {error.encoding} as a whole ({error.reason}); convert it, or name its --encoding"
        ) from error
