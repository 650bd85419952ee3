"""Reduction by regions: of every P consecutive indices each worker owns one."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import bitmap, hashing

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._gather import SHORTEST, delta, difference, fitting, forward

T = TypeVar("T")


def split_and_reduce(
    comm: Comm, x: SparseVector, wire: Messages, parts: int, exchange: Callable[[jax.Array], jax.Array]
) -> tuple[SparseVector, SparseVector]:
    """Sends each region's elements to its owner, which adds what arrives in the order of ranks.

    Indices are dealt to the owners like cards: of every ``parts`` consecutive ones each owner gets
    one. A hash of the group's number says which owner begins. So wherever the elements lie, in one
    layer or in one row or column of a matrix, each region has about as many of them.

    All messages have the length of the longest one, rounded up to one of a few static lengths.
    One ``pmax`` makes the workers agree on it.

    Args:
      comm: the workers.
      x: this worker's elements, one run.
      wire: the layout of the messages.
      parts: the number of regions.
      exchange: sends row ``i`` of an array to the owner of region ``i``, and returns the rows that
        arrived, by rank.

    Returns:
      ``x`` as others read it; and the sum over this worker's region of ``ceil(n / parts)`` places,
      as one run. :func:`index_of` gives the index of a place.
    """
    k, block = x.capacity, -(-x.n // parts)
    owner, place, slot, counts = _deal(x, parts)

    def send(length: int) -> tuple[SparseVector, SparseVector]:
        def rows(leaf: jax.Array, fill: int) -> jax.Array:
            return jnp.full((parts, length), fill, leaf.dtype).at[owner, slot].set(leaf, mode="drop")

        own = SparseVector(rows(x.values, 0), rows(place, block), block)
        messages = wire.encode(own)
        arrived = wire.decode(exchange(messages), length, block, x.values.dtype)
        mine = arrived.merge().resize(min(parts * k, block))
        if wire.lossless:
            return x, mine
        values = wire.as_read(own, messages).values.at[owner, slot].get(mode="fill", fill_value=0)
        return SparseVector(values, x.indices, x.n), mine

    return with_length(comm, jnp.max(counts), share_lengths(k, parts, k, 1), send)


def with_length(comm: Comm, count: jax.Array, lengths: Sequence[int], send: Callable[[int], T]) -> T:
    """Sends messages of the shortest static length that holds what the fullest worker has.

    Args:
      comm: the workers.
      count: how many elements this worker has to send.
      lengths: the lengths, ascending. The last one holds any count.
      send: called with the length.
    """
    if len(lengths) == 1:
        return send(lengths[0])
    index = fitting(comm.pmax(count), lengths)
    return comm.switch(index, [functools.partial(send, length) for length in lengths])


def share_lengths(k: int, parts: int, most: int, divisor: int) -> list[int]:
    """Static lengths for the longest message, if k elements are dealt into messages to each part.

    They ascend from the usual length: the mean, and √(4 ln P) standard deviations, which is what
    the longest of P² random shares has. Each is longer by one part in ``divisor`` than the one
    before. None is below ``SHORTEST``, since a shorter message takes as long.

    >>> share_lengths(530, 8, 530, 1)
    [91, 182, 364, 530]
    """
    share = -(-k // parts)
    length = max(share + math.isqrt(3 * share * (parts - 1).bit_length()), SHORTEST)
    lengths = []
    while length < most:
        lengths.append(length)
        length += length // divisor
    return [*lengths, most]


def gather_regions(
    comm: Comm, x: SparseVector, mine: SparseVector, *, wire: Messages
) -> tuple[SparseVector | jax.Array, SparseVector | None]:
    """Gathers all regions, sparse or dense.

    ``n`` dense values take as many bytes as δ pairs of index and value (the thesis, section
    3.3.2). If the whole result may have more than δ elements, it is dense on each worker, and a
    longest region of more than δ elements for its places is gathered densely. If the whole result
    has at most δ elements and a region has more than k of them, the vectors of all workers are
    gathered instead, which are shorter.

    Args:
      comm: the workers.
      x: this worker's elements, as others read them in the split.
      mine: the sum over this worker's region, from :func:`split_and_reduce` with P parts.
      wire: the layout of sparse messages.

    Returns:
      ``(total, rounding)``: the whole vector, alike on all workers: one run if ``P k`` elements
      are at most δ, and dense otherwise; and what this worker added to it by rounding, or None
      where the wire is lossless.
    """
    size, n, k, block, dtype = comm.size, x.n, x.capacity, mine.n, x.values.dtype
    capacity = min(size * k, n)
    fills = capacity > delta(n, dtype, wire)
    most = min(k, block, delta(block, dtype, wire) if fills else block)
    lengths = share_lengths(k, size, most, 8)

    def changed(read: SparseVector | None = None) -> SparseVector | None:
        """What a message changed in this worker's region: nothing if it is sent as it is."""
        if wire.lossless:
            return None
        change = SparseVector(jnp.zeros_like(mine.values), mine.indices, block)
        if read is not None:
            change = difference(read.resize(mine.capacity), mine)
        return comm.varying(change)

    def sparse(length: int) -> tuple[SparseVector | jax.Array, SparseVector | None]:
        sent = mine.resize(length)
        message = wire.encode(sent)
        everyone = wire.decode(comm.all_gather(message), length, block, dtype)
        owner = lax.iota(jnp.int32, size)[:, None]
        everyone = SparseVector(everyone.values, index_of(everyone.indices, owner, size, n), n)
        return everyone.to_dense() if fills else everyone.join(capacity), changed(wire.as_read(sent, message))

    def dense() -> tuple[jax.Array, SparseVector | None]:
        return in_order(comm.all_gather(mine.to_dense()), n), changed()

    def whole() -> tuple[SparseVector, SparseVector | None]:
        again = forward(wire)
        everyone = again.decode(comm.all_gather(again.encode(x)), k, n, dtype)
        return everyone.merge().resize(capacity), changed()

    forms: list[Callable[[], Any]] = [functools.partial(sparse, length) for length in lengths]
    if most < mine.capacity:
        forms.append(dense if fills else whole)
    if len(forms) == 1:
        total, change = forms[0]()
    else:
        total, change = comm.switch(fitting(jnp.max(comm.all_gather(mine.count)), lengths), forms, replicated=True)
    if change is None:
        return total, None
    return total, SparseVector(change.values, index_of(change.indices, comm.rank(), size, n), n)


