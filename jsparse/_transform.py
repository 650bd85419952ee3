"""The gradient transformation: flatten, accumulate, select, reduce, average, unflatten."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kernels_pallas import bitmap

from ._buckets import Bucket, plan
from ._comm import Comm, CommLike, Metered, as_comm
from ._error_feedback import accumulate, retain
from ._sparse_vector import SparseVector
from .allreduce import AllReduce, Dense
from .select import Selector
from .wire import Full, Wire

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


class BucketState(NamedTuple):
    """What is carried for the leaves that are synchronised as one vector.

    Attributes:
      residual: shape ``(n,)``: what has been accumulated and not yet delivered; None without error feedback.
      select: the selector's state.
      reduce: the all-reduce's state.
    """

    residual: jax.Array | None
    select: Any
    reduce: Any


class Report(NamedTuple):
    """What the last synchronisation did; each leaf has shape ``(1,)``.

    Attributes:
      overflowed: int32: elements that this worker selected and that did not fit into its buffers.
      delivered: int32: elements of this worker that became part of the update.
      updated: int32: elements of the update; an all-gather counts an index once for each worker that sent it.
      words: uint32: 4-byte words that this worker sent.
      messages: uint32: messages that this worker sent.
    """

    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array
    words: jax.Array
    messages: jax.Array


class SparseAllReduceState(NamedTuple):
    """State of :func:`sparse_allreduce`: every leaf's leading axis concatenates over workers.

    Attributes:
      step: int32, shape ``(1,)``: synchronisations so far, those with a non-finite gradient apart.
      buckets: one for each vector that is synchronised.
      report: what the last step did.
    """

    step: jax.Array
    buckets: tuple[BucketState, ...]
    report: Report


@dataclasses.dataclass(frozen=True)
class Config:
    """How gradients are synchronised: the arguments of :func:`sparse_allreduce`."""

    comm: Comm
    select: Selector | None
    allreduce: AllReduce
    wire: Wire = Full()
    error_feedback: bool = True
    scope: Literal["global", "leaf"] = "global"
    dense_below: int = 0
    bucket_bytes: int | None = None

    def __post_init__(self):
        if self.allreduce.sparse and self.select is None:
            raise ValueError(f"{self.allreduce} sums sparse vectors; give it a selector, such as select=TopK(0.01)")
        if self.select is not None and not self.allreduce.sparse:
            raise ValueError(f"{self.allreduce} sums dense vectors and selects nothing; pass select=None")
        if self.scope not in ("global", "leaf"):
            raise ValueError(f'scope is {self.scope!r}; choose "global" or "leaf"')
        if self.dense_below < 0:
            raise ValueError(f"dense_below is {self.dense_below}; it is a number of elements, at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes, at least 1, or None")

    def plan(self, tree: Any) -> list[Bucket]:
        """Which leaves travel together."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.dtype not in FLOATS:
                raise ValueError(
                    f"leaf {jax.tree_util.keystr(path)} has type {leaf.dtype}; gradients are float16, bfloat16, "
                    "float32 or float64: keep what is not trained out of the parameters"
                )
        return plan(
            jax.tree.leaves(tree), scope=self.scope, dense_below=self.dense_below, bucket_bytes=self.bucket_bytes
        )

    def of(self, bucket: Bucket) -> "Config":
        """How one bucket is synchronised."""
        if not bucket.dense:
            return self
        return dataclasses.replace(self, select=None, allreduce=Dense(), error_feedback=False)


class SparseAllReduce(optax.GradientTransformationExtraArgs):
    """A gradient transformation that synchronises, and that can be asked how."""

    @staticmethod
    def of(config: Config) -> "SparseAllReduce":
        """The transformation of a configuration."""
        init: Any = functools.partial(_init, config)
        update: Any = functools.partial(_update, config)
        return SparseAllReduce(init, update)

    @property
    def config(self) -> Config:
        """Its configuration."""
        return self.init.args[0]  # type: ignore[attr-defined]


