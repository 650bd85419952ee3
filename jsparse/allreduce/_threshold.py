"""A threshold that selects k elements of a vector whose parts lie on different workers."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import count_above, estimate_kth_magnitude, varying_as

from .._comm.comm import Comm

# How many elements a worker samples to estimate the magnitudes at its ranks.
SAMPLE = 16384
# A factor of two, as a difference of the bits of two float32, read as integers.
OCTAVE = 2**23
# Search exactly when more than a tenth of k elements may lie outside the ranks that workers sent.
UNCERTAIN = 10


def global_threshold(
    comm: Comm, values: jax.Array, k: int, part: jax.Array, due: jax.Array, beside: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the magnitude that k elements reach, among the ``values`` of all workers together.

    Each worker sends the magnitudes at five ranks, around the number of elements that it had above
    the last threshold. Between these ranks its count is interpolated. The threshold is where the
    interpolated counts of all workers add up to k. This takes one exchange of six words.

    The ranks follow any distribution of magnitudes. Under error feedback, magnitudes pile up right
    below the last threshold, so counts above a fixed grid of thresholds would say little.

    The threshold is searched for exactly when that is due, or when the estimate falls outside the
    range that the workers sent.

    The arithmetic is all in integers (the bits of magnitudes have the order of the magnitudes). So
    workers that decide from the same messages decide the same, on any machines.

    Args:
      comm: the workers.
      values: this worker's elements, shape ``(capacity,)``, padded with 0.
      k: how many elements are wanted, static.
      part: int32 scalar, at least 1: about how many elements this worker should expect to have
        above the threshold.
      due: bool scalar, alike on all workers: whether to search exactly.
      beside: int32, shape ``(words,)``: words that this worker sends in the same exchange.

    Returns:
      ``(threshold, parts, beside)``, alike on all workers. ``parts``, int32 of shape ``(P,)``, is
      how many elements each worker has above the threshold, or a little more. ``beside`` is what
      all workers sent, shape ``(P, words)``.
    """
    told = estimate_kth_magnitude(values, _ranks(part), sample=SAMPLE).astype(jnp.float32)
    everyone = comm.all_gather(jnp.concatenate([lax.bitcast_convert_type(told, jnp.int32), part[None], beside]))
    magnitudes, ranks, beside = everyone[:, :5], _ranks(everyone[:, 5]), everyone[:, 6:]

    # Counts are in units of 2**shift, so that their sum over the workers does not overflow.
    shift = max(0, (2 * k).bit_length() - 22, (2 * k * comm.size).bit_length() - 30)
    wanted = k >> shift
    curves = _Curves.through(magnitudes, ranks >> shift)

    def refine(i, found):
        candidate = found | (jnp.int32(1) << 30 - i)
        return jnp.where(jnp.sum(curves.counts(candidate)) >= wanted, candidate, found)

    between = lax.fori_loop(0, 31, refine, varying_as(jnp.int32(0), magnitudes))
    known = (between > 0) & (jnp.sum(curves.unknown(between)) <= wanted // UNCERTAIN)
    # A magnitude of 0 at a rank means that the worker has fewer elements than that rank. If the
    # workers have at most k elements together, the threshold is 0: all are taken.
    most = jnp.min(jnp.where(magnitudes > 0, min(2 * k, 2**31 - 2**12), ranks), axis=1)
    everything = jnp.sum((most + (1 << shift) - 1) >> shift) <= wanted

    def estimate():
        threshold = lax.bitcast_convert_type(jnp.where(everything, 0, between), jnp.float32)
        counts = (curves.counts(between) + 1) << shift
        # A little more than the interpolated count, so that the chosen messages are long enough.
        return threshold.astype(values.dtype), jnp.where(everything, most, counts + (counts >> 5) + 1)

    def search():
        found = _search(comm, values, k)
        return found, comm.all_gather(count_above(values, found))

    exactly = due | ~(known | everything)
    return *comm.switch(exactly.astype(jnp.int32), [estimate, search], replicated=True), beside


def reused_threshold(
    comm: Comm, values: jax.Array, k: int, last: jax.Array, due: jax.Array, beside: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The threshold of the last step as it is, or an exact one if that is due.

    Arguments and results are those of :func:`global_threshold`, with ``last`` in place of
    ``part``. Here ``parts`` is exact.
    """
    threshold = comm.switch(due.astype(jnp.int32), [lambda: last, lambda: _search(comm, values, k)])
    everyone = comm.all_gather(jnp.append(beside, count_above(values, threshold)))
    return threshold, everyone[:, -1], everyone[:, :-1]


def _ranks(part: jax.Array) -> jax.Array:
    """The ranks whose magnitudes a worker with ``part`` expected elements sends.

    They ascend: int32, shape ``(*part.shape, 5)``.
    """
    part = jnp.minimum(part, 2**30 - 1)
    each = (part // 2, part - part // 4, part, part + part // 4, 2 * part)
    return jnp.stack([jnp.maximum(rank, i) for i, rank in enumerate(each, 1)], axis=-1)


class _Curves(NamedTuple):
    """Each worker's count of elements above a threshold, interpolated from what the worker sent.

    The count is linear between corners. Above the first corner it falls to 0 within an octave.
    Below the last corner it is constant.

    Attributes:
      corners: descending thresholds, as the bits of a float32; each has shape ``(P,)``.
      ranks: the counts at the corners, ascending, below ``2**22``; of the same shape.
    """

    corners: list[jax.Array]
    ranks: list[jax.Array]

    @staticmethod
    def through(magnitudes: jax.Array, ranks: jax.Array) -> "_Curves":
        """Makes the curves from magnitudes (as bits) and ranks of shape ``(P, 5)``.

        A magnitude of 0 gives no information. The corner there is an octave below the one before.
        """
        corners = [magnitudes[:, 0]]
        for told in magnitudes.T[1:]:
            corners.append(jnp.where(told > 0, told, corners[-1] - OCTAVE))
        return _Curves(corners, list(ranks.T))

    def counts(self, threshold: jax.Array) -> jax.Array:
        """Each worker's count, shape ``(P,)``. It never rises with the threshold."""
        first = self.corners[0]
        counts = _share(self.ranks[0], first + OCTAVE - threshold, jnp.full_like(first, OCTAVE))
        for i, (upper, lower) in enumerate(itertools.pairwise(self.corners)):
            counts += _share(self.ranks[i + 1] - self.ranks[i], upper - threshold, upper - lower)
        return counts

    def unknown(self, threshold: jax.Array) -> jax.Array:
        """About how many elements each worker's curve may leave out: shape ``(P,)``."""
        below = jnp.where(threshold < self.corners[-1], self.ranks[-1], 0)
        return below + jnp.where(threshold > self.corners[0], self.ranks[0] // 2, 0)


def _share(amount: jax.Array, part: jax.Array, whole: jax.Array) -> jax.Array:
    """``amount * part / whole``, with ``part`` clipped to [0, whole].

    The quotient ``part / whole`` has steps of 1/256.
    """
    fine = jnp.where(whole >= 2**22, 9, 0)
    return amount * ((jnp.clip(part, 0, whole) >> fine) * 256 // jnp.maximum(whole >> fine, 1)) >> 8


def _search(comm: Comm, values: jax.Array, k: int) -> jax.Array:
    """The exact k-th largest magnitude over all workers, or 0 if there are fewer than k elements.

    It is found bit by bit, with a sum of one scalar for each bit.
    """
    bits = jnp.finfo(values.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        reached = comm.psum(count_above(values, lax.bitcast_convert_type(candidate, values.dtype)))
        return jnp.where(reached >= k, candidate, found)

    return lax.bitcast_convert_type(comm.repeat(bits - 1, refine, jnp.zeros((), integer)), values.dtype)
