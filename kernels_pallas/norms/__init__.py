"""The norms of a vector."""

import jax

from .. import _check
from .._implementation import choose
from . import xla


def norms(x: jax.Array, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes the largest magnitude, and the sum of all magnitudes over it, which does not overflow.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; None chooses (see :func:`kernels_pallas.using`).

    Returns:
      ``(largest, total)``: scalars of the type of ``x``: the L∞ norm, and the L1 norm divided by it, between 1 and n;
      both 0 where all elements are. Where one is NaN or infinite they may be anything.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or too long, or there is no such ``implementation``.

    >>> largest, total = norms(jnp.array([3.0, -1.0, 0.5, -4.0]))
    >>> float(largest), float(total)
    (4.0, 2.125)
    """
    return choose(implementation, {"xla": xla.norms, "triton": _triton}, _check.vector(x))


def _triton(x, *, interpret=False):
    from . import triton  # Imports Pallas, which takes a while.

    return triton.norms(x, interpret=interpret)
