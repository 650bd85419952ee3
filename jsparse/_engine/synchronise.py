"""One synchronisation: accumulate, select, sum."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap, choose

from .._comm.comm import Comm
from .._comm.metered import Metered, add_words
from .._vector.buckets import Bucket
from .._vector.layout import Layout
from .._vector.sparse_vector import SparseVector
from ..select.fixed import AboveThreshold
from .config import Config
from .memory import accumulate, largest
from .momentum import clip
from .space import gather, scatter


class BucketState(NamedTuple):
    """What is carried for the leaves that are synchronised as one vector.

    Attributes:
      residual: shape ``(n,)``, over two levels that of the shard: what has been accumulated and not yet delivered;
        None without error feedback.
      select: the selector's state.
      reduce: the all-reduce's state.
      velocity: shape of the residual: with momentum correction this worker's momentum, otherwise None.
    """

    residual: jax.Array | None
    select: Any
    reduce: Any
    velocity: jax.Array | None = None


class Report(NamedTuple):
    """What the last synchronisation did; each leaf has shape ``(1,)``.

    Attributes:
      overflowed: int32: elements that this worker selected and that did not fit into its buffers.
      delivered: int32: elements of this worker that became part of the update; where the wire is not lossless, those of
        sums that it rounded, too.
      updated: int32: elements of the update that are not zero, over n the density to which it has filled in; an
        all-gather counts an index once for each worker that sent it.
      words: uint32: 4-byte words that this worker sent. A round in which pairs exchange counts for all workers, those
        too that have no part in it: in a tree, and where P is no power of two, that is what the busiest path takes.
      messages: uint32: messages that this worker sent, likewise.
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


class Reduced(NamedTuple):
    """What has become of the buckets, in their order.

    Attributes:
      totals: the sum of each.
      carried: the state of each.
      overflowed, delivered, updated: int32 scalars, as in :class:`Report`.
    """

    totals: list[SparseVector | jax.Array]
    carried: list[BucketState]
    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array


def synchronise(config: Config, grads: Any, state: SparseAllReduceState) -> tuple[Sums, SparseAllReduceState]:
    """Sums the workers' gradients, as much of them as the algorithm delivers."""
    levels = [Metered(comm) for comm in config.levels]
    size = math.prod(level.size for level in levels)
    buckets = config.plan(grads)
    check(config, levels, buckets, grads, state)
    leaves = gradients(config, grads, size)

    step, bad = state.step[0], jnp.array(False)
    left_out = [bad] * len(buckets)
    stateful = sum(bool(jax.tree.leaves(before)) for before in state.buckets)
    if stateful == 1:
        step, bad = agree(levels, step, leaves)
        left_out = [bad] * len(buckets)
    elif stateful:
        # Several do not wait for each other's gradients: a worker leaves out where its own are not finite, and once
        # all have told, the step is undone.
        step = _pmax(levels, step)
        left_out = [_not_finite(bucket.of(leaves)) for bucket in buckets]

    reduced = reduce_buckets(config, levels, buckets, leaves, state.buckets, left_out, step)
    if stateful > 1:
        # Only after the agreed step: XLA would merge the two, and nothing could begin before the last gradient.
        bad = _pmax(levels, jnp.where(jnp.any(jnp.stack(left_out)), step + 1, 0)) > 0
    sent = [(level.words, level.messages) for level in levels]
    after = conclude(levels, state, reduced, sent, bad, step, undo=stateful > 1)
    return Sums(buckets, reduced.totals, bad, size), after


def gradients(config: Config, grads: Any, size: int) -> list[jax.Array]:
    """A worker's gradients, clipped where that is asked for: to what leaves the sum of ``size`` within the norm."""
    leaves = jax.tree.leaves(grads)
    return leaves if config.clip_norm is None else clip(leaves, config.clip_norm / size**0.5)


