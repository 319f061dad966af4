"""Conversations -> token ids, turn by turn, and which of them are learned.

The text is that of the chat template beside the tokenizer. The ids differ from the template's only where they should:
a marker such as "<|im_end|>" within somebody's words is spelled out in ordinary tokens, and an answer is encoded apart
from its header, as when it is generated. Learned are an assistant's tokens, reasoning and tool calls included, and the
end token after them; nothing else.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dataset.conversations import (
    ASSISTANT,
    EMPTY_ANSWER,
    NO_ANSWER,
    SYSTEM,
    THINK,
    USER,
    Conversation,
    Turn,
    conversation_of,
)
from dataset.encode import Encoded, text_hash, typecode
from dataset.records import BadRecord, Chunk
from dataset.rendering import CONTROLS, END, START, Piece, empty_think_block, lay_out, prompt_header
from dataset.tokenizer import TextTokenizer
from dataset.tokens import MARKS, ROWS

# Kinds of what the length limit does; the first is a record that is dropped, the others are notes.
TOO_LONG, CUT_ANSWER, SPLIT = "longer than --max_seq_len", "answer beyond --max_seq_len", "split for --max_seq_len"
# Conversations that are as they should be, but of which nothing can be learned: counted and left out.
DROPPED = (TOO_LONG, EMPTY_ANSWER, NO_ANSWER)
# Of an id: it is to be predicted; an empty think block may go before it; a system turn may (of a row's first).
LEARNED, TAKES_THINK, TAKES_SYSTEM = 1, 2, 4
HEADER_PIECES = 2  # an assistant's: the start token, and its name with the line end
CHAT_FORMAT = 2  # counts up when the same records become other rows


class Block(NamedTuple):
    """The ids of one turn, from its start token to the line end after its end token; results of tools share one.

    starts: where an answer without reasoning begins. text_bytes: UTF-8 bytes of the learned text.
    """

    role: str
    ids: list[int]
    learned: list[bool]
    starts: tuple[int, ...] = ()
    text_bytes: int = 0


class Row(NamedTuple):
    """Ids of a conversation or of a part of it. learned: which of them the model is to predict.

    starts: where an answer without reasoning begins; takes_system: whether it has neither a system turn nor tools.
    """

    ids: list[int]
    learned: list[bool]
    starts: tuple[int, ...] = ()
    takes_system: bool = False
    text_bytes: int = 0

    def marks(self) -> list[int]:
        """What the cache keeps beside each id: LEARNED, TAKES_THINK, TAKES_SYSTEM."""
        marks = [LEARNED * learned for learned in self.learned]
        for start in self.starts:
            marks[start] |= TAKES_THINK
        marks[0] |= TAKES_SYSTEM * self.takes_system
        return marks


class TooLong(BadRecord):
    """A conversation of which no answer fits into a row. needs: the --max_seq_len at which the first one would."""

    def __init__(self, max_seq_len: int | None, needs: int, system_tokens: int) -> None:
        system = f"the system turn has {system_tokens}" if system_tokens else "no system turn"
        super().__init__(TOO_LONG, f"no answer ends within {max_seq_len} tokens, one would within {needs}; {system}")
        self.needs = needs


@dataclass
class EncodedChats:
    """What records became: `used` conversations, bad records by kind, blank lines; their sum is what was given.

    rows: (number of the used conversation from 0, row); a long one has several. hashes: of the used conversations.
    notes: what was odd in them. needs: the --max_seq_len of each that was too long.
    """

    rows: list[tuple[int, Row]] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    used: int = 0
    blank_lines: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)  # (kind, "file:line: reason")
    notes: Counter[str] = field(default_factory=Counter)
    needs: list[int] = field(default_factory=list)


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
        except TooLong as bad:
            encoded.bad.append((bad.kind, f"{place}: {bad}"))
            encoded.needs.append(bad.needs)
            continue
        encoded.notes.update([*conversation.notes, *[CUT_ANSWER] * cut_answers, *[SPLIT] * (len(rows) > 1)])
        encoded.rows += [(encoded.used, row) for row in rows]
        # Written differently, as in another format, it is the same conversation.
        encoded.hashes.append(text_hash(repr((conversation.turns, conversation.tools)).encode("utf-8")))
        encoded.used += 1
    return encoded


@dataclass(frozen=True)
class ChatEncoder:
    """Turns records into streams of ids, marks (a byte an id) and row lengths; see encode.Encoder."""

    tokenizer: TextTokenizer
    max_seq_len: int
    val_fraction: float

    @property
    def columns(self) -> None:
        """All of them: which hold a conversation depends on the format."""
        return None

    @property
    def key(self) -> list[object]:
        """See Encoder."""
        return ["chats", CHAT_FORMAT, self.tokenizer.bos_id, self.tokenizer.eos_id, self.max_seq_len]

    def encode(self, chunk: Chunk, parse_only: bool) -> Encoded:
        """See Encoder. It is parsed and encoded at once, because a conversation's length decides whether it is used."""
        chats = encode_records(chunk.records("text"), self.tokenizer, self.max_seq_len)
        ids_type = typecode(self.tokenizer)
        streams = tuple({"bin": array(ids_type), MARKS: array("B"), ROWS: array("I")} for _ in range(2))
        encoded = Encoded(chunk.source.path, streams, [0, 0], [0, 0], chunk.read_bytes, chats.blank_lines)
        encoded.text_hashes.extend(chats.hashes)
        encoded.notes, encoded.needs = chats.notes, chats.needs
        for kind, line in chats.bad:
            (encoded.dropped if kind in DROPPED else encoded.bad).append((kind, line))
        # A conversation's parts stay together: what is held out must not be half known.
        splits = [int(hashed / 2**64 < self.val_fraction) for hashed in chats.hashes]
        for split in splits:
            encoded.documents[split] += 1
        for number, row in chats.rows:
            split = splits[number]
            encoded.text_bytes[split] += row.text_bytes
            streams[split]["bin"].extend(row.ids)
            streams[split][MARKS].extend(row.marks())
            counts = (len(row.ids), sum(row.learned), len(row.starts), row.takes_system)
            streams[split][ROWS].extend(counts)
        return encoded


