"""Exact top-k in plain JAX.

It computes the k-th magnitude in a superset of the k largest elements, then selects the elements
of the superset that reach it.
"""

import jax
import jax.numpy as jnp

from .. import bitmap
from ..kth_magnitude.xla import PLAIN, Marked, Primitives, in_superset
from ..select_above.xla import above, take


def select_top_k(
    x: jax.Array, k: int, primitives: Primitives = PLAIN, marked: Marked | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return primitives.compact(x, jnp.zeros((), x.dtype), k)
    return in_superset(x, k, lambda vector: _take(vector, k, primitives.search(vector, k)), primitives, marked)


def _take(x: jax.Array, k: int, threshold: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    reached = above(x, threshold)
    equal = reached & bitmap.pack((x == threshold) | (x == -threshold))
    larger = reached & ~equal
    return take(x, larger | bitmap.take_first(equal, k - bitmap.count(larger)), k)
