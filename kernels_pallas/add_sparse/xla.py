"""Addition of sparse lists to a dense vector in plain JAX: one scatter for each list."""

from collections.abc import Callable

import jax
from jax import lax


def add_sparse(dense: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    return in_order(add_list, dense, values, indices)


def add_list(dense: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    return dense.at[indices].add(values, mode="drop", indices_are_sorted=True, unique_indices=True)


def in_order(add: Callable[..., jax.Array], dense: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Adds the lists one after the other, by ``add``."""
    if values.shape[0] == 1:
        return add(dense, values[0], indices[0])
    return lax.scan(lambda dense, run: (add(dense, *run), None), dense, (values, indices))[0]
