"""What becomes of a step: the state after it, and the report."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._comm.metered import Metered, add_words
from .._vector.buckets import Bucket
from .agreement import varying_over
from .mean import Quotient
from .reducer import Counts
from .state import BucketState, Report, SparseAllReduceState


class Outcome(NamedTuple):
    """What has become of all vectors, in the order of their buckets.

    Attributes:
      quotients: their means.
      states: their states.
      report: what their reducers told; what was sent is not in it.
    """

    quotients: list[Quotient]
    states: list[BucketState]
    report: Report


def begin(
    synchroniser: Any, buckets: tuple[BucketState, ...], thresholds: tuple[jax.Array, ...]
) -> SparseAllReduceState:
    """The state before the first step, typed as differing between workers.

    Args:
      synchroniser: whose state it is.
      buckets: the vectors' states.
      thresholds: zeros in place of the thresholds of the report.
    """
    none, zero = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    report = Report(none, none, none, none, zero, zero, thresholds, thresholds)
    sizes = jnp.array([comm.size for comm in synchroniser.levels], jnp.int32)
    state = SparseAllReduceState(none, sizes, buckets, report)
    return varying_over([*synchroniser.levels, *synchroniser.agree_over], state)


def conclude(
    synchroniser: Any,
    levels: Sequence[Metered],
    state: SparseAllReduceState,
    outcome: Outcome,
    bad: jax.Array,
    step: jax.Array,
    *,
    undo: bool,
    sent: Sequence[tuple[jax.Array, jax.Array]] = (),
) -> SparseAllReduceState:
    """The state after a step; where a gradient was not finite, the state before it.

    Args:
      synchroniser: whose step it was.
      levels: the networks, which counted what was sent.
      state: before the step.
      outcome: what has become of the vectors.
      bad: bool scalar: whether a gradient was not finite.
      step: int32 scalar, the step's number, alike on all workers.
      undo: whether a bad step changed memories; if all workers left it out, it did not.
      sent: further words and messages.
    """

    def before_or(after: Any, before: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(bad, old, new), after, before)

    buckets = []
    for after, before in zip(outcome.states, state.buckets, strict=True):
        memory = before_or(after.memory, before.memory) if undo else after.memory
        buckets.append(BucketState(memory, before_or(after.reducer, before.reducer)))
    metered = [*((level.words, level.messages) for level in levels), *sent]
    report = finish_report(outcome.report, state.report, bad, metered)
    step = jnp.where(bad, step, step + 1)[None]
    comms = [*synchroniser.levels, *synchroniser.agree_over]
    return varying_over(comms, SparseAllReduceState(step, state.sizes, tuple(buckets), report))


def thresholds_of(buckets: Sequence[Bucket], selects: Sequence[bool]) -> tuple[jax.Array, ...]:
    """The thresholds before the first step: one for each bucket that is selected from."""
    pairs = zip(buckets, selects, strict=True)
    return tuple(jnp.zeros(1, bucket.layout.dtype) for bucket, told in pairs if told)


def report_of(counts: Sequence[Counts], selects: Sequence[bool], updated: jax.Array) -> Report:
    """The report of a step, without what was sent.

    Args:
      counts: what the buckets' reducers told.
      selects: which buckets have thresholds.
      updated: int32 scalar: elements of the update.
    """

    def total(name):
        return jnp.asarray(sum((getattr(told, name) for told in counts), jnp.int32(0)))[None]

    def each(name):
        return tuple(getattr(told, name)[None] for told, has in zip(counts, selects, strict=True) if has)

    none = jnp.zeros(1, jnp.uint32)
    return Report(
        selected=total("selected"),
        overflowed=total("overflowed"),
        delivered=total("delivered"),
        updated=updated[None],
        words=none,
        messages=none,
        thresholds=each("threshold"),
        global_thresholds=each("global_threshold"),
    )


def finish_report(
    report: Report, old: Report, bad: jax.Array, metered: Sequence[tuple[jax.Array, jax.Array]]
) -> Report:
    """The report of a step with what was sent, in the types of the old one.

    After a non-finite gradient nothing was delivered, and thresholds stay as they were.
    """
    words = functools.reduce(add_words, [words for words, _ in metered])
    messages = functools.reduce(jnp.add, [messages for _, messages in metered])
    report = jax.tree.map(lambda new, old: jnp.where(bad, 0, new).astype(old.dtype), report, old)

    def kept(new, old):
        return jax.tree.map(lambda new, old: jnp.where(bad, old, new), new, old)

    return report._replace(
        words=words[None],
        messages=messages[None],
        thresholds=kept(report.thresholds, old.thresholds),
        global_thresholds=kept(report.global_thresholds, old.global_thresholds),
    )
