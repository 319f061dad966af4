"""The starter files: reproducible, large enough, varied, well formed, and free of what they keep out."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dataset.tokenizer import load_tokenizer
from scripts import make_starter_data as starter
from scripts import starter_text
from train_pretrain import options
from trainer.options import named, parse_options
from trainer.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "dataset" / "starter"
FILES = ("pretrain.jsonl", "sft.jsonl", "lora_identity.jsonl", "questions.jsonl", "quiz.jsonl")


def read(name):
    return [json.loads(line) for line in (COMMITTED / name).read_bytes().splitlines()]


@pytest.fixture(scope="module")
def texts():
    return [record["text"] for record in read("pretrain.jsonl")]


@pytest.fixture(scope="module")
def sft():
    return [record["conversations"] for record in read("sft.jsonl")]


@pytest.fixture(scope="module")
def identity():
    return [record["conversations"] for record in read("lora_identity.jsonl")]


@pytest.fixture(scope="module")
def questions():
    return read("questions.jsonl")


@pytest.fixture(scope="module")
def trained(texts, sft, identity):
    """Everything that is trained on, with the calls to tools, as one text."""
    messages = [message for chat in sft + identity for message in chat]
    return "\n".join(texts + [message["content"] + message.get("tool_calls", "") for message in messages])


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_defaults_give_twenty_steps_on_any_number_of_ranks(texts, ranks):
    args = parse_options(options(), [])
    tokens = sum(len(ids) + 2 for ids in load_tokenizer(ROOT / "model" / "tokenizer").encode_texts(texts))
    names = ("batch_size", "max_seq_len", "epochs", "max_steps", "learning_rate", "base_batch_size", "lr_scaling")
    plan = Plan(
        samples=(tokens - 1) // args.max_seq_len,
        tokens_per_epoch=tokens,
        world_size=ranks,
        accumulation=args.gradient_accumulation_steps,
        global_batch=args.batch_size * ranks * args.gradient_accumulation_steps,
        lr_schedule=args.lr_schedule,
        warmup_steps=args.warmup_steps,
        **named(args, names),
    )
    assert plan.total_steps >= 20


def is_chinese(text):
    return bool(re.search(r"[一-鿿]", text))


def share_of_chinese(texts):
    text = "".join(texts)
    return len("".join(re.findall(r"[\u3000-\u9fff\uff00-\uffef“”]", text)).encode()) / len(text.encode())


def test_committed_files_are_reproduced_byte_for_byte(tmp_path):
    command = [sys.executable, "-m", "scripts.make_starter_data", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(FILES)
    for name, line in zip(FILES, result.stdout.splitlines(), strict=True):
        assert (tmp_path / name).read_bytes() == (COMMITTED / name).read_bytes(), name
        assert name in line
        assert "distinct sentences" in line or name in ("questions.jsonl", "quiz.jsonl")


def test_sizes_suit_a_first_training_and_git(texts, sft, identity):
    assert 1_000_000 <= (COMMITTED / "pretrain.jsonl").stat().st_size <= 3_000_000
    assert (COMMITTED / "sft.jsonl").stat().st_size <= 3_000_000
    tokens = load_tokenizer(ROOT / "model" / "tokenizer").encode_texts(texts)
    assert sum(len(ids) + 2 for ids in tokens) >= 600_000
    assert 2_000 < len(sft) < 10_000
    assert 200 < len(identity) < 1_000


def test_files_are_half_chinese_and_without_duplicates(texts, sft, identity):
    for chats in (sft, identity):
        lines = ["\n".join(message["content"] for message in chat if message["role"] != "system") for chat in chats]
        assert 0.35 < share_of_chinese(lines) < 0.6
        assert len(set(map(json.dumps, chats))) == len(chats)
    assert 0.35 < share_of_chinese(texts) < 0.6
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if re.search(r"[{}<>|]", text) and " > " not in text]


def test_no_template_gives_more_than_a_twentieth(sft):
    pieces = [piece for text in starter.make_texts() for piece in text]
    by_template = Counter()
    for piece in pieces:
        by_template[piece.template] += len(piece.text.encode())
    assert max(by_template.values()) < 0.05 * by_template.total()
    chats = Counter(chat.template for chat in starter.make_chats()[0])
    assert chats.total() == len(sft)
    assert max(chats.values()) < 0.05 * chats.total()


def test_every_conversation_takes_turns_and_ends_with_an_answer(sft, identity):
    followers = {"system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant"}}
    for chat in sft + identity:
        roles = [message["role"] for message in chat]
        assert roles[0] in ("system", "user")
        assert roles[-1] == "assistant"
        assert all(after in followers[before] for before, after in pairwise(roles))
        assert chat[-1]["content"].strip()
        for before, after in pairwise(chat):
            assert ("tool_calls" in before) == (after["role"] == "tool")
            assert before["content"].strip() or "tool_calls" in before
        assert not re.search(r"[{}<>|]|=>", "".join(message["content"] for message in chat))


def test_every_tool_call_names_a_tool_of_its_system_message(sft):
    called = 0
    for chat in sft:
        tools = {tool["function"]["name"]: tool for tool in json.loads(chat[0].get("tools", "[]"))}
        for message in chat:
            for call in json.loads(message.get("tool_calls", "[]")):
                called += 1
                assert set(call["arguments"]) == set(tools[call["name"]]["function"]["parameters"]["required"])
    assert 0.02 < called / len(sft) < 0.10
    assert sum(len(chat) > 3 for chat in sft) > 0.1 * len(sft)


def test_sums_are_right_and_held_out_operands_never_occur(trained):
    results = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "÷": int.__floordiv__}
    answer = r"(?: = |=|\?\nA: | 等于多少？\n答：)(\d+)"
    found = re.findall(r"(\d+) ?([-+×÷]) ?(\d+)" + answer, trained)
    assert len(found) > 3000
    for a, sign, b, result in found:
        assert results[sign](int(a), int(b)) == int(result)
    pairs = re.findall(r"(\d+) ?([-+×÷*>]) ?(\d+)", trained)
    forms = {"+": r"(\d+)加(\d+)|sum of (\d+) and (\d+)", "-": r"(\d+)减(\d+)|difference between (\d+) and (\d+)"}
    forms |= {"*": r"(\d+)乘以(\d+)|(\d+) times (\d+)", "/": r"(\d+)除以(\d+)|(\d+) divided by (\d+)"}
    forms |= {">": r"(\d+)和(\d+)|(\d+) or (\d+)|(\d+) is greater than (\d+)|(\d+)比(\d+)大"}
    for sign, form in forms.items():
        numbers = [tuple(filter(None, groups)) for groups in re.findall(form, trained)]
        assert len(numbers) > 100
        pairs += [(a, sign, b) for a, b in numbers]
    for a, sign, b in pairs:
        assert not starter_text.is_held_out({"×": "*", "÷": "/"}.get(sign, sign), int(a), int(b)), (a, sign, b)


def test_stories_about_numbers_keep_the_held_out_operands_out(trained):
    checked = 0
    for sentence in re.split(r"[。\n]|\. ", trained):
        if re.search(r"[×÷乘除*比]|每盒|平均|taken|Share", sentence):
            continue
        numbers = [int(digits) for digits in re.findall(r"\d+", sentence)]
        for a, b, c in zip(numbers, numbers[1:], numbers[2:], strict=False):
            for operator in [sign for sign, result in {"+": a + b, "-": a - b}.items() if result == c]:
                checked += 1
                assert not starter_text.is_held_out(operator, a, b), sentence
    assert checked > 2000


def test_held_out_operands_are_one_in_ten_and_have_no_order():
    pairs = [(a, b) for a in range(100) for b in range(a + 1)]
    for operator in "+-*/>":
        assert 0.08 < sum(starter_text.is_held_out(operator, a, b) for a, b in pairs) / len(pairs) < 0.12
    for operator in "+*>":
        assert all(
            starter_text.is_held_out(operator, a, b) == starter_text.is_held_out(operator, b, a) for a, b in pairs
        )


def test_held_out_pairs_do_not_occur_in_words_either(trained):
    numbers = {starter_text.english(n): n for n in range(1000)} | {starter_text.chinese(n): n for n in range(1000)}
    assert len(numbers) == 2000
    zh, en = "([零一二三四五六七八九十百]+)", "([a-z -]+)"
    forms = {"+": (f"{zh}加{zh}等于{zh}。", f"\\b{en} plus {en} is {en}\\.", int.__add__)}
    forms["-"] = (f"{zh}减{zh}等于{zh}。", f"\\b{en} minus {en} is {en}\\.", int.__sub__)
    forms["*"] = (f"{zh}乘{zh}得{zh}。", f"\\b{en} times {en} is {en}\\.", int.__mul__)
    forms["/"] = (f"{zh}除以{zh}得{zh}。", f"\\b{en} divided by {en} is {en}\\.", int.__floordiv__)
    for operator, (chinese, english, result) in forms.items():
        found = re.findall(chinese, trained) + re.findall(english, trained.lower())
        assert len(found) > 100
        for words in found:
            a, b, c = (numbers[word] for word in words)
            assert result(a, b) == c
            assert not starter_text.is_held_out(operator, a, b), words


def test_questions_ask_for_what_was_learnt_in_words_that_were_not(questions, trained):
    trained = trained.lower()
    assert len({question["question"] for question in questions}) == len(questions) >= 30
    stretches = {trained[start : start + 20] for start in range(len(trained) - 19)}
    for question in questions:
        asked = question["question"].lower().rstrip("。？！.?!")
        assert asked not in trained, asked
        assert not {asked[start : start + 20] for start in range(len(asked) - 19)} & stretches, asked
        assert any(answer.lower() in trained for answer in question["answers"]), asked


def test_questions_cover_both_languages_sums_and_the_name(questions):
    sums = [question for question in questions if question["topic"] in "+-*/>"]
    assert len(sums) >= 10
    assert {question["topic"] for question in questions} >= {"country", "animal", "opposite", "identity"}
    assert 0.3 < sum(is_chinese(question["question"]) for question in questions) / len(questions) < 0.7
    for question in sums:
        a, b = map(int, re.search(r"(\d+)\D+(\d+)$", question["question"].rstrip("?.谁更大？: thelarg")).groups())
        operator = question["topic"]
        assert starter_text.is_held_out(operator, a, b)
        assert int(question["answers"][0]) == {"+": a + b, "-": a - b, ">": max(a, b)}[operator]


def test_quiz_is_ten_of_the_questions_with_three_sums(questions):
    quiz = read("quiz.jsonl")
    assert len({question["question"] for question in quiz}) == len(quiz) == 10
    assert all(question in questions for question in quiz)
    assert sum(question["topic"] in "+-" for question in quiz) >= 3
    assert {is_chinese(question["question"]) for question in quiz} == {True, False}


def test_the_model_gives_one_name_in_each_language(identity, questions):
    accepted = {answer for question in questions if question["topic"] == "identity" for answer in question["answers"]}
    assert len(accepted) == 2
    for chat in identity:
        for before, after in pairwise(chat):
            if re.search(r"你叫什么名字|[Ww]hat is your name", before["content"]):
                assert any(name in after["content"] for name in accepted)


@pytest.mark.parametrize(
    ("number", "chinese", "english"),
    [
        (0, "零", "zero"),
        (10, "十", "ten"),
        (15, "十五", "fifteen"),
        (20, "二十", "twenty"),
        (47, "四十七", "forty-seven"),
        (100, "一百", "one hundred"),
        (105, "一百零五", "one hundred and five"),
        (110, "一百一十", "one hundred and ten"),
        (219, "二百一十九", "two hundred and nineteen"),
    ],
)
def test_numbers_in_words(number, chinese, english):
    assert (starter_text.chinese(number), starter_text.english(number)) == (chinese, english)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a owl and a fox", "an owl and a fox"),
        ("A animal", "An animal"),
        ("a useful key", "a useful key"),
        ("a one-legged bird", "a one-legged bird"),
        ("pasta is", "pasta is"),
    ],
)
def test_articles_fit_the_word_that_follows(text, expected):
    assert starter_text.with_articles(text) == expected


def test_a_row_with_a_missing_cell_is_named(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("[animal] zh en\nzh> {zh}\n猫|cat\n狗\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"facts.txt:4: 1 cells, \[animal\] has 2"):
        starter_text.read_tables(path)
