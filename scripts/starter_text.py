"""What the starter files are made of: tables of facts, skeletons of texts, and arithmetic with held-out operands.

Every choice is a SHA-256 of its own name, so any Python on any machine makes the same text.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = ("zh", "en")
MARKS = re.compile(r"(zh>|en>|zh\?|en\?|zh\+|en\+|held\?) ")


@dataclass
class Table:
    """A section of a file of tables. `phrasings` maps a mark (zh>, en?, ...) to the lines that begin with it."""

    name: str
    columns: list[str]
    phrasings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    rows: list[list[str]] = field(default_factory=list)

    @property
    def facts(self) -> int:
        """Statements in the table: one for each attribute of each row, whatever the languages."""
        attributes = {re.sub(r"_?(zh|en)$", "", column) for column in self.columns} - {"be"}
        return len(self.rows) * (len(attributes) - 1)

    def fill(self, phrasing: str, row_number: int, key: str) -> str:
        """Put the cells of a row into a phrasing; {name2} is a cell of another row, which `key` decides."""
        other = (row_number + 1 + number(key, len(self.rows) - 1)) % len(self.rows)
        values = self._cells(row_number, "") | self._cells(other, "2")
        return with_articles(phrasing.format_map(values))

    def _cells(self, row_number: int, suffix: str) -> dict[str, str]:
        cells = dict(zip(self.columns, self.rows[row_number], strict=True))
        cells |= {name.capitalize(): capital(text) for name, text in cells.items()}
        return {name + suffix: text for name, text in cells.items()}


def number(key: str, below: int) -> int:
    """A fixed number in [0, below) that looks random."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % below


def capital(text: str) -> str:
    """Make the first letter a capital and leave the others alone."""
    return text[:1].upper() + text[1:]


def with_articles(text: str) -> str:
    """Write "an" where a filled-in word begins with a vowel."""
    return re.sub(r"\b([Aa]) (?=[aei]|o(?!ne)|u(?!ni|se))", r"\1n ", text)


def read_tables(path: Path) -> list[Table]:
    """Read a file of tables; ValueError names the line of a row with a wrong number of cells."""
    tables: list[Table] = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if header := re.fullmatch(r"\[(\S+)\] (.+)", line):
            tables.append(Table(header[1], header[2].split()))
        elif mark := MARKS.match(line):
            tables[-1].phrasings[mark[1]].append(line[mark.end() :].replace("\\n", "\n"))
        elif line and not line.startswith("#"):
            cells, table = line.split("|"), tables[-1]
            if len(cells) != len(table.columns):
                found = f"{len(cells)} cells, [{table.name}] has {len(table.columns)}"
                raise ValueError(f"{path}:{line_number}: {found}; separate the cells by |")
            table.rows.append(cells)
    return tables


