"""Four bits for each value, with steps that grow with it."""

import dataclasses

import jax
import jax.numpy as jnp

from ._base import Scaled, row_maximum, share

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

    def _scales(self, rows: jax.Array, m: int) -> jax.Array:
        return row_maximum(rows)

    def _digits(self, rows: jax.Array, scales: jax.Array, draws: jax.Array) -> jax.Array:
        part = share(rows, scales)
        level = sum((part > least).astype(jnp.int32) for least in HALFWAY)
        return jnp.where(rows < 0, -level, level) + LEVELS

    def _values(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        signed = digits - LEVELS
        magnitude = jnp.where(signed == 0, 0, 1 << jnp.abs(signed)).astype(scales.dtype) / 2**LEVELS
        return scales * jnp.where(signed < 0, -magnitude, magnitude)
