"""Exact top-k of each segment in plain JAX.

It is the algorithm of ``select_top_k``, for all segments at once. A sample of each segment gives a
lower bound of its k-th magnitude, one compaction takes all elements at or above the bound of their
segment, and a search bit by bit finds the k-th magnitude of each segment among them.

For the search, each segment begins with a new square of 32 by 32 elements. So all elements of a
square are compared with one number, and what is counted in a square is counted in one segment.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import bitmap
from .._in_place import zero_of
from .._varying import varying_as
from ..kth_magnitude.xla import Marked, beyond, by_bits, most_above_bound, power_of_2, rank_of_bound, sample_places
from ..select_above.xla import reaches

# About one of so many elements of a segment is in its sample, within limits. All are powers of 2.
SPREAD = 128
SMALLEST_SAMPLE, LARGEST_SAMPLE = 4096, 16384


class Selected(NamedTuple):
    """The result of :func:`select_segment_top_k`."""

    values: jax.Array
    indices: jax.Array
    counts: jax.Array
    smallest: jax.Array


def sample_sizes(lengths: Sequence[int], quota: Sequence[int]) -> list[int]:
    """How many elements of each segment are in its sample: a multiple of a square, or none."""
    sizes = []
    for n, k in zip(lengths, quota, strict=True):
        size = power_of_2(n // SPREAD, SMALLEST_SAMPLE, LARGEST_SAMPLE)
        sizes.append(size if n > 4 * size and most_above_bound(n, k, size) <= n // 4 else 0)
    return sizes


def room(lengths: Sequence[int], quota: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The most elements that reach their bounds, if all hold; None if they are nearly all."""
    each = [most_above_bound(n, k, size) if size else n for n, k, size in zip(lengths, quota, sizes, strict=True)]
    # Rounded up to an even number of squares: XLA divides a loop between the cores of a CPU.
    total = -(-sum(each) // bitmap.STRETCH) * bitmap.STRETCH
    return total if total <= sum(lengths) // 4 else None


def bounds(sampled: jax.Array, lengths: Sequence[int], quota: Sequence[int]) -> jax.Array:
    sizes = sample_sizes(lengths, quota)
    ranks = [rank_of_bound(n, k, size) for n, k, size in zip(lengths, quota, sizes, strict=True)]
    segment = np.repeat(np.arange(len(sizes)), np.array(sizes) // bitmap.SQUARE)
    among = _Squares.of(sampled, jnp.asarray(segment, jnp.int32), len(sizes))
    return jnp.where(jnp.array(sizes) > 0, among.kth_magnitudes(jnp.array(ranks, jnp.int32)), 0)


def select_segment_top_k(
    x: jax.Array, marked: Marked | None, *, lengths: tuple[int, ...], quota: tuple[int, ...]
) -> Selected:
    sizes = sample_sizes(lengths, quota)
    capacity = room(lengths, quota, sizes)
    if capacity is None:
        return _of_all(x, lengths, quota)
    if marked is None:
        at = [
            begin + sample_places(lax.iota(jnp.uint32, size), n, size).astype(jnp.int32)
            for begin, n, size in zip(_begins(lengths), lengths, sizes, strict=True)
            if size
        ]
        threshold = bounds(x[jnp.concatenate(at)], lengths, quota)
        each = [jnp.broadcast_to(threshold[i], (n,)) for i, n in enumerate(lengths)]
        marked = Marked(threshold, bitmap.pack(reaches(x, jnp.concatenate(each))))
    indices, count = bitmap.members(marked.words, capacity, x.shape[0])
    edges = jnp.append(bitmap.rank(marked.words, jnp.asarray(_begins(lengths), jnp.int32)), count)
    counts = jnp.diff(edges)
    enough = (counts >= jnp.array(quota)) | (marked.threshold <= jnp.finfo(x.dtype).tiny)
    return lax.cond(
        (count <= capacity) & jnp.all(enough),
        lambda: _of_candidates(x, indices, edges, quota),
        lambda: _of_all(x, lengths, quota),
    )


def aligned(lengths: Sequence[int]) -> list[int]:
    """How many places each segment takes in whole squares."""
    return [-(-n // bitmap.SQUARE) * bitmap.SQUARE for n in lengths]


def _begins(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]


class _Squares(NamedTuple):
    """Elements of several segments, each of which begins with a new square.

    Attributes:
      x: shape ``(squares, 32, 32)``. What fills up a square is 0.
      segment: int32, shape ``(squares,)``: the segment of each square; ascending.
      number: how many segments there are.
    """

    x: jax.Array
    segment: jax.Array
    number: int

    @staticmethod
    def of(x: jax.Array, segment: jax.Array, number: int) -> "_Squares":
        return _Squares(x.reshape(-1, bitmap.WORD, bitmap.WORD), segment, number)

    def spread(self, figures: jax.Array) -> jax.Array:
        """A figure of each segment, for the elements of its squares."""
        return figures[self.segment][:, None, None]

    def count(self, words: jax.Array) -> jax.Array:
        """How many elements of each segment are marked: int32, shape ``(number,)``.

        Args:
          words: uint32, 32 for each square: of a bitmap, or from ``bitmap.pack_squares``.
        """
        counts = lax.population_count(words).reshape(-1, bitmap.WORD)
        of_squares = jnp.sum(counts, axis=1, dtype=jnp.int32)
        start = varying_as(jnp.zeros(self.number, jnp.int32), of_squares)
        return start.at[varying_as(self.segment, of_squares)].add(of_squares, indices_are_sorted=True)

    def kth_magnitudes(self, k: jax.Array) -> jax.Array:
        """The k-th largest magnitude of each segment, or 0."""

        def count(thresholds: jax.Array) -> jax.Array:
            return self.count(bitmap.pack_squares(reaches(self.x, self.spread(thresholds))))

        return by_bits(count, k, varying_as(jnp.zeros(self.number, self.x.dtype), self.x))

    def select(self, quota: tuple[int, ...], index_of: Callable[[jax.Array], jax.Array]) -> Selected:
        """Selects.

        Args:
          quota: how many elements of each segment.
          index_of: the indices of the elements at some places, int32; it is also asked for the
            place ``x.size``.
        """
        k = jnp.array(quota, jnp.int32)
        kth = self.kth_magnitudes(k)
        at_least, larger = (
            bitmap.pack(reaches(self.x, self.spread(threshold)).reshape(-1)) for threshold in (kth, beyond(kth))
        )
        counts, certain = self.count(at_least), self.count(larger)
        # Of those equal to the k-th, the first ones of each segment, up to this rank among all.
        equal = counts - certain
        last = jnp.cumsum(equal, dtype=jnp.int32) - equal + k - certain
        words = larger | bitmap.take_first(at_least & ~larger, jnp.repeat(last[self.segment], bitmap.WORD))
        places, _ = bitmap.members(words, sum(quota), self.x.size)
        values = self.x.reshape(-1).at[places].get(mode="fill", fill_value=0)
        counts = jnp.minimum(counts, k)
        end = jnp.cumsum(counts, dtype=jnp.int32)
        own = varying_as(jnp.zeros(values.shape, jnp.int32), end).at[end].add(1, mode="drop")
        smallest = varying_as(jnp.full(self.number, jnp.inf, values.dtype), values)
        smallest = smallest.at[jnp.cumsum(own, dtype=jnp.int32)].min(
            jnp.where(places < self.x.size, jnp.abs(values), jnp.inf), mode="drop", indices_are_sorted=True
        )
        return Selected(values, index_of(places), counts, smallest)


def _of_candidates(x: jax.Array, indices: jax.Array, edges: jax.Array, quota: tuple[int, ...]) -> Selected:
    """Selects among some elements of a vector.

    Args:
      x: the vector.
      indices: of the elements, in ascending order, padded.
      edges: where in ``indices`` each segment begins, and at the end how many elements there are.
      quota: as of :func:`select_segment_top_k`.
    """
    n, number, counts = x.shape[0], len(quota), jnp.diff(edges)
    squares = indices.shape[0] // bitmap.SQUARE + number
    used = -(-counts // bitmap.SQUARE)
    first = jnp.cumsum(used, dtype=jnp.int32) - used
    segment = varying_as(jnp.zeros(squares, jnp.int32), x).at[first[1:]].add(1, mode="drop")
    segment = jnp.cumsum(segment, dtype=jnp.int32)
    before = (lax.iota(jnp.int32, squares) - first[segment]) * bitmap.SQUARE
    inside = before[:, None] + lax.iota(jnp.int32, bitmap.SQUARE)[None]
    place = jnp.where(inside < counts[segment][:, None], edges[segment][:, None] + inside, indices.shape[0]).reshape(-1)
    at = indices.at[place].get(mode="fill", fill_value=n)
    among = _Squares.of(x.at[at].get(mode="fill", fill_value=0), segment, number)
    return among.select(quota, lambda places: at.at[places].get(mode="fill", fill_value=n))


def _of_all(x: jax.Array, lengths: tuple[int, ...], quota: tuple[int, ...]) -> Selected:
    """Selects among all elements of a vector."""
    begins, starts = _begins(lengths), _begins(aligned(lengths))
    segment = np.repeat(np.arange(len(lengths)), np.array(aligned(lengths)) // bitmap.SQUARE)
    segment = jnp.asarray(segment, jnp.int32)
    shift = jnp.asarray(np.subtract(starts, begins), jnp.int32)
    zero = zero_of(x[0] == 0)
    apart = varying_as(jnp.zeros(sum(aligned(lengths)), x.dtype), x)
    for start, begin, n in zip(starts, begins, lengths, strict=True):
        apart = lax.dynamic_update_slice(apart, x[begin : begin + n], (start + zero,))

    def index_of(places: jax.Array) -> jax.Array:
        own = shift[segment.at[places // bitmap.SQUARE].get(mode="clip")]
        return jnp.where(places < apart.size, places - own, x.shape[0])

    return _Squares.of(apart, segment, len(lengths)).select(quota, index_of)
