"""The exact k-th largest magnitude."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from .._implementation import choose
from .._varying import alike
from . import xla
from .xla import sample_places as sample_places


def kth_magnitude(x: jax.Array, k: int, *, implementation: str | None = None) -> jax.Array:
    """Computes the k-th largest ``|x|``, exactly.

    ``k`` elements reach it as a threshold, or more if several magnitudes are equal to it. For
    most inputs it reads ``x`` once. NaN counts as 0. If ``k >= n``, the result is 0.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      A scalar of the type of ``x``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``k`` is not
        positive; or there is no implementation of this name.

    >>> kth_magnitude(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    Array(3., dtype=float32)
    """
    x = _check.vector(x)
    _check.positive("k", k)
    return choose_primitives(implementation, functools.partial(xla.kth_magnitude, k=k), x)


def estimate_kth_magnitude(
    x: jax.Array, k: ArrayLike, *, sample: int = 65536, implementation: str | None = None
) -> jax.Array:
    """Estimates the k-th largest ``|x|`` from a sample, without reading the rest of ``x``.

    It divides ``x`` into ``sample`` segments and takes one element of each. The number of
    elements that reach the estimate has the relative standard deviation
    ``sqrt(n / (sample * k))``. A vector of up to ``4 * sample`` elements is searched whole, and
    the result is exact.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: a rank, or int32 ranks of shape ``(m,)``; at least 1.
      sample: the number of elements in the sample, static, at least 1.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      Magnitudes of the type of ``x``, in the shape of ``k``. In a vector that is searched whole,
      the magnitude is 0 if ``k > n``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``sample`` is
        not positive; or there is no implementation of this name.
    """
    x = _check.vector(x)
    _check.positive("sample", sample)
    if isinstance(k, int) and k < x.shape[0] <= 4 * sample:
        return kth_magnitude(x, k, implementation=implementation)
    estimate = functools.partial(xla.estimate_kth_magnitude, size=sample)
    return choose_primitives(implementation, estimate, x, jnp.asarray(k, jnp.int32))


def choose_primitives(implementation: str | None, algorithm: Callable[..., Any], *args: Any) -> Any:
    """Runs an algorithm with the ``primitives`` of the form that is chosen."""

    def on_gpu(*args, interpret=False):
        from . import triton  # Imports Pallas, which takes a while.

        return algorithm(*args, primitives=triton.primitives(interpret))

    return choose(implementation, {"xla": algorithm, "triton": on_gpu}, *alike(args))
