"""Exact top-k by magnitude of each of several segments of a vector."""

from collections.abc import Sequence

import jax

from .. import _check
from .._varying import alike
from ..kth_magnitude.xla import Marked
from . import xla


def select_segment_top_k(
    x: jax.Array, *, lengths: Sequence[int], quota: Sequence[int], marked: Marked | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Selects the elements of largest magnitude in each segment of ``x``, in order of index.

    Among equal magnitudes of a segment it takes those with the lowest indices. Zeros and NaN are
    never selected. So fewer elements than its quota are selected of a segment that has fewer
    others.

    All segments are searched at once, where :func:`select_top_k` would be one search for each. If
    most elements are in segments of more than 16,384, of each of which little is selected, it
    reads ``x`` once for most inputs. Otherwise, and if very many elements of one segment are
    equal, it makes a copy of ``x`` and reads that once for each bit of a magnitude. There are no
    kernels for it.

    Args:
      x: float32 or float64, shape ``(n,)``.
      lengths: of the segments, one after another, static; each is at least 1, and their sum is
        ``n``. Each rounded up to a multiple of 1024, their sum is below ``2**31``.
      quota: how many elements to select in each segment, static, at least 1.
      marked: the thresholds of :func:`segment_top_k_bounds`, and the bitmap of the elements of
        ``x`` that reach that of their segment, for a caller that found them while it computed
        ``x``. This saves a pass over ``x``. The result is the same.

    Returns:
      ``(values, indices, counts, smallest)``. The first two have shape ``(k,)``, with k the sum of
      all quotas. Indices are int32, ascending, padded with ``n``. Values have the type of ``x``,
      and are padded with 0. The others have shape ``(segments,)``: the number of selected elements
      of each segment, int32, and the smallest of their magnitudes, infinity where there is none.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; the lengths do
        not add up to its own; a length or a quota is no positive whole number; or there is no
        segment, or not one quota for each.

    >>> x = jnp.array([3.0, -1.0, 0.5, -4.0, 2.0])
    >>> values, indices, counts, smallest = select_segment_top_k(x, lengths=(2, 3), quota=(1, 2))
    >>> values, indices
    (Array([ 3., -4.,  2.], dtype=float32), Array([0, 3, 4], dtype=int32))
    >>> counts, smallest
    (Array([1, 2], dtype=int32), Array([3., 2.], dtype=float32))
    """
    x = _check.vector(x)
    for name, numbers in (("lengths", lengths), ("quota", quota)):
        for number in numbers:
            _check.positive(name, number)
    if not lengths:
        raise ValueError("there is no segment: give the length and the quota of at least one")
    if len(lengths) != len(quota):
        raise ValueError(f"lengths are of {len(lengths)} segments, and quota is of {len(quota)}: give one for each")
    if sum(lengths) != x.shape[0]:
        raise ValueError(f"the lengths add up to {sum(lengths)}, and x has {x.shape[0]} elements: name all segments")
    if not segments_fit(lengths):
        raise ValueError(
            f"segments that begin at multiples of 1024 would take {sum(xla.aligned(lengths))} places; indices are "
            "int32, so split x into parts of less than 2**31"
        )
    return xla.select_segment_top_k(*alike((x, marked)), lengths=tuple(lengths), quota=tuple(quota))


def segment_top_k_samples(lengths: Sequence[int], quota: Sequence[int]) -> list[int] | None:
    """How many elements :func:`segment_top_k_bounds` needs of each segment.

    Args:
      lengths, quota: as of :func:`select_segment_top_k`.

    Returns:
      A number for each segment. It is 0 for a short one, or one of which much is selected: its
      bound is 0. None if bounds would be of no use.
    """
    sizes = xla.sample_sizes(lengths, quota)
    return None if xla.room(lengths, quota, sizes) is None else sizes


def segment_top_k_bounds(sampled: jax.Array, lengths: Sequence[int], quota: Sequence[int]) -> jax.Array:
    """Thresholds that the k largest of each segment reach, and few others: shape ``(segments,)``.

    They are estimates. :func:`select_segment_top_k` checks them, and does without them if one of
    them does not hold.

    Args:
      sampled: for each segment the elements at :func:`sample_places`, as many as
        :func:`segment_top_k_samples` says, one segment after another.
      lengths, quota: as of :func:`select_segment_top_k`.
    """
    return xla.bounds(sampled, lengths, quota)


def segments_fit(lengths: Sequence[int]) -> bool:
    """Whether :func:`select_segment_top_k` takes so many elements.

    Args:
      lengths: of the segments.
    """
    return sum(xla.aligned(lengths)) < 2**31
