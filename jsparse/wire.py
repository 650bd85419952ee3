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

from ._sparse_vector import SparseVector

__all__ = ["Full", "Wire"]


class Wire(Protocol):
    """A layout of sparse vectors in messages: a frozen dataclass."""

    def encode(self, x: SparseVector) -> jax.Array:
        """Lays each run out as one row of int32: shape ``(..., words)`` for values of shape ``(..., capacity)``."""
        ...

    def decode(self, message: jax.Array, n: int, dtype: DTypeLike) -> SparseVector:
        """Reads the rows back, as vectors of length ``n`` with values of ``dtype``."""
        ...

    def words(self, capacity: int, dtype: DTypeLike) -> int:
        """The length of a row, for a run of ``capacity`` values of ``dtype``."""
        ...


@dataclasses.dataclass(frozen=True)
class Full:
    """Values and indices at full width: 4 + 4 bytes an element for float32, 8 + 4 for float64. Lossless.

    >>> x = SparseVector(jnp.array([2.0, 5.0]), jnp.array([1, 3]), 4)
    >>> Full().encode(x).shape
    (4,)
    """

    def encode(self, x: SparseVector) -> jax.Array:
        values = lax.bitcast_convert_type(x.values, jnp.int32)
        return jnp.concatenate([values.reshape(*x.indices.shape[:-1], -1), x.indices], axis=-1)

    def decode(self, message: jax.Array, n: int, dtype: DTypeLike) -> SparseVector:
        width = self._width(dtype)
        capacity = message.shape[-1] // (width + 1)
        values, indices = message[..., : width * capacity], message[..., width * capacity :]
        if width > 1:
            values = values.reshape(*indices.shape, width)
        return SparseVector(lax.bitcast_convert_type(values, dtype), indices, n)

    def words(self, capacity: int, dtype: DTypeLike) -> int:
        return capacity * (self._width(dtype) + 1)

    def _width(self, dtype: DTypeLike) -> int:
        return jnp.dtype(dtype).itemsize // 4
