"""Documents -> packed windows of ids, for pretraining and for its validation."""

import hashlib
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataset.tokenizer import TextTokenizer
from dataset.tokens import DEFAULT_READING, Reading, TokenStream, open_token_cache
from model.loss import IGNORE_INDEX

log = logging.getLogger(__name__)


class TextWindows:
    """Non-overlapping windows over a token stream: window i reads ids i*T .. i*T+T and predicts each from those before.

    Documents follow one another (BOS ids EOS), so windows are full and need no padding. Training leaves out the ids
    after the last full window; with `keep_tail` (validation) a last, padded window predicts them, so that every id
    but the very first is predicted exactly once.
    """

    def __init__(self, stream: TokenStream, max_seq_len: int, keep_tail: bool = False):
        self.stream, self.tokens = stream, stream.tokens
        self.max_seq_len = max_seq_len
        self.documents = stream.documents
        self.text_bytes = stream.text_bytes
        self.data_sha256 = stream.sha256
        self.fingerprint = hashlib.sha256(f"windows {stream.sha256} {max_seq_len} {keep_tail}".encode()).hexdigest()
        predicted = len(stream.tokens) - 1
        self._length = -(-predicted // max_seq_len) if keep_tail else predicted // max_seq_len
        if self._length == 0:
            raise ValueError(
                f"{len(stream.tokens)} tokens in {stream.documents} documents do not fill one window of "
                f"--max_seq_len {max_seq_len} + 1; give more data or a smaller --max_seq_len"
            )
        self.target_counts = np.broadcast_to(np.int64(max_seq_len), self._length)
        if missing := max(0, self._length * max_seq_len - predicted):
            self.target_counts = self.target_counts.copy()
            self.target_counts[-1] -= missing

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        """Return `input_ids` and `targets`, each (n, T) int64, of these windows; the tail's padding is IGNORE_INDEX."""
        length = self.max_seq_len
        input_ids = np.zeros((len(indices), length), dtype=np.int64)
        targets = np.full((len(indices), length), IGNORE_INDEX, dtype=np.int64)
        for row, index in enumerate(indices):
            window = self.tokens[index * length : index * length + length + 1]
            input_ids[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        # Touched pages of the file count as resident memory of this process until they are let go (they stay cached).
        self.tokens._mmap.madvise(mmap.MADV_DONTNEED)
        return {"input_ids": torch.from_numpy(input_ids), "targets": torch.from_numpy(targets)}


def evaluation_windows(
    paths: Sequence[str],
    tokenizer: TextTokenizer,
    max_seq_len: int,
    cache_dir: Path,
    reading: Reading = DEFAULT_READING,
    builds: bool = True,
) -> TextWindows:
    """Return windows in which every token of these files but the first is predicted once."""
    stream = open_token_cache(list(paths), tokenizer, cache_dir, reading=reading, builds=builds).train
    return TextWindows(stream, max_seq_len, keep_tail=True)


def text_windows(
    data_path: Sequence[str],
    val_path: Sequence[str] | None,
    *,
    val_fraction: float,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    cache_dir: Path,
    reading: Reading = DEFAULT_READING,
    builds: bool = True,
) -> tuple[TextWindows, TextWindows | None]:
    """Return training windows and, from `val_path` or a share of the training files, validation windows.

    builds: whether this process builds a token cache at once; others let it go first. Raises ValueError (DataError for
    bad records) when the data cannot be used; see `open_token_cache`.
    """
    if val_path and val_fraction:
        raise ValueError("--val_path and --val_fraction exclude each other; give one of them")
    cache = open_token_cache(list(data_path), tokenizer, cache_dir, val_fraction, reading, builds)
    train = TextWindows(cache.train, max_seq_len)
    val = TextWindows(cache.val, max_seq_len, keep_tail=True) if cache.val else None
    if val_path:
        val = evaluation_windows(val_path, tokenizer, max_seq_len, cache_dir, reading, builds)
    used = len(train) * max_seq_len
    log.info(
        "training data: %d documents, %d windows of %d; %.2f %% of %d tokens are used and no position is padding",
        train.documents,
        len(train),
        max_seq_len,
        100 * used / (len(train.tokens) - 1),
        len(train.tokens),
    )
    return train, val
