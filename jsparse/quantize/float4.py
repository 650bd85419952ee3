"""Four bits for each value, with steps that grow with it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import Scaled, in_buckets, row_maximum, share

# Level i > 0 stands for the magnitude 2 ** (i - LEVELS) of the scale, level 0 for zero.
LEVELS = 7
# A level is nearest from halfway between its magnitude and the one below.
HALFWAY = (2.0**-LEVELS, *(0.75 * 2.0 ** (level - LEVELS) for level in range(2, LEVELS + 1)))


@dataclasses.dataclass(frozen=True)
class Float4(Scaled):
    """Rounds each value to zero or a power of two times the largest magnitude of its bucket.

    It is the format E3M0: one bit for the sign, three for the exponent, none for the mantissa. A
    value becomes the nearest of 0 and plus or minus 1, 1/2, 1/4, ..., 1/64 of the largest
    magnitude. So errors are at most a third of a value, down to 1/64 of the largest, and 1/128 of
    the largest below. A value takes four bits.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025, section 2.4 (which
      does not give the scale).
    """

    bucket: int | None = 256

    _base = 2**4

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        rows = in_buckets(values, self.bucket)
        scale = row_maximum(rows)
        part = share(rows, scale)
        level = sum((part > least).astype(jnp.int32) for least in HALFWAY)
        return self._pack(scale, jnp.where(rows < 0, -level, level) + LEVELS, values.shape[0])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        scale, digits = self._unpack(message, m, dtype)
        signed = digits - LEVELS
        magnitude = jnp.where(signed == 0, 0, 1 << jnp.abs(signed)).astype(dtype) / 2**LEVELS
        return (scale * jnp.where(signed < 0, -magnitude, magnitude)).reshape(-1)[:m]