def _deal(x: SparseVector, parts: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Deals the elements of a run to the owners of its indices.

    Returns:
      ``(owner, place, slot, counts)``. For each element: its owner, its place in the owner's
      region, and how many elements of that region stand before it: int32, shape ``(k,)``. The slot
      of an unused element is k. ``counts``, shape ``(parts,)``: the elements of each region.
    """
    groups, extra = divmod(x.n, parts)
    used = x.indices < x.n
    place = x.indices // parts
    owner = (x.indices % parts + _turn(place, groups, parts)) % parts
    # If the regions stood one after the other, an element's rank would be its slot in them all.
    starts = jnp.array([part * groups + min(part, extra) for part in range(parts)], jnp.int32)
    places = jnp.where(used, starts[owner] + place, x.n)
    union = SparseVector(x.values, places, x.n).union()
    first = jnp.minimum(bitmap.rank(union, starts), x.count)
    slot = jnp.where(used, bitmap.rank(union, places) - first[owner], x.capacity)
    return owner, place, slot, jnp.diff(first, append=x.count)


def index_of(place: jax.Array, owner: jax.Array, parts: int, n: int) -> jax.Array:
    """The index at a place of an owner's region, and ``n`` past the region's end: int32."""
    card = (owner - _turn(place, n // parts, parts)) % parts
    # Unsigned, because places past the end of a long region may have products above 2**31.
    return jnp.minimum(place.astype(jnp.uint32) * parts + card.astype(jnp.uint32), n).astype(jnp.int32)


def in_order(rows: jax.Array, n: int) -> jax.Array:
    """The vector of ``n`` elements whose dense regions are ``rows``, one for each owner."""
    parts, block = rows.shape
    group = lax.iota(jnp.int32, block)[:, None]
    owner = (lax.iota(jnp.int32, parts)[None] + _turn(group, n // parts, parts)) % parts
    return rows[owner, group].reshape(-1)[:n]


def _turn(group: jax.Array, groups: int, parts: int) -> jax.Array:
    """By how many owners the dealing of a group is shifted: by none after the last whole group."""
    return jnp.where(group < groups, hashing.mix(group.astype(jnp.uint32)) % parts, 0).astype(jnp.int32)
