"""A threshold that selects k elements of a vector spread over the workers."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import count_above

from .._comm import Comm

# Five thresholds, two on either side of the last one, spaced so that neighbours select counts in about this ratio.
GRID_RATIO = 1.5
# Elements by which a part may exceed its interpolated length: this share, and two.
MARGIN = 1 / 64
STEEPEST, FLATTEST = 50.0, 0.5


def global_threshold(
    comm: Comm, values: jax.Array, k: int, last: jax.Array, slope: jax.Array, due: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the magnitude that k elements reach, of all workers' ``values`` together.

    Every worker counts what it has above a grid of thresholds around the last one, and the counts are exchanged: the
    threshold is interpolated between them. When it is due, or falls outside the grid, it is searched for exactly.

    Args:
      comm: the workers.
      values: this worker's elements, shape ``(capacity,)``, padded with 0.
      k: how many are wanted, static.
      last: scalar, the last threshold.
      slope: scalar, ``-d log(count) / d log(threshold)`` as last seen.
      due: bool scalar, alike on all workers: whether to search exactly.

    Returns:
      ``(threshold, slope, parts)``, all alike on all workers: ``parts``, int32 of shape ``(P,)``, is how many elements
      each worker has above the threshold, at least nearly.
    """
    grid = last * GRID_RATIO ** ((jnp.arange(5, dtype=last.dtype) - 2) / slope)
    thresholds = jnp.concatenate([jnp.zeros_like(grid[:1]), grid])
    # What steers the workers together comes from these counts alone, not from their states: that types it as alike.
    counts = comm.all_gather(jax.vmap(count_above, (None, 0))(values, thresholds))
    totals = jnp.sum(counts, axis=0, dtype=jnp.int32)
    everything = totals[0] <= k
    inside = (totals[1] >= k) & (totals[-1] <= k)
    place = jnp.clip(jnp.sum(totals[1:] >= k) - 1, 0, grid.shape[0] - 2)
    upper, lower = totals[place + 1], jnp.maximum(totals[place + 2], 1)

    def interpolate():
        share = (upper - k) / jnp.maximum(upper - lower, 1)
        begin, end = counts[:, place + 1], counts[:, place + 2]
        parts = begin + jnp.round(share * (end - begin)).astype(jnp.int32)
        parts = jnp.where(everything, counts[:, 0], parts + (parts * MARGIN).astype(jnp.int32) + 2)
        return jnp.zeros((), values.dtype), jnp.ones((), values.dtype), parts

    def search():
        found = _search(comm, values, k)
        further = comm.psum(count_above(values, found * 1.1))
        reached = comm.all_gather(count_above(values, found))
        fall = jnp.log(jnp.sum(reached) / jnp.maximum(further, 1)) / math.log(1.1)
        return found, jnp.clip(fall.astype(values.dtype), FLATTEST, STEEPEST), reached

    exactly = due | ~(everything | inside)
    found, fall, parts = comm.switch(exactly.astype(jnp.int32), [interpolate, search], replicated=True)
    step = jnp.log(grid[place + 1] / grid[place])
    drop = jnp.log(upper / lower)
    between = grid[place] * jnp.exp(step * jnp.log(upper / k) / jnp.maximum(drop, 1e-6))
    seen = jnp.clip(drop / step, FLATTEST, STEEPEST)
    threshold = jnp.where(exactly, found, jnp.where(everything, 0, between.astype(values.dtype)))
    slope = jnp.where(exactly, fall, jnp.where(everything, slope, seen.astype(values.dtype)))
    return threshold, slope, parts


def _search(comm: Comm, values: jax.Array, k: int) -> jax.Array:
    """The exact k-th largest magnitude over all workers, bit by bit, by one scalar sum a bit; 0 if there are fewer."""
    bits = jnp.finfo(values.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        reached = comm.psum(count_above(values, lax.bitcast_convert_type(candidate, values.dtype)))
        return jnp.where(reached >= k, candidate, found)

    return lax.bitcast_convert_type(comm.repeat(bits - 1, refine, jnp.zeros((), integer)), values.dtype)
