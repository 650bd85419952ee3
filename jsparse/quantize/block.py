"""Equal steps: eight or four bits for each value."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ._base import Scaled, row_maximum, share


@dataclasses.dataclass(frozen=True)
class _EqualSteps(Scaled):
    """Rounds each value to a multiple of the largest magnitude of its bucket over ``_levels``."""

    bucket: int | None = 256

    _levels: ClassVar[int]

    def _scales(self, rows: jax.Array, m: int) -> jax.Array:
        return row_maximum(rows)

    def _digits(self, rows: jax.Array, scales: jax.Array, draws: jax.Array) -> jax.Array:
        signed = jnp.sign(rows) * jnp.round(self._levels * share(rows, scales))
        return jnp.where(jnp.isfinite(signed), signed, 0) + self._levels

    def _values(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        return scales * ((digits - self._levels).astype(scales.dtype) / self._levels)


@dataclasses.dataclass(frozen=True)
class Block8(_EqualSteps):
    """Rounds each value to a multiple of 1/127 of the largest magnitude of its bucket.

    A value takes one byte.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022, section 2.1 (with
      equal steps).
    """

    _base = 2**8
    _levels = 127


@dataclasses.dataclass(frozen=True)
class Int4(_EqualSteps):
    """Rounds each value to a multiple of 1/7 of the largest magnitude of its bucket.

    A value takes four bits. Values below 1/14 of the largest become zero: where magnitudes differ
    much within a bucket, these are most of them, and :class:`Float4` has smaller errors.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.

    References:
      Thérien et al., MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025 (linear, with
      4 bits; here symmetric, so that zeros stay zeros).
    """

    _base = 2**4
    _levels = 7
