"""Stochastic top-k in blocks: the probability of an element grows with its magnitude."""

import functools

import jax
from jax.typing import ArrayLike

from .. import _check, bitmap
from .._implementation import choose
from .._varying import alike
from ..select_block_top_k import fits_kernel
from . import xla


def select_stochastic(
    x: jax.Array,
    quota: ArrayLike,
    words: jax.Array,
    *,
    block: int,
    most: int,
    capacity: int,
    exact: bool,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws elements of each block of ``x`` at random, and selects the first of those drawn.

    In each block as many elements are drawn as its quota, in expectation. The probability of an
    element v is ``quota |v| / ‖v‖₁``, if that is at most 1 for all elements of the block. If it is
    not, see ``exact``. Of the elements drawn in a block, the first are selected, as many as its
    quota. Zeros and NaN are never drawn, and a block with an infinity has none drawn, unless its
    quota is its length: then all others are.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      quota: int32, shape ``(ceil(n / block),)``: from 0 to ``most``, and at most the length of
        the block.
      words: two random words, uint32, shape ``(2,)``. Equal words draw equal elements.
      block: the number of consecutive elements in a block, static, a multiple of 32. The last
        block is shorter if ``n`` is no multiple of it.
      most: the largest quota, static, at least 1.
      capacity: the length of the result, static, at least 1: the sum of all quotas.
      exact: if a probability of a block would exceed 1, whether all of them become
        ``quota (|v| + ε) / (‖v‖₁ + n ε)``, with the smallest ε for which none exceeds 1. Otherwise
        the probability is cut to 1, and fewer elements are drawn in expectation.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`). All draw the same elements. In blocks of more than
        8192 elements the plain form runs.

    Returns:
      ``(values, indices, count)``: shapes ``(capacity,)``, ``(capacity,)`` and ``()``. Indices
      are int32, ascending, padded with ``n``. Values have the type of ``x`` and are padded with
      0. ``count``, int32, is the number of drawn elements, which may exceed the number of those
      selected.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``quota`` does
        not have one number for each block; ``block`` is not a positive multiple of 32; ``most`` or
        ``capacity`` is not positive; or there is no implementation of this name.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 4.3.3.

    >>> x = jnp.array([3.0, 0.0, 0.5, -4.0])
    >>> words, static = jnp.zeros(2, jnp.uint32), {"block": 32, "most": 4, "capacity": 4}
    >>> values, indices, count = select_stochastic(x, [4], words, exact=True, **static)
    >>> values, indices, int(count)
    (Array([ 3. ,  0.5, -4. ,  0. ], dtype=float32), Array([0, 2, 3, 4], dtype=int32), 3)
    """
    x = _check.vector(x)
    for name, value in (("block", block), ("most", most), ("capacity", capacity)):
        _check.positive(name, value)
    if block % bitmap.WORD:
        raise ValueError(f"block is {block}; it must be a multiple of {bitmap.WORD}")
    quota = _check.quota(quota, x.shape[0], block)
    static = {"block": block, "most": most, "capacity": capacity, "exact": exact}
    forms = {
        "xla": functools.partial(xla.select_stochastic, **static),
        "triton": functools.partial(_triton, **static),
    }
    return choose(implementation if fits_kernel(x.shape[0], block, most) else "xla", forms, *alike((x, quota, words)))


def _triton(*args, **kwargs):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.select_stochastic(*args, **kwargs)
