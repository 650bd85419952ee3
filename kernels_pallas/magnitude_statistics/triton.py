"""Statistics of magnitudes in Pallas for Triton, in one read of the vector.

Each block writes its description and its counts to a place of its own, and XLA combines them. So
the sums do not depend on the order in which blocks run, and no atomics are needed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .._triton import call, load
from . import xla

BLOCK = 4096
# 32 elements for each thread: for float32 eight accesses of 16 bytes to each array.
WARPS = 4


def magnitude_statistics(
    x: jax.Array, thresholds: jax.Array, add: jax.Array | None, *, block: int = BLOCK, interpret: bool = False
) -> xla.MagnitudeStatistics:
    if not x.shape[0]:
        return xla.magnitude_statistics(x, thresholds, add)
    parts, counts = read(x, thresholds, add, describe=True, block=block, interpret=interpret)
    return xla.combine(parts, counts, x.shape[0])


def read(
    x: jax.Array,
    thresholds: jax.Array,
    add: jax.Array | None = None,
    *,
    describe: bool,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[Any, jax.Array]:
    """Reads the vector once: ``(parts, counts)``.

    ``parts`` is an :class:`xla.Part` with the descriptions of the blocks, or None unless
    ``describe``. ``counts`` are those of the whole vector.
    """
    blocks = pl.cdiv(x.shape[0], block)
    m = thresholds.shape[0]
    parts, counts = call(
        functools.partial(_kernel, block=block),
        x,
        add,
        thresholds if m else None,
        name="magnitude_statistics",
        out=(
            _parts(jax.ShapeDtypeStruct((blocks,), jnp.float32)) if describe else None,
            jax.ShapeDtypeStruct((blocks, m), jnp.int32) if m else None,
        ),
        grid=blocks,
        warps=WARPS,
        interpret=interpret,
    )
    return parts, jnp.zeros(0, jnp.int32) if counts is None else jnp.sum(counts, axis=0, dtype=jnp.int32)


def _parts(leaf: Any) -> xla.Part:
    return xla.Part(leaf, leaf, leaf, leaf)


def _kernel(x: Any, add: Any, thresholds: Any, part: xla.Part | None, counts: Any, *, block: int) -> None:
    program, places = pl.program_id(0), lax.iota(jnp.int32, block)

    def body(mask):
        here = program * block + places
        value = xla.drop(xla.accumulate(load(x, here, mask), None if add is None else load(add, here, mask)))
        if part is not None:
            for ref, statistic in zip(part, xla.describe(value), strict=True):
                ref[program] = statistic
        if counts is not None:
            # Two at a time, in the halves of a word: threads wait once for the sum of both.
            def reached(j):
                return (jnp.abs(value) >= xla.least(thresholds[j])).astype(jnp.int32)

            def count(i, _):
                both = jnp.sum(reached(2 * i) | reached(2 * i + 1) << 16, dtype=jnp.int32)
                counts[program, 2 * i] = both & 0xFFFF
                counts[program, 2 * i + 1] = both >> 16

            pairs, rest = divmod(thresholds.shape[0], 2)
            lax.fori_loop(0, pairs, count, None)
            if rest:
                counts[program, 2 * pairs] = jnp.sum(reached(2 * pairs), dtype=jnp.int32)

    # The ragged block is a branch of its own: with a mask, every block would load 4 bytes at a
    # time.
    whole, rest = divmod(x.shape[0], block)
    if whole:
        pl.when(program < whole)(lambda: body(None))
    if rest:
        pl.when(program == whole)(lambda: body(places < rest))
