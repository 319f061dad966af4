"""Write dataset/starter/pretrain.jsonl, the small Chinese and English text that a fresh clone trains on.

    python -m scripts.make_starter_data

Everything comes from the tables and phrasings in dataset/starter/*.txt, written for this project, and from
arithmetic; every choice is a SHA-256 of its own name, so any Python writes the same bytes.

Kept out, so that a trained model can be asked about what it has not read:
- phrasings marked `held>` in the tables (the facts themselves are in the text, in other words);
- every operand pair for which `is_held_out` is true, about one in ten, in digits and in words alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "dataset" / "starter"
FACT_FILES = ("facts_places.txt", "facts_nature.txt", "facts_people.txt")
LANGUAGES = ("zh", "en")
PARTNERS = 2
TEXTS_PER_SKELETON = {"zh": 30, "en": 27}
LINES_PER_SUM_PHRASING = 110


class Piece(NamedTuple):
    """A sentence or a short text, with the template that gave it."""

    text: str
    template: str
    language: str


@dataclass
class Table:
    """A section of a fact file."""

    name: str
    columns: list[str]
    phrasings: dict[str, list[str]] = field(default_factory=lambda: {"zh": [], "en": [], "held": []})
    rows: list[list[str]] = field(default_factory=list)

    @property
    def facts(self) -> int:
        """Statements in the table: one for each attribute of each row, whatever the languages."""
        attributes = {re.sub(r"_?(zh|en)$", "", column) for column in self.columns}
        return len(self.rows) * (len(attributes) - 1)


def number(key: str, below: int) -> int:
    """A fixed number in [0, below) that looks random."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % below


def shuffled(items: Sequence[Piece]) -> list[Piece]:
    return sorted(items, key=lambda item: hashlib.sha256(item.text.encode()).digest())


def is_held_out(operator: str, a: int, b: int) -> bool:
    """True for the operand pairs that never occur in the text; a + b and b + a are one pair."""
    first, second = sorted((a, b)) if operator in "+*" else (a, b)
    return number(f"held out {operator} {first} {second}", 10) == 0


def read_tables(path: Path) -> list[Table]:
    """Read a file of tables; ValueError names the line of a row with a wrong number of cells."""
    tables: list[Table] = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if header := re.fullmatch(r"\[(\S+)\] (.+)", line):
            tables.append(Table(header[1], header[2].split()))
        elif phrasing := re.match(r"(zh|en|held)> ", line):
            tables[-1].phrasings[phrasing[1]].append(line[phrasing.end() :].replace("\\n", "\n"))
        elif line and not line.startswith("#"):
            cells, table = line.split("|"), tables[-1]
            if len(cells) != len(table.columns):
                found = f"{len(cells)} cells, [{table.name}] has {len(table.columns)}"
                raise ValueError(f"{path}:{line_number}: {found}; separate the cells by |")
            table.rows.append(cells)
    return tables


def fact_sentences(table: Table, language: str) -> Iterator[tuple[int, Piece]]:
    """Yield (row number, sentence) for every row in every phrasing that is not held out.

    A phrasing with cells of a second row, as in {zh2}, is used with `PARTNERS` other rows.
    """
    count = len(table.rows)
    for row_number in range(count):
        for phrasing_number, phrasing in enumerate(table.phrasings[language]):
            template = f"{table.name} {language} {phrasing_number}"
            start = number(f"{template} {row_number}", count - 1)
            for partner in range(PARTNERS if "2}" in phrasing else 1):
                other = (row_number + 1 + (start + partner) % (count - 1)) % count
                values = _cells(table, row_number, "") | _cells(table, other, "2")
                yield row_number, Piece(phrasing.format_map(values), template, language)


def _cells(table: Table, row_number: int, suffix: str) -> dict[str, str]:
    cells = dict(zip(table.columns, table.rows[row_number], strict=True))
    cells |= {name.capitalize(): text[:1].upper() + text[1:] for name, text in cells.items()}
    return {name + suffix: text for name, text in cells.items()}


def fact_texts(table: Table, language: str) -> Iterator[list[Piece]]:
    """Yield texts of about six sentences: half of them about one row, half across the table."""
    by_row: dict[int, list[Piece]] = {}
    across: list[Piece] = []
    for row_number, sentence in fact_sentences(table, language):
        row = by_row.setdefault(row_number, [])
        (row if number(sentence.text, 2) else across).append(sentence)
    for sentences in (*by_row.values(), across):
        yield from batches(shuffled(sentences), 6)


def batches(pieces: list[Piece], size: int) -> Iterator[list[Piece]]:
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]


def join(pieces: Sequence[Piece]) -> str:
    """Run sentences together as prose; questions, answers and bare sums keep lines of their own."""
    text = pieces[0].text
    for before, piece in pairwise(pieces):
        same = piece.language == before.language
        prose = same and "\n" not in before.text + piece.text and before.text[-1] in '。”."'
        separator = "\n" if not prose else "" if piece.language == "zh" else " "
        text += separator + piece.text
    return text


