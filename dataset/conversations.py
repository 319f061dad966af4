"""Records of four formats -> conversations of one form. Nothing is dropped without a name that is counted.

Formats, told apart by their keys; each may be JSON lines, a JSON array or parquet, gzipped or not:

- MiniMind  {"conversations": [{"role", "content", "reasoning_content"?, "tools"?, "tool_calls"?}]}
- OpenAI    {"messages": [{"role", "content", "tool_calls"?, "weight"?}], "tools"?}
- ShareGPT  {"conversations": [{"from", "value"}], "system"?, "tools"?}
- Alpaca    {"instruction", "input"?, "output", "system"?, "history"?: [[question, answer]]}

What is odd                                         | Rule
----------------------------------------------------|-----------------------------------------------------------------
role of another name                                | human = user; gpt, bot, model, chatgpt = assistant; developer =
                                                    | system; observation, function = tool; function_call, tool_call =
                                                    | an assistant's calls; any other is a bad record
two turns of one role in a row, a late system turn  | kept where they stand
content null or white space                         | a user's: bad record; an assistant's without calls: noted, not
                                                    | trained; a system turn's: left out; a tool's: an empty result
no content, value or calls; no output               | bad record that lists the keys
content beside from, value beside role              | the text, where the format's own key has none
conversations and messages                          | the one that is not empty; two that differ: bad record
content as list of parts                            | the text parts, joined by line ends; an image or sound: bad record
a tool's content as object or list                  | written as JSON
answer that begins with <think> ... </think>        | its reasoning; marker strings anywhere else stay plain text
line ends before an answer                          | left out, as by the chat template
reasoning that is empty                             | the same as none
tools, functions: list or JSON string; on the record| all taken to one list of {"type": "function", "function": {...}};
or on a message                                     | nulls inside, as parquet fills in, go; two that differ: bad record
tool_calls, function_call: object, list or JSON     | {"name", "arguments": {...}} each; "" and null arguments are {};
string, nested in "function" or not                 | what is no JSON object: bad record
tool_call_id, name and other keys                   | left out; results stay in their order
"weight": 0 on an assistant's message (OpenAI)      | read, not trained
answer before any question                          | noted; read, not trained
turns after the last answer to train on             | noted; left out
no answer to train on at all                        | bad record: "no answer", or "empty answer" where there is one
Alpaca's input                                      | follows the instruction on a new line
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataset.json_array import JSON
from dataset.records import BadRecord, names, text_of

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
CALL = "function_call"
ROLES = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function"), TOOL),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
}
MESSAGES = ("conversations", "messages")  # keys of a record
TEXT_PARTS = ("text", "input_text", "output_text")
THINK, END_THINK = "<think>", "</think>"

# What is counted of conversations that are used in part.
EMPTY_ANSWER, EARLY_ANSWER, UNANSWERED = "empty answer", "answer before any question", "turns after the last answer"
NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Turn:
    """One message. role: system, user, assistant or tool; calls: {"name", "arguments": {...}} each.

    trained: whether an assistant's turn is learned or only read.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[dict, ...] = ()
    trained: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether an assistant's turn says nothing."""
        return not (self.content.strip() or self.calls)


@dataclass(frozen=True)
class Conversation:
    """Turns and the tools described to the model. notes: names of what was odd.

    empty_think: answers without reasoning begin with an empty think block.
    """

    turns: tuple[Turn, ...]
    tools: tuple[dict, ...] = ()
    notes: tuple[str, ...] = ()
    empty_think: bool = False

    def as_messages(self) -> tuple[list[dict], list[dict] | None]:
        """Return (messages, tools) as `apply_chat_template` of transformers takes them."""
        messages = []
        for turn in self.turns:
            message: dict = {"role": turn.role, "content": turn.content}
            if turn.reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.calls:
                message["tool_calls"] = [{"type": "function", "function": call} for call in turn.calls]
            messages.append(message)
        return messages, list(self.tools) or None


