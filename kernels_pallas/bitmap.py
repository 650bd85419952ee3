"""Bitmaps: one bit an element, 32 to a word, the form in which selections and index sets are computed.

A set of indices out of ``n`` takes ``ceil(n / 32)`` words. Counting it, ranking its members, intersecting two of
them and writing its members down in ascending order all run over words, 1/32 of the elements, so that selecting
``k`` of ``n`` elements reads the ``n``-long array once and does the rest in little space. Bit ``i % 32`` of word
``i // 32`` stands for index ``i``.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

WORD = 32
STRETCH = 64 * WORD


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
    # The columns of the columns' bits are the rows.
    words = _pack_columns((columns[:, :, None] & _bits()[None, None]) != 0).reshape(-1)
    return jnp.concatenate([words, tail]) if tail.shape[0] else words


def _columns(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The columns of the mask's whole squares of 32 by 32 elements, a word each, shape ``(squares, 32)``; and the rest.

    XLA shares a loop out between a CPU's cores, and vectorizes it best when each gets an equal part.
    """
    whole = mask.shape[0] // STRETCH * STRETCH
    rest = jnp.pad(mask[whole:], (0, (whole - mask.shape[0]) % WORD)).reshape(-1, WORD)
    tail = jnp.sum(jnp.where(rest, _bits(), jnp.uint32(0)), axis=1, dtype=jnp.uint32)
    return _pack_columns(mask[:whole].reshape(-1, WORD, WORD)), tail