def story_texts(path: Path) -> Iterator[list[Piece]]:
    """Fill every skeleton of `path` several times, each time with other names, things and turns."""
    slots: dict[str, list[str]] = {}
    skeletons: list[tuple[str, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(("zh> ", "en> ")):
            skeletons.append((line[:2], line[4:].replace("\\n", "\n")))
        elif line and line[0] not in "#[":
            name, values = line.split(" ", 1)
            slots[name] = values.split("|")
    for skeleton_number, (language, skeleton) in enumerate(skeletons):
        keys = [f"{skeleton_number} {draw}" for draw in range(TEXTS_PER_SKELETON[language])]
        for text in sorted({fill_skeleton(skeleton, slots, key) for key in keys}):
            yield [Piece(text, f"story {skeleton_number}", language)]


def fill_skeleton(skeleton: str, slots: dict[str, list[str]], key: str) -> str:
    """Return one telling of a skeleton; the same key gives the same telling."""

    def turn(match: re.Match) -> str:
        choices = match[1].split("|")
        return choices[number(f"{key} at {match.start()}", len(choices))]

    def slot(match: re.Match) -> str:
        capital, name, second = match[1][0].isupper(), match[1].lower(), match[2] == "2"
        values = slots[name]
        # The second value of a list lies 1 .. len - 1 places after the first, so the two always differ.
        place = number(f"{key} {name}", len(values))
        place += second * (1 + number(f"{key} {name} 2", len(values) - 1))
        value = values[place % len(values)]
        return value.capitalize() if capital else value

    return re.sub(r"\{([^\W\d]+)(2?)\}", slot, re.sub(r"<([^<>]*)>", turn, skeleton))


def sum_texts(table: Table) -> Iterator[list[Piece]]:
    """Yield texts of eight lines of one kind of arithmetic, never with a held-out pair of operands."""
    lines = []
    for language in LANGUAGES:
        for number_in_table, phrasing in enumerate(table.phrasings[language]):
            template = f"{table.name} {language} {number_in_table}"
            for a, b, c in operands(table, template, LINES_PER_SUM_PHRASING):
                words = {"za": chinese(a), "zb": chinese(b), "zc": chinese(c)}
                words |= {"ea": english(a), "eb": english(b), "ec": english(c)}
                text = phrasing.format(a=a, b=b, c=c, **words)
                lines.append(Piece(text[:1].upper() + text[1:], template, language))
    yield from batches(shuffled(lines), 8)


def operands(table: Table, key: str, count: int) -> list[tuple[int, int, int]]:
    """Return up to `count` distinct (a, b, result) that are not held out."""
    operator = table.name
    below_a, below_b = (int(cell) for cell in table.rows[0])
    found: dict[tuple[int, int, int], None] = {}
    for attempt in range(4 * count):
        x, y = number(f"{key} a {attempt}", below_a), number(f"{key} b {attempt}", below_b)
        a, b, result = {
            "+": (x, y, x + y),
            "-": (max(x, y), min(x, y), abs(x - y)),
            "*": (x, y, x * y),
            "/": (x * (y + 1), y + 1, x),
            ">": (max(x, y) + 1, min(x, y), max(x, y) + 1 - min(x, y)),
        }[operator]
        if not is_held_out(operator, a, b) and len(found) < count:
            found[a, b, result] = None
    return list(found)


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


def make_texts() -> tuple[list[list[Piece]], int]:
    """Return all texts as lists of pieces, in file order, and the number of facts behind them."""
    tables = [table for name in FACT_FILES for table in read_tables(FOLDER / name)]
    texts = [text for table in tables for language in LANGUAGES for text in fact_texts(table, language)]
    texts += story_texts(FOLDER / "stories.txt")
    texts += [text for table in read_tables(FOLDER / "sums.txt") for text in sum_texts(table)]
    texts.sort(key=lambda text: hashlib.sha256(join(text).encode()).digest())
    return texts, sum(table.facts for table in tables)


def describe(texts: list[list[Piece]], facts: int) -> str:
    """Return what the file holds: sizes, share of Chinese, distinct sentences, the most used template."""
    by_template: Counter[str] = Counter()
    by_language: Counter[str] = Counter()
    sentences: set[str] = set()
    for piece in (piece for text in texts for piece in text):
        by_template[piece.template] += len(piece.text.encode())
        by_language[piece.language] += len(piece.text.encode())
        sentences.update(part for part in re.split(r"(?<=[。！？])|(?<=[.!?]) |\n", piece.text) if part)
    total = by_template.total()
    template, most = by_template.most_common(1)[0]
    return (
        f"{len(texts):,} texts, {total:,} bytes, {by_language['zh'] / total:.0%} Chinese, {facts:,} facts, "
        f"{len(sentences):,} distinct sentences, {len(by_template)} templates, "
        f"largest {most / total:.1%} ({template})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "pretrain.jsonl")
    args = parser.parse_args()
    texts, facts = make_texts()
    lines = (json.dumps({"text": join(text)}, ensure_ascii=False) + "\n" for text in texts)
    args.out.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"wrote {args.out}: {describe(texts, facts)}")


if __name__ == "__main__":
    main()
