"""Accumulation and compaction on a GPU.

It uses the compaction kernels of ``select_above``, which add the gradient while they read.
"""

import jax
import jax.numpy as jnp

from ..select_above.triton import Plan, compact


def accumulate_and_select(
    grad: jax.Array,
    residual: jax.Array,
    threshold: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    *,
    capacity: int,
    limit: float,
    clear: bool,
    block: int | None = None,
    slots: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return compact(
        residual,
        threshold,
        start,
        Plan.of(residual.shape[0], capacity, block, slots),
        addend=(grad, keep.astype(jnp.int32)),
        limit=limit,
        clear=clear,
        interpret=interpret,
    )
