"""The L∞ and L1 norms of a vector."""

import jax

from .. import _check
from .._implementation import choose
from . import xla


def norms(x: jax.Array, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes the largest magnitude, and the sum of all magnitudes divided by it.

    The quotient does not overflow.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      ``(largest, total)``: scalars of the type of ``x``. ``largest`` is the L∞ norm. ``total`` is
      the L1 norm divided by the L∞ norm, between 1 and n. Both are 0 if all elements are 0. Both
      are undefined if an element is NaN or infinite.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; or there is no
        implementation of this name.

    >>> largest, total = norms(jnp.array([3.0, -1.0, 0.5, -4.0]))
    >>> float(largest), float(total)
    (4.0, 2.125)
    """
    return choose(implementation, {"xla": xla.norms, "triton": _triton}, _check.vector(x))


def _triton(x, *, interpret=False):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.norms(x, interpret=interpret)
