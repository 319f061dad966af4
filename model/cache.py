"""The keys and values of tokens a model has seen, so that the next ones cost no second pass over them."""

import torch
from torch import Tensor

SMALLEST_ROOM = 64  # tokens


class LayerCache:
    """One layer's keys and values, (batch, heads, length, head_dim) each."""

    def __init__(self) -> None:
        self.length = 0
        self._room: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new ones behind the old; returns all of them, as views that the next call may overwrite."""
        start, end = self.length, self.length + keys.shape[2]
        if self._room is None or end > self._room[0].shape[2]:
            self._room = tuple(self._grown(number, new, end) for number, new in enumerate((keys, values)))
        self._room[0][:, :, start:end], self._room[1][:, :, start:end] = keys, values
        self.length = end
        return self._room[0][:, :, :end], self._room[1][:, :, :end]

    def _grown(self, number: int, new: Tensor, needed: int) -> Tensor:
        # Doubling: a copy of everything at every token would cost more than a small model's forward pass.
        batch, heads, _, head_dim = new.shape
        room = new.new_empty(batch, heads, max(SMALLEST_ROOM, 2 * self.length, needed), head_dim)
        if self._room is not None:
            room[:, :, : self.length] = self._room[number][:, :, : self.length]
        return room


class KVCache:
    """What GPT.hidden remembers of the tokens before: one per batch of growing rows.

    ids: (batch, length), the tokens themselves. segments: the same shape, or None where every row is one text.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]
        self.ids: Tensor | None = None
        self.segments: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of a row that are held."""
        return 0 if self.ids is None else self.ids.shape[1]

    def extend(self, ids: Tensor, segments: Tensor | None) -> Tensor | None:
        """Note new tokens; returns the segments of all. Segments with one call and not with another: ValueError."""
        if self.ids is None:
            self.ids, self.segments = ids, segments
        elif (segments is None) != (self.segments is None):
            raise ValueError("the cache was begun with segments or without, and this call is not; keep to one way")
        else:
            self.ids = torch.cat((self.ids, ids), dim=1)
            if segments is not None:
                self.segments = torch.cat((self.segments, segments), dim=1)
        return self.segments

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row; fewer stay where not every layer has seen as many."""
        # A pass that was interrupted has added its tokens to some of the layers only: they are forgotten, too.
        length = min(length, self.length, *(layer.length for layer in self.layers))
        self.ids = self.ids[:, :length] if length else None
        self.segments = self.segments[:, :length] if length and self.segments is not None else None
        for layer in self.layers:
            layer.length = length
