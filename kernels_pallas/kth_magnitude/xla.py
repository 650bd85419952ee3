"""The exact k-th largest magnitude in plain JAX.

The bits of magnitudes, read as integers, have the same order as the magnitudes. So the k-th
largest can be found bit by bit: for each bit a pass counts the elements at or above a candidate.
On a long vector those passes are avoided. A sample gives a lower bound of the k-th magnitude, one
compaction takes all elements at or above that bound, and the search runs in this superset of the
k largest. The code checks that the superset does hold the k largest.

It may not, where a vector was quantized and very many elements are equal. Then the k-th magnitude
is likely the bound, or one of the next larger magnitudes in the sample. Each takes a pass. If it
is none of them, the whole vector is searched bit by bit.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import bitmap
from .._varying import varying_as
from ..select_above.xla import above, count_above, take

# On a CPU one of about so many elements is in the sample, within limits. All are powers of 2.
SEGMENT = 64
SMALLEST_SAMPLE, LARGEST_SAMPLE = 16384, 65536
# The margin of the superset on either side of k, in standard deviations of the sampled rank.
MARGIN = 4
# How many magnitudes above the lower bound are tried before the whole vector is searched.
STEPS = 3


def search(x: jax.Array, k: ArrayLike) -> jax.Array:
    """The k-th largest magnitude, by one counting pass for each bit."""
    return by_bits(lambda threshold: count_above(x, threshold), k, varying_as(jnp.zeros((), x.dtype), x))


def by_bits(count: Callable[[jax.Array], jax.Array], k: ArrayLike, zeros: jax.Array) -> jax.Array:
    """The largest thresholds that ``k`` elements reach, by one count for each bit.

    Args:
      count: how many elements reach thresholds.
      k: how many are to reach them.
      zeros: of the thresholds' shape and type.
    """
    bits = jnp.finfo(zeros.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        return jnp.where(count(lax.bitcast_convert_type(candidate, zeros.dtype)) >= k, candidate, found)

    found = lax.fori_loop(0, bits - 1, refine, lax.bitcast_convert_type(zeros, integer))
    return lax.bitcast_convert_type(found, zeros.dtype)


def sample_size(n: int) -> int:
    """How many of ``n`` elements are in the sample on a CPU."""
    return power_of_2(n // SEGMENT, SMALLEST_SAMPLE, LARGEST_SAMPLE)


def power_of_2(most: int, least: int, limit: int) -> int:
    """The largest power of two up to ``most``, between two powers of two."""
    return 2 ** (min(max(most, least), limit).bit_length() - 1)


class Primitives(NamedTuple):
    """The parts of the algorithm that are faster in one way on a CPU, and in another on a GPU.

    Attributes:
      search: computes the k-th largest magnitude of a vector, by passes over the whole vector.
      compact: computes ``(values, indices, count)`` of the elements that reach a threshold, in
        buffers of a given capacity.
      largest: computes the same of the k largest elements of a vector, by passes over the whole
        vector.
      sample_size: computes how many of n elements are in the sample. A vector of up to four times
        as many is searched whole.
    """

    search: Callable[[jax.Array, ArrayLike], jax.Array]
    compact: Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]]
    largest: Callable[[jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]]
    sample_size: Callable[[int], int]


def largest(
    x: jax.Array, k: int, search: Callable[[jax.Array, ArrayLike], jax.Array] = search
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k largest elements; of those equal to the k-th, the ones with the lowest indices."""
    return take_reached(x, k, reached(x, search(x, k)))


PLAIN = Primitives(search, lambda x, threshold, capacity: take(x, above(x, threshold), capacity), largest, sample_size)


def kth_magnitude(x: jax.Array, k: int, primitives: Primitives = PLAIN) -> jax.Array:
    if k >= x.shape[0]:
        return varying_as(jnp.zeros((), x.dtype), x)
    capacity = superset_capacity(x.shape[0], k, primitives.sample_size(x.shape[0]))
    if capacity is None:
        return primitives.search(x, k)
    found = superset(x, k, capacity, primitives)
    return lax.cond(
        found.holds,
        lambda: primitives.search(found.values, k),
        lambda: search_upwards(x, k, found.lower, primitives).threshold,
    )


