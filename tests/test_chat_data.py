"""Conversations in, ids and what is learned of them out; the text is the chat template's."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dataset.chat import CUT_ANSWER, SPLIT, TOO_LONG, Block, Row, TooLong, encode, encode_records, fit, prompt_ids, show
from dataset.conversations import Conversation, Turn, conversation_of
from dataset.files import identify
from dataset.records import BadRecord, read_chunks
from dataset.rendering import rendered
from dataset.tokenizer import load_tokenizer
from dataset.variation import SYSTEM_PROMPTS, Variation
from tests.conftest import ROOT, SHARED_DATA

TOKENIZER = ROOT / "model" / "tokenizer"
# Ids of the committed vocabulary's reserved entries; every id below 36 is one.
START, END, CALL, END_CALL, RESPONSE, END_RESPONSE, THINK, END_THINK = 1, 2, 21, 22, 23, 24, 25, 26
MARKERS = "<|im_end|>\n<|im_start|>assistant\n<think></think><tool_call></tool_call><tool_response></tool_response>"

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"maximum": 9}}}
CALL_OF_ADD = {"name": "add", "arguments": {"a": 1, "b": "二"}}
ASKS = {"role": "user", "content": "1 + 二?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL_OF_ADD])}
RESULT = {"role": "tool", "content": "3"}
ANSWERS = {"role": "assistant", "content": "It is 3."}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def template():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        yield AutoTokenizer.from_pretrained(TOKENIZER)


def minimind(*messages, **more):
    return {"conversations": list(messages), **more}


def one_row(record, tokenizer) -> Row:
    encoded = encode_records([("here", record)], tokenizer)
    assert encoded.bad == []
    [(_, row)] = encoded.rows
    return row


def spelled(tokenizer, *parts) -> list[int]:
    """Ids of texts and control ids in a row; what is in a list is learned, and comes out negative less one."""
    ids = []
    for part in parts:
        if isinstance(part, list):
            ids += [-1 - token for token in spelled(tokenizer, *part)]
        else:
            ids += [part] if isinstance(part, int) else tokenizer.encode_texts([part])[0]
    return ids


def marked(row: Row) -> list[int]:
    return [-1 - token if learned else token for token, learned in zip(row.ids, row.learned, strict=True)]


def records_of(path: Path) -> list[tuple[str, object]]:
    source = identify(str(path), "utf-8")
    return [record for chunk in read_chunks(source, hashlib.sha256()) for record in chunk.records("text")]


def shared(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"needs {path.name} beside the repository")
    return path


def test_only_the_answer_and_its_end_token_are_learned(tokenizer):
    row = one_row(minimind({"role": "system", "content": "Be kind."}, ASKS, ANSWERS, ASKS, ANSWERS), tokenizer)
    answer = [*(START, "assistant\n"), ["It is 3.", END], "\n"]
    question = [START, "user\n1 + 二?", END, "\n"]
    expected = [START, "system\nBe kind.", END, "\n", *question, *answer, *question, *answer]
    assert marked(row) == spelled(tokenizer, *expected)


def test_tools_reasoning_calls_and_results_have_their_control_ids(tokenizer):
    calls = CALLS | {"reasoning_content": "Add them.", "tool_calls": [CALL_OF_ADD, CALL_OF_ADD]}
    row = one_row(minimind(ASKS, calls, RESULT, RESULT, ANSWERS, tools=json.dumps([TOOL])), tokenizer)
    call = '\n{"name": "add", "arguments": {"a": 1, "b": "二"}}\n'
    system = (
        "system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"maximum": 9}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
    )
    example = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    expected = [
        *(START, system, CALL, END_CALL, " XML tags:\n", CALL, example, END_CALL, END, "\n"),
        *(START, "user\n1 + 二?", END, "\n"),
        *(START, "assistant\n"),
        [THINK, "\nAdd them.\n", END_THINK, "\n\n", CALL, call, END_CALL, "\n", CALL, call, END_CALL, END],
        *("\n", START, "user\n", RESPONSE, "\n3\n", END_RESPONSE, "\n", RESPONSE, "\n3\n", END_RESPONSE, END, "\n"),
        *(START, "assistant\n", ["It is 3.", END], "\n"),
    ]
    assert marked(row) == spelled(tokenizer, *expected)


def test_marker_strings_in_anybodys_words_stay_text(tokenizer):
    tool = {"name": "add", "description": MARKERS}
    call = json.dumps([{"name": "add", "arguments": {"a": MARKERS}}])
    messages = (
        {"role": "system", "content": MARKERS, "tools": json.dumps([tool])},
        {"role": "user", "content": MARKERS},
        {"role": "assistant", "content": "x" + MARKERS, "tool_calls": call, "reasoning_content": "y" + MARKERS},
        {"role": "tool", "content": MARKERS},
        {"role": "assistant", "content": "z" + MARKERS},
    )
    row = one_row(minimind(*messages), tokenizer)
    controls = [token for token in row.ids if token < 36]
    system, user, result = [START, CALL, END_CALL, CALL, END_CALL, END], [START, END], [RESPONSE, END_RESPONSE]
    calls = [START, THINK, END_THINK, CALL, END_CALL, END]
    assert controls == [*system, *user, *calls, START, *result, END, *user]
    assert tokenizer.decode(row.ids).count(MARKERS) == 6  # and twice as JSON, where line ends are written \n


CASES = {
    "one turn": minimind(ASKS, ANSWERS),
    "system, many turns": minimind({"role": "system", "content": "简短回答。"}, ASKS, ANSWERS, ASKS, ANSWERS),
    "tools without a system turn": minimind(ASKS, CALLS, RESULT, ANSWERS, tools=[TOOL]),
    "tools and two results": minimind(
        {"role": "system", "content": "Be brief. 简短。", "tools": json.dumps([TOOL, TOOL], ensure_ascii=False)},
        *(ASKS, CALLS | {"content": "我来算。", "tool_calls": [CALL_OF_ADD] * 2}, RESULT, RESULT, ANSWERS),
    ),
    "thinking in some answers": minimind(ASKS, ANSWERS | {"reasoning_content": "想一想。\n\nYes."}, ASKS, ANSWERS),
    "thinking before a call": minimind(ASKS, CALLS | {"reasoning_content": "call it"}, RESULT, ANSWERS, tools=[TOOL]),
    "late system turn, two questions": minimind(ASKS, ASKS, ANSWERS, {"role": "system", "content": "s"}, ASKS, ANSWERS),
    "lines and spaces": minimind(
        {"role": "user", "content": "\n a \n\n"}, {"role": "assistant", "content": "\n b\n\n"}
    ),
    "markup of the web": minimind({"role": "user", "content": "<b>'\"&\\n{{ x }}"}, ANSWERS, tools=[TOOL]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("empty_think", [False, True])
def test_text_and_ids_are_the_chat_templates(name, empty_think, template, tokenizer):
    conversation = conversation_of(CASES[name])
    messages, tools = conversation.as_messages()
    conversation = replace(conversation, empty_think=empty_think)
    options = dict(tools=tools, empty_think=empty_think)
    text = template.apply_chat_template(messages, tokenize=False, **options)
    assert rendered(conversation) == text
    [blocks] = encode([conversation], tokenizer)
    ids = [token for block in blocks for token in block.ids]
    assert tokenizer.decode(ids) == text
    assert ids == template.apply_chat_template(messages, **options)["input_ids"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"empty_think": True}, {"open_thinking": True}], ids=str)
def test_prompt_is_the_templates_generation_prompt(name, options, template, tokenizer):
    conversation = conversation_of(CASES[name])
    asked = Conversation(conversation.turns[:-1], conversation.tools, empty_think="empty_think" in options)
    messages, tools = asked.as_messages()
    expected = template.apply_chat_template(messages, tools=tools, add_generation_prompt=True, **options)["input_ids"]
    assert prompt_ids(asked, tokenizer, open_thinking="open_thinking" in options) == expected


def test_template_takes_openai_messages_as_they_are(template):
    nested = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "二"}'}}
    messages = [ASKS, {"role": "assistant", "content": None, "tool_calls": [nested]}, RESULT, ANSWERS]
    text = template.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert text == rendered(conversation_of({"messages": messages, "tools": [TOOL]}))


@pytest.mark.skipif("MINIMIND_CHECKOUT" not in os.environ, reason="set MINIMIND_CHECKOUT to try a checkout")
@pytest.mark.parametrize("name", CASES)
def test_with_empty_think_blocks_text_and_ids_are_minimind_3s(name):
    from transformers import AutoTokenizer

    folder = Path(os.environ["MINIMIND_CHECKOUT"]) / "model"
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    conversation = replace(conversation_of(CASES[name]), empty_think=True)
    messages, tools = conversation.as_messages()
    assert rendered(conversation) == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    asked = replace(conversation, turns=conversation.turns[:-1])
    prompt = theirs.apply_chat_template(messages[:-1], tools=tools, add_generation_prompt=True)["input_ids"]
    assert prompt_ids(asked, tokenizer) == prompt


def test_four_formats_give_the_same_conversation():
    nested = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": "二"})}}
    ]
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": "二?"}]
    flat = json.dumps([TOOL["function"]])
    system = {"role": "system", "content": "Be kind."}
    expected = Conversation(
        turns=(
            Turn("system", "Be kind."),
            Turn("user", "1 +\n二?"),
            Turn("assistant", "", calls=(CALL_OF_ADD,), trained=True),
            Turn("tool", "3"),
            Turn("assistant", "It is 3.", reasoning="Easy.", trained=True),
        ),
        tools=(TOOL,),
    )
    asks, answers = ASKS | {"content": "1 +\n二?"}, ANSWERS | {"reasoning_content": "Easy."}
    thinks = "<think>\nEasy.\n</think>\n\nIt is 3."
    sharegpt = [
        *({"from": "human", "value": "1 +\n二?"}, {"from": "function_call", "value": json.dumps(CALL_OF_ADD)}),
        *({"from": "observation", "value": "3"}, {"from": "gpt", "value": thinks}),
    ]
    for record in (
        minimind(system | {"tools": json.dumps([TOOL])}, asks, CALLS, RESULT, answers),
        minimind(system | {"functions": flat}, asks, CALLS | {"content": None}, RESULT, answers),
        {
            "messages": [
                *(system, ASKS | {"content": parts}, {"role": "assistant", "content": None, "tool_calls": nested}),
                *(RESULT | {"tool_call_id": "1"}, ANSWERS | {"content": [{"type": "text", "text": thinks}]}),
            ],
            "tools": [TOOL],
        },
        {"conversations": sharegpt, "system": "Be kind.", "tools": flat},
    ):
        assert conversation_of(record) == expected
    alpaca = {"instruction": "1 +", "input": "二?", "output": thinks, "system": "Be kind.", "history": [["a", "b"]]}
    alpaca_turns = (Turn("user", "a"), Turn("assistant", "b", trained=True), expected.turns[1], expected.turns[4])
    assert conversation_of(alpaca).turns == (expected.turns[0], *alpaca_turns)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ([ASKS, ANSWERS], "not an object"),
        ({"text": "a"}, "no conversation"),
        ({"chosen": [ASKS], "rejected": [ASKS]}, "no conversation"),
        ({"conversations": "a"}, '"conversations" is not a list of objects'),
        ({"messages": ["a"]}, '"messages" is not a list of objects'),
        (minimind(), "no answer"),
        (minimind(ASKS), "no answer"),
        (minimind(ANSWERS), "no answer"),
        (minimind(ASKS, ANSWERS | {"content": None}), "empty answer"),
        (minimind(ASKS, {"role": "assistant"}), 'no "content" key'),
        (minimind(ASKS, ANSWERS | {"content": " \n", "reasoning_content": "hm"}), "empty answer"),
        (minimind(ASKS, ANSWERS | {"content": 3}), '"content" is a number, not a string'),
        (minimind(ASKS, ANSWERS | {"content": "a\0"}), '"content" holds a NUL character'),
        (minimind(ASKS, ANSWERS | {"content": "a\ud83d"}), '"content" holds a lone surrogate'),
        (minimind(ASKS | {"content": None}, ANSWERS), "empty user message"),
        (minimind(ASKS | {"content": [{"type": "image_url", "image_url": {}}]}, ANSWERS), "content that is not text"),
        (minimind(ASKS | {"role": "critic"}, ANSWERS), "unknown role"),
        (minimind(ASKS | {"role": None}, ANSWERS), "unknown role"),
        (minimind(ASKS | {"tool_calls": [CALL_OF_ADD]}, ANSWERS), 'tool calls in a "user" message'),
        (minimind(ASKS, CALLS | {"tool_calls": "add(1)"}), "tool calls are not JSON"),
        (minimind(ASKS, CALLS | {"tool_calls": "3"}), "tool calls are neither a list nor an object"),
        (minimind(ASKS, CALLS | {"tool_calls": '[{"name": "add", "arguments": [1]}]'}), "arguments of a tool call are"),
        (minimind(ASKS, CALLS | {"tool_calls": '[{"arguments": {}}]'}), "tool call without a name"),
        (minimind(ASKS, CALLS | {"tool_calls": '[{"name": "\\ud83d"}]'}), '"tool_calls" holds a lone surrogate'),
        (minimind(ASKS, ANSWERS, tools='[{"name": "\\ud83d"}]'), '"tools" holds a lone surrogate'),
        (
            minimind(ASKS, CALLS | {"tool_calls": '[{"name": "a", "arguments": {"a": NaN}}]'}),
            "a value that JSON cannot",
        ),
        (minimind(ASKS, ANSWERS, tools="add"), "tools are not JSON"),
        (minimind(ASKS, ANSWERS, tools=[{}]), "tool without a name"),
        (minimind(ASKS | {"tools": [TOOL]}, ANSWERS, tools=[TOOL, TOOL]), "tools in two places that differ"),
        ({"instruction": "a", "output": None}, "empty answer"),
        ({"instruction": "a", "response": "b"}, 'no "output" key'),
        (minimind({"role": "user", "text": "a"}, ANSWERS), 'no "content" key'),
        (minimind(ASKS, {"role": "assistant", "text": "b"}), 'no "content" key'),
        ({"conversations": [ASKS, ANSWERS], "messages": [ASKS]}, '"conversations" and "messages" differ'),
        ({"instruction": "", "output": "b"}, "empty user message"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, '"history" is not a list of pairs'),
        (BadRecord("not JSON", "cut"), "not JSON"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(record, kind, tokenizer):
    with pytest.raises(BadRecord) as raised:
        conversation_of(record)
    assert raised.value.kind.startswith(kind)
    encoded = encode_records([("a.jsonl:1", minimind(ASKS, ANSWERS)), ("a.jsonl:2", record)], tokenizer)
    assert (encoded.used, len(encoded.rows)) == (1, 1)
    [(counted, line)] = encoded.bad
    assert counted == raised.value.kind
    assert line.startswith(f"a.jsonl:2: {kind}")


@pytest.mark.parametrize("depth", [400, 600, *range(930, 1005, 5), 100_000])
@pytest.mark.parametrize("place", ["tools", "tools as a string", "arguments", "result"])
def test_values_nested_too_deeply_are_bad_records(tmp_path, tokenizer, place, depth):
    nested = "[" * depth + "]" * depth
    tools, call, result = json.dumps([TOOL]), json.dumps(CALL_OF_ADD), '"3"'
    if place == "result":
        result = nested
    elif place == "arguments":
        call = call.replace("1", nested)
    else:
        tools = tools.replace("9", nested) if place == "tools" else json.dumps(tools.replace("9", nested))
    path = tmp_path / "a.jsonl"
    path.write_text(
        f'{{"tools": {tools}, "messages": [{json.dumps(ASKS)}, {{"role": "assistant", "tool_calls": [{call}]}}, '
        f'{{"role": "tool", "content": {result}}}, {json.dumps(ANSWERS)}]}}\n'
    )
    encoded = encode_records(records_of(path), tokenizer)
    assert encoded.used + len(encoded.bad) == 1
    assert all("nested too deeply" in line for _, line in encoded.bad)
    assert encoded.used or depth > 400


def test_what_is_left_out_of_a_used_conversation_is_noted(tokenizer):
    greeting, silence = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": None}
    record = minimind(greeting, ASKS, ANSWERS, ASKS, silence, ASKS, ANSWERS, ASKS)
    encoded = encode_records([("a", record), ("b", None), ("c", minimind(ASKS, ANSWERS))], tokenizer)
    notes = {"answer before any question": 1, "empty answer": 1, "turns after the last answer": 1}
    assert (encoded.used, encoded.blank_lines, encoded.notes) == (2, 1, notes)
    shown = show(encoded.rows[0][1], tokenizer)
    question = "<|im_start|>user\n1 + 二?<|im_end|>\n<|im_start|>assistant\n"
    learned = f"{question}⟦It is 3.<|im_end|>⟧\n"
    assert shown == f"<|im_start|>assistant\nHello.<|im_end|>\n{learned}{question}<|im_end|>\n{learned}"


def test_odd_shapes_of_one_meaning_are_read_alike():
    expected = conversation_of(minimind(ASKS, CALLS, RESULT, ANSWERS, tools=[TOOL]))
    filled_in = TOOL["function"] | {"strict": None, "parameters": {"maximum": 9, "items": [{"enum": None}]}}
    emptied = TOOL["function"] | {"parameters": {"maximum": 9, "items": [{}]}}
    openai = {"role": "assistant", "content": "", "function_call": CALL_OF_ADD | {"arguments": '{"a": 1, "b": "二"}'}}
    assert conversation_of({"messages": [ASKS, openai, RESULT, ANSWERS], "functions": [TOOL]}) == expected
    shouted = ASKS | {"role": " User "}
    assert conversation_of(minimind(shouted, CALLS, RESULT | {"role": "function"}, ANSWERS, tools=TOOL)) == expected
    read = conversation_of(minimind(ASKS, ANSWERS, tools=[filled_in]))
    assert read.tools == ({"type": "function", "function": emptied},)
    for content, text in (({"a": "二"}, '{"a": "二"}'), ([1, {"b": None}], '[1, {"b": null}]'), (None, "")):
        read = conversation_of(minimind(ASKS, CALLS, RESULT | {"content": content}, ANSWERS))
        assert read.turns[2] == Turn("tool", text)
    for arguments in ("", None, {}, "{}"):
        read = conversation_of(minimind(ASKS, CALLS | {"tool_calls": [{"name": "now", "arguments": arguments}]}))
        assert read.turns[1].calls == ({"name": "now", "arguments": {}},)


def test_text_under_either_formats_key_is_read_alike():
    expected = conversation_of(minimind(ASKS, ANSWERS))
    for ask, answer in (
        ({"from": "human", "content": "1 + 二?"}, {"from": "gpt", "content": "It is 3."}),
        ({"role": "user", "value": "1 + 二?"}, {"role": "assistant", "value": "It is 3."}),
        (ASKS | {"value": None}, ANSWERS | {"value": "It is 3.", "content": None}),
        (ASKS | {"from": "human", "value": "9"}, ANSWERS),
    ):
        assert conversation_of(minimind(ask, answer)) == expected
    alpaca = {"instruction": "1 + 二?", "output": "It is 3."}
    assert conversation_of(alpaca) == expected


def test_of_two_lists_of_messages_an_empty_one_gives_way():
    expected = conversation_of(minimind(ASKS, ANSWERS))
    full = [ASKS, ANSWERS]
    for record in (
        {"conversations": [], "messages": full},
        {"conversations": full, "messages": []},
        {"conversations": full, "messages": full},
        {"conversations": [], "messages": None, "instruction": "1 + 二?", "output": "It is 3."},
    ):
        assert conversation_of(record) == expected


def test_a_message_of_no_weight_is_read_and_not_learned():
    conversation = conversation_of({"messages": [ASKS, ANSWERS | {"weight": 0}, ASKS, ANSWERS | {"weight": 1}]})
    assert [turn.trained for turn in conversation.turns] == [False, False, False, True]


def test_whole_numbers_in_tools_of_a_file_stay_whole(tmp_path):
    record = {"messages": [ASKS, CALLS | {"tool_calls": [CALL_OF_ADD]}], "tools": [TOOL]}
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(json.dumps(record) + "\n")
    array.write_text(json.dumps([record]))
    for path in (lines, array):
        [(_, value)] = records_of(path)
        assert '"maximum": 9}' in rendered(conversation_of(value))
        assert '{"a": 1, "b": "二"}' in rendered(conversation_of(value))


def test_a_whole_number_of_any_length_keeps_its_digits(tmp_path):
    numbers = [10**18 + 1, -(10**17) - 1, 2**64 - 1, 10**4299 + 1]
    call = {"name": "order", "arguments": {"ids": numbers, "as text": json.dumps({"id": numbers[2]})}}
    path = tmp_path / "a.jsonl"
    messages = ASKS, CALLS | {"tool_calls": json.dumps([call])}, RESULT | {"content": numbers}, ANSWERS
    path.write_text(json.dumps(minimind(*messages)))
    [(_, value)] = records_of(path)
    read = conversation_of(value)
    assert read.turns[1].calls == (call,)
    assert read.turns[2].content == json.dumps(numbers)
    path.write_text(path.read_text().replace(str(numbers[3]), "9" * 5000))  # beyond what Python turns into a number
    [(_, value)] = records_of(path)
    with pytest.raises(BadRecord, match="a value that JSON cannot hold"):
        conversation_of(value)


def test_older_vocabulary_without_think_tokens_spells_them(tmp_path):
    folder = Path(shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<think>", "<|buffer0|>"), encoding="utf-8")
    older = load_tokenizer(folder)
    row = one_row(minimind(ASKS, ANSWERS | {"reasoning_content": "Easy."}), older)
    parts = [START, "user\n1 + 二?", END, "\n", START, "assistant\n"]
    answer = ["<think>\nEasy.\n", END_THINK, "\n\nIt is 3.", END]
    assert marked(row) == spelled(older, *parts, answer, "\n")


def blocks_of(*described: str) -> list[Block]:
    """Blocks as "user 5", five ids that are the number of the block; of an assistant's the last two are learned."""
    blocks = []
    for number, text in enumerate(described):
        role, length = text.split()
        learned = [role == "assistant" and position >= int(length) - 2 for position in range(int(length))]
        blocks.append(Block(role, [number] * int(length), learned))
    return blocks


