"""Statistics of magnitudes in plain JAX, and the arithmetic that the kernels share with it.

A vector is described part by part and the descriptions are combined, in whatever parts it comes: the plain form has
one part, a kernel one for each of its blocks. Sums are taken of a part's elements divided by the power of two just
below its largest magnitude, so that neither they nor their squares overflow, and nothing that counts underflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._varying import varying_as
from ..count_above_many.xla import count_above_many


class MagnitudeStatistics(NamedTuple):
    """What :func:`kernels_pallas.magnitude_statistics` returns: scalars, in float32 where the input is narrower.

    Attributes:
      largest: the largest magnitude; 0 of no elements.
      mean: of the elements, with their signs.
      mean_magnitude: of their magnitudes.
      mean_square: of their squares.
      counts: int32, shape ``(m,)``: how many magnitudes reach each threshold.
    """

    largest: jax.Array
    mean: jax.Array
    mean_magnitude: jax.Array
    mean_square: jax.Array
    counts: jax.Array


class Part(NamedTuple):
    """The largest magnitude of a part of a vector, and three sums of its elements divided by :func:`unit` of that."""

    largest: jax.Array
    total: jax.Array
    magnitudes: jax.Array
    squares: jax.Array


def magnitude_statistics(x: jax.Array, thresholds: jax.Array, add: jax.Array | None) -> MagnitudeStatistics:
    x = accumulate(x, add)
    part = describe(drop(x)) if x.shape[0] else Part(*[jnp.zeros((), x.dtype)] * 4)
    return combine(jax.tree.map(lambda leaf: leaf[None], part), count_above_many(x, thresholds), x.shape[0])


def accumulate(x: jax.Array, add: jax.Array | None) -> jax.Array:
    """The sum of which statistics are taken, in float32 where its summands are narrower."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(dtype) if add is None else x.astype(dtype) + add


def drop(x: jax.Array) -> jax.Array:
    """Zeros in the place of NaN, and of what is below the normal numbers, which not every backend flushes to zero."""
    return jnp.where(jnp.abs(x) >= jnp.finfo(x.dtype).tiny, x, jnp.zeros((), x.dtype))


def least(thresholds: jax.Array) -> jax.Array:
    """The thresholds that count the same elements where what :func:`drop` leaves is compared: zeros are not counted."""
    tiny = jnp.asarray(jnp.finfo(thresholds.dtype).tiny, thresholds.dtype)
    return jnp.where(thresholds < tiny, tiny, thresholds)


def describe(x: jax.Array) -> Part:
    """Describes a part of at least one element, after :func:`drop`; of jax.numpy only what every Pallas has."""
    largest = jnp.max(jnp.abs(x))
    # Mosaic has no bits of scalars.
    scaled = x * inverse(unit(jnp.broadcast_to(largest, x.shape)))
    return Part(largest, jnp.sum(scaled), jnp.sum(jnp.abs(scaled)), jnp.sum(scaled * scaled))


def combine(parts: Part, counts: jax.Array, n: int) -> MagnitudeStatistics:
    """The statistics of a vector of ``n`` elements from those of its parts, shape ``(parts,)``, and its counts."""
    largest, total, magnitudes, squares = whole(parts)
    n, scale = max(n, 1), unit(largest)
    # Not by the square of the unit, which may overflow where the mean does not.
    return MagnitudeStatistics(largest, total / n * scale, magnitudes / n * scale, squares / n * scale * scale, counts)


def whole(parts: Part) -> Part:
    """The description of a vector from those of its parts, in one reduction."""

    def join(a: Part, b: Part) -> Part:
        largest = jnp.maximum(a.largest, b.largest)
        a_weight, b_weight = (unit(part.largest) * inverse(unit(largest)) for part in (a, b))
        return Part(
            largest,
            a.total * a_weight + b.total * b_weight,
            a.magnitudes * a_weight + b.magnitudes * b_weight,
            a.squares * a_weight * a_weight + b.squares * b_weight * b_weight,
        )

    return lax.reduce(parts, Part(*[varying_as(jnp.zeros((), leaf.dtype), leaf) for leaf in parts]), join, (0,))


def unit(largest: jax.Array) -> jax.Array:
    """The power of two at or just below a magnitude, within those whose inverse is a normal number, too."""
    info = jnp.finfo(largest.dtype)
    exponent = _bits(largest) >> info.nmant
    return lax.bitcast_convert_type(jnp.clip(exponent, 1, 2 * info.maxexp - 3) << info.nmant, largest.dtype)


def inverse(unit: jax.Array) -> jax.Array:
    """One over a power of two, exactly also where division is not."""
    info = jnp.finfo(unit.dtype)
    return lax.bitcast_convert_type((2 * info.maxexp - 2 << info.nmant) - _bits(unit), unit.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"int{jnp.finfo(x.dtype).bits}"))
