"""Random numbers that workers agree on, or agree to differ in."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def key_of(seed: int, *numbers: ArrayLike) -> jax.Array:
    """A random key of a seed and any integers, such as a step and a rank; alike wherever they are.

    It takes no state: what is drawn in a step is drawn again when the step is repeated.
    """
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def uniform(key: jax.Array, n: int) -> jax.Array:
    """A number of [0, 1] for each of n indices, float32: a hash of the index and the key.

    Where it is compared at once, XLA never writes it down: it costs a few operations an element, where
    ``jax.random.uniform`` costs an array as long and about forty times the time. Good enough to sample with.
    """
    mixed = lax.iota(jnp.uint32, n)
    for word in jax.random.bits(key, (2,), jnp.uint32):
        mixed = _mix(mixed ^ word)
    return (mixed >> 1).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-31)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which each bit of the result depends on all of ``x`` (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
