"""Narrower floating-point types."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._base import Quantizer


@dataclasses.dataclass(frozen=True)
class _Cast(Quantizer):
    """Two values in a word, each rounded to the nearest of a narrow type."""

    dtype: ClassVar[Any]

    @property
    def elementwise(self) -> bool:
        return True

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        most = jnp.finfo(self.dtype).max.astype(values.dtype)
        narrow = jnp.where(jnp.isinf(values), values, jnp.clip(values, -most, most)).astype(self.dtype)
        halves = lax.bitcast_convert_type(jnp.pad(narrow, (0, narrow.shape[0] % 2)), jnp.uint16)
        return lax.bitcast_convert_type(halves.reshape(-1, 2), jnp.int32)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        halves = lax.bitcast_convert_type(message[: -(-m // 2)], jnp.uint16).reshape(-1)[:m]
        return lax.bitcast_convert_type(halves, self.dtype).astype(dtype)

    def words(self, m: int, dtype: DTypeLike) -> int:
        return -(-m // 2)


class BFloat16(_Cast):
    """2 bytes a value, 8 bits of precision, the range of float32; larger magnitudes saturate.

    >>> quantize = BFloat16()
    >>> quantize.decode(quantize.encode(jnp.array([1.0, 257.0, 0.0]), jax.random.key(0)), 3, jnp.float32)
    Array([  1., 256.,   0.], dtype=float32)
    """

    dtype: ClassVar[Any] = jnp.bfloat16


class Float16(_Cast):
    """2 bytes a value, 11 bits of precision; magnitudes above 65,504 saturate, those below 6e-8 become zero."""

    dtype: ClassVar[Any] = jnp.float16
