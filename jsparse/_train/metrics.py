"""A chain's last synchronisation as a few scalars, for a logger."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._engine.state import SparseAllReduceState, check_not_donated, states_in
from .._vector.sparse_vector import flatten, to_dense
from .local_state import Counts, LocalState
from .stats import Stats, find, read, reader, residual_magnitudes, residual_squares


def metrics(opt_state: Any, updates: Any = None) -> dict[str, jax.Array]:
    """Reads from a chain's state what its last synchronisation did, as scalars for any logger.

    The scalars are computed on the devices, in one small jitted program, and nothing waits for
    them before they are read. It works inside ``jax.jit`` too. Nothing is computed for it in the
    training step: residuals, and updates if they are given, are summed here.

    Inside ``shard_map``, and among MPI processes, it tells of this worker alone. Over several
    processes that share a mesh, all of them must call it, and each gets the same figures.

    Args:
      opt_state: a chain's state, or a :class:`TrainState`, as for :func:`stats`.
      updates: what the jsparse transformation returned in that step, before the optimizer changed
        it: a pytree of arrays, those of one worker or of all workers side by side, or what
        :func:`sync` returned. It adds the last three keys. ``optax.snapshot`` behind the
        transformation keeps it in a chain's state.

    Returns:
      Scalars by name. ``jsparse/step`` and what was skipped are int32, the others float32.
      Means are over the workers, and a quotient of which the numerator is 0 is 0. Of a sharded
      model's worker, the figures of its devices are added, except messages.

      - ``jsparse/step``: synchronisations so far, without those that were skipped.
      - ``jsparse/skipped``: synchronisations that met a non-finite gradient and were undone.
      - ``jsparse/bytes``: what a worker sent in the last step; the mean.
      - ``jsparse/messages``: the messages that it sent; the mean.
      - ``jsparse/share_of_dense``: its bytes over those of a dense all-reduce of the gradients.
      - ``jsparse/density``: elements of the update that are not zero, over n.
      - ``jsparse/selected``: elements that qualified on a worker; the mean.
      - ``jsparse/overflowed``: those of them that its buffers had no room for; the mean.
      - ``jsparse/delivered``: its elements that became part of the update; the mean.
      - ``jsparse/residual_norm``: the Euclidean norm of a worker's residual; the root of the mean
        square. Over two levels, that of a node's residual, divided by the node's workers, as the
        residual is of their sum.
      - ``jsparse/local_steps``, of :func:`local_steps`: inner steps that a worker took in the last
        round; the mean.
      - ``jsparse/skipped_local_steps``, likewise: inner steps of all workers so far that were not
        finite, and were skipped.
      - ``jsparse/update_norm``: the Euclidean norm of the updates.
      - ``jsparse/residual_over_update``: the quotient of the two norms.
      - ``jsparse/age``: the sum of a worker's magnitudes in the residual, its mean, over that of
        the updates: how many updates of this size are waiting.

    Raises:
      ValueError: as from :func:`residual`.

    >>> tx = jsparse.topk_allgather("workers", density=0.25)
    >>> state = jax.vmap(lambda _: tx.init(jnp.zeros(4)), axis_name="workers")(jnp.arange(2))
    >>> gradients = jnp.array([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    >>> updates, state = jax.jit(jax.vmap(tx.update, axis_name="workers"))(gradients, state)
    >>> figures = jsparse.metrics(state, updates[0])
    >>> float(figures["jsparse/density"]), float(figures["jsparse/age"])
    (0.5, 1.5)
    """
    states = find(opt_state)
    check_not_donated(updates)
    rounds = [(local.counts.inner, local.skipped) for local in states_in(opt_state, LocalState)]
    return _summarised(reader(_read, states), states, updates, rounds)


class _Figures(NamedTuple):
    """What is read of each worker; every leaf has shape ``(P,)``.

    In a sharded model it is of each device of the workers.

    Attributes:
      stats: its figures.
      shards: how many devices share a worker's gradient.
      squares: of the residual in the units of one worker's gradient, added up.
      magnitudes: of the residual, added up.
    """

    stats: Stats
    shards: jax.Array
    squares: jax.Array
    magnitudes: jax.Array


@jax.jit
def _read(states: Sequence[SparseAllReduceState]) -> _Figures:
    return _Figures(
        read(states),
        states[0].shards.reshape(-1),
        sum(map(_squares, states), jnp.float32(0)),
        sum(map(residual_magnitudes, states), jnp.float32(0)),
    )


def _squares(state: SparseAllReduceState) -> jax.Array:
    """The squares of each worker's residual, added up, in the units of one worker's gradient.

    Their mean over the workers is that over the nodes: the g workers of a node have shards of the
    sum of g gradients, so a node's norm is divided by g, and its squares are those of g workers.
    """
    sizes = state.sizes.reshape(state.step.size, -1)
    return residual_squares(state) / jnp.prod(sizes[:, 1:], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _summarised(
    read: Callable[[Sequence[SparseAllReduceState]], _Figures],
    states: Sequence[SparseAllReduceState],
    updates: Any,
    rounds: Sequence[tuple[Counts, jax.Array]],
) -> dict[str, jax.Array]:
    told, shards, squares, magnitudes = read(states)

    def of_worker(figures: jax.Array) -> jax.Array:
        """The mean over the workers of what their devices sum up to."""
        return _mean(figures.astype(jnp.float32) * shards)

    sent, dense = of_worker(told.words), of_worker(told.dense_words)
    found = {
        "step": jnp.max(told.step),
        "skipped": jnp.max(told.skipped),
        "bytes": 4 * sent,
        "messages": _mean(told.messages),
        "share_of_dense": _quotient(sent, dense),
        "density": _quotient(of_worker(told.updated), of_worker(told.elements)),
        "selected": of_worker(told.selected),
        "overflowed": of_worker(told.overflowed),
        "delivered": of_worker(told.delivered),
        "residual_norm": jnp.sqrt(of_worker(squares)),
    }
    for counts, skipped in rounds:
        found["local_steps"] = _mean(counts.taken)
        found["skipped_local_steps"] = jnp.max(skipped)
    if updates is not None:
        leaves = [jnp.asarray(to_dense(leaf), jnp.float32) for leaf in flatten(updates)[0]]
        # Under pmap and vmap a state has the updates of all workers side by side.
        elements = jnp.maximum(of_worker(told.elements), 1)
        copies = jnp.maximum(jnp.round(sum(leaf.size for leaf in leaves) / elements), 1)
        norm = jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.float32(0)) / copies)
        found["update_norm"] = norm
        found["residual_over_update"] = _quotient(found["residual_norm"], norm)
        moved = sum((jnp.sum(jnp.abs(leaf)) for leaf in leaves), jnp.float32(0)) / copies
        found["age"] = _quotient(of_worker(magnitudes), moved)
    return {f"jsparse/{name}": figure for name, figure in found.items()}


def _mean(figures: jax.Array) -> jax.Array:
    """The mean over the workers, float32, in which counts can't overflow."""
    return jnp.mean(figures.astype(jnp.float32))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(a == 0, 0, a / b)
