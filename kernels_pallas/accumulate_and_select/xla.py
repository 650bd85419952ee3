"""Accumulation and compaction in plain JAX: a sum, then a compaction of the sum."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..select_above.xla import select_above


def accumulate_and_select(
    grad: jax.Array,
    residual: jax.Array,
    threshold: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    *,
    capacity: int,
    limit: float,
    clear: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    acc = residual + jnp.where(keep, grad.astype(residual.dtype), 0)
    if limit < math.inf:
        acc = jnp.clip(acc, -limit, limit)
    # Without the barrier XLA computes the sum again wherever it is read, and keeps a copy of the
    # old residual for that.
    acc = lax.optimization_barrier(acc)
    # No magnitude reaches a threshold of NaN.
    values, indices, count = select_above(acc, jnp.where(keep, threshold, jnp.nan), start, capacity=capacity)
    if clear:
        # The barrier makes XLA read the values first. Only then can it overwrite acc in place.
        acc, values = lax.optimization_barrier((acc, values))
        acc = acc.at[indices].set(0, mode="drop", indices_are_sorted=True)
    return values, indices, count, acc
