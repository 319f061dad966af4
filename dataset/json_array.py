"""A JSON array of any size, one element in memory at a time; and the JSON that data files may hold."""

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dataset.files import DataError


def _whole_number(digits: str) -> int | float:
    """Python refuses integers of over 4,300 digits; what reads as infinity is refused where it would be learned."""
    return int(digits) if len(digits) <= 4300 else float(digits)


# NaN, which Python writes, may be a number.
JSON = json.JSONDecoder(parse_int=_whole_number)

_SPACE = re.compile(r"[ \t\r\n]*")


class Element(NamedTuple):
    """One value of an array, as it is written there; line: where it begins, from 1."""

    line: int
    text: str


class ArrayReader:
    """The text of a JSON array, read as far as it is needed."""

    def __init__(self, path: str, read: Callable[[int], str], block: int, limit: int) -> None:
        """read: gives so many characters more, "" at the end; block: to read at once; limit: of one element."""
        self._path, self._read, self._block, self._limit = path, read, block, limit
        self._text, self._at, self._line, self._ended = "", 0, 1, False

    def elements(self) -> Iterator[Element]:
        """Yield every element. Raises DataError, with the line, where the text is not one array."""
        self._take("[", "[ expected")
        if self._peek() != "]":
            yield self._element()
            while self._peek() == ",":
                self._take(",", "")
                yield self._element()
        self._take("]", "a comma or ] expected")
        if self._peek():
            raise self._broken("something stands after its ]")

    def _peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            end = _SPACE.match(self._text, self._at).end()
            self._pass(end)
            if end < len(self._text) or not self._more():
                return self._text[end : end + 1]

    def _take(self, character: str, problem: str) -> None:
        found = self._peek()
        if found != character:
            raise self._broken(f"{problem}, found {found!r}" if found else "it ends in the middle")
        self._pass(self._at + 1)

    def _element(self) -> Element:
        self._peek()
        line = self._line
        while True:
            try:
                _, end = JSON.raw_decode(self._text, self._at)
                # Of a number more digits may follow.
                if end < len(self._text) or self._ended:
                    text = self._text[self._at : end]
                    self._pass(end)
                    return Element(line, text)
                problem = "it ends in the middle"
            except RecursionError:
                raise self._broken("nested too deeply") from None
            except json.JSONDecodeError as error:
                problem = error.msg
                # A value that is only cut by the end of what was read fails there, or is an open string.
                if error.pos < len(self._text) - 16 and not error.msg.startswith("Unterminated string"):
                    raise self._broken(problem, error.pos) from None
            if not self._more():
                raise self._broken(problem)

    def _broken(self, problem: str, position: int | None = None) -> DataError:
        line = self._line + self._text.count("\n", self._at, position or self._at)
        return DataError(f"{self._path}:{line}: the JSON array is broken ({problem}); repair it, or fetch it again")

    def _pass(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _more(self) -> bool:
        waiting = len(self._text) - self._at
        if waiting > self._limit:
            raise DataError(
                f"{self._path}:{self._line}: an element of over {self._limit:,} characters; make it several"
            )
        # As much again as is waiting: a long value is tried a few times, not once a block.
        more = self._read(max(self._block, min(waiting, self._limit + 1 - waiting)))
        self._text, self._at, self._ended = self._text[self._at :] + more, 0, not more
        return bool(more)
