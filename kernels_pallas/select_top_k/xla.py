"""Exact top-k in plain JAX.

It computes the k-th magnitude in a superset of the k largest elements, then selects the elements
of the superset that reach it.
"""

import jax
import jax.numpy as jnp

from .. import bitmap
from ..kth_magnitude.xla import PLAIN, Marked, Primitives, Reached, in_superset, reached, search_upwards
from ..select_above.xla import take


def select_top_k(
    x: jax.Array, k: int, primitives: Primitives = PLAIN, marked: Marked | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return primitives.compact(x, jnp.zeros((), x.dtype), k)
    return in_superset(
        x,
        k,
        lambda vector: _take(vector, k, reached(vector, primitives.search(vector, k))),
        primitives,
        marked,
        lambda lower: _take(x, k, search_upwards(x, k, lower, primitives)),
    )


def _take(x: jax.Array, k: int, kth: Reached) -> tuple[jax.Array, jax.Array, jax.Array]:
    equal = kth.words & ~kth.larger
    return take(x, kth.larger | bitmap.take_first(equal, k - bitmap.count(kth.larger)), k)
