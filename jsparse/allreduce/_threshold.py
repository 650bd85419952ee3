"""A threshold that selects k elements of a vector spread over the workers."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import count_above, estimate_kth_magnitude

from .._comm import Comm

# The ranks whose magnitudes each worker tells, in units of how many elements it had above the last threshold.
RANKS = (0.5, 0.8, 1.0, 1.25, 2.0)
# Elements that a worker looks at to estimate them.
SAMPLE = 16384
# The share by which a part may be longer than estimated.
MARGIN = 1 / 32
# Search exactly when workers with more than this share of k are beyond the ranks they told.
UNCERTAIN = 0.1


def global_threshold(
    comm: Comm, values: jax.Array, k: int, part: jax.Array, due: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds the magnitude that k elements reach, of all workers' ``values`` together.

    Each worker tells the magnitudes of five ranks, around the number of elements that it had above the last threshold.
    Between them its count is interpolated; where the counts add up to k is the threshold. This takes one exchange of
    six words, and follows whatever shape the magnitudes have: under error feedback they pile up right below the last
    threshold, so that counts above a grid of thresholds would say little. When it is due, or the threshold falls
    outside what the workers told, it is searched for exactly.

    Args:
      comm: the workers.
      values: this worker's elements, shape ``(capacity,)``, padded with 0.
      k: how many are wanted, static.
      part: int32 scalar, at least 1: about how many elements this worker should expect to have above the threshold.
      due: bool scalar, alike on all workers: whether to search exactly.

    Returns:
      ``(threshold, parts)``, alike on all workers: ``parts``, int32 of shape ``(P,)``, is how many elements each worker
      has above the threshold, or a little more than it.
    """
    told = estimate_kth_magnitude(values, _ranks(part), sample=SAMPLE).astype(jnp.float32)
    message = jnp.append(lax.bitcast_convert_type(told, jnp.int32), part)
    everyone = comm.all_gather(message)
    ranks = _ranks(everyone[:, -1]).astype(jnp.float32)
    magnitudes = lax.bitcast_convert_type(everyone[:, :-1], jnp.float32)

    def counts(threshold):
        """Each worker's count above a threshold, by its piecewise linear curve."""
        inside = jax.vmap(lambda m, r: jnp.interp(threshold, m[::-1], r[::-1]))(magnitudes, ranks)
        beyond = ranks[:, 0] * jnp.maximum(2 - threshold / jnp.maximum(magnitudes[:, 0], 1e-37), 0)
        return jnp.where(threshold > magnitudes[:, 0], beyond, inside)

    # The sum of the curves is piecewise linear between all that was told; k lies between two neighbours of it.
    corners = magnitudes.reshape(-1)
    totals = jax.vmap(lambda corner: jnp.sum(counts(corner)))(corners)
    enough = totals >= k
    low, high = jnp.max(jnp.where(enough, corners, -1)), jnp.min(jnp.where(enough, jnp.inf, corners))
    more, fewer = jnp.min(jnp.where(enough, totals, jnp.inf)), jnp.max(jnp.where(enough, 0, totals))
    between = low + (high - low) * (more - k) / jnp.maximum(more - fewer, 1e-6)
    beyond = jnp.where(between < magnitudes[:, -1], ranks[:, -1], 0)
    beyond += jnp.where(between > magnitudes[:, 0], ranks[:, 0] / 2, 0)
    known = (low > 0) & jnp.isfinite(high) & (jnp.sum(beyond) <= UNCERTAIN * k)

    # Where the magnitude of a rank is 0, fewer elements than that are left: if that makes k of all, take all.
    most = jnp.min(jnp.where(magnitudes > 0, jnp.inf, ranks), axis=1)
    everything = jnp.sum(most) <= k

    def estimate():
        threshold = jnp.where(everything, 0, between)
        parts = jnp.where(everything, most, counts(threshold) * (1 + MARGIN) + 2)
        return threshold.astype(values.dtype), parts.astype(jnp.int32)

    def search():
        found = _search(comm, values, k)
        return found, comm.all_gather(count_above(values, found))

    exactly = due | ~(known | everything)
    return comm.switch(exactly.astype(jnp.int32), [estimate, search], replicated=True)


def _ranks(part: jax.Array) -> jax.Array:
    """The ranks that a worker with so many elements tells: ascending, int32, shape ``(*part.shape, 5)``."""
    each = [jnp.maximum(jnp.ceil(part * rank).astype(jnp.int32), i) for i, rank in enumerate(RANKS, 1)]
    return jnp.stack(each, axis=-1)


def _search(comm: Comm, values: jax.Array, k: int) -> jax.Array:
    """The exact k-th largest magnitude over all workers, bit by bit, by one scalar sum a bit; 0 if there are fewer."""
    bits = jnp.finfo(values.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        reached = comm.psum(count_above(values, lax.bitcast_convert_type(candidate, values.dtype)))
        return jnp.where(reached >= k, candidate, found)

    return lax.bitcast_convert_type(comm.repeat(bits - 1, refine, jnp.zeros((), integer)), values.dtype)