@pytest.mark.parametrize("rounds", [True, False])
def test_cutting_a_conversation_costs_in_proportion_to_its_turns(rounds):
    class Counted(list):
        looks = 0

        def __len__(self) -> int:
            Counted.looks += 1
            return super().__len__()

    def looks(turns: int, max_seq_len: int) -> int:
        described = ["user 2", *(["assistant 3", "user 2"] if rounds else ["assistant 3"]) * turns]
        Counted.looks = 0
        fit([block._replace(ids=Counted(block.ids)) for block in blocks_of(*described)], max_seq_len)
        return Counted.looks

    for max_seq_len in (20, 1000, 10**6):
        assert looks(800, max_seq_len) < 5 * looks(200, max_seq_len)


def rows_of(blocks, max_seq_len) -> tuple[list[list[int]], int]:
    rows, cut = fit(blocks, max_seq_len)
    assert all(len(row.ids) - 1 <= max_seq_len for row in rows)
    return [sorted(set(row.ids)) for row in rows], cut


def test_long_conversation_is_split_before_questions_and_keeps_its_system_turn():
    blocks = blocks_of("system 3", *["user 5", "assistant 5"] * 3)
    assert rows_of(blocks, 32) == ([[0, 1, 2, 3, 4, 5, 6]], 0)
    assert rows_of(blocks, 31) == ([[0, 1, 2, 3, 4], [0, 5, 6]], 0)
    assert rows_of(blocks, 22) == ([[0, 1, 2, 3, 4], [0, 5, 6]], 0)
    assert rows_of(blocks, 21) == ([[0, 1, 2], [0, 3, 4], [0, 5, 6]], 0)
    assert rows_of(blocks, 12) == ([[0, 1, 2], [0, 3, 4], [0, 5, 6]], 0)
    with pytest.raises(BadRecord, match=TOO_LONG):
        fit(blocks, 11)


