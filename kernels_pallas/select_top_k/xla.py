"""Exact top-k in plain JAX.

It computes the k-th magnitude in a superset of the k largest elements, then selects the elements
of the superset that reach it.
"""

import jax
import jax.numpy as jnp

from ..kth_magnitude.xla import PLAIN, Marked, Primitives, in_superset, search_upwards, take_reached


def select_top_k(
    x: jax.Array, k: int, primitives: Primitives = PLAIN, marked: Marked | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return primitives.compact(x, jnp.zeros((), x.dtype), k)
    return in_superset(
        x,
        k,
        lambda vector: primitives.largest(vector, k),
        primitives,
        marked,
        lambda lower: take_reached(x, k, search_upwards(x, k, lower, primitives)),
    )
