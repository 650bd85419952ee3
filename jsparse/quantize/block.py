"""Eight bits for each value."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import Scaled, in_buckets, row_maximum, share

LEVELS = 127


@dataclasses.dataclass(frozen=True)
class Block8(Scaled):
    """Rounds each value to a multiple of 1/127 of the largest magnitude of its bucket.

    A value takes one byte.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022, section 2.1 (with
      equal steps).
    """

    bucket: int | None = 256

    _base = 2**8

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        rows = in_buckets(values, self.bucket)
        scale = row_maximum(rows)
        signed = jnp.sign(rows) * jnp.round(LEVELS * share(rows, scale))
        return self._pack(scale, jnp.where(jnp.isfinite(signed), signed, 0) + LEVELS, values.shape[0])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        scale, digits = self._unpack(message, m, dtype)
        return (scale * ((digits - LEVELS).astype(dtype) / LEVELS)).reshape(-1)[:m]
