"""Compaction in plain JAX: a bit-packed mask, then the members of the bitmap."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import bitmap


def reaches(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """Where ``|x| >= threshold``, zeros and NaN apart: an exact zero has nothing to send.

    Two comparisons, not an absolute value: in a loop over thresholds XLA would keep ``|x|``, an array as long as ``x``.
    """
    threshold = jnp.maximum(threshold, jnp.finfo(x.dtype).tiny)
    return (x >= threshold) | (x <= -threshold)


def above(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """The bitmap of the elements that reach a threshold."""
    return bitmap.pack(reaches(x, threshold))


def count_above(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    return bitmap.count_mask(reaches(x, threshold))


def take(x: jax.Array, words: jax.Array, capacity: int, start: ArrayLike = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The values, indices and count of the elements of ``x`` that a bitmap marks."""
    indices, count = bitmap.members(words, capacity, x.shape[0], start)
    return x.at[indices].get(mode="fill", fill_value=0), indices, count


def select_above(x: jax.Array, threshold: ArrayLike, capacity: int, start: ArrayLike):
    return take(x, above(x, threshold), capacity, start)
