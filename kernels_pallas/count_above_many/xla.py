"""Counts at many thresholds in plain JAX: a bit-packed mask for each.

On a CPU that reads the vector once a threshold, and is many times faster than one comparison of all elements with all
thresholds, of which XLA there keeps the whole table.
"""

import jax
import jax.numpy as jnp

from ..select_above.xla import count_above


def count_above_many(x: jax.Array, thresholds: jax.Array) -> jax.Array:
    return jax.vmap(lambda threshold: count_above(x, threshold))(thresholds)


def count_at_once(x: jax.Array, thresholds: jax.Array) -> jax.Array:
    """The same counts by that one comparison, which XLA makes one kernel of on a GPU."""
    thresholds = jnp.maximum(thresholds, jnp.finfo(x.dtype).tiny)
    return jnp.sum(jnp.abs(x)[:, None] >= thresholds[None], axis=0, dtype=jnp.int32)
