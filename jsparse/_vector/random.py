"""Random numbers that are the same on all workers, or different on each, as the caller chooses."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kernels_pallas import hashing


def key_of(seed: int, *numbers: ArrayLike) -> jax.Array:
    """A random key made from a seed and any integers, such as a step and a rank.

    Equal arguments give equal keys on all workers. There is no state, so a step that is repeated
    draws the same numbers again.
    """
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def uniform(key: jax.Array, n: int, begin: ArrayLike = 0) -> jax.Array:
    """A number from 0 to 1, both included, for each of n indices from ``begin`` on.

    The numbers are float32, of shape ``(n,)``.

    It is a hash of the index and the key, good enough for sampling. If the caller compares the
    numbers at once, XLA never stores them, and they cost a few operations for each element.
    ``jax.random.uniform`` would cost an array of length n, and about forty times the time.
    """
    return hashing.uniform(lax.iota(jnp.uint32, n) + jnp.uint32(begin), *words_of(key))


def words_of(key: jax.Array) -> jax.Array:
    """Two random words, uint32, shape ``(2,)``: what :func:`uniform` makes its numbers from."""
    return jax.random.bits(key, (2,), jnp.uint32)