def estimate_kth_magnitude(x: jax.Array, k: jax.Array, size: int, primitives: Primitives = PLAIN) -> jax.Array:
    if x.shape[0] > 4 * size:
        k = jnp.maximum(jnp.round(k * (size / x.shape[0])).astype(jnp.int32), 1)
        x = sample(x, size)
    return jnp.vectorize(lambda rank: primitives.search(x, rank))(k)


def superset_capacity(n: int, k: int, size: int) -> int | None:
    """The capacity of the superset, in elements; None if searching the whole vector is as good.

    Args:
      n, k: the lengths of the vector and of what is selected.
      size: the length of the sample.
    """
    if n <= 4 * size:
        return None
    capacity = most_above_bound(n, k, size)
    # Round up. XLA divides a loop between the cores of a CPU, and unequal parts are far slower.
    capacity = -(-capacity // (size // 32)) * (size // 32)
    return capacity if capacity <= n // 4 else None


def most_above_bound(n: int, k: int, size: int) -> int:
    """How many of ``n`` elements reach the bound of ``k`` from a sample, if it holds."""
    expected = k / n * size
    return math.ceil((expected + 2 * MARGIN * math.sqrt(expected) + MARGIN**2) * n / size)


def rank_of_bound(n: int, k: int, size: int) -> int:
    """The rank in a sample of the magnitude that is likely below the k-th largest of ``n``."""
    expected = k / n * size
    return math.ceil(expected + MARGIN * math.sqrt(expected) + 1)


class Marked(NamedTuple):
    """A threshold, and which elements of a vector reach it.

    Attributes:
      threshold: a scalar.
      words: a bitmap.
    """

    threshold: jax.Array
    words: jax.Array


def lower_bound(sampled: jax.Array, n: int, k: int, primitives: Primitives = PLAIN) -> jax.Array:
    """A magnitude that is likely below the k-th largest of ``n``, and above that of a superset.

    Args:
      sampled: from :func:`sample`.
      n, k: as of the whole vector.
    """
    return primitives.search(sampled, rank_of_bound(n, k, sampled.shape[0]))


class Superset(NamedTuple):
    """The elements of a vector at or above a lower bound of the k-th magnitude.

    Attributes:
      values, indices: shape ``(capacity,)``.
      lower: the bound, from a sample.
      holds: whether they include the ``k`` largest, or all non-zero elements.
    """

    values: jax.Array
    indices: jax.Array
    lower: jax.Array
    holds: jax.Array


def superset(x: jax.Array, k: int, capacity: int, primitives: Primitives, marked: Marked | None = None) -> Superset:
    """Lists the elements at or above a lower bound of the k-th magnitude.

    Args:
      x, k, primitives: as of :func:`in_superset`.
      capacity: from :func:`superset_capacity`.
      marked: the lower bound, and what reaches it, for a caller that already has them.
    """
    if marked is None:
        lower = lower_bound(sample(x, primitives.sample_size(x.shape[0])), x.shape[0], k, primitives)
        values, indices, count = primitives.compact(x, lower, capacity)
    else:
        lower = marked.threshold
        values, indices, count = take(x, marked.words, capacity)
    holds = (count <= capacity) & ((count >= k) | (lower <= jnp.finfo(x.dtype).tiny))
    return Superset(values, indices, lower, holds)


def in_superset(
    x: jax.Array,
    k: int,
    choose: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
    primitives: Primitives = PLAIN,
    marked: Marked | None = None,
    otherwise: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies ``choose`` to a superset of the k largest elements, or to all of ``x``.

    The superset is used if it has at most a quarter of the elements of ``x``, and if it does hold
    the k largest.

    Args:
      x: the vector.
      k: how many of the largest elements the superset must hold.
      choose: computes ``(values, indices, count)`` of a vector. It may select only from the k
        largest elements, and from elements that are in every such superset.
      primitives: the parts that depend on the device.
      marked: as of :func:`superset`.
      otherwise: computes the same of ``x``, given the lower bound, if the superset does not hold
        them; with None ``choose`` does.

    Returns:
      ``(values, indices, count)``, with the indices of elements in ``x``.
    """
    capacity = superset_capacity(x.shape[0], k, (PLAIN if marked else primitives).sample_size(x.shape[0]))
    if capacity is None:
        return choose(x)
    found = superset(x, k, capacity, primitives, marked)

    def of_superset():
        kept, places, count = choose(found.values)
        return kept, found.indices.at[places].get(mode="fill", fill_value=x.shape[0]), count

    return lax.cond(found.holds, of_superset, lambda: otherwise(found.lower) if otherwise else choose(x))


class Reached(NamedTuple):
    """A magnitude, and two bitmaps of the elements that reach it.

    Attributes:
      threshold: the magnitude.
      words: the elements of this magnitude, and the larger ones.
      larger: the larger ones.
    """

    threshold: jax.Array
    words: jax.Array
    larger: jax.Array


def reached(x: jax.Array, threshold: jax.Array) -> Reached:
    """Marks what reaches a magnitude."""
    return Reached(threshold, above(x, threshold), larger(x, threshold))


def take_reached(x: jax.Array, k: int, kth: Reached) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes the k largest elements, given the k-th magnitude and what reaches it."""
    equal = kth.words & ~kth.larger
    return take(x, kth.larger | bitmap.take_first(equal, k - bitmap.count(kth.larger)), k)


def larger(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """The bitmap of the elements whose magnitude is larger than a threshold."""
    return above(x, beyond(threshold))


def beyond(thresholds: jax.Array) -> jax.Array:
    """The thresholds that exactly the elements reach whose magnitude is larger than these."""
    following = jnp.nextafter(thresholds, jnp.full_like(thresholds, jnp.inf))
    return jnp.where(thresholds == jnp.inf, jnp.nan, following)  # Nothing reaches NaN.


def search_upwards(x: jax.Array, k: int, lower: jax.Array, primitives: Primitives) -> Reached:
    """The k-th largest magnitude of a vector in which each magnitude occurs often.

    It is likely a lower bound, or one of the next larger magnitudes in a sample.

    Args:
      x, k, primitives: as of :func:`in_superset`.
      lower: the bound.
    """
    magnitudes = jnp.abs(sample(x, primitives.sample_size(x.shape[0])))

    def ascend(threshold: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
        threshold = jnp.min(jnp.where(magnitudes > threshold, magnitudes, jnp.inf))
        return threshold, larger(x, threshold)

    threshold, beyond = lower, larger(x, lower)
    for _ in range(STEPS):  # Not a loop of XLA: on a CPU a pass takes twice as long in one.
        is_below = bitmap.count(beyond) >= k
        threshold, beyond = lax.cond(is_below, ascend, lambda *unchanged: unchanged, threshold, beyond)
    found = Reached(threshold, above(x, threshold), beyond)
    is_kth = (bitmap.count(found.words) >= k) & (bitmap.count(found.larger) < k)
    return lax.cond(is_kth, lambda: found, lambda: reached(x, primitives.search(x, k)))


def sample(x: jax.Array, size: int) -> jax.Array:
    """Takes one element of each of ``size`` segments of nearly equal length.

    The places within the segments follow no period.
    """
    return x[sample_places(lax.iota(jnp.uint32, size), x.shape[0], size).astype(jnp.int32)]


def sample_places(segments: Any, n: int, size: int) -> Any:
    """The places in a vector of ``n`` elements that :func:`sample` takes.

    Args:
      segments: uint32, numbers of segments: an array of JAX or of NumPy.
      n: the length of the vector.
      size: the number of all segments.

    Returns:
      uint32, of the same shape. They ascend with the segments.
    """
    length, longer = divmod(n, size)
    begin = segments * np.uint32(length) + segments.clip(max=np.uint32(longer))
    # The high bits of Knuth's multiplicative hash (golden ratio).
    return begin + ((segments * np.uint32(2654435769)) >> np.uint32(8)) % np.uint32(length)
