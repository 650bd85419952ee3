"""The primitives of the exact k-th magnitude on a GPU.

A vector that is not too long is searched by a few kernels, each of which finds several bits. Each
program first reads what all programs of the kernel before counted, and then counts in its own part
of the vector, which its registers hold. Such a search takes little longer than its kernels take to
start. A longer vector is read by counting passes. The compaction is that of ``select_above``.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from .._triton import call, load, magnitude_bits, store
from .._varying import varying_as
from ..count_above_many.triton import SHORT, count_above_many
from ..select_above import select_above
from ..select_above.triton import WARP, floats, ints
from . import xla
from .xla import Primitives

Carry = TypeVar("Carry")

# The longest vector that programs hold; how many of them are wanted; and the fewest and the most
# elements that one of them holds.
HELD = 2**22
PROGRAMS = 128
FEWEST, MOST = 512, 8192
# How many candidates are counted at once: for each count alone threads would wait for each other.
AT_ONCE = 8
# The elements of a program that selects.
BLOCK = 2048


def primitives(interpret: bool = False) -> Primitives:
    compact = functools.partial(select_above, implementation="interpret" if interpret else "triton")
    return Primitives(
        functools.partial(search, interpret=interpret),
        compact,
        functools.partial(largest, interpret=interpret),
        lambda n: xla.LARGEST_SAMPLE,
    )


def search(x: jax.Array, k: ArrayLike, *, interpret: bool = False) -> jax.Array:
    """The k-th largest magnitude of a vector of float32. Each pass finds several bits."""
    if 0 < x.shape[0] <= HELD:
        return _search_held(x, k, interpret=interpret)

    def refine(carry, bits):
        found, left = carry
        left -= bits
        candidates = found | (lax.iota(jnp.int32, 2**bits - 1) + 1 << left)
        counts = count_above_many(x, lax.bitcast_convert_type(candidates, x.dtype), interpret=interpret)
        # Counts fall as candidates rise. So the number of counts that reach k is the value of the
        # bits.
        return found | jnp.sum(counts >= k, dtype=jnp.int32) << left, left

    start = varying_as(jnp.int32(0), x), jnp.int32(31)
    found, _ = in_passes(x.shape[0], 31, refine, start)
    return lax.bitcast_convert_type(found, x.dtype)


def in_passes(n: int, bits: int, find: Callable[[Carry, int], Carry], carry: Carry) -> Carry:
    """Finds ``bits`` bits by passes over ``n`` elements. ``find(carry, width)`` is one pass.

    The number of passes does not depend on what they find, because a loop with such a condition
    would wait for the host after each pass. The passes over a short vector are unrolled, so that
    they can be launched as one graph.
    """
    for width, group in itertools.groupby(passes(n, bits)):
        carry = lax.fori_loop(
            0, len(list(group)), lambda _, carry, width=width: find(carry, width), carry, unroll=n <= SHORT
        )
    return carry


def passes(n: int, bits: int) -> list[int]:
    """The number of bits that each pass finds.

    A pass over few elements takes as long as its kernels take to start, so it finds up to 6 bits.
    A pass over many elements finds up to 3 bits: from about 7 thresholds on, comparisons and not
    reads determine its time.
    """
    return evenly(bits, 6 if n <= SHORT else 3)


def evenly(bits: int, most: int) -> list[int]:
    """The fewest parts of at most ``most`` bits each, nearly equal, the larger ones first."""
    count = -(-bits // most)
    return [bits // count + (i < bits % count) for i in range(count)]


def _search_held(x: jax.Array, k: ArrayLike, *, interpret: bool) -> jax.Array:
    """The search in a vector that programs hold, each a part of it.

    A kernel first settles the bits of the pass before from what all programs counted, and then
    counts for the next ones. So a pass is one kernel.
    """
    part = min(max(pl.next_power_of_2(pl.cdiv(x.shape[0], PROGRAMS)), FEWEST), MOST)
    programs = pl.cdiv(x.shape[0], part)
    run = functools.partial(call, warps=part // WARP, interpret=interpret, name="kth_magnitude")
    k, found, counts, last = jnp.asarray(k, jnp.int32), jnp.int32(0), None, (0, 31)
    # The more programs, the more counts each of them reads.
    for bits in evenly(31, 6 if programs <= PROGRAMS else 4):
        count = functools.partial(_count, programs=programs, part=part, last=last, bits=bits)
        found, counts = run(count, x, k, found, counts, out=(ints(), ints(programs * 2**bits)), grid=programs)
        last = bits, last[1] - bits
    settle = functools.partial(_settle, programs=programs, last=last)
    (found,) = run(settle, k, found, counts, out=(ints(),), grid=1)
    return lax.bitcast_convert_type(found, x.dtype)


def _count(
    x, k, found, counts, new_found, new_counts, *, programs: int, part: int, last: tuple[int, int], bits: int
) -> None:
    """Counts the elements of a program that reach each candidate for the next ``bits`` bits."""
    program = pl.program_id(0)
    least = _settled(k, found, counts, programs, last)

    @pl.when(program == 0)
    def _():
        new_found[...] = least

    places = program * part + lax.iota(jnp.int32, part)
    magnitudes = magnitude_bits(load(x, places, places < x.shape[0]))
    at_once = min(2**bits, AT_ONCE)

    def count(i, _):
        number = i * at_once + lax.iota(jnp.int32, at_once)
        candidates = least | number + 1 << last[1] - bits
        reached = (magnitudes[None, :] >= candidates[:, None]).astype(jnp.int32)
        store(new_counts, program * 2**bits + number, jnp.sum(reached, axis=1, dtype=jnp.int32))

    # The last one is no candidate, and its count is not used.
    lax.fori_loop(0, 2**bits // at_once, count, None)


def _settle(k, found, counts, new_found, *, programs: int, last: tuple[int, int]) -> None:
    new_found[...] = _settled(k, found, counts, programs, last)


def _settled(k: Any, found: Any, counts: Any, programs: int, last: tuple[int, int]) -> jax.Array:
    """What is found after a pass. ``last`` is how many bits it was for, and how many are left."""
    bits, left = last
    if counts is None:
        return found[...]
    shape = (pl.next_power_of_2(programs), 2**bits)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    totals = jnp.sum(load(counts, row * 2**bits + column, row < programs), axis=0, dtype=jnp.int32)
    # Counts fall as candidates rise. So the number of counts that reach k is the value of the
    # bits. The last count is of no candidate.
    reached = (totals >= k[...]) & (lax.iota(jnp.int32, 2**bits) < 2**bits - 1)
    return found[...] | jnp.sum(reached.astype(jnp.int32), dtype=jnp.int32) << left


def largest(x: jax.Array, k: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k largest elements; of those equal to the k-th, the ones with the lowest indices.

    After the search one kernel counts what each block has of either kind, one computes where the
    elements of each block begin in the result, and one places them.
    """
    if not 0 < x.shape[0] <= HELD:
        return xla.largest(x, k, functools.partial(search, interpret=interpret))
    blocks = pl.cdiv(x.shape[0], BLOCK)
    run = functools.partial(call, warps=BLOCK // WARP, interpret=interpret)
    kth = search(x, k, interpret=interpret)
    counts = run(_reach, x, kth, name="top_k_count", out=(ints(blocks), ints(blocks)), grid=blocks)
    before, left, count = run(
        functools.partial(_share, k=k),
        counts,
        name="top_k_share",
        out=(ints(blocks), ints(blocks), ints()),
        grid=1,
    )
    values, indices = run(
        functools.partial(_place, blocks=blocks),
        x,
        kth,
        before,
        left,
        count,
        name="top_k_place",
        out=(floats(k), ints(k)),
        grid=blocks + pl.cdiv(k, BLOCK),
    )
    return values, indices, count


def _block(x: Any, kth: Any, program: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The places and elements of a program, and which are larger than the k-th or equal to it."""
    places = program * BLOCK + lax.iota(jnp.int32, BLOCK)
    value = load(x, places, places < x.shape[0])
    bits, least = magnitude_bits(value), lax.bitcast_convert_type(kth[...], jnp.int32)
    return places, value, (bits > least).astype(jnp.int32), ((bits == least) & (bits > 0)).astype(jnp.int32)


def _reach(x, kth, larger, equal) -> None:
    program = pl.program_id(0)
    _, _, above, same = _block(x, kth, program)
    larger[program] = jnp.sum(above, dtype=jnp.int32)
    equal[program] = jnp.sum(same, dtype=jnp.int32)


def _share(counts, before, left, count, *, k: int) -> None:
    """How many elements are taken before each block, and how many equal ones are left for it."""
    blocks = counts[0].shape[0]
    places = lax.iota(jnp.int32, pl.next_power_of_2(blocks))
    larger, equal = (load(ref, places, places < blocks) for ref in counts)
    quota = k - jnp.sum(larger, dtype=jnp.int32)
    equal_before = jnp.cumsum(equal, dtype=jnp.int32) - equal
    larger_before = jnp.cumsum(larger, dtype=jnp.int32) - larger
    store(before, places, larger_before + jnp.minimum(equal_before, quota), places < blocks)
    store(left, places, jnp.maximum(quota - equal_before, 0), places < blocks)
    count[...] = k - quota + jnp.minimum(jnp.sum(equal, dtype=jnp.int32), quota)


def _place(x, kth, before, left, count, values, indices, *, blocks: int) -> None:
    program = pl.program_id(0)

    @pl.when(program < blocks)
    def _():
        places, value, above, same = _block(x, kth, program)
        # Both ranks from one cumulative sum: a block has fewer than 2**15 elements.
        both = jnp.cumsum(above << 16 | same, dtype=jnp.int32) - (above << 16 | same)
        same_before, quota = both & 0xFFFF, left[program]
        place = before[program] + (both >> 16) + jnp.minimum(same_before, quota)
        taken = (above > 0) | ((same > 0) & (same_before < quota))
        store(values, place, value, taken)
        store(indices, place, places, taken)

    @pl.when(program >= blocks)
    def _():
        places = (program - blocks) * BLOCK + lax.iota(jnp.int32, BLOCK)
        unused = (places >= count[...]) & (places < values.shape[0])
        store(values, places, jnp.zeros_like(places, values.dtype), unused)
        store(indices, places, jnp.full_like(places, x.shape[0]), unused)
