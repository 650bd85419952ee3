"""Calling a Pallas-Triton kernel: the little that all of them share.

Every operand is passed whole and the kernel computes its addresses: blocks cut by Pallas would be masked wherever the
length is ragged, and a mask turns 16-byte accesses into 4-byte ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ._varying import varying_as, varying_axes


def call(
    kernel: Callable[..., None],
    *args: Any,
    out: Any,
    grid: int,
    warps: int,
    interpret: bool = False,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Runs ``kernel(*args, *out)``, all of them references to whole arrays, ``grid`` times.

    Args:
      kernel: takes a tree of references for each argument and each output.
      *args: trees of arrays, of which all vary over the same axes in the call.
      out: a tuple of trees of ``jax.ShapeDtypeStruct``.
      grid: the number of programs.
      warps: of 32 threads, in a program.
      interpret: runs in Pallas's interpreter, on any backend.
      aliases: which outputs, by their place among the leaves, are written over which inputs.
    """
    leaves = jax.tree.leaves(args)
    widest = leaves[0]
    for leaf in leaves:
        widest = varying_as(widest, leaf)
    del leaves
    args = jax.tree.map(lambda leaf: varying_as(leaf, widest), args)
    kind = jax.typeof(widest).manual_axis_type if varying_axes(widest) else None
    return pl.pallas_call(
        kernel,
        out_shape=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=kind), out),
        grid=(grid,),
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
    )(*args)


def load(ref: Any, places: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Elements of a vector in memory; 0 where masked off."""
    return plgpu.load(ref.at[places], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store(ref: Any, places: jax.Array, values: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes elements of a vector in memory, where the mask says so."""
    if mask is not None:
        # The interpreter writes back what it finds at a masked place, which may be another's: past the end it is lost.
        places = jnp.where(mask, places, ref.shape[0])
    plgpu.store(ref.at[places], values, mask=mask)
