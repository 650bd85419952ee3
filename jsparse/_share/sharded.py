"""An optimizer of which each worker computes a part, and keeps that part's state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._comm.comm import Comm, CommLike, as_comm, axes_of
from .._train.per_worker import PerWorkerState, ShardedState, laid_out
from .elementwise import mixing_primitive
from .parts import all_gather, check_replicated


def sharded(tx: optax.GradientTransformation, comm: CommLike) -> optax.GradientTransformationExtraArgs:
    """Cuts an optimizer among the workers: each worker updates a P-th of every leaf.

    An all-gather collects the updates. The state is cut likewise, so that a worker holds a P-th
    of it (ZeRO's first stage, weight-update sharding). Put it *after* the all-reduce in a chain,
    where updates and parameters are the same on all workers.

    A worker's part of a leaf is a stretch of the raveled leaf. It is ``ceil(size / P)`` long,
    with zeros at the end where the leaf is shorter. ``tx`` sees the part with the leaf's number
    of axes, all but the first of length 1, so that masks by path and by ``ndim`` work as they
    should.

    The all-gather sends half as much as a dense all-reduce, and many times as much as a sparse
    one. So this is for networks that are fast and memory that is short. Over two levels ``comm``
    may be the axis inside a node alone: then each node holds the whole state, and nothing passes
    between nodes.

    Args:
      tx: a transformation, or a chain, that treats each element by itself, such as
        ``optax.adamw``; schedules may depend on the step. Extra arguments of ``update`` reach it
        unchanged.
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.

    Returns:
      A gradient transformation, equal to ``tx`` up to rounding. Its state is a
      :class:`ShardedState`, placed by :func:`init` and :func:`state_specs`. An array of the
      state, joined over the workers, is ``tx``'s own array for the leaf, raveled and filled up
      with zeros.

    Raises:
      ValueError: from ``update`` (and so from :func:`init`): ``tx`` mixes elements (by a norm, a
        trust ratio, factors, noise or a collective), the state is for other parameters or another
        number of workers, or the updates' types say that they differ between workers.

    **Cost**: ``(P-1)`` times the sum over leaves of ``ceil(size / P)`` words, about n, in one
    all-gather, ``log P`` messages.

    Example::

      tx = optax.chain(jsparse.dense("data"), jsparse.sharded(optax.adamw(1e-3), "data"))

    References:
      Shi et al., MLSys 2021, section 4.2, equations 12 to 14; Rajbhandari et al., ZeRO: Memory
      Optimizations Toward Training Trillion Parameter Models, 2020, "P_os"; Xu et al., Automatic
      Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
    """
    comm, tx = as_comm(comm), optax.with_extra_args_support(tx)
    by_parts: Any = laid_out(tx)

    def init_fn(params) -> Any:
        return ShardedState(comm.varying(by_parts.init(_part(comm, params)).inner), axes_of(comm))

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        check_replicated(comm, updates, "update")
        check_replicated(comm, params, "parameter")
        own, own_params = _part(comm, updates), _part(comm, params)
        _check_state(by_parts.init, own if params is None else own_params, state)
        for of in ((own, own_params), (updates, params)):  # Some optimizers go by the shapes.
            _check_elementwise(tx, *of, extra_args)
        own, after = by_parts.update(own, PerWorkerState(state.inner), own_params, **extra_args)

        def join(parts, update):
            return parts.reshape(-1)[: update.size].reshape(update.shape)

        whole = jax.tree.map(join, all_gather(comm, own), updates)
        return whole, ShardedState(comm.varying(after.inner), state.axis)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _part(comm: Comm, tree: Any) -> Any:
    """This worker's stretch of every leaf, with the leaf's number of axes."""
    size, rank = comm.size, comm.rank()

    def stretch(leaf):
        flat = jnp.asarray(leaf).reshape(-1)
        width = -(-flat.shape[0] // size)
        filled = jnp.pad(flat, (0, width * size - flat.shape[0]))
        return lax.dynamic_slice_in_dim(filled, rank * width, width).reshape(
            (width, *[1] * (jnp.ndim(leaf) - 1))[: jnp.ndim(leaf)]
        )

    return jax.tree.map(stretch, tree)


def _check_elementwise(tx: optax.GradientTransformationExtraArgs, updates: Any, params: Any, extra_args: Any) -> None:
    """Raises a ValueError if the transformation mixes the elements of its arguments."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (updates, params))
    state = jax.eval_shape(tx.init, shapes[0] if params is None else shapes[1])
    mixing = mixing_primitive(lambda *args: tx.update(*args, **extra_args), shapes[0], state, shapes[1])
    if mixing:
        raise ValueError(
            f"the transformation in sharded mixes elements, by {mixing!r}: each worker would mix those of its own part "
            "only. Put what takes norms, draws noise or communicates outside, before or after it in the chain"
        )


def _check_state(init: Any, own: Any, state: ShardedState) -> None:
    """Raises a ValueError if the state's arrays do not have the shapes of this worker's part."""
    have, want = (
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (state.inner, jax.eval_shape(init, own).inner)
    )
    if have != want:
        raise ValueError(
            f"the state's arrays have shapes {have}; for these parameters and this number of workers they are {want}: "
            "initialise the state with parameters of the gradients' shapes, for as many workers as there are here"
        )
