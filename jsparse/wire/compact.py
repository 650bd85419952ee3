"""A wire format with few bits for ascending indices, and quantized values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import bitmap

from .._vector.random import key_of
from .._vector.sparse_vector import SparseVector
from ..quantize import Exact, Quantizer
from ..quantize._base import check_quantizer, pack_digits, packed_words, unpack_digits
from ._base import Wire


@dataclasses.dataclass(frozen=True)
class Compact(Wire):
    """Ascending indices in about ``2 + log2(n / capacity)`` bits each, and quantized values.

    The low bits of an index are written as they are. The upper bits of all indices are written in
    unary, in one bitmap, with one bit for each element: the bit of element ``i`` is at place
    ``i + (index >> low)``. The number of low bits is the one that makes the message shortest. The
    indices of 1 % of a vector take 8.6 bits each, and those of 0.1 % take 12, for any set of
    indices.

    What a quantizer rounds away is not delivered. The worker that rounds keeps it in its residual.

    Attributes:
      values: the layout of values: ``Exact()``, lossless, 4 bytes each for float32;
        ``quantize.BFloat16()``, 2 bytes each; ``quantize.Codebook(4)`` and ``Codebook(2)``, 4 and
        2 bits; any other quantizer. Those that round at random (``QSGD``, ``TernGrad``) need
        ``contract=True`` beside error feedback.

    >>> x = SparseVector(jnp.array([2.0, 5.0]), jnp.array([1, 3]), 4)
    >>> Compact().encode(x, step=0).shape
    (3,)
    >>> Compact().words(1000, 100_000, jnp.float32)
    1269

    References:
      Elias, "Efficient storage and retrieval by content and address of static files", J. ACM
      21(2), 1974.
    """

    values: Quantizer = Exact()

    def __post_init__(self):
        check_quantizer("values", self.values)

    @property
    def lossless(self) -> bool:
        return self.values.lossless

    @property
    def elementwise(self) -> bool:
        return self.values.elementwise

    @property
    def unbiased(self) -> bool:
        return self.values.unbiased

    def encode(self, x: SparseVector, step: jax.Array) -> jax.Array:
        if x.values.ndim > 1:
            return jax.vmap(lambda run: self.encode(run, step))(x)
        low = _low_bits(x.capacity, x.n)
        fields = [pack_digits(x.indices >> shift & (1 << width) - 1, 1 << width) for shift, width in _fields(low)]
        places = (x.indices >> low) + lax.iota(jnp.int32, x.capacity)
        upper = bitmap.mark(jnp.zeros(_upper_words(x.capacity, x.n, low), jnp.uint32), places)
        # The random numbers depend on the values as well, so workers that send equal runs send
        # equal bits.
        total = jnp.sum(x.values.view(jnp.uint32), dtype=jnp.uint32)
        key = key_of(getattr(self.values, "seed", 0), step, total)
        values = self.values.encode(x.values, key)
        return jnp.concatenate([upper.view(jnp.int32), *fields, values])

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        if message.ndim > 1:
            return jax.vmap(lambda row: self.decode(row, capacity, n, dtype))(message)
        low = _low_bits(capacity, n)
        begin = _upper_words(capacity, n, low)
        places, _ = bitmap.members(message[:begin].view(jnp.uint32), capacity, fill=0)
        indices = places - lax.iota(jnp.int32, capacity) << low
        for shift, width in _fields(low):
            end = begin + packed_words(capacity, 1 << width)
            indices |= unpack_digits(message[begin:end], capacity, 1 << width) << shift
            begin = end
        values = self.decode_values(message, capacity, n, dtype)
        return SparseVector(jnp.where(indices < n, values, 0), indices, n)

    def decode_values(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> jax.Array:
        if message.ndim > 1:
            return jax.vmap(lambda row: self.decode_values(row, capacity, n, dtype))(message)
        begin = _index_words(capacity, n, _low_bits(capacity, n))
        return self.values.decode(message[begin:], capacity, dtype)

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        return _index_words(capacity, n, _low_bits(capacity, n)) + self.values.words(capacity, dtype)


@functools.cache
def _low_bits(capacity: int, n: int) -> int:
    """How many bits of an index are written as they are, so that the message is shortest."""
    return min(
        (low for low in range(32) if (n >> low) + capacity < 2**31), key=lambda low: _index_words(capacity, n, low)
    )


def _index_words(capacity: int, n: int, low: int) -> int:
    fields = sum(packed_words(capacity, 1 << width) for _, width in _fields(low))
    return _upper_words(capacity, n, low) + fields


def _upper_words(capacity: int, n: int, low: int) -> int:
    return -(-((n >> low) + capacity) // 32)


def _fields(low: int) -> list[tuple[int, int]]:
    """``(shift, width)`` of the parts of the low bits: widths that fill whole words."""
    return [(low & (width - 1), width) for width in (16, 8, 4, 2, 1) if low & width]
