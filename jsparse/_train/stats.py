"""What a chain's state tells about its last synchronisation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.metered import add_words
from .._comm.processes import is_global
from .._engine.state import SparseAllReduceState, check_not_donated, states_in

T = TypeVar("T")


def residual(opt_state: Any) -> jax.Array:
    """The residuals: what each worker has accumulated and has not yet delivered.

    Args:
      opt_state: a chain's state, or a :class:`TrainState`: global arrays, or one worker's part.

    Returns:
      Shape ``(P, n)``: the flat residuals, in the order of ``jax.tree.leaves(params)`` (with
      ``scope="leaf"`` and ``dense_below``, those of the sparse leaves; with ``tiles``, each leaf
      in the order of its tiles). ``n`` is 0 without error feedback. Over two levels it is the
      length of a shard. If the chain has several jsparse transformations, their residuals lie side
      by side. Of a sharded model there is a row for each device, workers first: the residual of
      its shards, and its part of that of leaves that can't be cut, which is 0 after a step; with
      Dion, all of their momentum. Over several processes the result is a global array: its
      ``addressable_shards`` are the rows of this process's workers.

    Raises:
      ValueError: the state holds no state of a jsparse transformation, or was donated.
    """
    states = find(opt_state)
    parts = [part for state in states for part in residuals(state)]
    return jnp.concatenate(parts, axis=1) if parts else jnp.zeros((states[0].step.size, 0))


def residuals(state: SparseAllReduceState) -> list[jax.Array]:
    """The residuals of the buckets that have one, each with a row for each worker."""
    kept = [bucket.residual for bucket in state.buckets if bucket.residual is not None]
    return [part.reshape(state.step.size, -1) for part in kept]


class Stats(NamedTuple):
    """What the last synchronisation did.

    Every leaf has one entry for each worker, shape ``(P,)``. If the chain has several jsparse
    transformations, their counts are added, their thresholds lie side by side, and the residual is
    that of all of them. Of a sharded model there is an entry for each device, workers first, which
    tells of the shards that this device holds.

    Attributes:
      step: int32: synchronisations so far, without those that met a non-finite gradient; the most
        of any transformation.
      skipped: int32: synchronisations that met a non-finite gradient and were undone, likewise. A
        transformation without a state of its own, such as :func:`dense`, does not look for them.
      selected: int32: elements that qualified on this worker.
      overflowed: int32: those of them that did not fit into its buffers and wait in its residual.
      delivered: int32: elements of this worker that became part of the update. Those of sums that
        it rounded or took over count, too.
      updated: int32: elements of the update that are not zero, alike on all workers. Divided by
        ``elements``, that is the density to which the update has filled in. An all-gather counts
        an index once for each worker that sent it.
      elements: uint32: n, the elements of the gradient.
      thresholds: shape ``(P, buckets)``: the magnitude that elements had to reach on this worker.
      global_thresholds: shape ``(P, buckets)``: the magnitude that elements had to reach in the
        sum; 0 if the all-reduce has no such threshold.
      residual_norm: Euclidean norm of this worker's residual.
      words: uint32: 4-byte words that this worker sent; of each collective a last word that is
        begun counts as whole. For rounds in which pairs exchange, the busiest path is counted.
        What the devices of a sharded model's worker send each other does not count.
      dense_words: uint32: the words that it would send if one dense all-reduce summed the
        gradients in their own types.
      messages: uint32: messages that this worker sent, counted likewise.
    """

    step: jax.Array
    skipped: jax.Array
    selected: jax.Array
    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array
    elements: jax.Array
    thresholds: jax.Array
    global_thresholds: jax.Array
    residual_norm: jax.Array
    words: jax.Array
    dense_words: jax.Array
    messages: jax.Array


def stats(opt_state: Any) -> Stats:
    """Reads from a chain's state what its last synchronisation did.

    Over several processes, all of them must call it, and each gets the figures of all workers. A
    few words a worker are gathered for this, in one message.

    Args:
      opt_state: a chain's state, or a :class:`TrainState`: global arrays, such as those of
        ``shard_map``, ``pmap`` or ``vmap``, or one worker's part.

    Returns:
      One entry for each worker.

    Raises:
      ValueError: as from :func:`residual`.
    """
    states = find(opt_state)
    return reader(read, states)(states)


@jax.jit
def read(states: Sequence[SparseAllReduceState]) -> Stats:
    """The figures of the workers whose parts the states hold."""
    workers = states[0].step.size

    def joined(join: Callable[[jax.Array, jax.Array], jax.Array], figures: Sequence[jax.Array]) -> jax.Array:
        return functools.reduce(join, [figure.reshape(workers) for figure in figures])

    def beside(thresholds: Sequence[Sequence[jax.Array]]) -> jax.Array:
        columns = [column.reshape(workers, 1) for columns in thresholds for column in columns]
        return jnp.concatenate(columns, axis=1) if columns else jnp.zeros((workers, 0))

    reports = [state.report for state in states]
    return Stats(
        step=joined(jnp.maximum, [state.step for state in states]),
        skipped=joined(jnp.maximum, [report.skipped for report in reports]),
        selected=joined(jnp.add, [report.selected for report in reports]),
        overflowed=joined(jnp.add, [report.overflowed for report in reports]),
        delivered=joined(jnp.add, [report.delivered for report in reports]),
        updated=joined(jnp.add, [report.updated for report in reports]),
        elements=joined(add_words, [state.elements for state in states]),
        thresholds=beside([report.thresholds for report in reports]),
        global_thresholds=beside([report.global_thresholds for report in reports]),
        residual_norm=jnp.sqrt(sum(map(residual_squares, states))),
        words=joined(add_words, [report.words for report in reports]),
        dense_words=joined(add_words, [state.dense_words for state in states]),
        messages=joined(jnp.add, [report.messages for report in reports]),
    )


def residual_squares(state: SparseAllReduceState) -> jax.Array:
    """The square of the Euclidean norm of each worker's residual: at least float32."""
    parts = [jnp.sum(jnp.square(_wide(part)), axis=1) for part in residuals(state)]
    return sum(parts, jnp.zeros(state.step.size))


