"""One synchronisation: accumulate, select, sum; and how it is configured."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap

from ._buckets import Bucket, plan
from ._comm import Comm, axes_of
from ._error_feedback import accumulate, largest, retain
from ._flatten import Layout
from ._ledger import Metered, add_words
from ._sparse_vector import SparseVector
from ._two_levels import gather, scatter
from .allreduce import AllReduce, Dense
from .select import Selector
from .wire import Full, Wire

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


class BucketState(NamedTuple):
    """What is carried for the leaves that are synchronised as one vector.

    Attributes:
      residual: shape ``(n,)``, over two levels that of the shard: what has been accumulated and not yet delivered;
        None without error feedback.
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
      delivered: int32: elements of this worker that became part of the update; where the wire is not lossless, those of
        sums that it rounded, too.
      updated: int32: elements of the update that are not zero, over n the density to which it has filled in; an
        all-gather counts an index once for each worker that sent it.
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
    """How gradients are synchronised: the arguments of :func:`sparse_allreduce`, and ``intra``.

    Where ``intra`` are the workers of a node, each of them has a shard of the node's sum, and ``comm`` are the workers
    that have the same shard, one on each node.
    """

    comm: Comm
    select: Selector | None
    allreduce: AllReduce
    wire: Wire = Full()
    error_feedback: bool = True
    scope: Literal["global", "leaf"] = "global"
    dense_below: int = 0
    bucket_bytes: int | None = None
    intra: Comm | None = None

    def __post_init__(self):
        axes = [name for comm in self.levels for name in axes_of(comm)]
        if len(set(axes)) < len(axes):
            raise ValueError(
                f"the axes are {axes}, one of them twice; name each once: over two levels, inter is the axis along "
                "which the nodes stand, and intra the one along which a node's workers do"
            )
        if self.allreduce.sparse and self.select is None:
            raise ValueError(f"{self.allreduce} sums sparse vectors; give it a selector, such as select=TopK(0.01)")
        if self.select is not None and not self.allreduce.sparse:
            raise ValueError(f"{self.allreduce} sums dense vectors and selects nothing; pass select=None")
        if getattr(self.allreduce, "operator", "sum") != "sum":
            raise ValueError(f"{self.allreduce} does not sum; gradients are averaged: leave operator at its default")
        for quantizer in (getattr(self.allreduce, "quantize", None), getattr(self.wire, "values", None)):
            if self.error_feedback and quantizer is not None and quantizer.unbiased:
                raise ValueError(
                    f"{quantizer} with error feedback makes the residual grow without bound: shrink what it decodes "
                    "with contract=True, or, where dense vectors are summed, pass error_feedback=False"
                )
        if self.scope not in ("global", "leaf"):
            raise ValueError(f'scope is {self.scope!r}; choose "global" or "leaf"')
        if self.dense_below < 0:
            raise ValueError(f"dense_below is {self.dense_below}; it is a number of elements, at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes, at least 1, or None")

    @property
    def levels(self) -> tuple[Comm, ...]:
        """The networks that a worker is in."""
        return (self.comm,) if self.intra is None else (self.comm, self.intra)

    def length(self, n: int) -> int:
        """How many elements of a vector of length ``n`` a worker selects from: all, or a shard."""
        return n if self.intra is None else -(-n // self.intra.size)

    def plan(self, tree: Any) -> list[Bucket]:
        """Which leaves travel together."""
        check_floats(tree)
        return plan(
            jax.tree.leaves(tree), scope=self.scope, dense_below=self.dense_below, bucket_bytes=self.bucket_bytes
        )

    def of(self, bucket: Bucket) -> "Config":
        """How one bucket is synchronised."""
        if not bucket.dense:
            return self
        return dataclasses.replace(self, select=None, allreduce=Dense(), error_feedback=False)


class Sums(NamedTuple):
    """The sums over the workers, before anything is made of them.

    Attributes:
      plan: the buckets.
      totals: the sum of each.
      bad: bool scalar: a gradient was not finite somewhere, and the totals are void.
      size: the number of workers, on all levels.
    """

    plan: list[Bucket]
    totals: list[SparseVector | jax.Array]
    bad: jax.Array
    size: int


def synchronise(config: Config, grads: Any, state: SparseAllReduceState) -> tuple[Sums, SparseAllReduceState]:
    """Sums the workers' gradients, as much of them as the algorithm delivers."""
    levels = [Metered(comm) for comm in config.levels]
    comm, intra = levels[0], levels[1] if len(levels) > 1 else None
    size = math.prod(level.size for level in levels)
    leaves = jax.tree.leaves(grads)
    buckets = config.plan(grads)
    check_local(levels, grads)
    _check_state(config, buckets, state)

    step, bad = state.step[0], jnp.array(False)
    left_out = [bad] * len(buckets)
    stateful = sum(bool(jax.tree.leaves(before)) for before in state.buckets)
    if stateful == 1:
        # One exchange opens the step: whether any gradient is not finite, and a step that all agree on.
        opening = _pmax(levels, jnp.stack([_not_finite(leaves).astype(jnp.int32), step]))
        bad, step = opening[0] > 0, opening[1]
        left_out = [bad] * len(buckets)
    elif stateful:
        # Several do not wait for each other's gradients: a worker leaves out where its own are not finite, and once
        # all have told, the step is undone.
        step = _pmax(levels, step)
        left_out = [_not_finite(bucket.of(leaves)) for bucket in buckets]

    totals: dict[int, SparseVector | jax.Array] = {}
    carried: dict[int, BucketState] = {}
    overflowed = delivered = updated = jnp.int32(0)
    _next_bucket(levels)
    # In the order in which a backward pass has them ready.
    for i in sorted(range(len(buckets)), key=lambda i: buckets[i].ids[0], reverse=True):
        bucket, before, keep, how = buckets[i], state.buckets[i], ~left_out[i], config.of(buckets[i])
        _next_bucket(levels)
        layout, parts = bucket.layout, bucket.of(leaves)
        if intra:
            whole = accumulate(layout, None, parts, keep, size)
            if how.error_feedback:
                whole = jnp.clip(whole, -largest(whole.dtype, size), largest(whole.dtype, size))
            parts = [scatter(intra, whole)]
            layout = Layout.of(parts)
        x = acc = accumulate(layout, before.residual, parts, keep, comm.size)
        chosen = before.select
        if how.select is not None:
            x, chosen = how.select(acc, chosen, step, comm.rank())
            overflowed += chosen.selected[0] - x.count
            x = x.where(keep)
        elif how.error_feedback:
            x = jnp.where(keep, acc, 0)
        total, arrived, reduce = how.allreduce(comm, x, before.reduce, step=step, wire=how.wire.at(step))
        overflowed += getattr(reduce, "overflowed", jnp.zeros(1, jnp.int32))[0]
        if intra:
            total = gather(intra, total, bucket.layout.n)
        delivered += _count(arrived)
        updated += _count(total, filled=how.select is not None)
        residual = retain(acc, arrived) if how.error_feedback else None
        totals[i], carried[i] = total, BucketState(residual, chosen, reduce)

    if stateful > 1:
        # Only after the agreed step: XLA would merge the two, and nothing could begin before the last gradient.
        bad = _pmax(levels, jnp.where(jnp.any(jnp.stack(left_out)), step + 1, 0)) > 0
    for i, before in enumerate(state.buckets):
        undone = jax.tree.map(lambda new, old: jnp.where(bad, old, new), carried[i], before)
        # With one, nothing was added to the residual, nor delivered.
        carried[i] = undone if stateful > 1 else undone._replace(residual=carried[i].residual)

    delivered, updated = jnp.where(bad, 0, delivered), jnp.where(bad, 0, updated)
    words = functools.reduce(add_words, [level.words for level in levels])
    messages = functools.reduce(jnp.add, [level.messages for level in levels])
    report = Report(overflowed, delivered, updated, words, messages)
    report = jax.tree.map(lambda new, old: new.astype(old.dtype)[None], report, state.report)
    step = jnp.where(bad, step, step + 1)[None]
    after = SparseAllReduceState(step, tuple(carried[i] for i in range(len(buckets))), report)
    return Sums(buckets, [totals[i] for i in range(len(buckets))], bad, size), varying_over(levels, after)


def _pmax(levels: list[Metered], x: jax.Array) -> jax.Array:
    for level in levels:
        x = level.pmax(x)
    return x


def _next_bucket(levels: list[Metered]) -> None:
    for level in levels:
        level.next_bucket()


def _not_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether any element is infinite or NaN: bool scalar."""
    wrong = [bitmap.count_mask(~jnp.isfinite(leaf.reshape(-1))) for leaf in leaves if leaf.size]
    return jnp.max(jnp.stack(wrong)) > 0


def varying_over(levels: Sequence[Comm], tree: Any) -> Any:
    return functools.reduce(lambda tree, comm: comm.varying(tree), levels, tree)


def check_floats(tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.dtype not in FLOATS:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has type {leaf.dtype}; gradients are float16, bfloat16, "
                "float32 or float64: keep what is not trained out of the parameters"
            )


def check_local(levels: Sequence[Comm], grads: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not all(comm.may_differ(leaf) for comm in levels):
            raise ValueError(
                f"gradient leaf {jax.tree_util.keystr(path)} is the same on all workers: under "
                "jax.shard_map(check_vma=True) the gradient with respect to replicated parameters is already summed. "
                "Compute it with jsparse.local_value_and_grad(loss_fn, axis), which leaves it local, and neither psum "
                "nor pmean it. Where the all-reduce is over two axes, pass both wherever an axis is asked for"
            )


def _check_state(config: Config, buckets: list[Bucket], state: SparseAllReduceState) -> None:
    had = [None if b.residual is None else (b.residual.shape[0], b.residual.dtype) for b in state.buckets]
    have = [(config.length(bucket.layout.n), bucket.layout.dtype) for bucket in buckets]
    if len(had) != len(have) or any(h is not None and h != g for h, g in zip(had, have, strict=True)):
        raise ValueError(
            f"the state is for buckets of (length, type) {had}, the gradients make {have}: initialise the state with "
            "parameters of the gradients' shapes and types, for as many workers as there are here"
        )


def _count(x: SparseVector | jax.Array, filled: bool = False) -> jax.Array:
    """The elements of a vector; of a dense one that has filled in, those that are not zero."""
    if isinstance(x, SparseVector):
        return jnp.sum(x.count, dtype=jnp.int32)
    return bitmap.count_mask(x != 0) if filled else jnp.int32(x.shape[0])
