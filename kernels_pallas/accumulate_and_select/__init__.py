"""Accumulation and compaction in one: adds a gradient to a residual, and selects from the sum."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla


def accumulate_and_select(
    grad: jax.Array,
    residual: jax.Array,
    threshold: ArrayLike,
    capacity: int,
    *,
    start: ArrayLike = 0,
    keep: ArrayLike = True,
    limit: float = math.inf,
    clear: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds a gradient to a residual, and selects elements of the sum by a threshold.

    The sum is ``acc = residual + grad``, clipped to magnitudes of at most ``limit``. An element
    qualifies if ``|acc| >= threshold``. ``acc`` overwrites the residual if XLA may overwrite
    that: if the residual is donated, or was made in the same program. Elements of ``acc`` are
    selected as by :func:`select_above`. Selected elements are 0 in the new residual. Elements
    that qualify but find no place in the result stay in the residual, so that nothing is lost:
    ``acc == new_residual + selected``.

    **Cost.** On a GPU it moves 12 bytes for each element if the gradient is float32, 10 bytes if
    it has 16 bits, and 24 bytes more for each selected element. Elements are set to zero while
    they are written, without another pass.

    Args:
      grad: bfloat16, float16 or float32, or the type of ``residual``; shape ``(n,)``,
        ``n < 2**31``.
      residual: float32 or float64, shape ``(n,)``.
      threshold: a scalar, at least 0. At 0 every non-zero element qualifies.
      capacity: the length of the result, static, at least 1.
      start: int32 scalar. If more elements qualify than ``capacity``, the rank of the first
        element that is taken.
      keep: a boolean scalar. If it is false, the gradient counts as 0 and nothing is selected.
      limit: the largest magnitude of a sum, static, above 0. NaN stays NaN.
      clear: static. If it is false, the new residual is ``acc`` itself: for a caller that later
        subtracts what was delivered.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses.
        All give the same bits.

    Returns:
      ``(values, indices, count, new_residual)``: shapes ``(capacity,)``, ``(capacity,)``, ``()``
      and ``(n,)``. Indices are int32, ascending, padded with ``n``. Values have the type of the
      residual and are padded with 0. ``count``, int32, is the number of elements that qualify,
      which may exceed ``capacity``.

    Raises:
      ValueError: ``residual`` is not one vector of float32 or float64, or it is too long;
        ``grad`` has another shape or an unsuitable type; ``capacity`` or ``limit`` is not
        positive; or there is no implementation of this name.

    >>> grad, residual = jnp.array([1.0, 0.5, -1.0]), jnp.array([1.0, 0.25, 0.0])
    >>> values, indices, count, residual = accumulate_and_select(grad, residual, 1.0, 2)
    >>> values, indices, int(count), residual
    (Array([ 2., -1.], dtype=float32), Array([0, 2], dtype=int32), 2,
     Array([0.  , 0.75, 0.  ], dtype=float32))
    """
    residual = _check.vector(residual)
    grad = jnp.asarray(grad)
    if grad.shape != residual.shape:
        raise ValueError(
            f"grad has shape {grad.shape} and residual {residual.shape}; they must have the same shape: "
            "one element for each"
        )
    if grad.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, residual.dtype):
        raise ValueError(f"grad has type {grad.dtype}; cast it to {residual.dtype}, or to bfloat16, float16 or float32")
    _check.positive("capacity", capacity)
    if not limit > 0:
        raise ValueError(
            f"limit is {limit}; the largest magnitude of a sum must be above 0: pass math.inf for no limit"
        )
    forms = {
        "xla": functools.partial(xla.accumulate_and_select, capacity=capacity, limit=limit, clear=clear),
        "triton": functools.partial(_triton, capacity=capacity, limit=limit, clear=clear),
    }
    threshold = jnp.asarray(threshold, residual.dtype)
    args = alike((grad, residual, threshold, jnp.asarray(start, jnp.int32), jnp.asarray(keep, bool)))
    return choose(implementation if residual.shape[0] else "xla", forms, *args)


def _triton(*args, **kwargs):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.accumulate_and_select(*args, **kwargs)
