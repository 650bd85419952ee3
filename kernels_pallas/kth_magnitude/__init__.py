"""The exact k-th largest magnitude."""

import jax

from .. import _check
from . import xla


def kth_magnitude(x: jax.Array, k: int) -> jax.Array:
    """Computes the k-th largest ``|x|``, exactly: the threshold above or at which ``k`` elements stand, ties apart.

    Reads ``x`` once for most inputs. A NaN counts as 0; with ``k >= n`` the result is 0.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.

    Returns:
      A scalar of the type of ``x``.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, too long, or ``k`` is not positive.

    >>> kth_magnitude(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    Array(3., dtype=float32)
    """
    _check.vector(x)
    _check.positive("k", k)
    return xla.kth_magnitude(x, k)


def estimate_kth_magnitude(x: jax.Array, k: int) -> jax.Array:
    """Estimates the k-th largest ``|x|`` from one element in each of 65,536 stretches, without reading the rest.

    The number of elements that reach the estimate has relative standard deviation ``sqrt(n / (65536 * k))``. Vectors
    of up to 262,144 elements are searched whole, so that the result is exact.

    Args, Returns, Raises: as :func:`kth_magnitude`.
    """
    _check.vector(x)
    _check.positive("k", k)
    return xla.estimate_kth_magnitude(x, k)
