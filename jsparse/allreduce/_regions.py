"""Reduction by regions: each worker owns an equal part of the indices."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._gather import delta, exchange_surplus, fitting, forward, halvings, lengths_between, moves, round_once, rounding

T = TypeVar("T")
# A longer message counts as this long. The sum of two such lengths still fits in an int32.
MOST = 2**30 - 1


def split_and_reduce(comm: Comm, x: SparseVector, wire: Messages) -> tuple[SparseVector, SparseVector]:
    """Sends each region's elements to its owner, which adds what arrives in the order of ranks.

    All messages have the length of the longest one, rounded up by at most √2. One ``pmax`` makes
    the workers agree on it.

    Args:
      comm: the workers.
      x: this worker's elements, one run.
      wire: the layout of the messages.

    Returns:
      ``x`` as others read it; and the sum over this worker's region of ``ceil(n / P)`` indices, as
      one run whose indices count from the region's begin.
    """
    size, k = comm.size, x.capacity
    block = -(-x.n // size)
    capacity = min(size * k, block)
    first, counts = regions(x, size, block)

    def exchange(length: int) -> tuple[SparseVector, SparseVector]:
        rows = x.window(first, counts, length)
        messages = wire.encode(rows)
        received = wire.decode(comm.all_to_all(messages), length, x.n, x.values.dtype)
        mine = merge_region(received, comm.rank(), block).resize(capacity)
        return in_place(x, first, wire.as_read(rows, messages)) if not wire.lossless else x, mine

    return with_length(comm, jnp.max(counts), -(-k // size), k, exchange)


def in_place(x: SparseVector, first: jax.Array, rows: SparseVector) -> SparseVector:
    """The run ``x`` with the values of ``rows``, each of which holds one stretch of ``x``.

    The stretches begin at the places ``first`` of ``x``.
    """
    place = lax.iota(jnp.int32, x.capacity)
    row = jnp.searchsorted(first, place, side="right") - 1
    values = rows.values.at[row, place - first[row]].get(mode="fill", fill_value=0)
    return SparseVector(jnp.where(x.indices < x.n, values, 0), x.indices, x.n)


def with_length(comm: Comm, count: jax.Array, least: int, most: int, send: Callable[[int], T]) -> T:
    """Sends messages of the shortest static length that holds what the fullest worker has.

    Args:
      comm: the workers.
      count: how many elements this worker has to send.
      least: the shortest length that is offered.
      most: the longest.
      send: called with the length.
    """
    lengths = lengths_between(least, most)
    if len(lengths) == 1:
        return send(most)
    index = fitting(comm.pmax(count), lengths)
    return comm.switch(index, [functools.partial(send, length) for length in lengths])


def regions(x: SparseVector, parts: int, block: int) -> tuple[jax.Array, jax.Array]:
    """For each region of ``block`` indices, its first place in a run and its count of elements.

    Both are int32, shape ``(parts,)``.
    """
    starts = jnp.array([min(part * block, x.n) for part in range(parts + 1)], jnp.int32)
    edges = jnp.searchsorted(x.indices, starts).astype(jnp.int32)
    return edges[:-1], edges[1:] - edges[:-1]


def merge_region(arrived: SparseVector, region: jax.Array, block: int) -> SparseVector:
    """Adds runs that have elements of one region, as one run with the region's own indices."""
    own = jnp.where(arrived.indices < arrived.n, arrived.indices - region * block, block)
    return SparseVector(arrived.values, own, block).merge()


