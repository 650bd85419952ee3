"""Wire formats: how a sparse vector is laid out in a message.

A message is one buffer of 32-bit integers, so that values and indices travel together, in as many bytes as they need,
whatever the backend does to narrow floating-point types.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._random import key_of
from ._sparse_vector import SparseVector
from .quantize import Exact, Quantizer

__all__ = ["Compact", "Full", "Wire"]

# Indices in one block, so that those within it take two bytes.
BLOCK = 2**16


class Wire(Protocol):
    """A layout of sparse vectors in messages: a frozen dataclass.

    Attributes:
      lossless: whether what is read is what was written, to the bit.
      elementwise: whether what was read once is read as it is when it is sent again, whatever stands beside it.
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def elementwise(self) -> bool: ...

    def at(self, step: jax.Array) -> "Wire":
        """The wire for the messages of one step, where it draws random numbers: int32 scalar, alike on all workers."""
        ...

    def encode(self, x: SparseVector) -> jax.Array:
        """Lays each run out as one row of int32: shape ``(..., words)`` for values of shape ``(..., capacity)``.

        Equal runs are laid out alike, on every worker.
        """
        ...

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        """Reads the rows back, as vectors of length ``n`` with ``capacity`` values of ``dtype``."""
        ...

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        """The length of a row, for a run of ``capacity`` values of ``dtype`` out of ``n``."""
        ...


@dataclasses.dataclass(frozen=True)
class Full:
    """Values and indices at full width: 4 + 4 bytes an element for float32, 8 + 4 for float64. Lossless.

    >>> x = SparseVector(jnp.array([2.0, 5.0]), jnp.array([1, 3]), 4)
    >>> Full().encode(x).shape
    (4,)
    """

    @property
    def lossless(self) -> bool:
        return True

    @property
    def elementwise(self) -> bool:
        return True

    def at(self, step: jax.Array) -> "Full":
        return self

    def encode(self, x: SparseVector) -> jax.Array:
        values = lax.bitcast_convert_type(x.values, jnp.int32)
        return jnp.concatenate([values.reshape(*x.indices.shape[:-1], -1), x.indices], axis=-1)

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        split = message.shape[-1] - capacity
        values, indices = message[..., :split], message[..., split:]
        if jnp.dtype(dtype).itemsize > 4:
            values = values.reshape(*indices.shape, -1)
        return SparseVector(lax.bitcast_convert_type(values, dtype), indices, n)

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        return capacity * (jnp.dtype(dtype).itemsize // 4 + 1)


@dataclasses.dataclass(frozen=True)
class Compact:
    """Ascending indices in 2 bytes each, and values in as few as their quantizer takes.

    An index is written modulo 65,536, and before them how many lie in each block of so many: 2 bytes a block (4 in
    messages of 65,536 elements or more), ``n / 65536`` of them.

    What a quantizer rounds away is not delivered: whoever rounds has it in its residual.

    Attributes:
      values: how values are laid out: ``Exact()``, lossless, 6 bytes an element in all for float32;
        ``quantize.BFloat16()``, 4 bytes; ``quantize.Codebook(4)`` and ``(2)``, 2.5 and 2.25 bytes; any other quantizer.
      key: of the random numbers of one step; :meth:`at` sets it.

    >>> x = SparseVector(jnp.array([2.0, 5.0]), jnp.array([1, 3]), 4)
    >>> Compact().encode(x).shape
    (4,)
    >>> Compact().words(1000, 1_000_000, jnp.float32)
    1508
    """

    values: Quantizer = Exact()
    key: jax.Array | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def lossless(self) -> bool:
        return self.values.lossless

    @property
    def elementwise(self) -> bool:
        return self.values.elementwise

    def at(self, step: jax.Array) -> "Compact":
        seed = getattr(self.values, "seed", None)
        return self if seed is None else dataclasses.replace(self, key=key_of(seed, step))

    def encode(self, x: SparseVector) -> jax.Array:
        if x.values.ndim > 1:
            return jax.vmap(self.encode)(x)
        blocks = -(-x.n // BLOCK)
        edges = jnp.array([min(block * BLOCK, x.n) for block in range(blocks + 1)], jnp.int32)
        before = jnp.searchsorted(x.indices, edges).astype(jnp.int32)
        counts = before[1:] - before[:-1]
        if x.capacity < BLOCK:
            counts = _pairs(counts)
        # What is random depends on what is sent, so that all who send the same send the same bits.
        key = jax.random.key(0) if self.key is None else self.key
        bits = lax.bitcast_convert_type(x.values, jnp.uint32)
        key = jax.random.fold_in(key, jnp.sum(bits, dtype=jnp.uint32))
        return jnp.concatenate([counts, _pairs(x.indices % BLOCK), self.values.encode(x.values, key)])

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        if message.ndim > 1:
            return jax.vmap(lambda row: self.decode(row, capacity, n, dtype))(message)
        head, blocks = self._head(capacity, n), -(-n // BLOCK)
        places = head + -(-capacity // 2)
        counts = message[:head] if capacity >= BLOCK else _unpair(message[:head], blocks)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        place = lax.iota(jnp.int32, capacity)
        # An element's block: how many blocks have ended by its place.
        block = jnp.cumsum(jnp.zeros(capacity, jnp.int32).at[ends].add(1, mode="drop"), dtype=jnp.int32)
        used = place < ends[-1]
        indices = jnp.where(used, block * BLOCK + _unpair(message[head:places], capacity), n)
        values = jnp.where(used, self.values.decode(message[places:], capacity, dtype), 0)
        return SparseVector(values, indices, n)

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        return self._head(capacity, n) + -(-capacity // 2) + self.values.words(capacity, dtype)

    def _head(self, capacity: int, n: int) -> int:
        blocks = -(-n // BLOCK)
        return blocks if capacity >= BLOCK else -(-blocks // 2)


def moving(wire: Wire) -> Wire:
    """The wire on which what was read once can go on without being rounded again."""
    return wire if wire.elementwise else Compact()


def as_read(wire: Wire, x: SparseVector, message: jax.Array) -> SparseVector:
    """What others read of ``x`` in its message."""
    if wire.lossless:
        return x
    return SparseVector(wire.decode(message, x.capacity, x.n, x.values.dtype).values, x.indices, x.n)


def _pairs(numbers: jax.Array) -> jax.Array:
    """Two numbers of 16 bits in a word."""
    halves = jnp.pad(numbers, (0, numbers.shape[0] % 2)).astype(jnp.uint16).reshape(-1, 2)
    return lax.bitcast_convert_type(halves, jnp.int32)


def _unpair(words: jax.Array, count: int) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:count].astype(jnp.int32)
