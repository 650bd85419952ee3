"""Error feedback: what was not delivered is kept and added to the next gradient.

One rule for every algorithm: ``residual' = acc - delivered`` with ``acc = residual + gradient``. Local top-k, global
top-k, a full buffer, a rounded value: whatever the reason that something did not arrive, it is still in ``acc``.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ._flatten import Layout
from ._sparse_vector import SparseVector


def accumulate(
    layout: Layout, residual: jax.Array | None, leaves: Sequence[jax.Array], keep: jax.Array, size: int
) -> jax.Array:
    """``acc``: the residual plus the gradient where ``keep``, in place of the residual when that may be overwritten.

    It saturates at the largest float over the number of workers: a sum of finite gradients that became infinite would
    stay in the residual for ever.
    """
    if residual is None:
        return jnp.where(keep, layout.ravel(leaves), 0)
    return layout.add_leaves(residual, leaves, keep, limit=largest(residual.dtype, size))


def largest(dtype: jnp.dtype, size: int) -> float:
    """The largest magnitude of which ``size`` workers have a finite sum."""
    return float(jnp.finfo(dtype).max) / size


def retain(acc: jax.Array, delivered: SparseVector | jax.Array) -> jax.Array:
    """The new residual, ``acc - delivered``: for a sparse vector in place, without a pass over ``acc``."""
    if isinstance(delivered, SparseVector):
        return acc.at[delivered.indices.reshape(-1)].add(-delivered.values.reshape(-1), mode="drop")
    return acc - delivered