def _pack_columns(squares: jax.Array) -> jax.Array:
    """Sums over columns, which XLA on a CPU vectorizes three times better than sums over rows."""
    return jnp.sum(jnp.where(squares, _bits()[:, None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def _bits() -> jax.Array:
    return jnp.uint32(1) << lax.iota(jnp.uint32, WORD)


def count(words: jax.Array) -> jax.Array:
    """The number of members, int32."""
    return jnp.sum(lax.population_count(words), dtype=jnp.int32)


def count_mask(mask: jax.Array) -> jax.Array:
    """The number of true elements of a mask, int32: by way of words, many times faster on a CPU than its sum."""
    columns, tail = _columns(mask)
    return count(columns) + count(tail)


def mark(words: jax.Array, indices: jax.Array) -> jax.Array:
    """Adds members to a bitmap.

    Args:
      words: the bitmap.
      indices: int32, shape ``(m,)``, no index twice; those past the bitmap are dropped.

    Returns:
      The bitmap with the indices' bits set.
    """
    word, bit = _locate(indices)
    already = words.at[word].get(mode="fill", fill_value=0) & bit
    return words.at[word].add(bit & ~already, mode="drop")


def contains(words: jax.Array, indices: jax.Array) -> jax.Array:
    """Whether each index is a member: booleans of the indices' shape; past the bitmap, False."""
    word, bit = _locate(indices)
    return (words.at[word].get(mode="fill", fill_value=0) & bit) != 0


def starts(words: jax.Array) -> jax.Array:
    """For each word, how many members stand before it: int32, shape ``(words,)``."""
    counts = lax.population_count(words).astype(jnp.int32)
    # A scan over an eighth of the words, then eight additions: twice as fast on a CPU as one scan.
    blocks = jnp.pad(counts, (0, -words.shape[0] % 8)).reshape(-1, 8)
    sums = jnp.sum(blocks, axis=1, dtype=jnp.int32)
    before = [jnp.cumsum(sums, dtype=jnp.int32) - sums]
    for column in range(7):
        before.append(before[-1] + blocks[:, column])
    return jnp.stack(before, axis=1).reshape(-1)[: words.shape[0]]


def rank(words: jax.Array, indices: jax.Array) -> jax.Array:
    """For each index, how many members are smaller than it: int32, of the indices' shape.

    An index past the bitmap gets a rank past every member.
    """
    word, bit = _locate(indices)
    here = lax.population_count(words.at[word].get(mode="fill", fill_value=0) & (bit - 1))
    before = starts(words).at[word].get(mode="fill", fill_value=jnp.iinfo(jnp.int32).max)
    return before + here.astype(jnp.int32)


def take_first(words: jax.Array, quota: ArrayLike) -> jax.Array:
    """The bitmap of the ``quota`` smallest members."""
    left = jnp.clip(quota - starts(words), 0, WORD)
    below = (jnp.uint32(1) << _nth_bit(words, left).astype(jnp.uint32)) - 1
    return jnp.where(left >= lax.population_count(words).astype(jnp.int32), words, words & below)


def take_circle(words: jax.Array, quota: ArrayLike, start: ArrayLike) -> jax.Array:
    """The bitmap of ``quota`` members round a circle that begins at the member of rank ``start`` (modulo the count).

    All members, where there are no more than ``quota``.

    >>> take_circle(jnp.array([0b10110], jnp.uint32), 2, start=2)
    Array([18], dtype=uint32)
    """
    total = count(words)
    wrapped, gap = circle(total, quota, start)
    last = take_first(words, jnp.where(total > quota, gap + quota, total))
    return take_first(words, wrapped) | (last & ~take_first(words, wrapped + gap))


def members(words: jax.Array, capacity: int, fill: int, start: ArrayLike = 0) -> tuple[jax.Array, jax.Array]:
    """Writes a bitmap's members down in ascending order.

    When there are more members than ``capacity``, ``capacity`` of them are taken round a circle that begins at the
    member of rank ``start`` (modulo the count), still written in ascending order. A caller that moves ``start`` on
    by ``capacity`` each time takes every member in turn.

    Args:
      words: the bitmap.
      capacity: length of the result, static.
      fill: what stands in unused places.
      start: int32 scalar, the rank at which the circle begins.

    Returns:
      ``(indices, count)``: int32 of shape ``(capacity,)``, and the int32 number of members, which may exceed
      ``capacity``.

    >>> members(jnp.array([0b10110], jnp.uint32), 2, fill=5)
    (Array([1, 2], dtype=int32), Array(3, dtype=int32))
    >>> members(jnp.array([0b10110], jnp.uint32), 2, fill=5, start=2)
    (Array([1, 4], dtype=int32), Array(3, dtype=int32))
    """
    before = starts(words)
    total = count(words)
    slot = lax.iota(jnp.int32, capacity)
    if not words.shape[0]:
        return jnp.full_like(slot, fill), total
    wrapped, gap = circle(total, capacity, start)
    # The place at which a word's first member would be written, those in the gap all at its end. The last word that
    # claims a place owns it and those after it, up to the next claim, which is at most 32 places on.
    claim = jnp.where(before < wrapped, before, jnp.maximum(before - gap, wrapped))
    claim = jnp.where(words != 0, claim, capacity)
    owner = jnp.zeros(capacity, jnp.int32).at[claim].max(lax.iota(jnp.int32, words.shape[0]), mode="drop")
    for shift in (1, 2, 4, 8, 16):
        owner = jnp.maximum(owner, jnp.pad(owner, (shift, 0))[:capacity])
    place = slot + jnp.where(slot < wrapped, 0, gap)
    indices = owner * WORD + _nth_bit(words[owner], place - before[owner])
    return jnp.where(slot < total, indices, fill), total


def circle(total: jax.Array, capacity: ArrayLike, start: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Which ``capacity`` of ``total`` ranks are taken round a circle that begins at rank ``start``.

    Returns:
      ``(wrapped, gap)``, of the shape of ``total``: place ``j`` of the result holds rank ``j`` where ``j < wrapped``
      and rank ``j + gap`` elsewhere. All are taken, in order, when ``total <= capacity``.
    """
    over = total > capacity
    start = jnp.where(over, start % jnp.maximum(total, 1), 0)
    wrapped = jnp.where(over, jnp.maximum(start + capacity - total, 0), capacity)
    return wrapped, jnp.where(over, start - wrapped, 0)


def turn(step: jax.Array, capacity: ArrayLike) -> jax.Array:
    """Where the circle begins at a step, so that each step takes up where the one before left off."""
    return (step.astype(jnp.uint32) * jnp.asarray(capacity).astype(jnp.uint32) & jnp.uint32(2**31 - 1)).astype(
        jnp.int32
    )


def _locate(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return indices // WORD, jnp.uint32(1) << (indices % WORD).astype(jnp.uint32)


def _nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
    """The position of the n-th set bit (from 0) of each word, by halving: int32. Past the last one, at least it."""
    position = jnp.zeros_like(n)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        in_low = lax.population_count(low).astype(jnp.int32)
        upper = n >= in_low
        n = jnp.where(upper, n - in_low, n)
        word = jnp.where(upper, word >> half, low)
        position = jnp.where(upper, position + half, position)
    return position
