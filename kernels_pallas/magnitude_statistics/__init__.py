"""The largest, the means and the counts that selectors ask of a vector, in one read."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla
from .xla import MagnitudeStatistics


def magnitude_statistics(
    x: jax.Array,
    thresholds: ArrayLike | None = None,
    *,
    add: jax.Array | None = None,
    implementation: str | None = None,
) -> MagnitudeStatistics:
    """Describes ``x + add``: the largest magnitude, the means, and how many elements reach each threshold.

    NaN counts as 0, and so does what lies below the smallest normal number: neither is ever among the counts. Sums are
    taken in trees and in units of the largest magnitudes: for any ``n`` a mean is within about 1e-6 of the mean of its
    summands' magnitudes, and overflows only where it is no finite number, as mean squares above 3.4e38 are not. An
    infinite element makes the means infinite, or ``mean`` NaN where both infinities stand.

    Args:
      x: bfloat16, float16, float32 or float64, shape ``(n,)``, ``n < 2**31``; narrow ones are widened to float32.
      thresholds: shape ``(m,)``, at least 0, in any order; None for none.
      add: float32, or the type of ``x`` where that is wider; shape ``(n,)``: what ``x`` is added to before.
      implementation: ``"xla"``, ``"triton"``, ``"mosaic"`` or ``"interpret"``; None chooses (see
        :func:`kernels_pallas.using`).

    Returns:
      A :class:`MagnitudeStatistics`.

    Raises:
      ValueError: ``x`` is not one vector of floats, or too long, ``add`` is not its like, ``thresholds`` are not one
        vector, or there is no such ``implementation``.

    >>> found = magnitude_statistics(jnp.array([3.0, -1.0, 0.5, -4.0]), jnp.array([0.0, 1.0, 3.5]))
    >>> float(found.largest), float(found.mean), float(found.mean_magnitude), float(found.mean_square)
    (4.0, -0.375, 2.125, 6.5625)
    >>> found.counts
    Array([4, 3, 1], dtype=int32)
    """
    x = _check.vector(x, narrow=True)
    if add is not None:
        add = _check.vector(add)
        if add.shape != x.shape:
            raise ValueError(f"add has shape {add.shape} and x {x.shape}; they are added element by element")
    dtype = jax.eval_shape(xla.accumulate, x, add).dtype
    forms = {"xla": xla.magnitude_statistics, "triton": _triton, "mosaic": _mosaic}
    thresholds = _check.thresholds(jnp.zeros(0) if thresholds is None else thresholds)
    return choose(implementation, forms, *alike((x, thresholds.astype(dtype), add)))


def _triton(*args, interpret=False):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.magnitude_statistics(*args, interpret=interpret)


def _mosaic(*args):
    from . import mosaic

    return mosaic.magnitude_statistics(*args)
