"""Conversations -> token ids, turn by turn, and which of them are learned.

The text is that of the chat template beside the tokenizer. The ids differ from the template's only where they should:
a marker such as "<|im_end|>" within somebody's words is spelled out in ordinary tokens, and an answer is encoded apart
from its header, as when it is generated. Learned are an assistant's tokens, reasoning and tool calls included, and the
end token after them; nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dataset.conversations import ASSISTANT, SYSTEM, USER, Conversation, conversation_of
from dataset.records import BadRecord
from dataset.rendering import CONTROLS, END, START, Piece, lay_out, prompt_header
from dataset.tokenizer import TextTokenizer
from model.gpt import IGNORE_INDEX

# Kinds of what the length limit does; the first is a bad record, the others are notes.
TOO_LONG, CUT_ANSWER, SPLIT = "longer than --max_seq_len", "answer beyond --max_seq_len", "split for --max_seq_len"


class Block(NamedTuple):
    """The ids of one turn, from its start token to the line end after its end token; results of tools share one."""

    role: str
    ids: list[int]
    learned: list[bool]


class Row(NamedTuple):
    """Ids of a conversation or of a part of it. learned: which of them the model is to predict."""

    ids: list[int]
    learned: list[bool]

    def inputs_and_targets(self) -> tuple[list[int], list[int]]:
        """Return input ids and, for each, the id that should follow, or IGNORE_INDEX."""
        targets = [token if learned else IGNORE_INDEX for token, learned in zip(self.ids, self.learned, strict=True)]
        return self.ids[:-1], targets[1:]


@dataclass
class EncodedChats:
    """What records became: `used` conversations, bad records by kind, blank lines; their sum is what was given.

    rows: (number of the used conversation from 0, row); a long one has several. notes: what was odd in used ones.
    """

    rows: list[tuple[int, Row]] = field(default_factory=list)
    used: int = 0
    blank_lines: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)  # (kind, "file:line: reason")
    notes: Counter[str] = field(default_factory=Counter)


def encode_records(
    records: Iterable[tuple[str, object]], tokenizer: TextTokenizer, max_seq_len: int | None = None
) -> EncodedChats:
    """Encode records as `Chunk.records` yields them; all their texts go through one call of the tokenizer.

    max_seq_len: input positions of a row; None: no limit. Bad records are counted and named, not raised.
    """
    encoded = EncodedChats()
    found: list[tuple[str, Conversation]] = []
    for place, record in records:
        if record is None:
            encoded.blank_lines += 1
            continue
        try:
            found.append((place, conversation_of(record)))
        except BadRecord as bad:
            encoded.bad.append((bad.kind, f"{place}: {bad}"))
    blocks_of_all = encode([conversation for _, conversation in found], tokenizer)
    for (place, conversation), blocks in zip(found, blocks_of_all, strict=True):
        try:
            rows, cut_answers = fit(blocks, max_seq_len)
        except BadRecord as bad:
            encoded.bad.append((bad.kind, f"{place}: {bad}"))
            continue
        encoded.notes.update([*conversation.notes, *[CUT_ANSWER] * cut_answers, *[SPLIT] * (len(rows) > 1)])
        encoded.rows += [(encoded.used, row) for row in rows]
        encoded.used += 1
    return encoded


def encode(conversations: Sequence[Conversation], tokenizer: TextTokenizer) -> list[list[Block]]:
    """Encode any number of conversations with one call of the tokenizer; returns the blocks of each."""
    return _encode([list(lay_out(conversation)) for conversation in conversations], tokenizer)


def prompt_ids(conversation: Conversation, tokenizer: TextTokenizer, open_thinking: bool = False) -> list[int]:
    """Return the ids of a conversation and of the header that its next answer follows.

    open_thinking: that answer begins inside a think block; otherwise, with `empty_think`, after an empty one.
    """
    header = prompt_header(open_thinking, conversation.empty_think)
    [blocks] = _encode([[*lay_out(conversation), (ASSISTANT, header)]], tokenizer)
    return [token for block in blocks for token in block.ids]


def fit(blocks: Sequence[Block], max_seq_len: int | None) -> tuple[list[Row], int]:
    """Cut a conversation into rows of at most `max_seq_len` inputs; returns them and how many answers are in none.

    Cuts are made before a question, and every row begins with the system turn: each answer is learned once, whole,
    with its end token, and sees no question from before its row. Where one question and what follows it is too long,
    it ends after the last answer that fits. Raises BadRecord where no answer fits.
    """
    limit = sum(len(block.ids) for block in blocks) if max_seq_len is None else max_seq_len + 1
    rows: list[Row] = []
    head_length = next((n for n, block in enumerate(blocks) if block.role != SYSTEM), len(blocks))
    head, current, cut_answers = list(blocks[:head_length]), [], 0
    for asked in _rounds(blocks[head_length:]):
        if _length(head + current + asked) <= limit:
            current = current + asked
            continue
        rows += _row(head, current)
        current = asked
        while current and not (any(current[-1].learned) and _length(head + current) <= limit):
            current = current[:-1]
        if len(current) < len(asked):
            cut_answers += sum(any(block.learned) for block in asked[len(current) :])
            rows += _row(head, current)
            current = []
    rows += _row(head, current)
    if not rows:
        raise BadRecord(TOO_LONG, f"no answer ends within {max_seq_len} tokens; the system turn has {_length(head)}")
    return rows, cut_answers


def show(row: Row, tokenizer: TextTokenizer) -> str:
    """Return the text of a row with what is learned in ⟦ ⟧."""
    stretches = groupby(zip(row.ids, row.learned, strict=True), key=lambda pair: pair[1])
    texts = [(learned, tokenizer.decode([token for token, _ in pairs])) for learned, pairs in stretches]
    return "".join(f"⟦{text}⟧" if learned else text for learned, text in texts)


def _rounds(blocks: Sequence[Block]) -> list[list[Block]]:
    """Split at each question: where a user's or a system turn follows an answer or the result of a tool."""
    rounds: list[list[Block]] = []
    for number, block in enumerate(blocks):
        if number and (block.role not in (USER, SYSTEM) or blocks[number - 1].role in (USER, SYSTEM)):
            rounds[-1].append(block)
        else:
            rounds.append([block])
    return rounds