def test_questions_in_a_row_stay_together():
    blocks = blocks_of("user 5", "assistant 5", "system 5", "user 5", "user 5", "assistant 5")
    assert rows_of(blocks, 24) == ([[0, 1], [2, 3, 4, 5]], 0)


def test_answer_too_long_for_a_row_is_counted_and_its_question_not_kept():
    blocks = blocks_of("user 5", "assistant 5", "user 5", "assistant 50", "user 5", "assistant 5", "user 2")
    assert rows_of(blocks, 20) == ([[0, 1], [4, 5]], 1)
    with pytest.raises(BadRecord, match=TOO_LONG):
        fit(blocks_of("user 5", "assistant 50"), 20)


def test_chain_of_tool_calls_too_long_for_a_row_ends_after_an_answer_that_fits():
    chain = ["user 5", "assistant 5", "tool 5", "assistant 5", "tool 40", "assistant 5"]
    assert rows_of(blocks_of("system 2", *chain, "user 5", "assistant 5"), 30) == ([[0, 1, 2, 3, 4], [0, 7, 8]], 1)


def test_what_is_too_long_says_the_length_that_would_keep_an_answer():
    with pytest.raises(TooLong, match="no answer ends within 11 tokens, one would within 12; the system turn has 3"):
        fit(blocks_of("system 3", *["user 5", "assistant 5"] * 3), 11)
    with pytest.raises(TooLong, match="one would within 54; no system turn"):
        fit(blocks_of("user 5", "assistant 50"), 20)
    draw = random.Random(1)
    for _ in range(200):
        roles = draw.choices(["user", "assistant", "tool", "system"], [4, 5, 1, 1], k=draw.randint(1, 8))
        blocks = blocks_of(*(f"{role} {draw.randint(2, 9)}" for role in [*roles, "assistant"]))
        with pytest.raises(TooLong) as problem:
            fit(blocks, 0)
        with pytest.raises(TooLong):
            fit(blocks, problem.value.needs - 1)
        assert fit(blocks, problem.value.needs)[0]


