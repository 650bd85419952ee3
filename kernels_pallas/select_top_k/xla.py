"""Exact top-k in plain JAX: the k-th magnitude of a superset, then the part of the superset that reaches it."""

import jax

from .. import bitmap
from ..kth_magnitude.xla import in_superset, search
from ..select_above.xla import above, take


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return take(x, above(x, 0), k)
    return in_superset(x, k, lambda vector: _search_and_take(vector, k))


def _search_and_take(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    threshold = search(x, k)
    reached = above(x, threshold)
    equal = reached & bitmap.pack((x == threshold) | (x == -threshold))
    larger = reached & ~equal
    return take(x, larger | bitmap.take_first(equal, k - bitmap.count(larger)), k)
