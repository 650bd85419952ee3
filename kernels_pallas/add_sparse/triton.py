"""Addition of sparse lists to a dense vector, in Pallas for Triton.

Each lane takes one element of a list and adds it at its index. A list names no index twice, so no
two lanes write to the same place. Each list is a launch of its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .._triton import call, load, store
from .xla import in_order

# The elements of a program, and its warps. That is 4 elements for each thread: for float32 one
# 16-byte access to the values, and one to the indices.
BLOCK = 512
WARPS = 4


def add_sparse(
    dense: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
    interpret: bool = False,
) -> jax.Array:
    if not (dense.size and values.size):
        return dense

    def add_list(dense, values, indices):
        return call(
            functools.partial(_kernel, block=block),
            dense,
            values,
            indices,
            name="add_sparse",
            out=(jax.ShapeDtypeStruct(dense.shape, dense.dtype),),
            grid=pl.cdiv(values.shape[0], block),
            warps=warps,
            interpret=interpret,
            aliases={0: 0},
        )[0]

    return in_order(add_list, dense, values, indices)


def _kernel(before: Any, values: Any, indices: Any, after: Any, *, block: int) -> None:
    program, lanes = pl.program_id(0), lax.iota(jnp.int32, block)

    def body(mask):
        lane = program * block + lanes
        place, value = load(indices, lane, mask), load(values, lane, mask)
        here = place < before.shape[0] if mask is None else mask & (place < before.shape[0])
        # bfloat16 is added in float32 and then rounded, as XLA does: so the sum is the same.
        total = load(before, place, here).astype(jnp.float32) + value.astype(jnp.float32)
        store(after, place, total.astype(after.dtype), here)

    # The ragged end is a branch of its own, so that only it has a mask.
    whole, rest = divmod(values.shape[0], block)
    if whole:
        pl.when(program < whole)(lambda: body(None))
    if rest:
        pl.when(program == whole)(lambda: body(lanes < rest))
