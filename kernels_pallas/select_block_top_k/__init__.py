"""Exact top-k by magnitude of each block of consecutive elements."""

import functools

import jax
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla

# The length of the longest block whose elements fit the registers of one program of a kernel.
LONGEST = 8192


def select_block_top_k(
    x: jax.Array, quota: ArrayLike, *, block: int, most: int, capacity: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects the elements of largest magnitude in each block of ``x``, in order of index.

    Among equal magnitudes it takes those with the lowest indices. Zeros and NaN are never
    selected. So fewer elements than its quota are selected of a block that has fewer others.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      quota: int32, shape ``(ceil(n / block),)``: how many elements to select in each block, from 0
        to ``most``.
      block: the number of consecutive elements in a block, static, at least 1. The last block is
        shorter if ``n`` is no multiple of it.
      most: the largest quota, static, at least 1.
      capacity: the length of the result, static, at least 1: the sum of all quotas.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`). All give the same bits. In blocks of more than 8192
        elements the plain form runs.

    Returns:
      ``(values, indices, count)``: shapes ``(capacity,)``, ``(capacity,)`` and ``()``. Indices
      are int32, ascending, padded with ``n``. Values have the type of ``x`` and are padded with
      0. ``count``, int32, is the number of selected elements.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``quota`` does
        not have one number for each block; ``block``, ``most`` or ``capacity`` is not positive; or
        there is no implementation of this name.

    >>> x = jnp.array([3.0, -1.0, 0.5, -4.0, 2.0])
    >>> values, indices, count = select_block_top_k(x, [1, 2, 1], block=2, most=2, capacity=4)
    >>> values, indices, int(count)
    (Array([ 3. ,  0.5, -4. ,  2. ], dtype=float32), Array([0, 2, 3, 4], dtype=int32), 4)
    """
    x = _check.vector(x)
    for name, value in (("block", block), ("most", most), ("capacity", capacity)):
        _check.positive(name, value)
    quota = _check.quota(quota, x.shape[0], block)
    static = {"block": block, "most": most, "capacity": capacity}
    forms = {
        "xla": functools.partial(xla.select_block_top_k, **static),
        "triton": functools.partial(_triton, **static),
    }
    return choose(implementation if fits_kernel(x.shape[0], block, most) else "xla", forms, *alike((x, quota)))


def fits_kernel(n: int, block: int, most: int) -> bool:
    """Whether a kernel can select up to ``most`` elements in each block.

    A program has to hold a block, and the slots for all selected elements need int32 places.
    """
    return n > 0 and block <= LONGEST and -(-n // block) * slots(block, most) < 2**31


def slots(block: int, most: int) -> int:
    """The number of places that a kernel has for the selected elements of a block."""
    return 1 << (min(block, most) - 1).bit_length()


def _triton(*args, **kwargs):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.select_block_top_k(*args, **kwargs)
