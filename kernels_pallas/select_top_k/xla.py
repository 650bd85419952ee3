"""Exact top-k in plain JAX: the k-th magnitude of a superset, then the part of the superset that reaches it."""

import jax
from jax import lax

from .. import bitmap
from ..kth_magnitude.xla import search, superset, superset_capacity
from ..select_above.xla import above, take


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return take(x, above(x, 0), k)
    capacity = superset_capacity(x.shape[0], k)
    if capacity is None:
        return _search_and_take(x, k)
    values, indices, holds = superset(x, k, capacity)

    def of_superset():
        kept, places, count = _search_and_take(values, k)
        return kept, indices.at[places].get(mode="fill", fill_value=x.shape[0]), count

    return lax.cond(holds, of_superset, lambda: _search_and_take(x, k))


def _search_and_take(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    threshold = search(x, k)
    reached = above(x, threshold)
    equal = reached & bitmap.pack((x == threshold) | (x == -threshold))
    larger = reached & ~equal
    return take(x, larger | bitmap.take_first(equal, k - bitmap.count(larger)), k)