def _length(blocks: Sequence[Block]) -> int:
    return sum(len(block.ids) for block in blocks)


def _row(head: Sequence[Block], blocks: Sequence[Block]) -> list[Row]:
    """One row that ends with the last answer to learn, or none."""
    last = max((number for number, block in enumerate(blocks) if any(block.learned)), default=None)
    if last is None:
        return []
    parts = [*head, *blocks[: last + 1]]
    ids, learned = ([value for part in parts for value in part[field]] for field in (1, 2))
    return [Row(ids, learned)]


def _encode(laid_out: list[list[tuple[str, list[Piece]]]], tokenizer: TextTokenizer) -> list[list[Block]]:
    # Another tokenizer's own tokens for the start and the end of a turn take the place of these two names.
    controls = {name: tokenizer.control_id(name) for name in CONTROLS} | {
        START: tokenizer.bos_id,
        END: tokenizer.eos_id,
    }
    joined = [[(role, _joined(pieces, controls)) for role, pieces in blocks] for blocks in laid_out]
    texts = list(
        {text: None for blocks in joined for _, pieces in blocks for text, control, _ in pieces if not control}
    )
    ids_of = dict(zip(texts, tokenizer.encode_texts(texts), strict=True))

    def block(role: str, pieces: list[Piece]) -> Block:
        ids: list[int] = []
        learned: list[bool] = []
        for piece in pieces:
            ids += [controls[piece.text]] if piece.is_control else ids_of[piece.text]
            learned += [piece.learned] * (len(ids) - len(learned))
        return Block(role, ids, learned)

    return [[block(role, pieces) for role, pieces in blocks] for blocks in joined]


def _joined(pieces: Iterable[Piece], controls: dict[str, int | None]) -> list[Piece]:
    """Join texts that stand side by side, so that they become the ids they have in one text.

    A control token that the vocabulary lacks is text: MiniMind's older ones have neither think nor tool tokens.
    """
    joined: list[Piece] = []
    for text, is_control, learned in pieces:
        is_control = is_control and controls[text] is not None
        if joined and not (is_control or joined[-1].is_control) and learned == joined[-1].learned:
            joined[-1] = Piece(joined[-1].text + text, False, learned)
        else:
            joined.append(Piece(text, is_control, learned))
    return [piece for piece in joined if piece.text]
