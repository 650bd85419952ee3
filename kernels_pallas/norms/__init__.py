"""The norms of a vector."""

import jax

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
