"""Bitmaps: sets of indices, with one bit for each element and 32 bits to a word.

A set of indices below ``n`` takes ``ceil(n / 32)`` words. Bit ``i % 32`` of word ``i // 32``
stands for index ``i``. To count a set, to rank its members, to intersect two sets and to list the
members in ascending order, it is enough to go over the words, which number 1/32 of the elements.
So a selection of ``k`` out of ``n`` elements reads the array of length ``n`` once, and needs
little memory for the rest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

WORD = 32
SQUARE = WORD * WORD
STRETCH = 2 * SQUARE
# How many words are counted together where members are ranked and listed: the four counts, each of
# at most 32, are the bytes of one word.
GROUP = 4


def pack(mask: jax.Array) -> jax.Array:
    """Packs a mask of any length into a bitmap.

    Args:
      mask: booleans, shape ``(n,)``.

    Returns:
      uint32 words, shape ``(ceil(n / 32),)``.

    >>> pack(jnp.array([True, False, True]))
    Array([5], dtype=uint32)
    """
    columns, tail = _columns(mask)
    return _of_columns([columns], tail)


def of_squares(columns: Sequence[jax.Array], tail: jax.Array) -> jax.Array:
    """The bitmap of a mask that was packed square by square.

    Args:
      columns: what :func:`pack_squares` makes of the mask's squares, in order.
      tail: booleans: the mask after the last square.
    """
    return _of_columns(columns, _pack_rows(tail))


def _of_columns(columns: Sequence[jax.Array], tail: jax.Array) -> jax.Array:
    # Each word holds a column of a square, so its bits form the transposed square. The columns of
    # that are the rows of the mask. Put together before, the columns would take three times as
    # long on a CPU: XLA looks for the part that a column is in with each of its bits.
    words = [pack_squares((part[:, :, None] & _bits()[None, None]) != 0).reshape(-1) for part in columns]
    words = [part for part in [*words, tail] if part.shape[0]]
    return jnp.concatenate(words) if words else tail


def _pack_rows(mask: jax.Array) -> jax.Array:
    rows = jnp.pad(mask, (0, -mask.shape[0] % WORD)).reshape(-1, WORD)
    return jnp.sum(jnp.where(rows, _bits(), jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def _columns(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs the mask's squares of 32 by 32 elements by columns, and the rest by rows.

    The squares cover a multiple of ``STRETCH`` elements: XLA divides a loop between the cores of
    a CPU, and vectorizes it best if each core gets an equal part.

    Returns:
      ``(columns, tail)``: the columns of the squares, one word each, shape ``(squares, 32)``; and
      the words of the elements after the last square.
    """
    whole = mask.shape[0] // STRETCH * STRETCH
    return pack_squares(mask[:whole].reshape(-1, WORD, WORD)), _pack_rows(mask[whole:])


