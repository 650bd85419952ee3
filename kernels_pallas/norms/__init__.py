"""The norms of a vector."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _check
from . import xla


def norms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the largest magnitude, and the sum of all magnitudes over it, which does not overflow.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.

    Returns:
      ``(largest, total)``: scalars of the type of ``x``: the L∞ norm, and the L1 norm divided by it, between 1 and n;
      both 0 where all elements are. Where one is NaN or infinite they may be anything.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or too long.

    >>> largest, total = norms(jnp.array([3.0, -1.0, 0.5, -4.0]))
    >>> float(largest), float(total)
    (4.0, 2.125)
    """
    return xla.norms(_check.vector(x))


def over_largest(x: jax.Array, largest: ArrayLike) -> jax.Array:
    """Computes ``|x| / largest``, whatever the scale: XLA's own division is lost to rounding where it is near the ends.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      largest: scalar of the same type: the largest magnitude, from :func:`norms`.

    Returns:
      Numbers of [0, 1], of the type and shape of ``x``; zeros where ``largest`` is 0.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or too long.

    >>> over_largest(jnp.array([3.0, -1.0, 0.5, -4.0]), 4.0)
    Array([0.75 , 0.25 , 0.125, 1.   ], dtype=float32)
    """
    return xla.over_largest(_check.vector(x), jnp.asarray(largest))
