"""MSTopK: approximate top-k by a search for a threshold, in ascending order of index."""

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
    """Writes down ``k`` elements: those above a threshold that at most ``k`` reach, and some of those just below it.

    The threshold is searched for between the mean and the largest magnitude (below the mean, where fewer than ``k``
    reach that). What is missing to ``k`` is a window of the elements between it and the next lower threshold that was
    tried. Zeros and NaN are never selected, so that fewer than ``k`` come where fewer than ``k`` are not zero.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.
      searches: static, at least 1: how often the interval that holds the k-th magnitude is halved. Halves have as
        many representable numbers; from the width of the type on (31, 63 for float64) the result is exact, ties apart.
      turn: int32 scalar: which window, round a circle; a caller that counts it up takes every element in turn.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; None chooses (see :func:`kernels_pallas.using`).
        With few searches the rounding of the mean may decide what is found, and that differs between them.

    Returns:
      ``(values, indices, count)``: shapes ``(k,)``, ``(k,)``, ``()``. Indices are int32, ascending, padded with
      ``n``; values have the type of ``x``, padded with 0.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, too long, ``k`` or ``searches`` is not positive, or
        there is no such ``implementation``.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
      Algorithm 1.

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
