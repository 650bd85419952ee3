"""The optax transformation of a synchroniser, and synchronisation without a dense update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._vector.layout import Layout
from .._vector.parts import rescale
from .._vector.sparse_vector import Leaf, SparseVector, to_dense
from .agreement import check_floats
from .shards import begin, on_shards
from .state import SparseAllReduceState
from .synchroniser import Synchroniser


class SparseAllReduce(optax.GradientTransformationExtraArgs):
    """A gradient transformation that synchronises, and that can be asked how.

    ``init`` and ``update`` are those of optax; ``synchroniser`` says how gradients become their
    mean.
    """

    @staticmethod
    def of(synchroniser: Synchroniser) -> "SparseAllReduce":
        """The transformation of a synchroniser."""
        return SparseAllReduce(functools.partial(_init, synchroniser), functools.partial(_update, synchroniser))

    @property
    def synchroniser(self) -> Any:
        """How gradients become their mean."""
        return self.init.args[0]  # type: ignore[attr-defined]


def _init(synchroniser: Synchroniser, params: optax.Params) -> SparseAllReduceState:
    check_floats(params)
    return begin(synchroniser, params)


def _update(
    synchroniser: Synchroniser,
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args,
) -> tuple[optax.Updates, SparseAllReduceState]:
    del extra_args
    synchroniser = on_shards(synchroniser)
    if params is not None:
        synchroniser.check_like(updates, params)
    return synchroniser.update(updates, state)


def sync(
    tx: SparseAllReduce, grads: optax.Updates | SparseVector, state: SparseAllReduceState
) -> tuple[Leaf, SparseAllReduceState]:
    """Averages gradients as ``tx.update`` does, and leaves a sparse mean sparse.

    Then it forms no array of length n.

    For plain SGD, whose update of a zero is zero: apply the result with :func:`apply_sparse`.

    A gradient that is sparse by itself may be given as a :class:`SparseVector` in place of a leaf
    of shape ``(n,)``. With ``select=NonZero(capacity / n)`` and ``error_feedback=False`` it goes
    straight to the all-reduce. Where the capacity is too small for it, keep ``error_feedback``:
    the rest is added to the residual in place, and goes later.

    Args:
      tx: a preset, or :func:`sparse_allreduce`, that sums all leaves as one vector; not a chain.
      grads: this worker's gradients. A leaf may be a :class:`SparseVector`; the state is that of
        an array in its place.
      state: from ``tx.init`` or from the step before; donate it, and its residual is updated in
        place.

    Returns:
      The mean, in the order of ``jax.tree.leaves(grads)``, each raveled; and the new state. The
      mean is a :class:`SparseVector`. It is an array of shape ``(n,)`` if the all-reduce is dense,
      if its sum might fill in, as with few elements in all, or if a leaf is in tiles. After a
      non-finite gradient the mean holds a NaN.

    Raises:
      ValueError: ``tx`` sums more than one vector, or is no preset.
    """
    if not isinstance(tx, SparseAllReduce):
        raise ValueError(
            f"tx is {type(tx).__name__}; sync takes a preset such as jsparse.oktopk(...) itself: apply what else a "
            "chain would hold (a learning rate, say) through the scale of jsparse.apply_sparse"
        )
    means, state = on_shards(tx.synchroniser).reduce(grads, state)
    if len(means.quotients) != 1:
        raise ValueError(
            f'this transform sums {len(means.quotients)} vectors, and sync returns one: take scope="global", '
            "dense_below=0 and no bucket_bytes, or use tx.update"
        )
    mean = means.quotients[0].value()
    if not isinstance(mean, SparseVector):
        return to_dense(rescale(mean, lambda x: jnp.where(means.bad, jnp.nan, x))), state
    values = jnp.where(means.bad, jnp.nan, mean.values)
    # A mean without elements has no place for a NaN: index 0 becomes one.
    first = (0,) * mean.indices.ndim
    indices = mean.indices.at[first].set(jnp.where(means.bad, 0, mean.indices[first]))
    return SparseVector(values, indices, mean.n), state


def apply_sparse(params: optax.Params, update: Leaf, scale: ArrayLike = 1.0) -> optax.Params:
    """Adds ``scale * update`` to parameters.

    If they are donated, it changes only the elements that a sparse update holds.

    Args:
      params: arrays of ``update.n`` elements together, in the order in which :func:`sync` saw
        their gradients.
      update: from :func:`sync`: a sparse vector or an array of shape ``(n,)``, alike on all
        workers.
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
    if layout.n != update.size:
        raise ValueError(
            f"the parameters have {layout.n} elements, the update is for {update.size}: pass the same pytree"
        )
    if not isinstance(update, SparseVector):
        parts = layout.unravel(jnp.asarray(scale) * update)
        return jax.tree.unflatten(treedef, [leaf + part for leaf, part in zip(leaves, parts, strict=True)])
    if any(jnp.finfo(dtype).bits < jnp.finfo(update.values.dtype).bits for dtype in layout.dtypes):
        # Several runs, added one by one to narrow leaves, would be rounded as often.
        update = update.merge()
    scaled = SparseVector(jnp.asarray(scale) * update.values, update.indices, update.n)
    return jax.tree.unflatten(treedef, layout.add_sparse(leaves, scaled))
