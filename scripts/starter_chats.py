"""Conversations for SFT and LoRA, and the questions that are kept out of them, from the same tables as the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from scripts.starter_text import LANGUAGES, Table, capital, fill_skeleton, number, sums, tellings

Message = dict[str, str]
CHATS_PER_SUM_PHRASING = 64
MOST_ROWS = 12


class Chat(NamedTuple):
    """A conversation, with the template of its first turn."""

    messages: list[Message]
    template: str
    language: str


class Tools:
    """The invented tools of chats.txt, and the system messages, that conversations may begin with."""

    def __init__(self, slots: dict[str, list[str]]) -> None:
        self.systems = {language: slots[f"system_{language}"] for language in LANGUAGES}
        self.specifications: dict[str, dict] = {}
        for tool in slots["tools"]:
            name, description, argument, meaning = tool.split(": ")
            properties = {argument: {"type": "string", "description": meaning}}
            parameters = {"type": "object", "properties": properties, "required": [argument]}
            function = {"name": name, "description": description, "parameters": parameters}
            self.specifications[name] = {"type": "function", "function": function}

    def system(self, called: list[str], language: str, key: str) -> list[Message]:
        """Return the system message that goes before a conversation, if any: always one where a tool is called."""
        draw = number(f"{key} system", 40)
        if not called and draw > 1:
            return []
        content = self.systems[language][number(f"{key} words", len(self.systems[language]))]
        if not called and draw == 1:
            return [{"role": "system", "content": content}]
        names = list(self.specifications)
        given = sorted({*called, names[number(f"{key} more", len(names))]})
        specifications = [self.specifications[name] for name in given]
        return [{"role": "system", "content": content, "tools": json.dumps(specifications, ensure_ascii=False)}]


def chat(text: str, template: str, language: str, tools: Tools) -> Chat:
    """Make a conversation of "question => answer => ..."; "!tool argument=value" calls, and a result follows it."""
    messages: list[Message] = []
    called: list[str] = []
    for step in text.split(" => "):
        role = {"user": "assistant", "tool": "assistant"}.get(messages[-1]["role"] if messages else "", "user")
        if messages and "tool_calls" in messages[-1]:
            role = "tool"
        if role == "assistant" and step.startswith("!"):
            name, arguments = step[1:].split(" ", 1)
            argument, value = arguments.split("=", 1)
            call = json.dumps([{"name": name, "arguments": {argument: value}}], ensure_ascii=False)
            messages.append({"role": role, "content": "", "tool_calls": call})
            called.append(name)
        else:
            messages.append({"role": role, "content": step})
    return Chat(tools.system(called, language, text) + messages, template, language)


def table_chats(table: Table, tools: Tools) -> Iterator[Chat]:
    """Ask every row in every zh? or en? phrasing; some conversations go on about the row, some about another."""
    for language in LANGUAGES:
        asked, follow = table.phrasings[f"{language}?"], table.phrasings[f"{language}+"]
        turns = [(row, phrasing) for row in asked_rows(table) for phrasing in range(len(asked))]
        turns.sort(key=lambda turn: number(f"{table.name} {language} {turn}", 2**32))
        while turns:
            row, phrasing = turns.pop()
            template = f"{table.name} {language} {phrasing}"
            key = f"{template} {row} chat"
            text = table.fill(asked[phrasing], row, key)
            draw = number(f"{key} goes on", 6)
            more = table.fill(follow[number(f"{key} follow", len(follow))], row, key) if follow else ""
            if more and draw < 2 and more.split(" => ")[1] not in text:
                text += " => " + more
            elif turns and draw > 3:
                row, phrasing = turns.pop()
                text += " => " + table.fill(asked[phrasing], row, key)
            yield chat(text, template, language, tools)


def asked_rows(table: Table) -> list[int]:
    """The rows that conversations are about: MOST_ROWS of them, first those of the held-out questions.

    The texts tell of all rows; but what a model trained for minutes is to answer must be few things, asked in many
    ways.
    """
    names = [row[0] for row in table.rows]
    held_out = {name for line in table.phrasings["held?"] for name in line.split(": ", 1)[0].split("|")}
    ranks = {name: (name not in held_out, number(f"asked {name}", 2**32)) for name in names}
    order = sorted(range(len(names)), key=lambda row: ranks[names[row]])
    return sorted(order[:MOST_ROWS])


def sum_chats(table: Table, tools: Tools) -> Iterator[Chat]:
    """Yield conversations with one or two sums."""
    for language in LANGUAGES:
        for phrasing_number, phrasing in enumerate(table.phrasings[f"{language}?"]):
            template = f"{table.name} {language} {phrasing_number}"
            texts = list(sums(table, phrasing, f"{template} chat", CHATS_PER_SUM_PHRASING))
            while texts:
                text = texts.pop()
                if texts and number(text, 5) == 0:
                    text += " => " + texts.pop()
                yield chat(text, template, language, tools)


def skeleton_chats(
    name: str, slots: dict[str, list[str]], skeletons: list[tuple[str, str]], count: int, tools: Tools
) -> Iterator[Chat]:
    """Yield up to `count` tellings of every zh? or en? skeleton; some go on with a zh+ or en+ skeleton."""
    for skeleton_number, (mark, skeleton) in enumerate(skeletons):
        if mark not in ("zh?", "en?"):
            continue
        language, template = mark[:2], f"{name} {skeleton_number}"
        follow = [more for other, more in skeletons if other == f"{language}+"]
        for text in map(capital, tellings(skeleton, slots, template, count)):
            if follow and number(f"{text} goes on", 5) == 0:
                text += " => " + fill_skeleton(follow[number(text, len(follow))], slots, text)
            yield chat(text, template, language, tools)


def table_questions(table: Table) -> Iterator[dict]:
    """Yield the held-out questions of a table: "held? rows: question => answer / answer"; of sums, "held? count: "."""
    for line in table.phrasings["held?"]:
        rows, phrasing = line.split(": ", 1)
        if rows.isdigit():
            texts = list(sums(table, phrasing, f"question {line}", int(rows), held_out=True))
        else:
            numbers = [[row[0] for row in table.rows].index(name) for name in rows.split("|")]
            texts = [table.fill(phrasing, row_number, line) for row_number in numbers]
        yield from (question(text, table.name) for text in texts)


def skeleton_questions(name: str, slots: dict[str, list[str]], skeletons: list[tuple[str, str]]) -> Iterator[dict]:
    """Yield the held? lines of a file of skeletons as questions."""
    for mark, skeleton in skeletons:
        if mark == "held?":
            yield question(fill_skeleton(skeleton, slots, skeleton), name)


def question(text: str, topic: str) -> dict:
    """Make a record of questions.jsonl out of "question => answer / answer"."""
    asked, answers = text.split(" => ")
    return {"question": asked, "answers": answers.split(" / "), "topic": topic}
