"""What becomes of a step: the state after it, and the report."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._comm.comm import Comm
from .._comm.cost import collective_cost
from .._comm.metered import Metered, add_words
from .._vector.sparse_vector import Leaf
from .agreement import varying_over
from .mean import Quotient
from .reducer import Counts
from .space import Space
from .state import BucketState, Report, SparseAllReduceState


class Outcome(NamedTuple):
    """What has become of a vector.

    Attributes:
      quotient: its mean.
      state: its state.
      counts: what its reducer told.
      updated: int32 scalar: elements of its mean.
    """

    quotient: Quotient
    state: BucketState
    counts: Counts
    updated: jax.Array


def begin(
    levels: Sequence[Comm],
    space: Space,
    leaves: Sequence[Leaf],
    buckets: Sequence[BucketState],
    thresholds: Sequence[jax.Array],
) -> SparseAllReduceState:
    """The state before the first step, typed as differing between workers.

    Args:
      levels: the networks of the synchronisation.
      space: where the leaves stand: a worker's devices may hold them in shards.
      leaves: arrays of the gradients' shapes and types.
      buckets: the vectors' states.
      thresholds: zeros in place of the thresholds of the report.
    """
    none, zero = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    report = Report(none, none, none, none, zero, zero, none, tuple(thresholds), tuple(thresholds))
    sizes, shards = [comm.size for comm in levels], math.prod(comm.size for comm in space.model)
    # Of a leaf that a worker's devices share, each sends a part.
    own = [-(-leaf.size // shards) if i in space.shared else leaf.size for i, leaf in enumerate(leaves)]
    length = sum(size * leaf.dtype.itemsize for size, leaf in zip(own, leaves, strict=True))
    counts = sum(own), -(-collective_cost("psum", length, math.prod(sizes)).bytes // 4)
    elements, dense_words = (jnp.full(1, min(count, 2**32 - 1), jnp.uint32) for count in counts)
    state = SparseAllReduceState(
        step=none,
        sizes=jnp.array(sizes, jnp.int32),
        shards=jnp.full(1, shards, jnp.int32),
        elements=elements,
        dense_words=dense_words,
        buckets=tuple(buckets),
        report=report,
    )
    return varying_over([*levels, *space.model], state)


def conclude(
    levels: Sequence[Metered],
    model: Sequence[Comm],
    state: SparseAllReduceState,
    outcomes: Sequence[Outcome],
    selects: Iterable[bool],
    bad: jax.Array,
    step: jax.Array,
    *,
    undo: bool,
    sent: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> SparseAllReduceState:
    """The state after a step; where a gradient was not finite, the state before it.

    Args:
      levels: the networks, which counted what was sent.
      model: the networks inside a worker, which count for nothing.
      state: before the step.
      outcomes: what has become of the vectors, in the order of their buckets.
      selects: for each bucket, whether it has thresholds to report.
      bad: bool scalar: whether a gradient was not finite.
      step: int32 scalar, the step's number, alike on all workers.
      undo: whether a bad step changed memories; if all workers left it out, it did not.
      sent: further words and messages.
    """

    def before_or(after: Any, before: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(bad, old, new).astype(old.dtype), after, before)

    def total(figures: Iterable[jax.Array]) -> jax.Array:
        """Over all vectors, at most ``2**31 - 1``. In a bad step nothing is delivered."""
        most, wide = jnp.uint32(2**31 - 1), (figure.astype(jnp.uint32) for figure in figures)
        added = functools.reduce(lambda a, b: jnp.minimum(a + b, most), wide, jnp.uint32(0))
        return jnp.where(bad, 0, added.astype(jnp.int32))[None]

    buckets = []
    for outcome, before in zip(outcomes, state.buckets, strict=True):
        memory = before_or(outcome.state.memory, before.memory) if undo else outcome.state.memory
        buckets.append(BucketState(memory, before_or(outcome.state.reducer, before.reducer)))
    counts, earlier = [outcome.counts for outcome in outcomes], state.report
    told = [count for count, has in zip(counts, selects, strict=True) if has]
    metered = [*((level.words, level.messages) for level in levels), *sent]
    report = Report(
        selected=total(count.selected for count in counts),
        overflowed=total(count.overflowed for count in counts),
        delivered=total(count.delivered for count in counts),
        updated=total(outcome.updated for outcome in outcomes),
        words=functools.reduce(add_words, [words for words, _ in metered])[None],
        messages=functools.reduce(jnp.add, [messages for _, messages in metered])[None],
        skipped=earlier.skipped + jnp.where(bad, 1, 0),
        thresholds=before_or(tuple(count.threshold[None] for count in told), earlier.thresholds),
        global_thresholds=before_or(tuple(count.global_threshold[None] for count in told), earlier.global_thresholds),
    )
    step = jnp.where(bad, step, step + 1)[None]
    return varying_over((*levels, *model), state._replace(step=step, buckets=tuple(buckets), report=report))
