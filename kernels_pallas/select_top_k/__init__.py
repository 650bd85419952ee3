"""Exact top-k by magnitude."""

import functools

import jax

from .. import _check
from .._implementation import choose
from . import xla


def select_top_k(x: jax.Array, k: int, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects the ``k`` elements of largest magnitude, in ascending order of index.

    For most inputs it reads ``x`` once. Among elements equal to the k-th magnitude it takes those
    with the lowest indices. Zeros and NaN are never selected. So fewer than ``k`` elements are
    selected if ``x`` has fewer than ``k`` others.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      ``(values, indices, count)``: shapes ``(k,)``, ``(k,)`` and ``()``. Indices are int32,
      ascending, padded with ``n``. Values have the type of ``x`` and are padded with 0.
      ``count``, int32, is the number of selected elements.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``k`` is not
        positive; or there is no implementation of this name.

    >>> values, indices, count = select_top_k(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    >>> values, indices, int(count)
    (Array([ 3., -4.], dtype=float32), Array([0, 3], dtype=int32), 2)
    """
    x = _check.vector(x)
    _check.positive("k", k)
    algorithm = functools.partial(xla.select_top_k, k=k)

    def on_gpu(x, *, interpret=False):
        from ..kth_magnitude import triton  # Imports Pallas, which takes a while.

        return algorithm(x, primitives=triton.primitives(interpret))

    return choose(implementation, {"xla": algorithm, "triton": on_gpu}, x)
