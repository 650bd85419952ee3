"""Statistics of magnitudes in Pallas for Mosaic GPU, the successor of Triton on Hopper and later.

It computes the same as the Triton kernel. Mosaic has no masked accesses, so XLA computes the
statistics of the elements after the last whole block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._varying import varying_axes
from ..count_above_many.xla import count_at_once
from . import xla

BLOCK = 4096


def magnitude_statistics(
    x: jax.Array, thresholds: jax.Array, add: jax.Array | None, *, block: int = BLOCK
) -> xla.MagnitudeStatistics:
    n, m = x.shape[0], thresholds.shape[0]
    blocks = n // block
    if not blocks:
        return xla.magnitude_statistics(x, thresholds, add)
    kind = jax.typeof(x).manual_axis_type if varying_axes(x) else None
    *parts, counts = plgpu.kernel(
        functools.partial(_kernel, block=block, add=add is not None),
        out_type=(
            *[jax.ShapeDtypeStruct((blocks,), jnp.float32, manual_axis_type=kind)] * 4,
            # At least one row: an array without elements cannot be passed.
            jax.ShapeDtypeStruct((max(m, 1), blocks), jnp.int32, manual_axis_type=kind),
        ),
        grid=(blocks,),
        grid_names=("block",),
    )(x, *([] if add is None else [add]), *([thresholds] if m else []))
    parts, counts = xla.Part(*parts), jnp.sum(counts[:m], axis=1, dtype=jnp.int32)
    if n % block:
        rest = xla.accumulate(x[blocks * block :], None if add is None else add[blocks * block :])
        last = xla.describe(xla.drop(rest))
        parts = jax.tree.map(lambda leaf, of_rest: jnp.append(leaf, of_rest), parts, last)
        counts += count_at_once(rest, thresholds)
    return xla.combine(parts, counts, n)


def _kernel(*refs: Any, block: int, add: bool) -> None:
    *operands, largest, total, magnitudes, squares, counts = refs
    program = lax.axis_index("block")
    here = pl.ds(program * block, block)
    # Each thread loads 16 bytes of float32 at a time. One layout for both summands puts their
    # elements in the same order in the registers.
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=4)
    summands = [plgpu.layout_cast(ref[here], layout) for ref in operands[: 1 + add]]
    value = xla.drop(xla.accumulate(summands[0], summands[1] if add else None))
    for ref, statistic in zip((largest, total, magnitudes, squares), xla.describe(value), strict=True):
        ref[program] = statistic
    for thresholds in operands[1 + add :]:
        for j in range(thresholds.shape[0]):
            reached = jnp.abs(value) >= xla.least(thresholds[j])
            counts[j, program] = jnp.sum(reached.astype(jnp.int32), dtype=jnp.int32)