def test_every_answer_is_in_one_row_or_counted_whatever_the_shape():
    draw = random.Random(0)
    for _ in range(500):
        roles = draw.choices(["user", "assistant", "tool", "system"], [4, 5, 1, 1], k=draw.randint(1, 12))
        blocks = blocks_of(*(f"{role} {draw.randint(2, 9)}" for role in roles))
        answers = sum(role == "assistant" for role in roles)
        limit = draw.randint(3, 40)
        try:
            rows, cut = fit(blocks, limit)
        except BadRecord:
            rows, cut = [], answers
        pairs = [pair for row in rows for pair in zip(row.ids, row.learned, strict=True)]
        learned = Counter(token for token, is_learned in pairs if is_learned)
        assert set(learned.values()) <= {2}
        assert len(learned) + cut == answers
        assert all(row.learned[-1] and len(row.ids) - 1 <= limit for row in rows)


def test_length_limit_is_counted_by_name(tokenizer):
    long = {"role": "assistant", "content": "word " * 99}
    records = [minimind(ASKS, ANSWERS, ASKS, long, ASKS, ANSWERS), minimind(ASKS, long), minimind(ASKS, ANSWERS)]
    encoded = encode_records(enumerate(records), tokenizer, max_seq_len=40)
    assert [kind for kind, _ in encoded.bad] == [TOO_LONG]
    assert encoded.notes == {CUT_ANSWER: 1, SPLIT: 1}
    assert (encoded.used, [number for number, _ in encoded.rows]) == (2, [0, 0, 1])


