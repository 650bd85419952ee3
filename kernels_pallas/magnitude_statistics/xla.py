"""Statistics of magnitudes in plain JAX, and the arithmetic that the kernels share with it.

A vector is described in parts, and the descriptions are combined. The plain form has one part,
and a kernel has one part for each block. Before summing, the elements of a part are divided by
the power of two at or just below the largest magnitude of the part. So neither the sums nor the
sums of squares overflow, and no element that matters to them underflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._varying import varying_as
from ..count_above_many.xla import count_above_many


class MagnitudeStatistics(NamedTuple):
    """The result of :func:`kernels_pallas.magnitude_statistics`.

    All but ``counts`` are scalars, in the type of the input, or in float32 if the input is
    narrower.

    Attributes:
      largest: the largest magnitude; 0 if there are no elements.
      mean: the mean of the elements, with their signs.
      mean_magnitude: the mean of the magnitudes.
      mean_square: the mean of the squares.
      counts: int32, shape ``(m,)``: the number of magnitudes that reach each threshold.
    """

    largest: jax.Array
    mean: jax.Array
    mean_magnitude: jax.Array
    mean_square: jax.Array
    counts: jax.Array


class Part(NamedTuple):
    """The description of a part of a vector: its largest magnitude, and three sums.

    The sums are of the part's elements divided by :func:`unit` of the largest magnitude.

    Attributes:
      largest: the largest magnitude.
      total: the sum of the divided elements.
      magnitudes: the sum of their magnitudes.
      squares: the sum of their squares.
    """

    largest: jax.Array
    total: jax.Array
    magnitudes: jax.Array
    squares: jax.Array


def magnitude_statistics(x: jax.Array, thresholds: jax.Array, add: jax.Array | None) -> MagnitudeStatistics:
    x = accumulate(x, add)
    part = describe(drop(x)) if x.shape[0] else Part(*[jnp.zeros((), x.dtype)] * 4)
    return combine(jax.tree.map(lambda leaf: leaf[None], part), count_above_many(x, thresholds), x.shape[0])


def accumulate(x: jax.Array, add: jax.Array | None) -> jax.Array:
    """The vector that is described: ``x``, plus ``add`` if given; at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(dtype) if add is None else x.astype(dtype) + add


def drop(x: jax.Array) -> jax.Array:
    """Replaces NaN, and magnitudes below the smallest normal number, by 0.

    Not every backend flushes those magnitudes to zero by itself.
    """
    return jnp.where(jnp.abs(x) >= jnp.finfo(x.dtype).tiny, x, jnp.zeros((), x.dtype))


def least(thresholds: jax.Array) -> jax.Array:
    """Raises thresholds to at least the smallest normal number, so that zeros do not reach them.

    A non-zero element that :func:`drop` leaves reaches the new threshold if it reaches the old
    one.
    """
    tiny = jnp.asarray(jnp.finfo(thresholds.dtype).tiny, thresholds.dtype)
    return jnp.where(thresholds < tiny, tiny, thresholds)


def describe(x: jax.Array) -> Part:
    """Describes a part that has at least one element and went through :func:`drop`.

    It uses only functions of jax.numpy that every backend of Pallas has.
    """
    largest = jnp.max(jnp.abs(x))
    # Broadcast first: Mosaic cannot read the bits of a scalar.
    scaled = x * inverse(unit(jnp.broadcast_to(largest, x.shape)))
    return Part(largest, jnp.sum(scaled), jnp.sum(jnp.abs(scaled)), jnp.sum(scaled * scaled))


def combine(parts: Part, counts: jax.Array, n: int) -> MagnitudeStatistics:
    """The statistics of a vector of ``n`` elements.

    ``parts`` are the descriptions of its parts, shape ``(parts,)``; ``counts`` are of the whole
    vector.
    """
    largest, total, magnitudes, squares = whole(parts)
    n, scale = max(n, 1), unit(largest)
    # Multiply by the unit twice: its square can overflow although the mean square does not.
    return MagnitudeStatistics(largest, total / n * scale, magnitudes / n * scale, squares / n * scale * scale, counts)


def whole(parts: Part) -> Part:
    """The description of a vector, from the descriptions of its parts, in one reduction."""

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
    """The power of two at or just below a magnitude.

    It is limited to the powers of two whose inverse is a normal number as well.
    """
    info = jnp.finfo(largest.dtype)
    exponent = _bits(largest) >> info.nmant
    return lax.bitcast_convert_type(jnp.clip(exponent, 1, 2 * info.maxexp - 3) << info.nmant, largest.dtype)


def inverse(unit: jax.Array) -> jax.Array:
    """One over a power of two. It is exact, also on backends where division is not."""
    info = jnp.finfo(unit.dtype)
    return lax.bitcast_convert_type((2 * info.maxexp - 2 << info.nmant) - _bits(unit), unit.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"int{jnp.finfo(x.dtype).bits}"))