def agree(levels: list[Metered], step: jax.Array, leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """One exchange opens the step: a step that all agree on, and whether any gradient is not finite."""
    opening = _pmax(levels, jnp.stack([_not_finite(leaves).astype(jnp.int32), step]))
    return opening[1], opening[0] > 0


def reduce_buckets(
    config: Config,
    levels: list[Metered],
    buckets: list[Bucket],
    leaves: list[jax.Array],
    states: Sequence[BucketState],
    left_out: list[jax.Array],
    step: jax.Array,
) -> Reduced:
    """Accumulates, selects and sums every bucket; of those that are left out, nothing.

    Args:
      config: how.
      levels: its networks, metered.
      buckets: which leaves travel together.
      leaves: this worker's gradients.
      states: of the buckets.
      left_out: bool scalars, one for each bucket.
      step: int32 scalar, alike on all workers.
    """
    comm, intra = levels[0], levels[1] if len(levels) > 1 else None
    size = math.prod(level.size for level in levels)
    totals: dict[int, SparseVector | jax.Array] = {}
    carried: dict[int, BucketState] = {}
    overflowed = delivered = updated = jnp.int32(0)
    _next_bucket(levels)
    # In the order in which a backward pass has them ready.
    for i in sorted(range(len(buckets)), key=lambda i: buckets[i].ids[0], reverse=True):
        bucket, before, keep, how = buckets[i], states[i], ~left_out[i], config.of(buckets[i])
        _next_bucket(levels)
        layout, parts = bucket.layout, bucket.of(leaves)
        if intra:
            whole = accumulate(layout, None, parts, keep, size)
            if how.error_feedback:
                whole = jnp.clip(whole, -largest(whole.dtype, size), largest(whole.dtype, size))
            parts = [scatter(intra, whole)]
            layout = Layout.of(parts)
        momentum, velocity = how.momentum, before.velocity
        if momentum and velocity is not None:
            velocity, parts = momentum.correct(layout, velocity, parts, keep, comm.size)
        acc, x, chosen = _accumulate_and_select(how, comm, layout, before, parts, keep, step)
        if isinstance(x, SparseVector):
            overflowed += chosen.selected[0] - x.count
            x = x.where(keep)
        elif how.error_feedback:
            x = jnp.where(keep, acc, 0)
        total, arrived, reduce = how.allreduce(comm, x, before.reduce, step=step, wire=how.wire.at(step))
        overflowed += getattr(reduce, "overflowed", jnp.zeros(1, jnp.int32))[0]
        residual = how.feedback.retain(comm, acc, arrived, total, keep) if how.feedback else None
        if momentum and velocity is not None and isinstance(x, SparseVector):
            velocity = momentum.mask(velocity, x, arrived)
        if intra:
            total = gather(intra, total, bucket.layout.n)
        delivered += _count(arrived)
        updated += _count(total, filled=how.select is not None)
        totals[i], carried[i] = total, BucketState(residual, chosen, reduce, velocity)
    order = range(len(buckets))
    return Reduced([totals[i] for i in order], [carried[i] for i in order], overflowed, delivered, updated)


def _accumulate_and_select(
    how: Config,
    comm: Comm,
    layout: Layout,
    before: BucketState,
    parts: list[jax.Array],
    keep: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, SparseVector | jax.Array, Any]:
    """``acc``, what is selected of it (all of it, without a selector), and the selector's state."""
    select, residual, rank = how.select, before.residual, comm.rank()

    def one_by_one(parts, residual, chosen, keep, step):
        acc = accumulate(layout, residual, parts, keep, comm.size)
        return (acc, acc, chosen) if select is None else (acc, *select(acc, chosen, step, rank))

    arguments = parts, residual, before.select, keep, step
    if not isinstance(select, AboveThreshold) or residual is None or len(parts) > 1:
        return one_by_one(*arguments)

    def in_one_pass(parts, residual, chosen, keep, step, *, interpret=False):
        limit = largest(residual.dtype, comm.size)
        return select.accumulate_and_select(
            parts[0].reshape(-1), residual, step, keep=keep, limit=limit, interpret=interpret
        )

    return choose(None, {"xla": one_by_one, "triton": in_one_pass}, *arguments)


def conclude(
    levels: Sequence[Comm],
    state: SparseAllReduceState,
    reduced: Reduced,
    sent: Sequence[tuple[jax.Array, jax.Array]],
    bad: jax.Array,
    step: jax.Array,
    *,
    undo: bool,
) -> SparseAllReduceState:
    """The state after a step, or, where a gradient was not finite, that before it, and a report of both.

    Args:
      levels: the networks.
      state: before the step.
      reduced: what has become of the buckets.
      sent: words and messages.
      bad: bool scalar: whether a gradient was not finite.
      step: int32 scalar, the step that all agreed on.
      undo: whether a bad step changed residuals; if all workers left it out, it did not.
    """
    carried = list(reduced.carried)
    for i, before in enumerate(state.buckets):
        undone = jax.tree.map(lambda new, old: jnp.where(bad, old, new), carried[i], before)
        # With one exchange for all, nothing was added to the residual, nor delivered.
        kept = {"residual": carried[i].residual, "velocity": carried[i].velocity}
        carried[i] = undone if undo else undone._replace(**kept)

    delivered, updated = jnp.where(bad, 0, reduced.delivered), jnp.where(bad, 0, reduced.updated)
    words = functools.reduce(add_words, [words for words, _ in sent])
    messages = functools.reduce(jnp.add, [messages for _, messages in sent])
    overflowed = jnp.where(bad, 0, reduced.overflowed)
    report = Report(overflowed, delivered, updated, words, messages)
    report = jax.tree.map(lambda new, old: new.astype(old.dtype)[None], report, state.report)
    step = jnp.where(bad, step, step + 1)[None]
    return varying_over(levels, SparseAllReduceState(step, tuple(carried), report))


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


def check(
    config: Config, levels: Sequence[Comm], buckets: list[Bucket], grads: Any, state: SparseAllReduceState
) -> None:
    """Refuses gradients that are already summed, and a state of others."""
    check_local(levels, grads)
    _check_state(config, buckets, state)


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
