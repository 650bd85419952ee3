"""Compaction: the elements whose magnitude reaches a threshold, in ascending order of index."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla


def select_above(
    x: jax.Array, threshold: ArrayLike, capacity: int, *, start: ArrayLike = 0, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes down the elements of ``x`` with ``|x| >= threshold``; zeros and NaN are never among them.

    Reads ``x`` once. When more elements qualify than ``capacity``, ``capacity`` of them are taken round a circle that
    begins at the qualifying element of rank ``start`` (modulo their number): a caller that moves ``start`` on by
    ``capacity`` each time takes every element in turn.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      threshold: a scalar, at least 0. At 0 every non-zero element qualifies.
      capacity: length of the result, static, at least 1.
      start: int32 scalar.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; None chooses. All give the same bits.

    Returns:
      ``(values, indices, count)``: shapes ``(capacity,)``, ``(capacity,)``, ``()``. Indices are int32, ascending,
      padded with ``n``; values have the type of ``x``, padded with 0; ``count`` is the number of elements that
      qualify, which may exceed ``capacity``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, too long, or ``capacity`` is not positive; or there
        is no such implementation.

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
    """Counts the elements that :func:`select_above` would find, without writing them down.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      threshold: a scalar, at least 0.

    Returns:
      int32 scalar.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or too long.

    >>> count_above(jnp.array([3.0, -1.0, 0.5, -4.0]), 1.0)
    Array(3, dtype=int32)
    """
    x = _check.vector(x)
    return xla.count_above(x, threshold)


def _triton(*args, **kwargs):
    from . import triton  # Pallas is imported where it is used.

    return triton.select_above(*args, **kwargs)
