"""The largest magnitude, means and counts of a vector, for selectors, in one read."""

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
    """Computes the largest magnitude and the means of ``x + add``, and counts at thresholds.

    NaN and magnitudes below the smallest normal number count as 0, and zeros are never counted at
    a threshold. Sums are computed in trees, in units of the largest magnitudes. So for any ``n``
    the error of a mean is at most about 1e-6 times the mean magnitude of its summands. A mean
    overflows only if it is itself too large for its type, such as a mean square above 3.4e38. An
    infinite element makes the means infinite. If there are infinities of both signs, ``mean`` is
    NaN.

    Args:
      x: bfloat16, float16, float32 or float64, shape ``(n,)``, ``n < 2**31``. Narrow types are
        widened to float32.
      thresholds: shape ``(m,)``, at least 0, in any order; None for no thresholds.
      add: a vector that is added to ``x`` first: float32, or the type of ``x`` if that is wider;
        shape ``(n,)``. None for no addition.
      implementation: ``"xla"``, ``"triton"``, ``"mosaic"`` or ``"interpret"``; with None the
        operation chooses (see :func:`kernels_pallas.using`).

    Returns:
      A :class:`MagnitudeStatistics`.

    Raises:
      ValueError: ``x`` is not one vector of floats, or it is too long; ``add`` has another shape
        or an unsuitable type; ``thresholds`` are not one vector; or there is no implementation of
        this name.

    >>> found = magnitude_statistics(jnp.array([3.0, -1.0, 0.5, -4.0]), jnp.array([0.0, 1.0, 3.5]))
    >>> float(found.largest), float(found.mean)
    (4.0, -0.375)
    >>> float(found.mean_magnitude), float(found.mean_square)
    (2.125, 6.5625)
    >>> found.counts
    Array([4, 3, 1], dtype=int32)
    """
    x = _check.vector(x, narrow=True)
    if add is not None:
        add = _check.vector(add)
        if add.shape != x.shape:
            raise ValueError(
                f"add has shape {add.shape} and x {x.shape}; they are added element by element, "
                "so give them the same shape"
            )
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
