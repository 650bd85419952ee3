"""Accumulation and compaction in plain JAX: a sum, then a compaction of it."""

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
    # Otherwise XLA forms the sum again wherever it is read, and keeps a copy of the residual for that.
    acc = lax.optimization_barrier(acc)
    # Nothing reaches NaN.
    values, indices, count = select_above(acc, jnp.where(keep, threshold, jnp.nan), start, capacity=capacity)
    if clear:
        # Only when the values have been read can what they were read from be overwritten in place.
        acc, values = lax.optimization_barrier((acc, values))
        acc = acc.at[indices].set(0, mode="drop", indices_are_sorted=True)
    return values, indices, count, acc
