"""Synchronisation without a dense update."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._vector.layout import Layout
from .._vector.sparse_vector import SparseVector
from .config import Config
from .synchronise import SparseAllReduceState, synchronise
from .transform import SparseAllReduce


def sync(
    tx: SparseAllReduce, grads: optax.Updates, state: SparseAllReduceState
) -> tuple[SparseVector, SparseAllReduceState]:
    """Averages gradients as ``tx.update`` does, and leaves the mean sparse: nothing as long as the gradient is made.

    For plain SGD, whose update of a zero is zero: apply the result with :func:`apply_sparse`.

    Args:
      tx: a sparse preset, or :func:`sparse_allreduce`, with ``scope="global"`` and ``dense_below=0``; not a chain.
      grads: this worker's gradients.
      state: from ``tx.init`` or from the step before; donate it, and its residual is updated in place.

    Returns:
      The mean, in the order of ``jax.tree.leaves(grads)``, each raveled; and the new state. After a non-finite
      gradient the mean holds a NaN.

    Raises:
      ValueError: ``tx`` makes a dense sum, or more than one vector, or is no preset.
    """
    if not isinstance(tx, SparseAllReduce):
        raise ValueError(
            f"tx is {type(tx).__name__}; sync takes a preset such as jsparse.oktopk(...) itself: apply what else a "
            "chain would hold (a learning rate, say) through the scale of jsparse.apply_sparse"
        )
    if not isinstance(tx.config, Config):
        raise ValueError(
            "the phases of a run have sums of different lengths; sync needs one sparse vector: use tx.update"
        )
    sums, state = synchronise(tx.config, grads, state)
    if len(sums.totals) != 1 or not isinstance(sums.totals[0], SparseVector):
        raise ValueError(
            "this transform's sum is not one sparse vector; sync needs a sparse all-reduce with "
            'scope="global" and dense_below=0: use tx.update for others'
        )
    total = sums.totals[0]
    values = jnp.where(sums.bad, jnp.nan, total.values / sums.size)
    # A total without elements has no place for a NaN; index 0 is one.
    first = (0,) * total.indices.ndim
    indices = total.indices.at[first].set(jnp.where(sums.bad, 0, total.indices[first]))
    return SparseVector(values, indices, total.n), state


def apply_sparse(params: optax.Params, update: SparseVector, scale: ArrayLike = 1.0) -> optax.Params:
    """Adds ``scale * update`` to parameters, touching only what the update holds when they are donated.

    Args:
      params: arrays of ``update.n`` elements together, in the order in which :func:`sync` saw their gradients.
      update: a sparse vector, alike on all workers.
      scale: a scalar, such as minus the learning rate.

    Returns:
      Parameters of the same shapes and types.

    Raises:
      ValueError: the parameters have another number of elements than the update.

    >>> update = SparseVector(jnp.array([2.0, 4.0]), jnp.array([0, 3]), 4)
    >>> apply_sparse({"a": jnp.zeros(1), "b": jnp.ones(3)}, update, -0.5)
    {'a': Array([-1.], dtype=float32), 'b': Array([ 1.,  1., -1.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(params)
    layout = Layout.of(leaves)
    if layout.n != update.n:
        raise ValueError(f"the parameters have {layout.n} elements, the update is for {update.n}: pass the same pytree")
    if any(jnp.finfo(dtype).bits < jnp.finfo(update.values.dtype).bits for dtype in layout.dtypes):
        # Several runs, added one by one to narrow leaves, would be rounded as often.
        update = update.merge()
    scaled = SparseVector(jnp.asarray(scale) * update.values, update.indices, update.n)
    return jax.tree.unflatten(treedef, layout.add_sparse(leaves, scaled))
