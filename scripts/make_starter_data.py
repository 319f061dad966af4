"""Write the small Chinese and English starter files that a fresh clone trains on, into dataset/starter/.

    python -m scripts.make_starter_data

pretrain.jsonl ({"text": ...}), sft.jsonl and lora_identity.jsonl ({"conversations": [...]}), questions.jsonl, and
quiz.jsonl, the ten of them that the quick start asks in the end.
Everything comes from the tables and skeletons in dataset/starter/*.txt, written for this project, and from arithmetic.

Kept out of the three training files, so that a trained model can be asked about what it has not read:
- the questions of questions.jsonl, and every stretch of 20 characters of them (lines marked `held?` in the tables);
- every operand pair for which `is_held_out` is true, about one in ten, in digits and in words alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from scripts.starter_chats import (
    Chat,
    Tools,
    skeleton_chats,
    skeleton_questions,
    sum_chats,
    table_chats,
    table_questions,
)
from scripts.starter_text import LANGUAGES, Table, capital, number, read_skeletons, read_tables, sums, tellings

FOLDER = Path(__file__).resolve().parent.parent / "dataset" / "starter"
FACT_FILES = ("facts_places.txt", "facts_nature.txt", "facts_people.txt")
# How many different fillings of one skeleton, or lines of one kind of sum, are made at most.
TELLINGS = {"stories.txt": 24, "essays.txt": 6}
TELLINGS_PER_CHAT = {"chats.txt": 14, "identity.txt": 6}
LINES_PER_SUM_PHRASING = 450
# One question of each of these topics makes the quiz; chosen by a hash, so nobody picks what a model happens to know.
QUIZ_TOPICS = ("+", "+", "-", ">", "country", "animal", "opposite", "person", "unit", "identity")


class Piece(NamedTuple):
    """A sentence or a short text, with the template that gave it."""

    text: str
    template: str
    language: str


def fact_texts(table: Table, language: str) -> Iterator[list[Piece]]:
    """Yield texts of about six sentences: half of them about one row, half across the table."""
    across: list[Piece] = []
    for row_number in range(len(table.rows)):
        row: list[Piece] = []
        for phrasing_number, phrasing in enumerate(table.phrasings[f"{language}>"]):
            template = f"{table.name} {language} {phrasing_number}"
            for partner in range(2 if "2}" in phrasing else 1):
                text = table.fill(phrasing, row_number, f"{template} {row_number} {partner}")
                (row if number(text, 2) else across).append(Piece(text, template, language))
        yield from batches(shuffled(row), 6)
    yield from batches(shuffled(across), 6)


def shuffled(pieces: Iterable[Piece]) -> list[Piece]:
    """Mix the pieces, each only once; the order depends on nothing but their text."""
    return sorted(set(pieces), key=lambda piece: hashlib.sha256(piece.text.encode()).digest())


def batches(pieces: list[Piece], size: int) -> Iterator[list[Piece]]:
    """Deal the pieces out into lists of about `size`, none of them much shorter than the others."""
    count = max(1, round(len(pieces) / size))
    yield from filter(None, (pieces[start::count] for start in range(count)))


def join(pieces: Sequence[Piece]) -> str:
    """Run sentences together as prose; questions, answers and bare sums keep lines of their own."""
    text = pieces[0].text
    for before, piece in pairwise(pieces):
        same = piece.language == before.language
        prose = same and "\n" not in before.text + piece.text and before.text[-1] in '。”."'
        separator = "\n" if not prose else "" if piece.language == "zh" else " "
        text += separator + piece.text
    return text


def skeleton_texts(name: str) -> Iterator[list[Piece]]:
    """Fill every skeleton of a file several times, each time with other names, things and turns."""
    slots, skeletons = read_skeletons(FOLDER / name)
    for skeleton_number, (mark, skeleton) in enumerate(skeletons):
        template = f"{name} {skeleton_number}"
        for text in tellings(skeleton, slots, template, TELLINGS[name]):
            yield [Piece(text, template, mark[:2])]


def sum_texts(table: Table) -> Iterator[list[Piece]]:
    """Yield texts of eight lines of one kind of arithmetic, never with a held-out pair of operands."""
    lines = []
    for language in LANGUAGES:
        for phrasing_number, phrasing in enumerate(table.phrasings[f"{language}>"]):
            template = f"{table.name} {language} {phrasing_number}"
            texts = sums(table, phrasing, template, LINES_PER_SUM_PHRASING)
            lines += [Piece(capital(text), template, language) for text in texts]
    yield from batches(shuffled(lines), 8)


def fact_tables() -> list[Table]:
    """Return the tables of all files of facts."""
    return [table for name in FACT_FILES for table in read_tables(FOLDER / name)]


def make_texts() -> list[list[Piece]]:
    """Return the texts of pretrain.jsonl as lists of pieces, in file order."""
    texts = [text for table in fact_tables() for language in LANGUAGES for text in fact_texts(table, language)]
    texts += [text for name in TELLINGS for text in skeleton_texts(name)]
    texts += [text for table in read_tables(FOLDER / "sums.txt") for text in sum_texts(table)]
    return sorted(texts, key=lambda text: hashlib.sha256(join(text).encode()).digest())


def make_chats() -> tuple[list[Chat], list[Chat], list[dict]]:
    """Return the conversations of sft.jsonl and of lora_identity.jsonl, in file order, and the held-out questions."""
    tables, sum_tables = fact_tables(), read_tables(FOLDER / "sums.txt")
    slots, skeletons = read_skeletons(FOLDER / "chats.txt")
    slots |= {f"{table.name}_{name}": column for table in tables for name, column in columns(table)}
    tools = Tools(slots)
    sft = [chat for table in tables for chat in table_chats(table, tools)]
    sft += [chat for table in sum_tables for chat in sum_chats(table, tools)]
    sft += skeleton_chats("chats.txt", slots, skeletons, TELLINGS_PER_CHAT["chats.txt"], tools)
    slots, skeletons = read_skeletons(FOLDER / "identity.txt")
    identity = list(skeleton_chats("identity.txt", slots, skeletons, TELLINGS_PER_CHAT["identity.txt"], tools))
    questions = [question for table in (*tables, *sum_tables) for question in table_questions(table)]
    questions += skeleton_questions("identity", slots, skeletons)
    return in_file_order(sft), in_file_order(identity), questions


def choose_quiz(questions: Sequence[dict]) -> list[dict]:
    """Return one question for each of QUIZ_TOPICS."""
    chosen: list[dict] = []
    for topic in QUIZ_TOPICS:
        open_ones = [question for question in questions if question["topic"] == topic and question not in chosen]
        chosen.append(min(open_ones, key=lambda question: number(f"quiz {question['question']}", 2**32)))
    return chosen


def columns(table: Table) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the different cells of every column."""
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        yield name, list(dict.fromkeys(cells))


