"""Values and indices at full width."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.sparse_vector import SparseVector
from ._base import Wire


@dataclasses.dataclass(frozen=True)
class Full(Wire):
    """Values and indices at full width. It is lossless.

    An element takes 4 + 4 bytes for float32, and 8 + 4 bytes for float64.

    >>> x = SparseVector(jnp.array([2.0, 5.0]), jnp.array([1, 3]), 4)
    >>> Full().encode(x, step=0).shape
    (4,)
    """

    lossless = True
    elementwise = True

    def encode(self, x: SparseVector, step: jax.Array) -> jax.Array:
        return jnp.concatenate([x.values.view(jnp.int32), x.indices], axis=-1)

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        indices = message[..., message.shape[-1] - capacity :]
        return SparseVector(self.decode_values(message, capacity, n, dtype), indices, n)

    def decode_values(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> jax.Array:
        return message[..., : message.shape[-1] - capacity].view(dtype)

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        return capacity * (jnp.dtype(dtype).itemsize // 4 + 1)
