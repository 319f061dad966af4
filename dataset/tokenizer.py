"""The tokenizer as training sees it: raw text to ids and back, and a fingerprint to match it with weights.

Only the `tokenizers` library is used: importing transformers costs seconds at every start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from model.weights import COPIED_TOKENIZER_FILES, require_regular

# Characters. A longer text is encoded in pieces; within the last part of one its end is looked for, on this context.
LONG_TEXT, CUT_SEARCH, CUT_CONTEXT = 1 << 18, 1 << 13, 256
DEFAULT_FOLDER = "model/tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_FILES_NEEDED = " and ".join(TOKENIZER_FILES)


@dataclass(frozen=True)
class TextTokenizer:
    """A loaded tokenizer folder. `fingerprint` (SHA-256, hex) covers everything that decides a text's ids."""

    folder: Path
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    _raw: Tokenizer = field(repr=False, compare=False)
    _full: Tokenizer = field(repr=False, compare=False)
    _files: dict[str, bytes] = field(repr=False, compare=False)

    def save(self, folder: Path) -> None:
        """Write the files as they were read: where a run has them from may be deleted by now, as an old checkpoint."""
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as it stands, without BOS or EOS; all cores work on one call.

        No reserved string inside a text becomes its control id: "<think>" is spelled out in ordinary tokens.
        Raises ValueError for a text with a lone surrogate, which has no UTF-8 bytes.
        """
        try:
            if any(len(text) > LONG_TEXT for text in texts):
                return [self._encode_in_pieces(text) for text in texts]
            encodings = self._raw.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as problem:
            raise ValueError(_why_not_text(texts)) from problem
        return [encoding.ids for encoding in encodings]

    def _encode_in_pieces(self, text: str) -> list[int]:
        """Encode a text of any length: the library takes about a hundred bytes a byte while it works on one."""
        ids, start = [], 0
        while start < len(text):
            end = self._neutral_cut(text, start + LONG_TEXT) if len(text) - start > LONG_TEXT else len(text)
            ids += self._raw.encode(text[start:end], add_special_tokens=False).ids
            start = end
        return ids

    def _neutral_cut(self, text: str, place: int) -> int:
        """The last position up to `place`, between a line end or else a mark and a letter, where a cut changes no id.

        Tried on the surroundings. A text without such a position, as a mile of one letter, is cut at `place`.
        """

        def ids(start: int, end: int) -> list[int]:
            return self._raw.encode(text[start:end], add_special_tokens=False).ids

        starts = [at for at in range(place, place - CUT_SEARCH, -1) if text[at].isalnum() > text[at - 1].isalnum()]
        for at in sorted(starts, key=lambda at: text[at - 1] != "\n"):
            if ids(at - CUT_CONTEXT, at) + ids(at, at + CUT_CONTEXT) == ids(at - CUT_CONTEXT, at + CUT_CONTEXT):
                return at
        return place

    def control_id(self, name: str) -> int | None:
        """Return the id of a reserved entry, as "<think>"; None where there is none, as in older vocabularies."""
        return self._full.token_to_id(name)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; control tokens appear as their names, broken UTF-8 as U+FFFD."""
        return self._full.decode(ids, skip_special_tokens=False)


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """Open a folder with tokenizer.json and tokenizer_config.json (ours or MiniMind's `model/`).

    Raises one ValueError that names the folder or file and what is wrong with it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"--tokenizer_path {folder}: no such folder (looked from {Path.cwd()}); start from the root of the clone, "
            f"or give a folder with {_FILES_NEEDED}"
        )
    description, config = (_read_json(folder / name) for name in TOKENIZER_FILES)
    full = _build(description, folder)
    names = ("bos_token", "eos_token", "pad_token")
    bos_id, eos_id, pad_id = (_named_id(config, full, name, folder) for name in names)
    return TextTokenizer(
        folder=folder,
        vocab_size=1 + max(full.get_vocab(with_added_tokens=True).values()),
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        fingerprint=_fingerprint(description),
        _raw=_build(_without_added_tokens(description), folder),
        _full=full,
        _files={name: (folder / name).read_bytes() for name in COPIED_TOKENIZER_FILES if (folder / name).is_file()},
    )


def tokenizer_folder(given: str | None, weights: Path | None) -> Path:
    """Where the tokenizer of a model is: the folder that was given, or that of its weights; without weights, ours.

    Weights without one beside them need it named, a ValueError otherwise: two vocabularies can have the same size.
    """
    if given is not None or weights is None:
        return Path(given or DEFAULT_FOLDER)
    if not (weights / TOKENIZER_FILES[0]).is_file():
        raise ValueError(f"{weights} has no tokenizer beside it; give --tokenizer_path, that of the weights' training")
    return weights


def require_matching(tokenizer: TextTokenizer, vocab_size: int, weights_folder: Path | None = None) -> None:
    """Raise ValueError unless `tokenizer` fits weights whose embedding has `vocab_size` rows.

    A tokenizer.json in `weights_folder` must have the same fingerprint; without one the sizes must be equal,
    which proves little: MiniMind's two vocabularies both have 6400 entries.
    """
    saved_file = weights_folder / "tokenizer.json" if weights_folder else None
    if saved_file and saved_file.exists():
        saved = _fingerprint(_read_json(saved_file))
        if saved != tokenizer.fingerprint:
            raise ValueError(
                f"tokenizer {tokenizer.folder} (fingerprint {tokenizer.fingerprint[:12]}) is not the one "
                f"saved with the weights (fingerprint {saved[:12]}); use --tokenizer_path {weights_folder}"
            )
        fits = tokenizer.vocab_size <= vocab_size  # rows are often padded to a round number
    else:
        fits = tokenizer.vocab_size == vocab_size
    if not fits:
        raise ValueError(
            f"tokenizer {tokenizer.folder} has {tokenizer.vocab_size} entries, the weights have "
            f"{vocab_size}; give the --tokenizer_path that the weights were trained with"
        )


def _read_json(path: Path) -> dict:
    try:
        require_regular(path)
        content = json.loads(path.read_bytes())
    except FileNotFoundError as problem:
        raise ValueError(f"{path}: no such file; a tokenizer folder needs {_FILES_NEEDED}") from problem
    except OSError as problem:
        raise ValueError(f"{path}: cannot be read ({problem.strerror or problem})") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: not valid JSON ({problem}); restore or retrain the tokenizer") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _build(description: dict, folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as problem:  # the library raises plain Exception for every malformed description
        raise ValueError(f"{folder / 'tokenizer.json'}: not a usable tokenizer ({problem})") from problem


def _without_added_tokens(description: dict) -> dict:
    """Return a copy that sees text only.

    The library's own switches are not enough: split_special_tokens and encode_special_tokens still match
    added tokens that are not marked special. Truncation and padding would change ids without a word.
    """
    text_only = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return description | text_only


def _named_id(config: dict, tokenizer: Tokenizer, name: str, folder: Path) -> int:
    token = config.get(name)
    if isinstance(token, dict):  # transformers writes {"content": ...} when a token has options
        token = token.get("content")
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        path = folder / "tokenizer_config.json"
        raise ValueError(f"{path}: {name} is {token!r}, which is not an entry of tokenizer.json")
    return token_id


def _fingerprint(description: dict) -> str:
    """Hash what decides the ids of a text, whatever the file's layout or the library's version."""
    model = description.get("model") or {}
    added = description.get("added_tokens") or []
    parts = {
        "vocab": model.get("vocab"),
        # Old files write a merge as "a b", newer ones as ["a", "b"]; byte-level pieces hold no space.
        "merges": [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or []],
        "added_tokens": sorted([token["id"], token["content"], token["special"]] for token in added),
        "normalizer": description.get("normalizer"),
        "pre_tokenizer": description.get("pre_tokenizer"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("ascii")).hexdigest()


def _why_not_text(texts: Sequence[str]) -> str:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {number} is {type(text).__name__}, not str"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            found = f"U+{ord(text[problem.start]):04X} at character {problem.start}"
            return f"text {number} holds the lone surrogate {found}, which has no UTF-8 form; remove it"
    return "the texts are not a list of str"
