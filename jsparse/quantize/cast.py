"""Narrower floating-point types."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import Quantizer


@dataclasses.dataclass(frozen=True)
class _Cast(Quantizer):
    """Rounds each value to the nearest value of a narrow type, and packs two in a word."""

    elementwise = True
    dtype: ClassVar[Any]

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        most = jnp.finfo(self.dtype).max.astype(values.dtype)
        narrow = jnp.where(jnp.isinf(values), values, jnp.clip(values, -most, most)).astype(self.dtype)
        return jnp.pad(narrow, (0, narrow.shape[0] % 2)).view(jnp.int32)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        return message[: self.words(m, dtype)].view(self.dtype)[:m].astype(dtype)

    def words(self, m: int, dtype: DTypeLike) -> int:
        return -(-m // 2)


class BFloat16(_Cast):
    """Rounds values to bfloat16: 2 bytes, 8 bits of precision, and the range of float32.

    Larger finite magnitudes become the largest bfloat16.

    >>> quantize = BFloat16()
    >>> message = quantize.encode(jnp.array([1.0, 257.0, 0.0]), jax.random.key(0))
    >>> quantize.decode(message, 3, jnp.float32)
    Array([  1., 256.,   0.], dtype=float32)
    """

    dtype: ClassVar[Any] = jnp.bfloat16


class Float16(_Cast):
    """Rounds values to float16: 2 bytes, 11 bits of precision.

    Finite magnitudes above 65,504 become 65,504. Magnitudes below 6e-8 become zero or 6e-8,
    whichever is nearer.
    """

    dtype: ClassVar[Any] = jnp.float16
