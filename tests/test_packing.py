"""Packed rows of conversations: each as if it stood alone, none lost, and varied from epoch to epoch by rule."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import model.gpt
from dataset.chat import encode, encode_records, fit
from dataset.conversations import SYSTEM, Turn, conversation_of
from dataset.files import DataError
from dataset.packing import PADDING, PackedChats, chat_rows, pack
from dataset.tokenizer import load_tokenizer
from dataset.tokens import Reading
from dataset.variation import Variation
from model.gpt import GPT, GPTConfig, stretches
from model.loss import IGNORE_INDEX
from tests.conftest import ROOT, SHARED_DATA

ASK, ANSWER = {"role": "user", "content": "你好, who are you?"}, {"role": "assistant", "content": "A small model."}
THOUGHTFUL = {"role": "assistant", "content": "It is 3.", "reasoning_content": "1 + 2"}
RECORDS = [
    {"conversations": [ASK, ANSWER]},
    {"conversations": [ASK, ANSWER, ASK, {"role": "assistant", "content": "第二个回答。"}]},
    {"conversations": [{"role": "system", "content": "Be brief."}, ASK, ANSWER]},
    {"conversations": [ASK, THOUGHTFUL, ASK, ANSWER]},
    {"conversations": [ASK, {"role": "assistant", "content": "Yes"}]},
    {"conversations": [ASK, {"role": "assistant", "content": "word " * 20}]},
]
ZEROS = np.zeros(99, dtype=np.int64)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model" / "tokenizer")


def write(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def opened(
    tmp_path, tokenizer, records=RECORDS, max_seq_len=64, val_fraction=0.0, skip=False, variation=None, val=None
):
    path = write(tmp_path / "a.jsonl", records)
    return chat_rows(
        [path],
        val,
        val_fraction=val_fraction,
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        cache_dir=tmp_path / "cache",
        reading=Reading(skip_bad_lines=skip),
        variation=variation,
    )


def conversations_in(chats: PackedChats, epoch: int = 0) -> list[tuple[list[int], list[int], list[int]]]:
    """(input ids, targets, positions) of every segment of all rows."""
    indices = np.arange(len(chats))
    rows = {key: value.numpy() for key, value in chats.rows(indices, np.full_like(indices, epoch)).items()}
    found = []
    for row, segments in enumerate(rows["segments"]):
        for segment in range(segments.max() + 1):
            found.append(
                tuple(rows[k][row][segments == segment].tolist() for k in ("input_ids", "targets", "positions"))
            )
        assert (rows["targets"][row][segments == PADDING] == IGNORE_INDEX).all()
    return found


def alone(record: dict, tokenizer, system: str | None = None, empty_think: bool = False) -> tuple[list[int], ...]:
    """The same of one conversation, by way of its turns."""
    conversation = conversation_of(record)
    if system:
        conversation = replace(conversation, turns=(Turn(SYSTEM, system), *conversation.turns))
    [blocks] = encode([replace(conversation, empty_think=empty_think)], tokenizer)
    [[row], _] = fit(blocks, None)
    targets = [token if learned else IGNORE_INDEX for token, learned in zip(row.ids, row.learned, strict=True)]
    inputs, targets = row.ids[:-1], targets[1:]
    return inputs, targets, list(range(len(inputs)))


def test_every_item_is_in_one_bin_and_no_bin_overflows():
    draw = np.random.default_rng(0)
    for capacity in (1, 7, 100, 768):
        lengths = draw.integers(1, capacity + 1, 500)
        items, starts = pack(lengths, capacity)
        assert sorted(items.tolist()) == list(range(500))
        sizes = np.add.reduceat(lengths[items], starts[:-1])
        assert sizes.max() <= capacity
        assert starts[-1] == 500
        # Best fit decreasing needs at most 11/9 of the bins of the best packing, and one (Johnson 1974).
        assert len(sizes) <= 11 / 9 * -(-lengths.sum() // capacity) + 60 * (capacity <= 7) + 9
    halves = pack(np.array([3, 3, 1, 1, 2, 2]), 4)
    assert len(halves[1]) - 1 == 3


def test_rows_hold_every_conversation_as_it_is_alone(tmp_path, tokenizer):
    chats, val = opened(tmp_path, tokenizer)
    assert val is None
    found = conversations_in(chats)
    assert sorted(found) == sorted(alone(record, tokenizer) for record in RECORDS)
    assert len(chats) < len(RECORDS)
    targets = [sum(target != IGNORE_INDEX for target in targets) for _, targets, _ in found]
    assert chats.target_counts.sum() == sum(targets)


def test_targets_are_the_ids_that_follow(tmp_path, tokenizer):
    chats, _ = opened(tmp_path, tokenizer, RECORDS[:1])
    [(inputs, targets, _)] = conversations_in(chats)
    asked, role, answer, line = tokenizer.encode_texts(
        ["user\n你好, who are you?", "assistant\n", "A small model.", "\n"]
    )
    start, end = tokenizer.bos_id, tokenizer.eos_id
    header = [start, *asked, end, *line, start, *role]
    assert inputs == [*header, *answer, end]
    assert targets == [IGNORE_INDEX] * (len(header) - 1) + [*answer, end] + [IGNORE_INDEX]


@pytest.mark.parametrize("short_text", [1, 10**9], ids=["each text alone", "with a mask"])
def test_packed_row_has_the_loss_and_gradients_of_its_conversations(tmp_path, tokenizer, monkeypatch, short_text):
    monkeypatch.setattr(model.gpt, "SHORT_TEXT", short_text)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=6400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, qk_norm=True)
    gpt = GPT(config).double()
    chats, _ = opened(tmp_path, tokenizer)
    batch = chats.rows(np.arange(len(chats)), ZEROS[: len(chats)])
    assert (stretches(batch["segments"]) is None) == (short_text > 1)
    packed = gpt(**batch)
    packed.backward()
    gradients = [weight.grad.clone() for weight in gpt.parameters()]
    gpt.zero_grad()
    one_by_one = 0.0
    for record in RECORDS:
        inputs, targets, _ = alone(record, tokenizer)
        loss = gpt(torch.tensor([inputs]), torch.tensor([targets]))
        loss.backward()
        one_by_one += loss.item()
    assert packed.item() == pytest.approx(one_by_one, rel=1e-12)
    for weight, gradient in zip(gpt.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-12)


def test_variation_is_that_of_the_turns_and_fits(tmp_path, tokenizer):
    variation = Variation(seed=3, system_prompt_share=0.5, empty_think_share=0.5)
    chats, _ = opened(tmp_path, tokenizer, variation=variation, max_seq_len=120)
    seen = set()
    for epoch in range(8):
        wanted = []
        for index, record in enumerate(RECORDS):
            system, empty_think = variation.draw(epoch, index)
            if record["conversations"][0]["role"] == "system":
                system = None
            seen.add((system is not None, empty_think))
            wanted.append(alone(record, tokenizer, system, empty_think))
        assert sorted(conversations_in(chats, epoch)) == sorted(wanted)
    assert len(seen) == 4
    # Where the longest variation has no room, there is none.
    longest = max(len(alone(record, tokenizer)[0]) for record in RECORDS)
    tight, _ = opened(tmp_path, tokenizer, variation=Variation(0, 1, 1), max_seq_len=longest + 5)
    assert alone(RECORDS[5], tokenizer) in conversations_in(tight)
    assert alone(RECORDS[4], tokenizer) not in conversations_in(tight)
    assert tight.fingerprint != opened(tmp_path, tokenizer, max_seq_len=longest)[0].fingerprint


def test_held_out_conversations_keep_their_parts_together(tmp_path, tokenizer):
    records = [
        {
            "conversations": [
                {"role": "user", "content": f"{n} asked"},
                ANSWER,
                ASK,
                {"role": "assistant", "content": "a " * 30},
            ]
        }
        for n in range(200)
    ]
    train, val = opened(tmp_path, tokenizer, records, max_seq_len=50, val_fraction=0.3)
    assert train.documents + val.documents == 200
    assert 30 < val.documents < 90
    for part in (train, val):
        texts = "".join(text for index in range(len(part)) for text in part.show(index))
        assert texts.count("asked") == part.documents
        assert texts.count("⟦a a a") == part.documents
    whole = conversations_in(train) + conversations_in(val)
    assert len(whole) == 400


def test_what_has_no_answer_or_no_room_is_dropped_named_and_counted(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    endless = {"role": "assistant", "content": "long " * 99}
    odd = [{"conversations": [ASK]}, {"conversations": [ASK, {"role": "assistant", "content": ""}]}]
    for _ in range(2):  # at the building and at every start after it
        caplog.clear()
        chats, _ = opened(tmp_path, tokenizer, [*RECORDS, *odd, {"conversations": [ASK, endless]}])
        assert chats.documents == len(RECORDS)
        assert "9 conversations = 6 used + 3 dropped + 0 bad" in caplog.text
        for line, kind in ((7, "no answer"), (8, "empty answer"), (9, "longer than --max_seq_len")):
            assert f"a.jsonl:{line}: {kind}" in caplog.text
            assert f"1 {kind}" in caplog.text


def test_what_is_dropped_for_its_length_says_its_share_and_the_length_that_would_keep_it(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    long = [{"conversations": [ASK, {"role": "assistant", "content": "long " * count}]} for count in (99, 120)]
    for _ in range(2):  # at the building and at every start after it
        caplog.clear()
        opened(tmp_path, tokenizer, [*RECORDS, *long])
        told = re.search(
            r"dropped \(25\.0%\): 2 longer .*; of those too long, --max_seq_len (\d+) would keep all", caplog.text
        )
        assert told
    caplog.clear()
    chats, _ = opened(tmp_path, tokenizer, [*RECORDS, *long], max_seq_len=int(told[1]))
    assert chats.documents == 8
    assert "dropped" not in caplog.text
    # One that is endless does not make the advice.
    endless = {"conversations": [ASK, {"role": "assistant", "content": "long " * 9999}]}
    opened(tmp_path, tokenizer, [*RECORDS, *long * 10, endless])
    assert f"--max_seq_len {told[1]} would keep all but 1\n" in caplog.text


def test_records_that_are_no_conversations_are_refused_or_left_out(tmp_path, tokenizer):
    records = [*RECORDS, {"text": "a text"}, {"conversations": [{"role": "alien", "content": "x"}]}]
    with pytest.raises(DataError, match=r"2 bad of 8 records.*(?s:.*)a.jsonl:7: no conversation.*(?s:.*)unknown role"):
        opened(tmp_path, tokenizer, records)
    assert opened(tmp_path, tokenizer, records, skip=True)[0].documents == len(RECORDS)


def test_a_file_with_nothing_to_learn_is_an_error_beside_good_ones(tmp_path, tokenizer):
    good, idle = write(tmp_path / "good.jsonl", RECORDS), write(tmp_path / "idle.jsonl", [{"conversations": [ASK]}])
    with pytest.raises(
        DataError, match=r"nothing to train on in .*idle.jsonl .*1 no answer(?s:.*)idle.jsonl:1: no answer"
    ):
        chat_rows([good, idle], None, val_fraction=0, tokenizer=tokenizer, max_seq_len=64, cache_dir=tmp_path / "cache")


def test_shown_rows_mark_what_is_learned(tmp_path, tokenizer):
    chats, _ = opened(tmp_path, tokenizer, RECORDS[:1])
    text = "<|im_start|>user\n你好, who are you?<|im_end|>\n<|im_start|>assistant\n⟦A small model.<|im_end|>⟧\n"
    assert chats.show(0) == [text]


def test_real_conversations_are_all_accounted_for_and_hardly_padded(tmp_path, tokenizer):
    path = SHARED_DATA / "sft_real.jsonl"
    if not path.exists():
        pytest.skip("needs the real conversations in ../shared/data")
    chats, _ = chat_rows(
        [str(path)], None, val_fraction=0, tokenizer=tokenizer, max_seq_len=768, cache_dir=tmp_path / "cache"
    )
    assert chats.filled > 0.99
    records = [("line", json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    encoded = encode_records(records[:300], tokenizer, 768)
    held = {tuple(ids) for ids, _, _ in conversations_in(chats)}
    assert all(tuple(row.ids[:-1]) in held for _, row in encoded.rows)


def test_a_text_that_another_interrupts_is_attended_to_with_a_mask(monkeypatch):
    monkeypatch.setattr(model.gpt, "SHORT_TEXT", 1)
    assert stretches(torch.tensor([[0, 0, 1], [0, 2, 2]])) == [2, 1, 1, 2]
    assert stretches(torch.tensor([[0, 1, 0]])) is None