def read_skeletons(path: Path) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Read a file of skeletons: its slots by name, and (mark, skeleton) in file order."""
    slots: dict[str, list[str]] = {}
    skeletons: list[tuple[str, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if mark := MARKS.match(line):
            skeletons.append((mark[1], line[mark.end() :].replace("\\n", "\n")))
        elif line and not line.startswith("#"):
            name, values = line.split(" ", 1)
            slots[name] = values.split("|")
    return slots, skeletons


def tellings(skeleton: str, slots: dict[str, list[str]], key: str, count: int) -> list[str]:
    """Return up to `count` different fillings of a skeleton; the same key gives the same ones."""
    return list(dict.fromkeys(fill_skeleton(skeleton, slots, f"{key} {telling}") for telling in range(count)))


def fill_skeleton(skeleton: str, slots: dict[str, list[str]], key: str) -> str:
    """Take one of each <a|b> and fill each {slot}; {slot2} and {slot3} are other values of the same slot."""

    def turn(match: re.Match) -> str:
        choices = match[1].split("|")
        return choices[number(f"{key} at {match.start()}", len(choices))]

    def slot(match: re.Match) -> str:
        name = match[1].lower()
        order = sorted(slots[name], key=lambda value: number(f"{key} {name} {value}", 2**32))
        value = order[int(match[2] or 1) - 1]
        return capital(value) if match[1][0].isupper() else value

    return with_articles(re.sub(r"\{([^\W\d]+)(\d?)\}", slot, re.sub(r"<([^<>]*)>", turn, skeleton)))


def is_held_out(operator: str, a: int, b: int) -> bool:
    """True for the operand pairs, one in ten, that no training file has; for + * > the order does not matter."""
    first, second = sorted((a, b)) if operator in "+*>" else (a, b)
    return number(f"held out {operator} {first} {second}", 10) == 0


def sums(table: Table, phrasing: str, key: str, count: int, held_out: bool = False) -> Iterator[str]:
    """Fill a phrasing with up to `count` different sums, either none of them held out or all."""
    for a, b, c in operands(table, key, count, held_out):
        words = {"za": chinese(a), "zb": chinese(b), "zc": chinese(c)}
        words |= {"ea": english(a), "eb": english(b), "ec": english(c)}
        words |= {name.capitalize(): capital(text) for name, text in words.items()}
        words |= {f"steps_{language}": counted(a, b, c, language) for language in LANGUAGES}
        yield phrasing.format(a=a, b=b, c=c, **words)


def operands(table: Table, key: str, count: int, held_out: bool = False) -> list[tuple[int, int, int]]:
    """Return up to `count` distinct (a, b, result); the rows of the table take turns in giving the ranges.

    Held-out ones are of the first row's ranges, because they are to be asked of a small model.
    """
    found: dict[tuple[int, int, int], None] = {}
    for attempt in range((40 if held_out else 4) * count):
        below_a, below_b = (int(cell) for cell in table.rows[0 if held_out else attempt % len(table.rows)])
        x, y = 1 + number(f"{key} a {attempt}", below_a - 1), 1 + number(f"{key} b {attempt}", below_b - 1)
        a, b, result = {
            "+": (x, y, x + y),
            "-": (max(x, y), min(x, y), abs(x - y)),
            "*": (x, y, x * y),
            "/": (x * y, y, x),
            ">": (max(x, y) + 1, min(x, y), max(x, y) + 1 - min(x, y)),
        }[table.name]
        if is_held_out(table.name, a, b) == held_out and len(found) < count:
            found[a, b, result] = None
    return list(found)


def counted(a: int, b: int, c: int, language: str) -> str:
    """Count from a up or down to a + b or a - b = c: "45 + 2: one 46, two 47. "; b from 1 to 9, else "".

    A small model adds wrongly by heart, and rightly when it counts aloud; and it counts better from what it has said
    just before than from what it was asked.
    """
    way = (c > a) - (c < a)
    if not 1 <= b <= 9 or abs(c - a) != b:
        return ""
    asked = f"{a} {'-+'[way > 0]} {b}"
    steps = [(step, a + way * step) for step in range(1, b + 1)]
    if language == "zh":
        return f"{asked}：{'，'.join(f'{chinese(step)}{at}' for step, at in steps)}。"
    return f"{asked}: {', '.join(f'{english(step)} {at}' for step, at in steps)}. "


def chinese(n: int) -> str:
    """Write 0 <= n < 1000 in Chinese."""
    digits = "零一二三四五六七八九"
    if n < 10:
        return digits[n]
    if n < 20:
        return "十" + digits[n - 10] * (n > 10)
    if n < 100:
        return digits[n // 10] + "十" + digits[n % 10] * (n % 10 > 0)
    hundreds, rest = digits[n // 100] + "百", n % 100
    if rest < 10:
        return hundreds + ("零" + digits[rest]) * (rest > 0)
    return hundreds + digits[rest // 10] + "十" + digits[rest % 10] * (rest % 10 > 0)


def english(n: int) -> str:
    """Write 0 <= n < 1000 in English."""
    small = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    small += ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"]
    small += ["seventeen", "eighteen", "nineteen"]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    if n < 20:
        return small[n]
    if n < 100:
        return tens[n // 10 - 2] + (f"-{small[n % 10]}" if n % 10 else "")
    return f"{small[n // 100]} hundred" + (f" and {english(n % 100)}" if n % 100 else "")