def in_file_order(chats: Iterable[Chat]) -> list[Chat]:
    """Leave out what comes twice and mix the rest."""
    by_digest = {hashlib.sha256(json.dumps(chat.messages).encode()).digest(): chat for chat in chats}
    return [by_digest[digest] for digest in sorted(by_digest)]


def describe(pieces: Iterable[Piece]) -> str:
    """Return what a file holds: bytes of text, share of Chinese, distinct sentences, the most used template."""
    by_template: Counter[str] = Counter()
    by_language: Counter[str] = Counter()
    sentences: set[str] = set()
    for piece in pieces:
        by_template[piece.template] += len(piece.text.encode())
        by_language[piece.language] += len(piece.text.encode())
        sentences.update(part for part in re.split(r"(?<=[。！？])|(?<=[.!?]) |\n", piece.text) if part)
    total = by_template.total()
    template, most = by_template.most_common(1)[0]
    return (
        f"{total:,} bytes of text, {by_language['zh'] / total:.0%} Chinese, {len(sentences):,} distinct sentences, "
        f"{len(by_template)} templates, largest {most / total:.1%} ({template})"
    )


def chat_pieces(chats: Iterable[Chat]) -> Iterator[Piece]:
    """Yield what is said in each conversation as one piece, for `describe`."""
    for chat in chats:
        yield Piece("\n".join(message["content"] for message in chat.messages), chat.template, chat.language)


def write(path: Path, records: Iterable[dict], description: str) -> None:
    """Write one JSON object a line and say in one line what was written."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"wrote {path}: {len(lines):,} lines, {path.stat().st_size:,} bytes; {description}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write the files into")
    out = parser.parse_args().out
    texts = make_texts()
    facts = sum(table.facts for table in fact_tables())
    pieces = (piece for text in texts for piece in text)
    write(out / "pretrain.jsonl", ({"text": join(text)} for text in texts), f"{facts:,} facts, {describe(pieces)}")
    sft, identity, questions = make_chats()
    for name, chats in (("sft.jsonl", sft), ("lora_identity.jsonl", identity)):
        tool_share = sum("tool_calls" in message for chat in chats for message in chat.messages) / len(chats)
        description = f"{describe(chat_pieces(chats))}, {tool_share:.1%} tool calls"
        write(out / name, ({"conversations": chat.messages} for chat in chats), description)
    topics = Counter(question["topic"] for question in questions)
    write(out / "questions.jsonl", questions, ", ".join(f"{count} {topic}" for topic, count in topics.items()))
    write(out / "quiz.jsonl", choose_quiz(questions), f"one question each of {', '.join(QUIZ_TOPICS)}")


if __name__ == "__main__":
    main()
