"""Selection in blocks on a GPU, in three kernels, and the k largest of each block by them.

**stage** reads the vector. A program holds one block, or several short ones, and decides in
registers which elements are hits. It writes the first hits of each block, up to its quota, to the
slots of the block. Each block has at least as many slots as its quota. Then the kernels **rank**
and **place** of ``select_above`` move the hits from the slots to the result.

A magnitude that exactly the quota of a block reaches is found bit by bit: bits of magnitudes, read
as integers, have the same order as the magnitudes. If there is none, it is the quota-th largest.

If a share ``d`` of the elements is selected, each element takes ``4 + 24 d`` bytes of memory
traffic.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .._triton import call, load, magnitude_bits, store
from ..select_above.triton import ACCESS, WARP, Plan, arrange, ints, ranked
from . import slots

ROW = ACCESS // 4


@dataclasses.dataclass(frozen=True)
class BlocksPlan(Plan):
    """The sizes of a selection in blocks. ``block`` is the number of elements of a program.

    Attributes:
      length: the number of elements of a block of the vector.
      most: the largest quota.
    """

    length: int
    most: int

    @staticmethod
    def of_blocks(n: int, capacity: int, length: int, most: int, program: int = WARP) -> "BlocksPlan":
        """A plan in which a program holds one block, or as many as ``program`` elements are.

        By default that is a warp, whose threads need not wait for others to add up counts.
        """
        width = max(pl.next_power_of_2(length), ROW)
        return BlocksPlan(n, capacity, max(program, width), slots(length, most), length, most)

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.n, self.length)

    @property
    def width(self) -> int:
        """The length of a block with padding: a power of two."""
        return max(pl.next_power_of_2(self.length), ROW)

    @property
    def held(self) -> int:
        """The number of blocks of a program."""
        return self.block // self.width


class Held(NamedTuple):
    """The blocks of a program. ``rows`` is ``width / ROW``, and a thread holds whole rows.

    Attributes:
      values: the elements, float32, shape ``(held, width)``, with 0 past the end of a block.
      columns: the columns of the rows of these, ``ROW`` arrays of shape ``(held, rows)``.
      places: the place of each row's first element in its block, int32, shape ``(1, rows)``.
      begin: the index of the first element of each block, int32, shape ``(held, 1)``.
      length: the number of elements of each block, int32, shape ``(held, 1)``.
      quota: the number of hits to take of each block, int32, shape ``(held, 1)``.
    """

    values: jax.Array
    columns: list[jax.Array]
    places: jax.Array
    begin: jax.Array
    length: jax.Array
    quota: jax.Array


def select_in_blocks(
    find: Callable[..., list[jax.Array]],
    x: jax.Array,
    quota: jax.Array,
    *given: jax.Array,
    plan: BlocksPlan,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Selects the first hits of each block, up to its quota.

    Args:
      find: says from a :class:`Held` and references to ``given`` which elements are hits: booleans
        in the shape of the columns. A zero must be no hit: past the end of a block are zeros.
      x: float32, shape ``(n,)``, ``n`` at least 1.
      quota: int32, shape ``(blocks,)``.
      *given: further arrays.
      plan: the sizes.
      interpret: whether to run in Pallas's interpreter.

    Returns:
      ``(values, indices, count, found)``: the first three as from
      :func:`kernels_pallas.select_block_top_k`; and the number of hits of each block, int32, shape
      ``(blocks,)``.
    """
    staged, counts, found = call(
        functools.partial(_stage, find=find, plan=plan),
        x,
        quota,
        given,
        name="select_stage",
        out=(plan.buffers, ints(plan.blocks), ints(plan.blocks)),
        grid=pl.cdiv(plan.blocks, plan.held),
        warps=plan.warps,
        interpret=interpret,
    )
    values, indices, count, _ = arrange(staged, counts, jnp.int32(0), plan, interpret=interpret)
    return values, indices, count, found


def _stage(x, quota, given, staged, counts, found, *, find: Callable[..., list[jax.Array]], plan: BlocksPlan) -> None:
    program = pl.program_id(0)
    rows = plan.width // ROW
    first = program * plan.held

    def body(masked: bool) -> None:
        block = first + lax.iota(jnp.int32, plan.held)
        there = block < plan.blocks
        begin = jnp.where(there, block * plan.length, 0)
        length = jnp.where(there, jnp.minimum(plan.length, plan.n - begin), 0)
        shape = (plan.held * rows, ROW)
        lanes = lax.broadcasted_iota(jnp.int32, shape, 0) * ROW + lax.broadcasted_iota(jnp.int32, shape, 1)
        if masked:
            here, place = first + lanes // plan.width, lanes % plan.width
            mask = (place < plan.length) & (here < plan.blocks)
            value = load(x, here * plan.length + place, mask & (place < plan.n - here * plan.length))
        else:
            value = load(x, first * plan.length + lanes)
        columns = [column.reshape(plan.held, rows) for column in lax.split(value, (1,) * ROW, axis=1)]
        take = jnp.minimum(load(quota, block, there), plan.most)
        places = lax.broadcasted_iota(jnp.int32, (1, rows), 1) * ROW
        held = Held(
            value.reshape(plan.held, plan.width), columns, places, begin[:, None], length[:, None], take[:, None]
        )
        hits = find(held, *given)
        ranks, count = ranked(hits)
        store(counts, block, jnp.minimum(count, take), there)
        store(found, block, count, there)
        for j in range(ROW):
            fits = hits[j] & (ranks[j] < held.quota)
            slot = block[:, None] * plan.slots + ranks[j]
            store(staged[0], slot, columns[j], fits)
            store(staged[1], slot, held.begin + places + j, fits)

    whole = plan.n // (plan.held * plan.length) if plan.width == plan.length else 0
    if whole:
        pl.when(program < whole)(lambda: body(False))
    if whole * plan.held < plan.blocks:
        pl.when(program >= whole)(lambda: body(True))


def largest(held: Held) -> list[jax.Array]:
    """The ``quota`` largest magnitudes of each block, except zeros and NaN."""
    bits = [magnitude_bits(column) for column in held.columns]

    def count(candidate: jax.Array, reaches: Callable[..., jax.Array]) -> jax.Array:
        ones = [reaches(column, candidate).astype(jnp.int32) for column in bits]
        return jnp.sum(sum(ones[1:], ones[0]), axis=1, keepdims=True, dtype=jnp.int32)

    def is_open(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        bit, _, reached = carry
        return (bit >= 0) & (jnp.max(reached - held.quota) > 0)

    def refine(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        bit, least, reached = carry
        candidate = least | jnp.int32(1) << bit
        here = count(candidate, jnp.greater_equal)
        enough = here >= held.quota
        return bit - 1, jnp.where(enough, candidate, least), jnp.where(enough, here, reached)

    # Once exactly the quota reaches a candidate, its other bits do not matter.
    zero = jnp.zeros_like(held.quota)
    _, least, _ = lax.while_loop(is_open, refine, (jnp.int32(30), zero, count(zero, jnp.greater)))
    left = held.quota - count(least, jnp.greater)
    equal = [(column == least) & (column > 0) for column in bits]
    ranks, _ = ranked(equal)
    return [(bits[j] > least) | (equal[j] & (ranks[j] < left)) for j in range(ROW)]


def select_block_top_k(
    x: jax.Array,
    quota: jax.Array,
    *,
    block: int,
    most: int,
    capacity: int,
    program: int = WARP,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    plan = BlocksPlan.of_blocks(x.shape[0], capacity, block, most, program)
    return select_in_blocks(largest, x, quota, plan=plan, interpret=interpret)[:3]