def pack_squares(squares: jax.Array) -> jax.Array:
    """Packs each column of each square into a word, from shape ``(m, 32, 32)`` to ``(m, 32)``.

    On a CPU, XLA vectorizes this sum over columns three times better than a sum over rows.
    """
    return jnp.sum(jnp.where(squares, _bits()[:, None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def _bits() -> jax.Array:
    return jnp.uint32(1) << lax.iota(jnp.uint32, WORD)


def count(words: jax.Array) -> jax.Array:
    """The number of members, int32."""
    return jnp.sum(lax.population_count(words), dtype=jnp.int32)


def count_mask(mask: jax.Array) -> jax.Array:
    """The number of true elements of a mask, int32.

    It counts bits of words, which on a CPU is many times faster than a sum of the mask.
    """
    columns, tail = _columns(mask)
    return count(columns) + count(tail)


def mark(words: jax.Array, indices: jax.Array) -> jax.Array:
    """Adds members to a bitmap.

    Args:
      words: the bitmap.
      indices: int32, shape ``(m,)``. No index may occur twice. Indices past the bitmap are
        dropped.

    Returns:
      The bitmap with the bits of these indices set.
    """
    word, bit = _locate(indices)
    already = words.at[word].get(mode="fill", fill_value=0) & bit
    return words.at[word].add(bit & ~already, mode="drop")


def contains(words: jax.Array, indices: jax.Array) -> jax.Array:
    """Whether each index is a member: booleans, in the shape of ``indices``.

    An index past the bitmap gives False.
    """
    word, bit = _locate(indices)
    return (words.at[word].get(mode="fill", fill_value=0) & bit) != 0


def starts(words: jax.Array) -> jax.Array:
    """For each word, the number of members in the words before it: int32, shape ``(words,)``."""
    counts = _Counts.of(words)
    before = counts.before[:, None] + _byte(counts.ends[:, None] << 8, lax.iota(jnp.int32, GROUP)[None])
    return before.reshape(-1)[: words.shape[0]]


def rank(words: jax.Array, indices: jax.Array) -> jax.Array:
    """For each index, the number of smaller members: int32, in the shape of ``indices``.

    An index past the bitmap gets a rank above those of all members.
    """
    if not words.shape[0]:
        return jnp.full_like(indices, jnp.iinfo(jnp.int32).max)
    counts = _Counts.of(words)
    word, bit = _locate(indices)
    from_here_on = lax.population_count(words.at[word].get(mode="clip") & ~(bit - 1)).astype(jnp.int32)
    group, place = word >> 2, word & (GROUP - 1)
    up_to_word = counts.before.at[group].get(mode="clip") + _byte(counts.ends.at[group].get(mode="clip"), place)
    return jnp.where(word < words.shape[0], up_to_word - from_here_on, jnp.iinfo(jnp.int32).max)


class _Counts(NamedTuple):
    """How many members there are up to each word, in groups of four words.

    Attributes:
      before: int32: the number of members before each group.
      ends: uint32: for each word of a group a byte, the lowest one for the first: the number of
        members of the group up to the end of this word.
      total: int32 scalar: the number of all members.
    """

    before: jax.Array
    ends: jax.Array
    total: jax.Array

    @staticmethod
    def of(words: jax.Array) -> "_Counts":
        counts = _in_fours(lax.population_count(words)) << (8 * lax.iota(jnp.uint32, GROUP))[None]
        # The product has in each byte the sum of the counts up to there.
        ends = jnp.sum(counts, axis=1, dtype=jnp.uint32) * jnp.uint32(0x01010101)
        groups = (ends >> 24).astype(jnp.int32)
        # A scan over a fourth of the groups, then additions, take half the time of a scan.
        first, second, third, fourth = _in_fours(groups).T
        after = jnp.cumsum(first + second + third + fourth, dtype=jnp.int32)
        before = [after - fourth - third - second - first, after - fourth - third - second, after - fourth - third]
        before = jnp.stack([*before, after - fourth], axis=1).reshape(-1)[: groups.shape[0]]
        # Not the last of these sums: on a GPU XLA would compute it together with what depends on
        # other workers, and all that is listed would wait for them.
        return _Counts(_stored(before), ends, jnp.sum(groups, dtype=jnp.int32))


def _in_fours(x: jax.Array) -> jax.Array:
    return jnp.pad(x, (0, -x.shape[0] % 4)).reshape(-1, 4)


def _byte(word: jax.Array, number: jax.Array) -> jax.Array:
    return (word >> (8 * number).astype(jnp.uint32) & 255).astype(jnp.int32)


def _stored(ascending: jax.Array) -> jax.Array:
    """The same ascending values, as an array in memory.

    On a CPU, XLA computes what a gather reads anew for each element that is read, however many
    there are. The result of a reduction over windows it computes once. The larger one of each
    value and the one before it is that value.
    """
    least = np.array(jnp.iinfo(ascending.dtype).min, ascending.dtype)
    return lax.reduce_window(ascending, least, lax.max, (2,), (1,), [(1, 0)])


def take_first(words: jax.Array, quota: ArrayLike) -> jax.Array:
    """The bitmap of the ``quota`` smallest members."""
    left = jnp.clip(quota - starts(words), 0, WORD)
    below = (jnp.uint32(1) << _nth_bit(words, left).astype(jnp.uint32)) - 1
    return jnp.where(left >= lax.population_count(words).astype(jnp.int32), words, words & below)


def take_circle(words: jax.Array, quota: ArrayLike, start: ArrayLike) -> jax.Array:
    """The bitmap of ``quota`` consecutive members, from the member of rank ``start`` on.

    ``start`` counts modulo the number of members, and after the last member comes the first one.
    If there are at most ``quota`` members, all of them are taken.

    >>> take_circle(jnp.array([0b10110], jnp.uint32), 2, start=2)
    Array([18], dtype=uint32)
    """
    total = count(words)
    wrapped, gap = circle(total, quota, start)
    last = take_first(words, jnp.where(total > quota, gap + quota, total))
    return take_first(words, wrapped) | (last & ~take_first(words, wrapped + gap))


def members(
    words: jax.Array, capacity: int, fill: int, start: ArrayLike = 0, limit: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Lists the members of a bitmap in ascending order.

    If there are more than ``limit`` members, it takes ``limit`` consecutive ones, from rank
    ``start`` (modulo the count) on; after the last member comes the first one. They are still
    listed in ascending order. A caller that adds ``limit`` to ``start`` each time takes every
    member in turn.

    Args:
      words: the bitmap.
      capacity: the length of the result, static.
      fill: the value of unused places.
      start: int32 scalar, the rank of the first member that is taken.
      limit: int32 scalar, at most ``capacity``, which is the default.

    Returns:
      ``(indices, count)``: the members, int32, shape ``(capacity,)``; and the number of members,
      an int32 scalar, which may exceed ``limit``.

    >>> members(jnp.array([0b10110], jnp.uint32), 2, fill=5)
    (Array([1, 2], dtype=int32), Array(3, dtype=int32))
    >>> members(jnp.array([0b10110], jnp.uint32), 2, fill=5, start=2)
    (Array([1, 4], dtype=int32), Array(3, dtype=int32))
    """
    slot = lax.iota(jnp.int32, capacity)
    if not words.shape[0]:
        return jnp.full_like(slot, fill), jnp.int32(0)
    counts = _Counts.of(words)
    before, total = counts.before, counts.total
    limit = capacity if limit is None else limit
    wrapped, gap = circle(total, limit, start)
    # Each group of words claims the place of its first member in the result; an empty one, that
    # of the next group's. Groups whose first member lies in the gap all claim the place after the
    # gap. The last group that claims a place owns it, and the places after it up to the next
    # claim, which is at most ``GROUP * WORD`` places on.
    claim = jnp.where(before < wrapped, before, jnp.maximum(before - gap, wrapped))
    reach = GROUP * WORD
    owner = jnp.zeros(reach - 1 + capacity, jnp.int32)
    owner = owner.at[reach - 1 + claim].max(lax.iota(jnp.int32, claim.shape[0]), mode="drop")
    for width, count in ((1, 4), (4, 4), (16, 4), (64, 2)):  # The largest of 4, of 16, of 64, of 128.
        owner = lax.reduce_window(owner, np.int32(0), lax.max, (count,), (1,), "VALID", window_dilation=(width,))
    inside = slot + jnp.where(slot < wrapped, 0, gap) - before[owner]
    ends = counts.ends[owner]
    passed = [_byte(ends, jnp.full_like(owner, i)) for i in range(GROUP - 1)]
    word, first = owner * GROUP, jnp.zeros_like(owner)
    for end in passed:
        word, first = jnp.where(inside >= end, word + 1, word), jnp.where(inside >= end, end, first)
    indices = _stored(word * WORD + _nth_bit(words.at[word].get(mode="clip"), inside - first))
    return jnp.where(slot < jnp.minimum(total, limit), indices, fill), total


def circle(total: jax.Array, capacity: ArrayLike, start: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Chooses ``capacity`` of ``total`` ranks in a circle: after the last rank comes the first.

    It takes consecutive ranks, from rank ``start`` (modulo ``total``) on. If
    ``total <= capacity``, all ranks are taken, in order.

    Returns:
      ``(wrapped, gap)``, in the shape of ``total``. Place ``j`` of the result holds rank ``j`` if
      ``j < wrapped``, and rank ``j + gap`` otherwise.
    """
    over = total > capacity
    start = jnp.where(over, start % jnp.maximum(total, 1), 0)
    wrapped = jnp.where(over, jnp.maximum(start + capacity - total, 0), capacity)
    return wrapped, jnp.where(over, start - wrapped, 0)


def turn(step: jax.Array, capacity: ArrayLike) -> jax.Array:
    """The rank from which members are taken at a step: ``step * capacity``, modulo ``2**31``.

    So each step continues where the step before stopped.
    """
    return (step.astype(jnp.uint32) * jnp.asarray(capacity).astype(jnp.uint32) & jnp.uint32(2**31 - 1)).astype(
        jnp.int32
    )


def _locate(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The word of each index, and its bit there. Shifts take half the time of divisions."""
    return indices >> 5, jnp.uint32(1) << (indices & (WORD - 1)).astype(jnp.uint32)


def _nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
    """The position of the n-th set bit of each word, int32. It is found by repeated halving.

    ``n`` counts from 0. If a word has no n-th set bit, the position is 31.
    """
    position = jnp.zeros_like(n)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        in_low = lax.population_count(low).astype(jnp.int32)
        upper = n >= in_low
        n = jnp.where(upper, n - in_low, n)
        word = jnp.where(upper, word >> half, low)
        position = jnp.where(upper, position + half, position)
    return position
