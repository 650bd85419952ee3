"""Sparse into dense: sorted lists added to a vector in place."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._implementation import choose
from .._varying import alike
from . import xla

# The kernel does what XLA's scatter does, and is chosen nowhere until it has been seen to beat it.
ON_CUDA = "xla"


def add_sparse(
    dense: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    scale: ArrayLike = 1,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Computes ``dense`` plus ``scale`` times a sparse vector, in place where ``dense`` is donated.

    Touches only what the lists name. Of ``P`` lists, as many workers send, one is added after the other, so that the
    sum is the same bits on every worker, which no sum with an index twice in one list would be.

    Args:
      dense: bfloat16, float32 or float64, shape ``(n,)``, ``n < 2**31``.
      values: floats, shape ``(k,)`` or ``(P, k)``; times ``scale`` they are rounded to the type of ``dense``.
      indices: int32, of the shape of ``values``: each list ascending, no index twice in it; at or above ``n``, where
        it is padded, nothing is added. Other lists have undefined results.
      scale: a scalar, such as minus the learning rate.
      implementation: ``"xla"``, ``"triton"``, ``"interpret"``, or None, which is the plain form everywhere: no kernel
        has yet been measured beside XLA's scatter.

    Returns:
      A vector of the shape and type of ``dense``.

    Raises:
      ValueError: a shape or type is not as above, or there is no such implementation.

    >>> add_sparse(jnp.ones(4), jnp.array([2.0, 4.0, 0.0]), jnp.array([0, 3, 4]), -0.5)
    Array([ 0.,  1.,  1., -1.], dtype=float32)
    """
    dense, values, indices = jnp.asarray(dense), jnp.asarray(values), jnp.asarray(indices)
    if dense.ndim != 1 or dense.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"dense has shape {dense.shape} and type {dense.dtype}; give one vector of bfloat16, float32 or float64"
        )
    if dense.shape[0] >= 2**31:
        raise ValueError(f"dense has {dense.shape[0]} elements; indices are int32, so split it into parts below 2**31")
    if values.ndim not in (1, 2) or values.shape != indices.shape:
        raise ValueError(
            f"values have shape {values.shape} and indices {indices.shape}; give one list (k,) or several (P, k)"
        )
    if indices.dtype != jnp.int32 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"values have type {values.dtype} and indices {indices.dtype}; give floats and int32")
    scaled = (jnp.asarray(scale) * values).astype(dense.dtype)
    lists = (scaled, indices) if values.ndim == 2 else (scaled[None], indices[None])
    forms = {"xla": xla.add_sparse, "triton": _triton}
    return choose(implementation, forms, *alike((dense, *lists)), on_cuda=ON_CUDA)


def _triton(*args: jax.Array, interpret: bool = False) -> jax.Array:
    from . import triton  # Imports Pallas, which takes a while.

    return triton.add_sparse(*args, interpret=interpret)
