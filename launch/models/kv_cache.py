"""Cache of keys and values for generation."""

from __future__ import annotations

from torch import Tensor


class KeyValues:
    """Keys and values of one block, each [B, kv heads, room, head_dim]; the first `length` tokens are filled. The first call of
    `extend` allocates the memory."""

    def __init__(self, room: int) -> None:
        self.room, self.length = room, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, kv heads, S, head_dim] of the next S tokens, and return keys and values of all tokens.
        Raises ValueError if the cache is full."""
        first, end = self.length, self.length + k.shape[2]
        if end > self.room:
            raise ValueError(f"a cache for {self.room} tokens got {end}; create a larger cache")
        if self._keys is None or self._values is None:
            self._keys, self._values = (each.new_empty(*each.shape[:2], self.room, each.shape[3]) for each in (k, v))
        for kept, new in ((self._keys, k), (self._values, v)):
            kept[:, :, first:end] = new
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]