def gather_regions(
    comm: Comm, mine: SparseVector, n: int, k: int, *, step: jax.Array, wire: Messages
) -> tuple[SparseVector | jax.Array, SparseVector | None]:
    """Gathers all regions in the fewest bytes: sparse, balanced and sparse, or dense.

    ``n`` dense values take as many bytes as δ pairs of index and value (the thesis, section
    3.3.2). So a result of δ elements or more is gathered densely.

    Args:
      comm: the workers.
      mine: this worker's region, one run in the region's own indices.
      n: length of the whole vector.
      k: the most elements that a worker had before the split.
      step: int32 scalar, alike on all workers.
      wire: the layout of sparse messages.

    Returns:
      ``(total, rounding)``: the whole vector, alike on all workers: one run if ``P k`` elements
      are at most δ, and dense otherwise; and what this worker added to it by rounding, or None
      where the wire is lossless.
    """
    size, block, dtype = comm.size, mine.n, mine.values.dtype
    capacity = min(size * k, n)
    counts = comm.all_gather(mine.count)
    used = mine.indices < block
    part = SparseVector(mine.values, jnp.where(used, mine.indices + comm.rank() * block, n), n)
    part, rounded = round_once(wire, part)
    mine = SparseVector(part.values, mine.indices, block)

    def words(wire: Messages, length: int) -> int:
        return min(wire.words(length, n, dtype), MOST)

    # The words of a message in each form. Each form sends P - 1 messages.
    lengths, amounts, fills = _region_lengths(n, k, size, dtype, wire)
    table = jnp.array([*(words(wire, length) for length in lengths), MOST])
    direct = fitting(jnp.max(counts), lengths)
    cost, length = table[direct], direct
    most = min(block * dtype.itemsize // 4, MOST) if fills else MOST
    if amounts:
        share = -(-jnp.sum(counts, dtype=jnp.int32) // size)
        even = fitting(share, lengths)
        way = fitting(jnp.max(moves(counts, share)[1]), amounts)
        together = table[even] + jnp.array([*(words(forward(wire), amount) for amount in amounts), MOST])[way]
        balance = (together < cost) & (together <= most)
        cost, length = jnp.where(balance, together, cost), jnp.where(balance, even, direct)

        def balanced(amount: int) -> SparseVector:
            own = part.window(jnp.int32(0), jnp.minimum(part.count, share), part.capacity)
            return own.followed_by(exchange_surplus(comm, part, counts, share, amount, forward(wire))).join(
                part.capacity
            )

        ways = [lambda: part, *(functools.partial(balanced, amount) for amount in amounts)]
        part = comm.switch(jnp.where(balance, way + 1, 0), ways)

    def sparse(length: int) -> tuple[SparseVector | jax.Array, SparseVector | None]:
        sent = part.resize(length)
        message = wire.encode(sent)
        everyone = wire.decode(comm.all_gather(message), length, n, dtype)
        change = rounding(comm, wire, sent, wire.as_read(sent, message), part.capacity)
        return everyone.to_dense() if fills else everyone.join(capacity), change

    def dense() -> tuple[jax.Array, SparseVector | None]:
        total = comm.all_gather(mine.to_dense()).reshape(-1)[:n]
        return total, rounding(comm, wire, part, part, part.capacity)

    forms: list[Callable[[], Any]] = [functools.partial(sparse, length) for length in lengths]
    if fills:
        forms.append(dense)
        length = jnp.where(cost <= most, length, len(lengths))
    total, change = comm.switch(length, forms, replicated=True)
    return total, change if rounded is None else rounded


def _region_lengths(n: int, k: int, size: int, dtype: DTypeLike, wire: Messages) -> tuple[list[int], list[int], bool]:
    """The lengths of sparse and of balancing messages, and whether regions may be dense.

    The regions hold at most ``P k`` elements together, so an equal share is at most k elements,
    and so is a message that balances: 2k elements in all. So a region of more than 2k elements is
    never gathered unbalanced.
    """
    block = -(-n // size)
    fills = min(size * k, n) > delta(n, dtype, wire)
    whole = min(size * k, block)
    most = min(whole, 2 * k, delta(block, dtype, wire, n) if fills else whole)
    lengths = lengths_between(min(-(-k // size), most), most)
    return lengths, halvings(k, down_to=lengths[0] // 4) if lengths != [whole] else [], fills
