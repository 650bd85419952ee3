"""What a chain's state tells about its last synchronisation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.processes import is_global
from .._engine.state import SparseAllReduceState, states_in


def residual(opt_state: Any) -> jax.Array:
    """The residuals: what each worker has accumulated and has not yet delivered.

    Args:
      opt_state: a chain's state with one sparse all-reduce: global arrays, or one worker's part.

    Returns:
      Shape ``(P, n)``: the flat residuals, in the order of ``jax.tree.leaves(params)`` (with
      ``scope="leaf"`` and ``dense_below``, those of the sparse leaves). ``n`` is 0 without error
      feedback. Over two levels it is the length of a shard. Over several processes the result is a
      global array: its ``addressable_shards`` are the rows of this process's workers.
    """
    state = find(opt_state)
    workers = state.step.shape[0]
    parts = [bucket.residual.reshape(workers, -1) for bucket in state.buckets if bucket.residual is not None]
    return jnp.concatenate(parts, axis=1) if parts else jnp.zeros((workers, 0))


class Stats(NamedTuple):
    """What the last synchronisation did.

    Every leaf has one entry for each worker, shape ``(P,)``.

    Attributes:
      step: int32: synchronisations so far, without those that met a non-finite gradient.
      selected: int32: elements that qualified on this worker.
      overflowed: int32: those of them that did not fit into its buffers and wait in its residual.
      delivered: int32: elements of this worker that became part of the update.
      updated: int32: elements of the update that are not zero, alike on all workers. Divided by n,
        that is the density to which the update has filled in. An all-gather counts an index once
        for each worker that sent it.
      thresholds: shape ``(P, buckets)``: the magnitude that elements had to reach on this worker.
      global_thresholds: shape ``(P, buckets)``: the magnitude that elements had to reach in the
        sum; 0 if the all-reduce has no such threshold.
      residual_norm: Euclidean norm of this worker's residual.
      words: uint32: 4-byte words that this worker sent. For rounds in which pairs exchange, the
        busiest path is counted.
      messages: uint32: messages that this worker sent, counted likewise.
    """

    step: jax.Array
    selected: jax.Array
    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array
    thresholds: jax.Array
    global_thresholds: jax.Array
    residual_norm: jax.Array
    words: jax.Array
    messages: jax.Array


def stats(opt_state: Any) -> Stats:
    """Reads from a chain's state what its last synchronisation did.

    Over several processes, all of them must call it, and each gets the figures of all workers. A
    few words a worker are gathered for this, in one message.

    Args:
      opt_state: a chain's state with one jsparse transformation: global arrays, or one worker's
        part.

    Returns:
      One entry for each worker.
    """
    state = find(opt_state)
    sharding = state.step.sharding if is_global(state.step) else None
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        return _gathering(sharding.mesh, sharding.spec[0])(state)
    return _read(state)


@jax.jit
def _read(state: SparseAllReduceState) -> Stats:
    figures, workers = state.report._asdict(), state.step.shape[0]
    for name in ("thresholds", "global_thresholds"):
        columns = [column.reshape(workers, 1) for column in figures[name]]
        figures[name] = jnp.concatenate(columns, axis=1) if columns else jnp.zeros((workers, 0))
    return Stats(step=state.step, residual_norm=jnp.linalg.norm(residual(state), axis=1), **figures)


@functools.cache
def _gathering(mesh: Mesh, axis: str | tuple[str, ...]) -> Callable[[SparseAllReduceState], Stats]:
    """A jitted function that reads the figures of all workers, in every process."""
    comm = AxisComm(axis)

    def local(state):
        figures = _read(state)
        own, unravel = ravel_pytree(jax.tree.map(lambda x: lax.bitcast_convert_type(x[0], jnp.uint8), figures))
        every = jax.vmap(unravel)(comm.all_gather(own))
        return jax.tree.map(lambda x, told: lax.bitcast_convert_type(told, x.dtype), figures, every)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec()))


def find(opt_state: Any) -> SparseAllReduceState:
    """The one state of a jsparse transformation in a chain's state."""
    found = states_in(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state holds {len(found)} states of a jsparse transformation; this function reads exactly "
            "one. If there are several, pass a part of the state that holds one. If there is none, put a preset such "
            "as jsparse.oktopk(axis, density=0.01) into the chain"
        )
    return found[0]
