"""The gradient transformation: flatten, synchronise, average, unflatten."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .._comm.comm import Comm, CommLike, as_comm
from .._vector.sparse_vector import SparseVector
from ..allreduce import AllReduce
from ..select import Selector
from ..wire import Full, Wire
from .config import Config, Phases
from .memory import ErrorFeedback
from .synchronise import BucketState, Report, SparseAllReduceState, Sums, synchronise, varying_over


class SparseAllReduce(optax.GradientTransformationExtraArgs):
    """A gradient transformation that synchronises, and that can be asked how."""

    @staticmethod
    def of(config: Config) -> "SparseAllReduce":
        """The transformation of a configuration."""
        init: Any = functools.partial(begin, config)
        update: Any = functools.partial(_update, config)
        return SparseAllReduce(init, update)

    @property
    def config(self) -> Config | Phases:
        """Its configuration."""
        return self.init.args[0]  # type: ignore[attr-defined]


def sparse_allreduce(
    comm: CommLike,
    *,
    select: Selector | None,
    allreduce: AllReduce,
    wire: Wire = Full(),
    error_feedback: bool | ErrorFeedback = True,
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """Averages gradients over the workers sparsely: any selector with any all-reduce.

    Takes the place of ``lax.pmean`` of the gradients: it is given each worker's own gradient and returns the mean of
    what was delivered, the same bits on every worker. What a worker did not get delivered stays in its residual and
    is added to its next gradient, so that nothing is lost. It runs wherever the axis is bound: in ``jax.shard_map``,
    ``jax.pmap`` or ``jax.vmap(axis_name=...)``.

    A non-finite gradient on any worker makes the whole update NaN on all of them and leaves the state as it was, so
    that ``optax.apply_if_finite`` around what *follows* can skip the step. (Where nothing is summed sparsely, there is
    no state to spoil, and only the elements concerned become NaN.)

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a :class:`Comm`.
      select: which elements a worker sends; None for an all-reduce of dense vectors.
      allreduce: how they are summed.
      wire: how they are laid out in messages.
      error_feedback: whether to keep what was not delivered, or how (:class:`ErrorFeedback`). Without it, that is lost.
      scope: select among all elements together (``"global"``), or in every leaf for itself (``"leaf"``), so that XLA
        can overlap the leaves' messages with each other and with the backward pass.
      dense_below: leaves of fewer elements are summed densely, all together.

    Returns:
      A gradient transformation. Its updates have the shapes and types of the gradients.

    Raises:
      ValueError: an argument is out of range. From ``init`` and ``update``: a leaf is not float16, bfloat16, float32
        or float64; a bucket has ``2**31`` elements or more; the axis is not bound; gradients are already summed.

    Example::

      tx = optax.chain(
          jsparse.sparse_allreduce(
              "data", select=jsparse.select.TopK(0.01), allreduce=jsparse.allreduce.OkTopk(0.01)
          ),
          optax.adam(1e-3),
      )
    """
    return SparseAllReduce.of(Config(as_comm(comm), select, allreduce, wire, error_feedback, scope, dense_below))


def _update(
    config: Config,
    updates: optax.Updates,
    state: SparseAllReduceState,
    params: optax.Params | None = None,
    **extra_args,
) -> tuple[optax.Updates, SparseAllReduceState]:
    del params, extra_args
    leaves, treedef = jax.tree.flatten(updates)
    sums, state = synchronise(config, updates, state)
    return jax.tree.unflatten(treedef, averages(sums, leaves)), state


def averages(sums: Sums, leaves: list[jax.Array]) -> list[jax.Array]:
    """The update: the sums over the number of workers, in the shapes and types of these leaves."""
    means = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for bucket, total in zip(sums.plan, sums.totals, strict=True):
        if isinstance(total, SparseVector):
            # One run is divided before it becomes dense, several after they are summed: both round once.
            one_run = total.values.ndim == 1
            if one_run:
                total = SparseVector(total.values / sums.size, total.indices, total.n)
            fill = jnp.where(sums.bad, jnp.nan, 0)
            parts = [jnp.full(shape, fill, bucket.layout.dtype) for shape in bucket.layout.shapes]
            parts = bucket.layout.add_sparse(parts, total)
            parts = [
                (part if one_run else part / sums.size).astype(dtype)
                for part, dtype in zip(parts, bucket.layout.dtypes, strict=True)
            ]
        else:
            parts = bucket.layout.unravel(jnp.where(sums.bad, jnp.nan, total / sums.size))
        for i, part in zip(bucket.ids, parts, strict=True):
            means[i] = part
    return means


def begin(config: Config, params: optax.Params) -> SparseAllReduceState:
    """The state before the first step."""
    states = []
    for bucket in config.plan(params):
        how, n, dtype = config.of(bucket), config.length(bucket.layout.n), bucket.layout.dtype
        states.append(
            BucketState(
                residual=jnp.zeros(n, dtype) if how.error_feedback else None,
                select=how.select.init(n, dtype) if how.select is not None else (),
                reduce=how.allreduce.init(n, config.comm.size, dtype),
                velocity=jnp.zeros(n, dtype) if how.momentum else None,
            )
        )
    return initial(config.levels, states)


def initial(levels: Sequence[Comm], states: Sequence[BucketState]) -> SparseAllReduceState:
    """The state before the first step, of states of the buckets."""
    none, zero = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    return varying_over(levels, SparseAllReduceState(none, tuple(states), Report(none, none, none, zero, zero)))
