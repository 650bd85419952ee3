"""Two or four bits for each value, with a codebook in each message."""

import dataclasses
import warnings
from typing import ClassVar, Literal

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

    unit = None
    # How many digits a bin has: one for each sign.
    _signs: ClassVar[int] = 2

    bits: Literal[2, 4] = 4

    def __post_init__(self):
        if not isinstance(self.bits, int) or self.bits not in (2, 4):
            raise ValueError(f"bits is {self.bits!r}; it must be 2 or 4")

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        top = row_maximum(values[None])
        shares = jnp.sign(values) * share(values[None], top[:, None])[0]
        digits = self._digits(values, shares)
        bins = jnp.arange(2**self.bits // self._signs)
        members = (digits[None] // self._signs == bins[:, None]) & (values != 0)[None]
        sums = total(jnp.where(members, (jnp.abs(shares) if self._signs > 1 else shares)[None], 0))
        book = top * (sums / jnp.maximum(jnp.sum(members, axis=1), 1))
        return jnp.concatenate([Exact().encode(book.astype(values.dtype), key), pack_digits(digits, 2**self.bits)])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        bins = 2**self.bits // self._signs
        head = Exact().words(bins, dtype)
        book = Exact().decode(message[:head], bins, dtype)
        digits = unpack_digits(message[head:], m, 2**self.bits)
        return jnp.where(digits % self._signs > 0, -1, 1).astype(dtype) * book[digits // self._signs]

    def words(self, m: int, dtype: DTypeLike) -> int:
        return Exact().words(2**self.bits // self._signs, dtype) + packed_words(m, 2**self.bits)

    def _digits(self, values: jax.Array, shares: jax.Array) -> jax.Array:
        """Twice the number of the bin of each value, and 1 more if the value is negative.

        Args:
          values: of which those that are zero do not count.
          shares: the same over the largest magnitude.
        """
        used = values != 0
        logs = jnp.log(jnp.where(used, jnp.abs(values), 1))
        low = jnp.min(logs, where=used, initial=jnp.inf)
        high = jnp.max(logs, where=used, initial=-jnp.inf)
        part = (logs - low) / jnp.where(high > low, high - low, 1)
        bins = 2 ** (self.bits - 1)
        found = jnp.clip(jnp.where(used, part, 0) * bins, 0, bins - 1).astype(jnp.int32)
        return 2 * found + (values < 0)


@dataclasses.dataclass(frozen=True)
class DeviationCodebook(Codebook):
    """The codebook of SparseLoCo's and MuLoCo's codes: bins by distance from the mean.

    There are 4 bins with 2 bits, and 16 with 4. Together they are 6 standard deviations of the
    message's values wide, and those at the ends have the rest. The values are the bins' means.

    With 2 bits take :class:`Codebook`: this class warns. It has one bin around the mean, one above
    it and two below it. Of values with heavy tails most are in that around the mean, whose own
    mean is about 0, so they are hardly sent. Of values that are all far from 0 it uses two bins
    only, as signs.

    Attributes:
      bits: the number of bits for each value, 2 or 4.

    References:
      Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025, and Thérien et
      al., MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025: their codes.
    """

    _signs = 1

    def __post_init__(self):
        super().__post_init__()
        if self.bits == 2:
            warnings.warn(
                "DeviationCodebook(2) makes most values with heavy tails about 0: take Codebook(2)", stacklevel=3
            )

    def _digits(self, values: jax.Array, shares: jax.Array) -> jax.Array:
        used = values != 0
        count = jnp.sum(used)
        mean = total(shares[None])[0] / jnp.maximum(count, 1)
        square = total(jnp.where(used, (shares - mean) ** 2, 0)[None])[0] / jnp.maximum(count - 1, 1)
        width = 6 * jnp.sqrt(square) / 2**self.bits
        distance = jnp.round((shares - mean) / jnp.where(width > 0, width, 1))
        middle = 2 ** (self.bits - 1)
        return middle + jnp.nan_to_num(jnp.clip(distance, -middle, middle - 1)).astype(jnp.int32)