def conversation_of(record: object) -> Conversation:
    """Read a record of any of the four formats. Raises BadRecord; the module's table has the rules."""
    if not isinstance(record, dict):
        raise record if isinstance(record, BadRecord) else BadRecord("not an object", f"but {type(record).__name__}")
    try:
        messages = _messages(record)
        turns = [turn for message in messages if (turn := _turn(message)) is not None]
        turns, notes = _choose_trained(turns)
        return Conversation(tuple(turns), _tools([record, *messages]), notes)
    except RecursionError:  # some hundred levels
        raise BadRecord("nested too deeply") from None


def _messages(record: dict) -> list[dict]:
    """The messages of a record as objects with "role" and "content"."""
    filled = [key for key in MESSAGES if record.get(key)]
    if len(filled) > 1 and record[filled[0]] != record[filled[1]]:
        raise BadRecord('"conversations" and "messages" differ')
    # Without "instruction" an empty list is one, too.
    listed = filled or [key for key in MESSAGES if record.get(key) is not None and "instruction" not in record]
    if listed:
        messages = record[listed[0]]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRecord(f'"{listed[0]}" is not a list of objects')
        messages = [_named_as_openai(message) for message in messages]
    elif "instruction" in record:
        messages = list(_alpaca_messages(record))
    else:
        keys = ", ".join(map(str, list(record)[:5])) or "none"
        hint = (
            "texts are for train_pretrain.py" if "text" in record else "conversations, messages or instruction has one"
        )
        raise BadRecord("no conversation", f"its keys: {keys}; {hint}")
    system = record.get("system")
    return messages if system is None else [{"role": SYSTEM, "content": system}, *messages]


def _named_as_openai(message: dict) -> dict:
    """A message with "role" and "content"; a mixture of the formats may have its text under the other's key."""
    if message.get("role") is None and "from" in message:
        role, keys = message["from"], ("value", "content")
    else:
        role, keys = message.get("role"), ("content", "value")
    if not any(key in message for key in (*keys, "tool_calls", "function_call")):
        raise BadRecord('no "content" key', f"a message has the keys {names(message) or 'none'}")
    text = next((message[key] for key in keys if message.get(key) not in (None, "")), None)
    return message | {"role": role, "content": text}


def _alpaca_messages(record: dict) -> Iterator[dict]:
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRecord('"history" is not a list of pairs')
    for question, answer in history:
        yield from ({"role": USER, "content": question}, {"role": ASSISTANT, "content": answer})
    if "output" not in record:
        raise BadRecord('no "output" key', f"its keys: {names(record)}")
    asked = [_content(record.get(key)) for key in ("instruction", "input")]
    yield {"role": USER, "content": "\n".join(part for part in asked if part.strip())}
    yield {"role": ASSISTANT, "content": record.get("output")}


def _turn(message: dict) -> Turn | None:
    """Read one message; None for a system message without text."""
    named = message.get("role")
    role = ROLES.get(named.strip().lower()) if isinstance(named, str) else None
    if role is None:
        raise BadRecord("unknown role", repr(named)[:40])
    content = message.get("content")
    if role == TOOL and (
        isinstance(content, dict) or (content and isinstance(content, list) and not _is_parts(content))
    ):
        content = _dump(content)
    content = _content(content)
    reasoning = _content(message.get("reasoning_content")).strip("\n")
    calls = _calls(message.get("tool_calls")) + _calls(message.get("function_call"))
    if role in (ASSISTANT, CALL):
        content, reasoning = _without_reasoning(content, reasoning)
        if role == CALL:
            calls, content = _calls(content) + calls, ""
        trained = message.get("weight") != 0
        return Turn(ASSISTANT, content if content.strip() else "", reasoning, calls, trained)
    if calls or reasoning:
        raise BadRecord(f'{"tool calls" if calls else "reasoning"} in a "{role}" message')
    if role == USER and not content.strip():
        raise BadRecord("empty user message")
    return Turn(role, content) if role != SYSTEM or content.strip() else None


