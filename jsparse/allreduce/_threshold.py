"""A threshold that selects k elements of a vector spread over the workers."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import count_above, estimate_kth_magnitude, varying_as

from .._comm.comm import Comm

# Elements that a worker looks at to estimate the magnitudes of ranks.
SAMPLE = 16384
# In the bits of a float32, read as an integer: a factor of two.
OCTAVE = 2**23
# Search exactly when workers with more than this part of k are beyond the ranks they told.
UNCERTAIN = 10


def global_threshold(
    comm: Comm, values: jax.Array, k: int, part: jax.Array, due: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds the magnitude that k elements reach, of all workers' ``values`` together.

    Each worker tells the magnitudes of five ranks, around the number of elements that it had above the last threshold.
    Between them its count is interpolated; where the counts add up to k is the threshold. This takes one exchange of
    six words, and follows whatever shape the magnitudes have: under error feedback they pile up right below the last
    threshold, so that counts above a grid of thresholds would say little. When it is due, or the threshold falls
    outside what the workers told, it is searched for exactly.

    All of it is integer arithmetic (a magnitude's bits order as it does): what the workers decide from the same
    messages is the same, whatever machines they are.

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
    everyone = comm.all_gather(jnp.append(lax.bitcast_convert_type(told, jnp.int32), part))
    magnitudes, ranks = everyone[:, :-1], _ranks(everyone[:, -1])

    # Counts are added up in units of 2**shift, so that no sum of them over the workers overflows.
    shift = max(0, (2 * k).bit_length() - 22, (2 * k * comm.size).bit_length() - 30)
    wanted = k >> shift
    curves = _Curves.through(magnitudes, ranks >> shift)

    def refine(i, found):
        candidate = found | (jnp.int32(1) << 30 - i)
        return jnp.where(jnp.sum(curves.counts(candidate)) >= wanted, candidate, found)

    between = lax.fori_loop(0, 31, refine, varying_as(jnp.int32(0), magnitudes))
    known = (between > 0) & (jnp.sum(curves.unknown(between)) <= wanted // UNCERTAIN)
    # Where the magnitude of a rank is 0, fewer elements than that are left: if that makes k of all, take all.
    most = jnp.min(jnp.where(magnitudes > 0, min(2 * k, 2**31 - 2**12), ranks), axis=1)
    everything = jnp.sum((most + (1 << shift) - 1) >> shift) <= wanted

    def estimate():
        threshold = lax.bitcast_convert_type(jnp.where(everything, 0, between), jnp.float32)
        counts = (curves.counts(between) + 1) << shift
        # A little more than was interpolated, so that the messages chosen by it are long enough.
        return threshold.astype(values.dtype), jnp.where(everything, most, counts + (counts >> 5) + 1)

    def search():
        found = _search(comm, values, k)
        return found, comm.all_gather(count_above(values, found))

    exactly = due | ~(known | everything)
    return comm.switch(exactly.astype(jnp.int32), [estimate, search], replicated=True)


def _ranks(part: jax.Array) -> jax.Array:
    """The ranks that a worker with so many elements tells: ascending, int32, shape ``(*part.shape, 5)``."""
    part = jnp.minimum(part, 2**30 - 1)
    each = (part // 2, part - part // 4, part, part + part // 4, 2 * part)
    return jnp.stack([jnp.maximum(rank, i) for i, rank in enumerate(each, 1)], axis=-1)


class _Curves(NamedTuple):
    """Each worker's count above a threshold, as it follows from what the worker told.

    Linear between corners; above the first it falls to nothing within an octave; below the last it stays.

    Attributes:
      corners: descending thresholds, as the bits of a float32; each has shape ``(P,)``.
      ranks: the counts there, ascending, below ``2**22``; likewise.
    """

    corners: list[jax.Array]
    ranks: list[jax.Array]

    @staticmethod
    def through(magnitudes: jax.Array, ranks: jax.Array) -> "_Curves":
        """From bits and ranks of shape ``(P, 5)``. A magnitude of 0 says nothing: an octave's fall takes its place."""
        corners = [magnitudes[:, 0]]
        for told in magnitudes.T[1:]:
            corners.append(jnp.where(told > 0, told, corners[-1] - OCTAVE))
        return _Curves(corners, list(ranks.T))

    def counts(self, threshold: jax.Array) -> jax.Array:
        """Shape ``(P,)``, never rising with the threshold."""
        first = self.corners[0]
        counts = self.ranks[0] - _share(self.ranks[0], threshold - first, jnp.full_like(first, OCTAVE))
        for i, (upper, lower) in enumerate(itertools.pairwise(self.corners)):
            counts += _share(self.ranks[i + 1] - self.ranks[i], upper - threshold, upper - lower)
        return counts

    def unknown(self, threshold: jax.Array) -> jax.Array:
        """How many elements of each worker, about, its curve may leave out: shape ``(P,)``."""
        below = jnp.where(threshold < self.corners[-1], self.ranks[-1], 0)
        return below + jnp.where(threshold > self.corners[0], self.ranks[0] // 2, 0)


def _share(amount: jax.Array, part: jax.Array, whole: jax.Array) -> jax.Array:
    """``amount * part / whole``, with ``part`` clipped to [0, whole] and the quotient in steps of 1/256."""
    fine = jnp.where(whole >= 2**22, 9, 0)
    return amount * ((jnp.clip(part, 0, whole) >> fine) * 256 // jnp.maximum(whole >> fine, 1)) >> 8


def _search(comm: Comm, values: jax.Array, k: int) -> jax.Array:
    """The exact k-th largest magnitude over all workers, bit by bit, by one scalar sum a bit; 0 if there are fewer."""
    bits = jnp.finfo(values.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        reached = comm.psum(count_above(values, lax.bitcast_convert_type(candidate, values.dtype)))
        return jnp.where(reached >= k, candidate, found)

    return lax.bitcast_convert_type(comm.repeat(bits - 1, refine, jnp.zeros((), integer)), values.dtype)
