"""Compaction in plain JAX: packs the mask of hits into a bitmap, then lists its members."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import bitmap
from .._implementation import sees_cuda
from .._varying import alike


def reaches(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """Where ``|x| >= threshold``, except at zeros and NaN: a mask, not fewer elements.

    Args:
      x: float32 or float64, of any shape.
      threshold: a scalar. Nothing reaches NaN.

    Returns:
      Booleans, in the shape of ``x``.

    >>> reaches(jnp.array([2.0, 0.0, -3.0]), 0)
    Array([ True, False,  True], dtype=bool)
    """
    # It compares twice and takes no absolute value: in a loop over thresholds XLA would store
    # |x|, an array as long as x. A threshold of NaN stays NaN; with a maximum instead of the
    # where it would be lost in a Triton kernel.
    tiny = jnp.finfo(x.dtype).tiny
    threshold = jnp.where(threshold < tiny, tiny, threshold)
    return (x >= threshold) | (x <= -threshold)


def above(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """The bitmap of the elements that reach a threshold."""
    return bitmap.pack(reaches(x, threshold))


def count_above(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """Counts the elements that reach a threshold.

    On a CPU it counts the bits of a bitmap. On a GPU it computes a sum, which XLA compiles to one
    read of ``x``.
    """
    if not sees_cuda():
        return bitmap.count_mask(reaches(x, threshold))
    return lax.platform_dependent(
        *alike((x, jnp.asarray(threshold, x.dtype))),
        cuda=lambda x, threshold: jnp.sum(reaches(x, threshold), dtype=jnp.int32),
        default=lambda x, threshold: bitmap.count_mask(reaches(x, threshold)),
    )


def take(x: jax.Array, words: jax.Array, capacity: int, start: ArrayLike = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The values, indices and count of the elements of ``x`` that a bitmap marks."""
    indices, count = bitmap.members(words, capacity, x.shape[0], start)
    if not x.shape[0]:
        return jnp.zeros(capacity, x.dtype), indices, count
    return x.at[indices].get(mode="fill", fill_value=0), indices, count


def select_above(x: jax.Array, threshold: ArrayLike, start: ArrayLike, *, capacity: int):
    return take(x, above(x, threshold), capacity, start)
