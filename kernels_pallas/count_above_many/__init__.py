"""Counts of the elements that reach each of many thresholds."""

import jax
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla


def count_above_many(x: jax.Array, thresholds: ArrayLike, *, implementation: str | None = None) -> jax.Array:
    """Counts the elements of ``x`` with ``|x| >= threshold``, for each threshold.

    Zeros and NaN are never counted.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      thresholds: shape ``(m,)``, at least 0, in any order.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      The counts: int32, shape ``(m,)``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``thresholds``
        are not one vector; or there is no implementation of this name.

    >>> count_above_many(jnp.array([3.0, -1.0, 0.5, -4.0]), jnp.array([0.0, 1.0, 3.5]))
    Array([4, 3, 1], dtype=int32)
    """
    x = _check.vector(x)
    forms = {"xla": xla.count_above_many, "triton": _triton}
    return choose(implementation, forms, *alike((x, _check.thresholds(thresholds).astype(x.dtype))))


def _triton(*args, interpret=False):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.count_above_many(*args, interpret=interpret)
