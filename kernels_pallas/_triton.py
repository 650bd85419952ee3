"""The call, the load and the store that all Pallas-Triton kernels use, and the bits of magnitudes.

Each kernel gets whole arrays and computes its own addresses. If Pallas cut an array into blocks,
a length that is no multiple of the block would put a mask on every block. A mask turns 16-byte
accesses into 4-byte accesses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ._varying import alike, varying_axes

# The bits of the smallest magnitude that is not zero, and of infinity.
TINY, INFINITY = (int(np.float32(x).view(np.int32)) for x in (np.finfo(np.float32).tiny, np.inf))


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
    """Runs ``grid`` programs of ``kernel(*args, *out)``, with references to whole arrays.

    Args:
      kernel: a function of references, in trees like those of ``args`` and ``out``.
      *args: arrays, or trees of arrays.
      name: the name of the kernel in profiles.
      out: a tuple of ``jax.ShapeDtypeStruct``, or of trees of them.
      grid: the number of programs.
      warps: the number of warps in a program, of 32 threads each.
      interpret: whether to run in Pallas's interpreter, which works on any backend.
      aliases: maps inputs to the outputs that overwrite them, by their places among the leaves.

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
    """Reads elements at the given places of a vector; 0 where ``mask`` is false."""
    return plgpu.load(ref.at[places], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store(ref: Any, places: jax.Array, values: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes elements to the given places of a vector, where ``mask`` is true."""
    if mask is not None:
        # The interpreter writes the old value back to a masked-off place, and another lane may
        # have written there. So masked-off lanes get a place past the end.
        places = jnp.where(mask, places, ref.shape[0])
    plgpu.store(ref.at[places], values, mask=mask)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of magnitudes, which have the same order: int32; 0 for zeros and NaN."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return jnp.where((bits >= TINY) & (bits <= INFINITY), bits, 0)
