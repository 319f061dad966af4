"""Conversations -> pieces of text and control tokens: the chat template, said a second time, for ids.

A template gives one text, in which a control token cannot be told from its name in somebody's words.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from dataset.conversations import ASSISTANT, END_THINK, SYSTEM, THINK, TOOL, USER, Conversation, Turn, write_json

# minimind-3's names.
START, END = "<|im_start|>", "<|im_end|>"
CALL, END_CALL, RESPONSE, END_RESPONSE = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{CALL}{END_CALL} XML tags:\n{CALL}\n"
    f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{END_CALL}'
)
CONTROLS = (START, END, THINK, END_THINK, CALL, END_CALL, RESPONSE, END_RESPONSE)


class Piece(NamedTuple):
    """Text that is encoded as it stands, or the name of a control token.

    apart: not joined with the text that follows, so that it has the ids it has in a prompt that ends with it.
    """

    text: str
    is_control: bool = False
    learned: bool = False
    apart: bool = False


def lay_out(conversation: Conversation) -> Iterator[tuple[str, list[Piece]]]:
    """Yield role and pieces of each turn; results of tools that follow one another share a turn of the user's."""
    turns = conversation.turns
    if conversation.tools:
        has_system = bool(turns) and turns[0].role == SYSTEM
        system = Piece(turns[0].content + "\n\n" if has_system else "")
        tools = Piece("".join("\n" + write_json(tool) for tool in conversation.tools))
        pieces = [*_header(SYSTEM), system, Piece(BEFORE_TOOLS), tools, *_with_controls(AFTER_TOOLS), *_footer()]
        yield SYSTEM, pieces
        turns = turns[has_system:]
    for role, same_role in groupby(turns, key=lambda turn: turn.role):
        if role == TOOL:
            yield TOOL, [*_header(USER), *_results(same_role), *_footer()]
            continue
        for turn in same_role:
            if role == ASSISTANT:
                yield role, [*_header(role), *_answer(turn, conversation.empty_think), *_footer(turn.trained)]
            else:
                yield role, [*_header(role), Piece(turn.content), *_footer()]


def prompt_header(open_thinking: bool, empty_think: bool) -> list[Piece]:
    """What an answer follows, as the template's generation prompt."""
    if open_thinking:
        return [*_header(ASSISTANT), Piece(THINK, True), Piece("\n")]
    return [*_header(ASSISTANT), *(empty_think_block(learned=False) if empty_think else ())]


def empty_think_block(learned: bool = True) -> list[Piece]:
    """What an answer without reasoning begins with under `empty_think`."""
    return _think_block("\n", learned)


def rendered(conversation: Conversation) -> str:
    """Return the text of a conversation, equal to the chat template's."""
    return "".join(piece.text for _, pieces in lay_out(conversation) for piece in pieces)


def _header(role: str) -> list[Piece]:
    # An answer is generated behind its header, so it is encoded apart from it, learned or not.
    return [Piece(START, True), Piece(role + "\n", apart=role == ASSISTANT)]


def _footer(learned: bool = False) -> list[Piece]:
    return [Piece(END, True, learned), Piece("\n")]


def _with_controls(text: str) -> list[Piece]:
    """Our own words, in which names of control tokens are meant."""
    return [Piece(part, part in (CALL, END_CALL)) for part in re.split(f"({CALL}|{END_CALL})", text)]


def _results(turns: Iterable[Turn]) -> Iterator[Piece]:
    for number, turn in enumerate(turns):
        yield Piece("\n" if number else "")
        yield from (Piece(RESPONSE, True), Piece(f"\n{turn.content}\n"), Piece(END_RESPONSE, True))


def _answer(turn: Turn, empty_think: bool) -> Iterator[Piece]:
    learned = turn.trained
    if turn.reasoning or empty_think:
        yield from _think_block(turn.reasoning + "\n", learned)
    content = turn.content.lstrip("\n")
    yield Piece(content, False, learned)
    for number, call in enumerate(turn.calls):
        yield Piece("\n" if content or number else "", False, learned)
        yield Piece(CALL, True, learned)
        yield Piece(f"\n{write_json(call)}\n", False, learned)
        yield Piece(END_CALL, True, learned)


def _think_block(thought: str, learned: bool) -> list[Piece]:
    # A prompt may end with the empty block, and the answer then begins anew.
    inside, after = Piece("\n" + thought, False, learned), Piece("\n\n", False, learned, apart=thought == "\n")
    return [Piece(THINK, True, learned), inside, Piece(END_THINK, True, learned), after]
