"""Two or four bits for each value, with a codebook in each message."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import Exact, Quantizer, pack_digits, packed_words, row_maximum, share, total, unpack_digits


@dataclasses.dataclass(frozen=True)
class Codebook(Quantizer):
    """Replaces each value by its sign and one of a few magnitudes, which are part of the message.

    There are 2 magnitudes with 2 bits, and 8 with 4 bits. The range from the smallest to the
    largest magnitude of the message is divided into bins, all with the same ratio of their ends.
    The magnitudes are the means of these bins. The quantizer is for the values of sparse vectors,
    none of which is zero: a zero would become the mean of the lowest bin.

    Attributes:
      bits: the number of bits for each value, 2 or 4.

    References:
      Renggli et al., SparCML, SC 2019 (sparse vectors of low precision); Lloyd, Least Squares
      Quantization in PCM, 1982 (the mean of a bin is its best value).
    """

    bits: Literal[2, 4] = 4

    def __post_init__(self):
        if not isinstance(self.bits, int) or self.bits not in (2, 4):
            raise ValueError(f"bits is {self.bits!r}; it must be 2 or 4")

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        magnitudes = jnp.abs(values)
        used = magnitudes > 0
        logs = jnp.log(jnp.where(used, magnitudes, 1))
        low = jnp.min(logs, where=used, initial=jnp.inf)
        high = jnp.max(logs, where=used, initial=-jnp.inf)
        part = (logs - low) / jnp.where(high > low, high - low, 1)
        bins = jnp.clip(jnp.where(used, part, 0) * self._bins, 0, self._bins - 1).astype(jnp.int32)
        members = (bins[None] == jnp.arange(self._bins)[:, None]) & used[None]
        top = row_maximum(values[None])
        sums = total(jnp.where(members, share(values[None], top[:, None]), 0))
        book = top * (sums / jnp.maximum(jnp.sum(members, axis=1), 1))
        digits = 2 * bins + (values < 0)
        return jnp.concatenate([Exact().encode(book.astype(values.dtype), key), pack_digits(digits, 2 * self._bins)])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        head = Exact().words(self._bins, dtype)
        book = Exact().decode(message[:head], self._bins, dtype)
        digits = unpack_digits(message[head:], m, 2 * self._bins)
        return jnp.where(digits % 2 > 0, -1, 1).astype(dtype) * book[digits // 2]

    def words(self, m: int, dtype: DTypeLike) -> int:
        return Exact().words(self._bins, dtype) + packed_words(m, 2 * self._bins)

    @property
    def _bins(self) -> int:
        return 2 ** (self.bits - 1)
