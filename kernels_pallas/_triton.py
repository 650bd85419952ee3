"""What every Pallas-Triton kernel needs: a call, a load and a store.

Arrays are passed whole and a kernel computes its addresses. Where Pallas cuts them into blocks, a ragged length puts a
mask on every block, and a mask turns 16-byte accesses into 4-byte ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ._varying import alike, varying_axes


def call(
    kernel: Callable[..., None],
    *args: Any,
    name: str,
    out: Any,
    grid: int,
    warps: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Runs ``kernel(*args, *out)`` with references to whole arrays, ``grid`` times.

    Args:
      kernel: a function of references, in trees like those of ``args`` and ``out``.
      *args: arrays, or trees of them.
      name: as profiles show it.
      out: a tuple of ``jax.ShapeDtypeStruct``, or trees of them.
      grid: the number of programs.
      warps: of 32 threads, a program.
      interpret: runs in Pallas's interpreter, on any backend.
      aliases: which input is overwritten by which output, by their places among the leaves.

    Returns:
      Arrays, in a tuple like ``out``.
    """
    args = alike(args)
    first = jax.tree.leaves(args)[0]
    variance = {"manual_axis_type": jax.typeof(first).manual_axis_type} if varying_axes(first) else {}
    return pl.pallas_call(
        kernel,
        out_shape=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, **variance), out),
        grid=(grid,),
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=name,
    )(*args)


def load(ref: Any, places: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The elements at some places of a vector; 0 where masked off."""
    return plgpu.load(ref.at[places], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store(ref: Any, places: jax.Array, values: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes elements to some places of a vector, where the mask says so."""
    if mask is not None:
        # The interpreter writes what was there before to a place masked off, which may be another's: past the end.
        places = jnp.where(mask, places, ref.shape[0])
    plgpu.store(ref.at[places], values, mask=mask)
