"""MSTopK: approximate top-k by a search for a threshold."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla


def select_ms_top_k(
    x: jax.Array,
    k: int,
    *,
    searches: int = 30,
    turn: ArrayLike = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects about the ``k`` elements of largest magnitude, in ascending order of index.

    It searches for a threshold that at most ``k`` elements reach, and selects these elements. It
    fills the other places with elements between this threshold and the next lower threshold that
    it tried. The search lies between the mean and the largest magnitude, or below the mean if
    fewer than ``k`` elements reach the mean. Zeros and NaN are never selected. So fewer than
    ``k`` elements are selected if ``x`` has fewer than ``k`` others.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.
      searches: static, at least 1: how often the interval that holds the k-th magnitude is
        halved. Each half has the same number of representable numbers. With 31 searches (63 for
        float64) or more the result is exact, except for the choice among equal magnitudes.
      turn: int32 scalar that says which of the elements below the threshold fill the places. A
        caller that counts it up by 1 takes each of them in turn.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`). The implementations round the mean in different ways.
        With few searches that can change the result.

    Returns:
      ``(values, indices, count)``: shapes ``(k,)``, ``(k,)`` and ``()``. Indices are int32,
      ascending, padded with ``n``. Values have the type of ``x`` and are padded with 0.
      ``count``, int32, is the number of selected elements.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``k`` or
        ``searches`` is not positive; or there is no implementation of this name.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters,
      MLSys 2021, Algorithm 1.

    >>> values, indices, count = select_ms_top_k(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    >>> values, indices, int(count)
    (Array([ 3., -4.], dtype=float32), Array([0, 3], dtype=int32), 2)
    """
    x = _check.vector(x)
    _check.positive("k", k)
    _check.positive("searches", searches)
    algorithm = functools.partial(xla.select_ms_top_k, k=k, searches=searches)

    def on_gpu(*args, interpret=False):
        from . import triton  # Imports Pallas, which takes a while.

        return algorithm(*args, primitives=triton.primitives(interpret))

    return choose(implementation, {"xla": algorithm, "triton": on_gpu}, *alike((x, jnp.asarray(turn))))