def _content(content: object) -> str:
    """The text of a message's content: a string, null, or a list of parts."""
    if _is_parts(content):
        texts = [part if isinstance(part, str) else _text_of_part(part) for part in content]
        content = "\n".join(texts)
    if content is None or (isinstance(content, str) and not content.strip()):
        return content or ""
    return text_of({"content": content}, "content")


def _is_parts(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and "type" in part) for part in content
    )


def _text_of_part(part: dict) -> str:
    if part["type"] not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise BadRecord("content that is not text", f"a part of type {part['type']!r}")
    return part["text"]


def _without_reasoning(content: str, reasoning: str) -> tuple[str, str]:
    """Move a think block at the start of an answer into its reasoning."""
    start = content.lstrip()
    if reasoning or not start.startswith(THINK) or END_THINK not in start:
        return content, reasoning
    thought, _, answer = start.removeprefix(THINK).partition(END_THINK)
    return answer.lstrip("\n"), thought.strip("\n") if thought.strip() else ""


def _calls(value: object) -> tuple[dict, ...]:
    calls = _json(value, "tool calls")
    return tuple(_call(call) for call in ([calls] if isinstance(calls, dict) else calls))


def _call(call: object) -> dict:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRecord("tool call without a name")
    arguments = _json(call.get("arguments"), "arguments of a tool call") or {}
    if not isinstance(arguments, dict):
        raise BadRecord("arguments of a tool call are not an object", call["name"])
    call = {"name": call["name"], "arguments": arguments}
    text_of({"tool_calls": _dump(call)}, "tool_calls")
    return call


def _tools(places: list[dict]) -> tuple[dict, ...]:
    """The one list of tools among a record and its messages."""
    found: list[dict] = []
    for value in (place.get(key) for place in places for key in ("tools", "functions")):
        tools = _json(value, "tools")
        tools = [_tool(_without_nulls(tool)) for tool in ([tools] if isinstance(tools, dict) else tools)]
        if found and tools and tools != found:
            raise BadRecord("tools in two places that differ")
        found = found or tools
    return tuple(found)


def _tool(tool: object) -> dict:
    if isinstance(tool, dict) and not isinstance(tool.get("function"), dict):
        tool = {"type": "function", "function": tool}
    if not isinstance(tool, dict) or not isinstance(tool["function"].get("name"), str):
        raise BadRecord("tool without a name")
    text_of({"tools": _dump(tool)}, "tools")
    return tool


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json(value: object, what: str) -> list | dict:
    """A list or object, or what a string of JSON holds; nothing at all is an empty list."""
    if isinstance(value, str) and value.strip():
        try:
            value = JSON.decode(value)
        except ValueError as problem:
            raise BadRecord(f"{what} are not JSON", str(problem)) from None
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, list | dict):
        raise BadRecord(f"{what} are neither a list nor an object", f"but {type(value).__name__}")
    return value


def _dump(value: object) -> str:
    try:
        return write_json(value)
    except (ValueError, TypeError) as problem:  # NaN, or a parquet column's date
        raise BadRecord("a value that JSON cannot hold", str(problem)) from None


def write_json(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _choose_trained(turns: list[Turn]) -> tuple[list[Turn], tuple[str, ...]]:
    """Mark what is only read, and leave out what follows the last answer."""
    notes, asked, empty = [], False, False
    for number, turn in enumerate(turns):
        asked = asked or turn.role == USER
        if turn.role == ASSISTANT and turn.is_empty:
            empty = True
            notes.append(EMPTY_ANSWER)
            turns[number] = replace(turn, trained=False)
        elif turn.role == ASSISTANT and not asked:
            notes.append(EARLY_ANSWER)
            turns[number] = replace(turn, trained=False)
    answers = [number for number, turn in enumerate(turns) if turn.trained]
    if not answers:
        raise BadRecord(EMPTY_ANSWER if empty else NO_ANSWER)
    if len(turns) > answers[-1] + 1:
        notes.append(UNANSWERED)
    return turns[: answers[-1] + 1], tuple(notes)