def test_variation_follows_seed_epoch_and_index_alone():
    variation = Variation(seed=1, system_prompt_share=0.2, empty_think_share=0.3)
    drawn = [variation.draw(epoch, index) for epoch in range(4) for index in range(500)]
    assert drawn == [variation.draw(epoch, index) for epoch in range(4) for index in range(500)]
    assert drawn[:500] != drawn[500:1000]
    assert drawn[:500] != [Variation(2, 0.2, 0.3).draw(0, index) for index in range(500)]
    prompts = Counter(prompt for prompt, _ in drawn if prompt)
    assert set(prompts) == set(SYSTEM_PROMPTS)
    assert 340 < sum(prompts.values()) < 460
    assert 530 < sum(empty for _, empty in drawn) < 670
    assert Variation().draw(0, 0) == (None, False)


@pytest.mark.parametrize(
    "name",
    [
        "05_sharegpt_tools.json",
        "06_sharegpt.jsonl",
        "07_alpaca.json",
        "08_openai_tools.jsonl",
        "11_sft_messages.parquet",
    ],
)
def test_odd_file_holds_the_conversations_its_manifest_says(name, tokenizer):
    records = records_of(shared(f"odd/{name}"))
    lines = shared("odd/MANIFEST.tsv").read_text(encoding="utf-8").splitlines()
    [said] = [int(line.split("\t")[3]) for line in lines if line.startswith(name)]
    encoded = encode_records(records, tokenizer)
    assert (encoded.used, len(encoded.rows), encoded.bad, encoded.notes) == (said, said, [], {})
    if name == "07_alpaca.json":
        questions = [sum(turn.role == "user" for turn in conversation_of(value).turns) for _, value in records]
        assert questions == [2] * 5 + [1] * 55