def encode(conversations: Sequence[Conversation], tokenizer: TextTokenizer) -> list[list[Block]]:
    """Encode any number of conversations with one call of the tokenizer; returns the blocks of each."""
    return _encode([list(lay_out(conversation)) for conversation in conversations], tokenizer)


def think_ids(tokenizer: TextTokenizer) -> list[int]:
    """The ids of the empty think block that an answer may begin with."""
    [[block]] = _encode([[(ASSISTANT, empty_think_block())]], tokenizer)
    return block.ids


def system_ids(text: str, tokenizer: TextTokenizer) -> list[int]:
    """The ids of a system turn."""
    [[block]] = encode([Conversation((Turn(SYSTEM, text),))], tokenizer)
    return block.ids


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
    it ends after the last answer that fits. Raises TooLong where no answer fits.
    """
    limit = _length(blocks) if max_seq_len is None else max_seq_len + 1
    rows: list[Row] = []
    head_length = next((n for n, block in enumerate(blocks) if block.role != SYSTEM), len(blocks))
    head, current, cut_answers = list(blocks[:head_length]), [], 0
    # Of `current`, counted along: a conversation may have as many turns as a line has room for.
    length, room = 0, limit - _length(head)
    for asked in _rounds(blocks[head_length:]):
        if length + _length(asked) <= room:
            current += asked
            length += _length(asked)
            continue
        rows += _row(head, current)
        current, length = list(asked), _length(asked)
        while current and not (any(current[-1].learned) and length <= room):
            length -= len(current.pop().ids)
        if len(current) < len(asked):
            cut_answers += sum(any(block.learned) for block in asked[len(current) :])
            rows += _row(head, current)
            current, length = [], 0
    rows += _row(head, current)
    if not rows:
        raise TooLong(max_seq_len, _needs(head, blocks[head_length:]), _length(head))
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


def _needs(head: Sequence[Block], blocks: Sequence[Block]) -> int:
    """The smallest --max_seq_len at which `fit` would keep an answer; 0 where there is none to learn."""
    ends = []
    for asked in _rounds(blocks):
        first = next((number for number, block in enumerate(asked, 1) if any(block.learned)), None)
        ends += [_length(head) + _length(asked[:first]) - 1] if first else []
    return min(ends, default=0)


def _length(blocks: Sequence[Block]) -> int:
    return sum(len(block.ids) for block in blocks)


def _row(head: Sequence[Block], blocks: Sequence[Block]) -> list[Row]:
    """One row that ends with the last answer to learn, or none."""
    last = max((number for number, block in enumerate(blocks) if any(block.learned)), default=None)
    if last is None:
        return []
    ids: list[int] = []
    learned: list[bool] = []
    starts: list[int] = []
    parts = [*head, *blocks[: last + 1]]
    for part in parts:
        starts += [len(ids) + start for start in part.starts]
        ids += part.ids
        learned += part.learned
    return [Row(ids, learned, tuple(starts), not head, sum(part.text_bytes for part in parts))]


def _encode(laid_out: list[list[tuple[str, list[Piece]]]], tokenizer: TextTokenizer) -> list[list[Block]]:
    # Another tokenizer's own tokens for the start and the end of a turn take the place of these two names.
    controls = {name: tokenizer.control_id(name) for name in CONTROLS} | {
        START: tokenizer.bos_id,
        END: tokenizer.eos_id,
    }
    joined = [[(role, _joined(pieces, controls)) for role, pieces in blocks] for blocks in laid_out]
    texts = list(
        {piece.text: None for blocks in joined for _, pieces in blocks for piece in pieces if not piece.is_control}
    )
    ids_of = dict(zip(texts, tokenizer.encode_texts(texts), strict=True))

    def block(role: str, pieces: list[Piece]) -> Block:
        ids: list[int] = []
        learned: list[bool] = []
        starts, text_bytes = [], 0
        for number, piece in enumerate(pieces):
            text_bytes += len(piece.text.encode("utf-8")) if piece.learned and not piece.is_control else 0
            if role == ASSISTANT and number == HEADER_PIECES and not piece.text.startswith(THINK):
                starts.append(len(ids))
            ids += [controls[piece.text]] if piece.is_control else ids_of[piece.text]
            learned += [piece.learned] * (len(ids) - len(learned))
        return Block(role, ids, learned, tuple(starts), text_bytes)

    return [[block(role, pieces) for role, pieces in blocks] for blocks in joined]


def _joined(pieces: Iterable[Piece], controls: dict[str, int | None]) -> list[Piece]:
    """Join texts that stand side by side, so that they become the ids they have in one text.

    A control token that the vocabulary lacks is text: MiniMind's older ones have neither think nor tool tokens.
    """
    joined: list[Piece] = []
    for text, is_control, learned, apart in pieces:
        is_control = is_control and controls[text] is not None
        before = joined[-1] if joined else None
        if before and not (is_control or before.is_control or before.apart) and learned == before.learned:
            joined[-1] = Piece(before.text + text, False, learned, apart)
        else:
            joined.append(Piece(text, is_control, learned, apart))
    return [piece for piece in joined if piece.text]
