"""Hashes of integers, from which every form of an operation makes the same random numbers."""

import jax
import jax.numpy as jnp


def mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words: each bit of the result depends on all bits of ``x``.

    It is Wellons' lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """A number from 0 to 1, both included, for each index: float32, in the shape of ``index``.

    It is a hash of the index and of two random words, good enough for sampling. All are uint32.
    """
    mixed = mix(mix(index ^ first) ^ second)
    return (mixed >> 1).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-31)
