"""Compaction: selects the elements whose magnitude reaches a threshold, in order of index."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla
from .xla import reaches

__all__ = ["count_above", "reaches", "select_above"]


def select_above(
    x: jax.Array, threshold: ArrayLike, capacity: int, *, start: ArrayLike = 0, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects the elements of ``x`` with ``|x| >= threshold``, except zeros and NaN.

    It reads ``x`` once. If more elements qualify than ``capacity``, it takes ``capacity``
    consecutive ones of them, from rank ``start`` (modulo their number) on; after the last one
    comes the first. A caller that adds ``capacity`` to ``start`` each time takes every element in
    turn.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      threshold: a scalar, at least 0. At 0 every non-zero element qualifies.
      capacity: the length of the result, static, at least 1.
      start: int32 scalar, the rank of the first element that is taken.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses.
        All give the same bits.

    Returns:
      ``(values, indices, count)``: shapes ``(capacity,)``, ``(capacity,)`` and ``()``. Indices
      are int32, ascending, padded with ``n``. Values have the type of ``x`` and are padded with
      0. ``count``, int32, is the number of elements that qualify, which may exceed ``capacity``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``capacity``
        is not positive; or there is no implementation of this name.

    >>> values, indices, count = select_above(jnp.array([3.0, -1.0, 0.5, -4.0]), 1.0, 4)
    >>> values, indices, int(count)
    (Array([ 3., -1., -4.,  0.], dtype=float32), Array([0, 1, 3, 4], dtype=int32), 3)
    """
    x = _check.vector(x)
    _check.positive("capacity", capacity)
    forms = {
        "xla": functools.partial(xla.select_above, capacity=capacity),
        "triton": functools.partial(_triton, capacity=capacity),
    }
    args = alike((x, jnp.asarray(threshold, x.dtype), jnp.asarray(start, jnp.int32)))
    return choose(implementation if x.shape[0] else "xla", forms, *args)


def count_above(x: jax.Array, threshold: ArrayLike) -> jax.Array:
    """Counts the elements of ``x`` that qualify in :func:`select_above`, without selecting them.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      threshold: a scalar, at least 0.

    Returns:
      int32 scalar.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long.

    >>> count_above(jnp.array([3.0, -1.0, 0.5, -4.0]), 1.0)
    Array(3, dtype=int32)
    """
    x = _check.vector(x)
    return xla.count_above(x, threshold)


def _triton(*args, **kwargs):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.select_above(*args, **kwargs)