def sparse_allreduce(
    comm: CommLike,
    *,
    select: Selector | None,
    allreduce: AllReduce,
    wire: Wire = Full(),
    error_feedback: bool = True,
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
      error_feedback: whether to keep what was not delivered. Without it, that is lost.
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


class Sums(NamedTuple):
    """The sums over the workers, before anything is made of them.

    Attributes:
      plan: the buckets.
      totals: the sum of each.
      bad: bool scalar: a gradient was not finite somewhere, and the totals are void.
      size: the number of workers.
    """

    plan: list[Bucket]
    totals: list[SparseVector | jax.Array]
    bad: jax.Array
    size: int


def synchronise(config: Config, grads: Any, state: SparseAllReduceState) -> tuple[Sums, SparseAllReduceState]:
    """Sums the workers' gradients, as much of them as the algorithm delivers."""
    comm = Metered(config.comm)
    leaves = jax.tree.leaves(grads)
    buckets = config.plan(grads)
    _check_local(comm, grads)
    _check_state(buckets, state)

    step, bad = state.step[0], jnp.array(False)
    left_out = [bad] * len(buckets)
    stateful = sum(bool(jax.tree.leaves(before)) for before in state.buckets)
    if stateful == 1:
        # One exchange opens the step: whether any gradient is not finite, and a step that all agree on.
        opening = comm.pmax(jnp.stack([_not_finite(leaves).astype(jnp.int32), step]))
        bad, step = opening[0] > 0, opening[1]
        left_out = [bad] * len(buckets)
    elif stateful:
        # Several do not wait for each other's gradients: a worker leaves out where its own are not finite, and once
        # all have told, the step is undone.
        step = comm.pmax(step)
        left_out = [_not_finite(bucket.of(leaves)) for bucket in buckets]

    totals: dict[int, SparseVector | jax.Array] = {}
    carried: dict[int, BucketState] = {}
    overflowed = delivered = updated = jnp.int32(0)
    comm.next_bucket()
    # In the order in which a backward pass has them ready.
    for i in sorted(range(len(buckets)), key=lambda i: buckets[i].ids[0], reverse=True):
        bucket, before, keep, how = buckets[i], state.buckets[i], ~left_out[i], config.of(buckets[i])
        comm.next_bucket()
        x = acc = accumulate(bucket.layout, before.residual, bucket.of(leaves), keep, comm.size)
        chosen = before.select
        if how.select is not None:
            x, chosen = how.select(acc, chosen, step)
            overflowed += chosen.selected[0] - x.count
            x = x.where(keep)
        totals[i], arrived, reduce = how.allreduce(comm, x, before.reduce, step=step, wire=how.wire)
        overflowed += getattr(reduce, "overflowed", jnp.zeros(1, jnp.int32))[0]
        delivered += _count(arrived)
        updated += _count(totals[i])
        residual = retain(acc, arrived) if how.error_feedback else None
        carried[i] = BucketState(residual, chosen, reduce)

    if stateful > 1:
        # Only after the agreed step: XLA would merge the two, and nothing could begin before the last gradient.
        bad = comm.pmax(jnp.where(jnp.any(jnp.stack(left_out)), step + 1, 0)) > 0
    for i, before in enumerate(state.buckets):
        undone = jax.tree.map(lambda new, old: jnp.where(bad, old, new), carried[i], before)
        # With one, nothing was added to the residual, nor delivered.
        carried[i] = undone if stateful > 1 else undone._replace(residual=carried[i].residual)

    delivered, updated = jnp.where(bad, 0, delivered), jnp.where(bad, 0, updated)
    report = Report(overflowed, delivered, updated, comm.words, comm.messages)
    report = jax.tree.map(lambda new, old: new.astype(old.dtype)[None], report, state.report)
    step = jnp.where(bad, step, step + 1)[None]
    after = SparseAllReduceState(step, tuple(carried[i] for i in range(len(buckets))), report)
    return Sums(buckets, [totals[i] for i in range(len(buckets))], bad, comm.size), comm.varying(after)


def _not_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether any element is infinite or NaN: bool scalar."""
    wrong = [bitmap.count_mask(~jnp.isfinite(leaf.reshape(-1))) for leaf in leaves if leaf.size]
    return jnp.max(jnp.stack(wrong)) > 0


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
    return jax.tree.unflatten(treedef, means), state


def _init(config: Config, params: optax.Params) -> SparseAllReduceState:
    comm, states = config.comm, []
    for bucket in config.plan(params):
        how, n, dtype = config.of(bucket), bucket.layout.n, bucket.layout.dtype
        states.append(
            BucketState(
                residual=jnp.zeros(n, dtype) if how.error_feedback else None,
                select=how.select.init(n, dtype) if how.select is not None else (),
                reduce=how.allreduce.init(n, comm.size, dtype),
            )
        )
    none, zero = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    return comm.varying(SparseAllReduceState(none, tuple(states), Report(none, none, none, zero, zero)))


def _check_local(comm: Comm, grads: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not comm.may_differ(leaf):
            raise ValueError(
                f"gradient leaf {jax.tree_util.keystr(path)} is the same on all workers: under "
                "jax.shard_map(check_vma=True) the gradient with respect to replicated parameters is already summed. "
                "Compute it with jsparse.local_value_and_grad(loss_fn, axis), which leaves it local, and neither psum "
                "nor pmean it"
            )


def _check_state(buckets: list[Bucket], state: SparseAllReduceState) -> None:
    had = [None if b.residual is None else (b.residual.shape[0], b.residual.dtype) for b in state.buckets]
    have = [(bucket.layout.n, bucket.layout.dtype) for bucket in buckets]
    if len(had) != len(have) or any(h is not None and h != g for h, g in zip(had, have, strict=True)):
        raise ValueError(
            f"the state is for buckets of (length, type) {had}, the gradients make {have}: initialise the state with "
            "parameters of the gradients' shapes and types, for as many workers as there are here"
        )


def _count(x: SparseVector | jax.Array) -> jax.Array:
    return jnp.sum(x.count, dtype=jnp.int32) if isinstance(x, SparseVector) else jnp.int32(x.shape[0])