@pytest.mark.parametrize("name", ["05_sharegpt_tools.json", "08_openai_tools.jsonl"])
def test_every_tool_call_survives_and_is_encoded_once(name, tokenizer):
    text = shared(f"odd/{name}").read_text(encoding="utf-8")
    raw = json.loads(text) if name.startswith("05") else [json.loads(line) for line in text.splitlines()]
    wanted = []
    for record in raw:
        for message in record.get("messages", record.get("conversations")):
            if message.get("from") == "function_call":
                wanted.append(json.loads(message["value"]))
            for call in message.get("tool_calls") or []:
                function = call["function"]
                wanted.append({"name": function["name"], "arguments": json.loads(function["arguments"])})
    found = []
    for _, row in encode_records(records_of(SHARED_DATA / "odd" / name), tokenizer).rows:
        begun = None
        for position, (token, learned) in enumerate(zip(row.ids, row.learned, strict=True)):
            if learned and token == CALL:
                begun = position
            elif learned and token == END_CALL:
                found.append(json.loads(tokenizer.decode(row.ids[begun + 1 : position])))
    assert len(wanted) > 30
    assert found == wanted


def test_all_rows_and_answers_of_the_real_conversations_are_accounted_for(tokenizer):
    path = shared("sft_real.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [sum(message["role"] == "assistant" for message in line["conversations"]) for line in lines]
    used, bad, notes, rows, learned = 0, [], Counter(), 0, 0
    for chunk in read_chunks(identify(str(path), "utf-8"), hashlib.sha256()):
        encoded = encode_records(chunk.records("text"), tokenizer, max_seq_len=768)
        used += encoded.used
        bad += encoded.bad
        notes += encoded.notes
        rows += len(encoded.rows)
        for _, row in encoded.rows:
            assert len(row.ids) <= 769
            learned += sum(token == END for token, is_learned in zip(row.ids, row.learned, strict=True) if is_learned)
    assert {kind for kind, _ in bad} == {TOO_LONG}
    assert set(notes) == {SPLIT, CUT_ANSWER}
    assert used + len(bad) == len(lines) == 6282
    assert used + notes[SPLIT] <= rows
    bad_lines = [int(line.removeprefix(f"{path}:").split(":")[0]) for _, line in bad]
    assert learned + notes[CUT_ANSWER] + sum(answers[number - 1] for number in bad_lines) == sum(answers)
