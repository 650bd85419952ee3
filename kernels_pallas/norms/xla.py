"""Norms in plain JAX: two passes."""

import jax
import jax.numpy as jnp


def norms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Not the maximum of |x|: XLA would keep |x| for both passes, an array as long as x.
    largest = jnp.maximum(jnp.max(x, initial=0), -jnp.min(x, initial=0))
    return largest, jnp.sum(over_largest(x, largest))


def over_largest(x: jax.Array, largest: jax.Array) -> jax.Array:
    # XLA multiplies by a reciprocal, and flushes it to zero where it is denormal: beyond 2**126.
    scale = jnp.where(largest > 1, 0.25, 1)
    return jnp.abs(x) * scale / jnp.where(largest < jnp.finfo(x.dtype).tiny, 1, scale * largest)