def residual_magnitudes(state: SparseAllReduceState) -> jax.Array:
    """The sum of the magnitudes in each worker's residual: at least float32."""
    parts = [jnp.sum(jnp.abs(_wide(part)), axis=1) for part in residuals(state)]
    return sum(parts, jnp.zeros(state.step.size))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def reader(
    read: Callable[[Sequence[SparseAllReduceState]], T], states: Sequence[SparseAllReduceState]
) -> Callable[[Sequence[SparseAllReduceState]], T]:
    """A function that reads the figures of all workers, also if they are in several processes.

    Args:
      read: a function of states whose results have an entry for each worker that the states hold.
      states: those that it will be given.
    """
    step = states[0].step
    sharding = step.sharding if is_global(step) else None
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        return _gathering(read, sharding.mesh, sharding.spec[0])
    return read


@functools.cache
def _gathering(
    read: Callable[[Sequence[SparseAllReduceState]], Any], mesh: Mesh, axis: str | tuple[str, ...]
) -> Callable[[Sequence[SparseAllReduceState]], Any]:
    """A jitted function that reads the figures of all workers, in every process."""
    comm = AxisComm(axis)

    def local(states):
        figures = read(states)
        # Words, not bytes: XLA:CPU fuses a cast to bytes with a long sum, which ends the process
        # (jax 0.10.2).
        own, unravel = ravel_pytree(jax.tree.map(lambda x: lax.bitcast_convert_type(x[0], jnp.uint32), figures))
        every = jax.vmap(unravel)(comm.all_gather(own))
        return jax.tree.map(lambda x, told: lax.bitcast_convert_type(told, x.dtype), figures, every)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec()))


def find(opt_state: Any) -> tuple[SparseAllReduceState, ...]:
    """The states of the jsparse transformations in a chain's state, at least one."""
    found = tuple(states_in(opt_state))
    if not found:
        raise ValueError(
            "the optimizer state holds no state of a jsparse transformation: put a preset such as "
            "jsparse.oktopk(axis, density=0.01) into the chain; and pass the state that init or the step returned, "
            "not dicts and lists of its arrays"
        )
    check_not_donated(found)
    if len({state.step.size for state in found}) > 1:
        raise ValueError(
            f"the optimizer state holds jsparse states of {sorted({state.step.size for state in found})} workers: pass "
            "a part of it whose states have the same workers"
        )
    return found
