"""Compaction on a GPU, in three kernels, without atomics, in order of index.

A *hit* is an element that reaches the threshold. A *slot* is a place for one hit in the buffers
that hold the hits between the first and the last kernel; each block of the vector has a few
slots.

1. **stage**, one program for each block: reads the block, ranks its hits by a cumulative sum,
   writes the first hits to the slots of the block, and writes the number of hits.
2. **rank**, one program for each 16,384 blocks: computes the number of hits before each block. If
   it takes several programs, a second kernel ranks their totals, and XLA adds those.
3. **place**, one program for each group of blocks: moves hits from the slots to their places in
   the result. A block with more hits than slots is read again, and its hits are placed directly.
   So the number of slots does not change the result. Without slots every block is read again: the
   two-pass form.

Nothing is decided on the host, and no branch of XLA is taken: the queue of the GPU would have to
run empty for it.

If a share ``d`` of the elements is selected, each element takes ``4 + 24 d`` bytes of memory
traffic. With ``addend`` there are also the bytes to read it and to write the sum. The two-pass
form takes 4 bytes more and ``16 d`` bytes less.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import bitmap
from .._triton import call, load, store
from .xla import reaches

# The number of elements of a block, and of a warp: 16 for each of its 32 threads.
BLOCK = 2048
WARP = 512
# A block gets SLACK times as many slots as it has hits on average, because the gradients of
# layers differ in size. It gets at least SLOTS slots, within the limit in `Plan.of`.
SLACK = 3
SLOTS = 64
# The number of blocks that one program ranks at most, and that a warp ranks.
CHUNK = 16384
RANKED = 1024
# The bytes of the widest memory access.
ACCESS = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a compaction.

    Attributes:
      n: the length of the vector.
      capacity: the length of the result.
      block: the number of elements in a block, a power of two.
      slots: the number of slots of a block: a power of two, or 0 for the two-pass form.
    """

    n: int
    capacity: int
    block: int
    slots: int

    @staticmethod
    def of(n: int, capacity: int, block: int | None = None, slots: int | None = None) -> "Plan":
        """A plan in which sizes that are not given follow from the density, ``capacity / n``."""
        block = block or BLOCK
        if slots is None:
            wanted = pl.next_power_of_2(max(SLACK * block * capacity // n, SLOTS))
            # All slots take at most a quarter of the memory of the vector. Blocks with more hits
            # are read twice.
            slots = min(wanted, block // 8) if capacity <= n / 10 else 0
        return Plan(n, capacity, block, min(slots, block))

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.n, self.block)

    @property
    def warps(self) -> int:
        return max(self.block // WARP, 1)

    @property
    def group(self) -> int:
        """The number of blocks whose slots one program moves.

        Their slots together are half as many as the elements of a block.
        """
        return max(self.block // (2 * self.slots), 1) if self.slots else 1

    @property
    def movers(self) -> int:
        """The number of programs that move hits.

        Each takes every ``movers``-th block, so that the programs share a region with many hits.
        """
        return pl.cdiv(self.blocks, self.group)

    @property
    def buffers(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct] | None:
        """The slots of all blocks: values, and indices in the vector. None without slots."""
        size = self.blocks * self.slots
        return (floats(size), ints(size)) if size else None

    def run(self, block: jax.Array, row: int, body: Callable[[jax.Array, jax.Array | None], None]) -> None:
        """Runs ``body(places, mask)`` for a block, in rows of ``row`` elements.

        Only the ragged block at the end has a mask. Past the last block nothing runs.
        """
        whole, rest = divmod(self.n, self.block)
        shape = (self.block // row, row)
        lanes = lax.broadcasted_iota(jnp.int32, shape, 0) * row + lax.broadcasted_iota(jnp.int32, shape, 1)
        if whole:
            pl.when(block < whole)(lambda: body(block * self.block + lanes, None))
        if rest:
            pl.when(block == whole)(lambda: body(block * self.block + lanes, lanes < rest))


class Hits(NamedTuple):
    """One column of the rows of a block. All arrays have shape ``(rows,)``.

    Attributes:
      hit: whether the element reaches the threshold.
      rank: the number of hits before the element in the block.
      value: the value of the element.
      index: the index of the element in the vector.
    """

    hit: jax.Array
    rank: jax.Array
    value: jax.Array
    index: jax.Array


def find(values: jax.Array, threshold: jax.Array, begin: jax.Array) -> tuple[list[Hits], jax.Array]:
    """Finds the hits of a block: ``(columns, count)``.

    A thread loads and holds whole rows. When the rows are split into columns, the values stay in
    their threads. As one vector, the block would pass through shared memory for each store to
    computed addresses.

    Args:
      values: shape ``(rows, row)``.
      threshold: a scalar.
      begin: the first index of the block.
    """
    rows, row = values.shape
    columns = [column.reshape(rows) for column in lax.split(values, (1,) * row, axis=1)]
    hits = [reaches(column, threshold) for column in columns]
    ranks, count = ranked(hits)
    index = begin + lax.iota(jnp.int32, rows) * row
    return [Hits(hits[j], ranks[j], columns[j], index + j) for j in range(row)], count


def ranked(hits: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Ranks the hits of a block: ``(ranks, count)``.

    Args:
      hits: the columns of the rows of a block, or of several blocks, shape ``(..., rows)`` each.

    Returns:
      For each column the number of hits before each element in its block; and the number of hits
      in each block, shape ``(...)``. All are int32.
    """
    ones = [hit.astype(jnp.int32) for hit in hits]
    in_row = sum(ones[1:], ones[0])
    ranks = [jnp.cumsum(in_row, axis=-1, dtype=jnp.int32) - in_row]
    for column in ones[:-1]:
        ranks.append(ranks[-1] + column)
    return ranks, jnp.sum(in_row, axis=-1, dtype=jnp.int32)


def compact(
    x: jax.Array,
    threshold: jax.Array,
    start: jax.Array,
    plan: Plan,
    *,
    addend: tuple[jax.Array, jax.Array] | None = None,
    limit: float = math.inf,
    clear: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Selects from ``x``, or from a sum that overwrites ``x``.

    Args:
      x: float32, shape ``(n,)``, ``n`` at least 1.
      threshold: a float32 scalar.
      start: int32 scalar, the rank of the first element that is taken.
      plan: the sizes.
      addend: ``(grad, keep)``, to add ``grad``, shape ``(n,)``, to ``x``. ``keep`` is an int32
        scalar: if it is 0, nothing is added and nothing is selected. None for no addition.
      limit: the largest magnitude of a sum.
      clear: whether to set the selected elements of the sum to zero.
      interpret: whether to run in Pallas's interpreter.

    Returns:
      ``(values, indices, count, acc)``. The first three are as in
      :func:`kernels_pallas.select_above`. ``acc`` is the sum, or ``x`` if there is no ``addend``.
    """

    acc, staged, counts = call(
        functools.partial(_stage, plan=plan, limit=limit, clear=clear),
        x,
        addend,
        threshold,
        name="select_stage",
        out=(floats(plan.n) if addend else None, plan.buffers, ints(plan.blocks)),
        grid=plan.blocks,
        warps=plan.warps,
        interpret=interpret,
        aliases={0: 0} if addend else {},
    )
    acc = acc if addend else x
    values, indices, count, cleared = arrange(
        staged, counts, start, plan, again=(acc, threshold), clear=clear, interpret=interpret
    )
    return values, indices, count, acc if cleared is None else cleared


def arrange(
    staged: tuple[jax.Array, jax.Array] | None,
    counts: jax.Array,
    start: jax.Array,
    plan: Plan,
    *,
    again: tuple[jax.Array, jax.Array] | None = None,
    clear: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Puts the hits of all blocks in order, from their slots.

    Args:
      staged: the values and the indices in the slots, as ``plan.buffers``; None without slots.
      counts: the number of hits of each block.
      start: int32 scalar, the rank of the first hit that is taken.
      plan: the sizes.
      again: the vector and the threshold, to read blocks again that have more hits than slots.
        None if there are no such blocks.
      clear: whether to set the taken elements of the vector to zero.
      interpret: whether to run in Pallas's interpreter.

    Returns:
      ``(values, indices, count, cleared)``. The first three are as in
      :func:`kernels_pallas.select_above`. ``cleared`` is the vector with ``clear``, or None.
    """
    before, count = rank(counts, interpret=interpret)
    acc, threshold = again or (None, None)
    cleared, values, indices = call(
        functools.partial(_place, plan=plan),
        acc,
        (threshold, staged, counts, before, count, start),
        name="select_place",
        out=(floats(plan.n) if clear else None, floats(plan.capacity), ints(plan.capacity)),
        grid=plan.movers + pl.cdiv(plan.capacity, plan.block),
        warps=2 * plan.warps,  # This kernel needs twice the registers.
        interpret=interpret,
        aliases={0: 0} if clear else {},
    )
    return values, indices, count, cleared


def rank(counts: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """For each count the sum of those before it, and the sum of all: int32."""
    blocks = counts.shape[0]
    chunk = min(pl.next_power_of_2(blocks), CHUNK)
    chunks = pl.cdiv(blocks, chunk)
    before, totals = call(
        functools.partial(_rank, chunk=chunk),
        counts,
        name="select_rank",
        out=(ints(blocks), ints(chunks)),
        grid=chunks,
        warps=max(chunk // RANKED, 1),
        interpret=interpret,
    )
    if chunks == 1:
        return before, totals[0]
    first, total = rank(totals, interpret=interpret)
    return before + first[lax.iota(jnp.int32, blocks) // chunk], total


def floats(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)


def ints(*size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.int32)


def _stage(x, addend, threshold, acc, staged, counts, *, plan: Plan, limit: float, clear: bool) -> None:
    block = pl.program_id(0)
    narrowest = x.dtype.itemsize if addend is None else addend[0].dtype.itemsize

    def body(places, mask):
        value = load(x, places, mask)
        least = threshold[...]
        if addend is not None:
            keep = addend[1][...] != 0
            value += jnp.where(keep, load(addend[0], places, mask).astype(value.dtype), 0)
            if limit < math.inf:  # Comparisons keep NaN; Triton's minimum would lose it.
                value = jnp.where(value > limit, limit, jnp.where(value < -limit, -limit, value))
            least = jnp.where(keep, least, jnp.nan)
        found, count = find(value, least, block * plan.block)
        counts[block] = count
        for hits in found if plan.slots else ():
            fits = hits.hit & (hits.rank < plan.slots)
            slot = block * plan.slots + hits.rank
            store(staged[0], slot, hits.value, fits)
            store(staged[1], slot, hits.index, fits)
        if clear:
            # Clear all hits, unless the block is read again. `move` restores those not taken.
            value = jnp.where(reaches(value, least) & (count <= plan.slots), 0, value)
        if acc is not None:
            store(acc, places, value, mask)

    plan.run(block, ACCESS // narrowest, body)


def _rank(counts, before, totals, *, chunk: int) -> None:
    program = pl.program_id(0)
    places = program * chunk + lax.iota(jnp.int32, chunk)
    mask = places < counts.shape[0]
    here = load(counts, places, mask)
    store(before, places, jnp.cumsum(here, dtype=jnp.int32) - here, mask)
    totals[program] = jnp.sum(here, dtype=jnp.int32)


def _place(acc, given: Any, cleared, values, indices, *, plan: Plan) -> None:
    threshold, staged, counts, before, total, start = given
    program = pl.program_id(0)

    def put(hits: Hits) -> jax.Array:
        """Writes the hits that are among the ``capacity`` taken ones. Returns which they are."""
        wrapped, gap = bitmap.circle(total[...], plan.capacity, start[...])
        place = jnp.where(hits.rank < wrapped, hits.rank, hits.rank - gap)
        taken = hits.hit & ((hits.rank < wrapped) | (place >= wrapped)) & (place < plan.capacity)
        store(values, place, hits.value, taken)
        store(indices, place, hits.index, taken)
        return taken

    def move() -> jax.Array:
        """Places the staged hits of a group of blocks.

        Returns whether one of the blocks has more hits than slots.
        """
        blocks = program + plan.movers * lax.iota(jnp.int32, plan.group)
        count, first = (load(ref, blocks, blocks < plan.blocks)[:, None] for ref in (counts, before))
        slot = lax.broadcasted_iota(jnp.int32, (plan.group, plan.slots), 1)
        hit = slot < jnp.where(count > plan.slots, 0, count)
        value, index = (load(ref, blocks[:, None] * plan.slots + slot, hit) for ref in staged)
        taken = put(Hits(hit, first + slot, value, index))
        if cleared is not None:
            # The first kernel cleared all of these hits. Restore those that are not taken.
            store(cleared, index, value, hit & ~taken)
        return jnp.max(count) > plan.slots

    def again(block):
        """Reads a block again if it has more hits than slots, and places its hits."""

        def body(places, mask):
            @pl.when(counts[block] > plan.slots)
            def _():
                for hits in find(load(acc, places, mask), threshold[...], block * plan.block)[0]:
                    taken = put(hits._replace(rank=before[block] + hits.rank))
                    if cleared is not None:
                        store(cleared, hits.index, jnp.zeros_like(hits.value), taken)

        plan.run(block, ACCESS // acc.dtype.itemsize, body)

    @pl.when(program < plan.movers)
    def _():
        crowded = move() if plan.slots else True
        if acc is None:
            return

        @pl.when(crowded)
        def _():
            lax.fori_loop(0, plan.group, lambda i, _: again(program + i * plan.movers), None)

    @pl.when(program >= plan.movers)
    def _():
        places = (program - plan.movers) * plan.block + lax.iota(jnp.int32, plan.block)
        unused = (places >= total[...]) & (places < plan.capacity)
        store(values, places, jnp.zeros_like(places, values.dtype), unused)
        store(indices, places, jnp.full_like(places, plan.n), unused)


def select_above(
    x: jax.Array,
    threshold: jax.Array,
    start: jax.Array,
    *,
    capacity: int,
    block: int | None = None,
    slots: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    plan = Plan.of(x.shape[0], capacity, block, slots)
    return compact(x, threshold, start, plan, interpret=interpret)[:3]
