"""Addition of sorted sparse lists to a dense vector, in place."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._implementation import choose
from .._varying import alike
from . import xla

# The kernel does the same as XLA's scatter. On an H100 the scatter is faster for a million
# elements, the kernel for a tenth of them (docs/kernels.md).
ON_CUDA = "xla"


def add_sparse(
    dense: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    scale: ArrayLike = 1,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Computes ``dense`` plus ``scale`` times a sparse vector, in place if ``dense`` is donated.

    It touches only the elements that the lists name. ``P`` lists, such as those of ``P`` workers,
    are added one after the other, so that the sum has the same bits on every worker. That would
    not hold if one list named an index twice.

    Args:
      dense: bfloat16, float32 or float64, shape ``(n,)``, ``n < 2**31``.
      values: floats, shape ``(k,)`` or ``(P, k)``. Their products with ``scale`` are rounded to
        the type of ``dense``.
      indices: int32, in the shape of ``values``. In each list indices ascend and none occurs
        twice. Indices of ``n`` or more are padding, and nothing is added for them. Lists that
        break these rules have undefined results.
      scale: a scalar, such as minus the learning rate.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``. None means the plain form
        everywhere: on an H100 it was the faster one for long lists, and the kernel for short ones.

    Returns:
      A vector of the shape and type of ``dense``.

    Raises:
      ValueError: a shape or type is not as above, or there is no implementation of this name.

    >>> add_sparse(jnp.ones(4), jnp.array([2.0, 4.0, 0.0]), jnp.array([0, 3, 4]), -0.5)
    Array([ 0.,  1.,  1., -1.], dtype=float32)
    """
    dense, values, indices = jnp.asarray(dense), jnp.asarray(values), jnp.asarray(indices)
    if dense.ndim != 1 or dense.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"dense has shape {dense.shape} and type {dense.dtype}; give one vector of bfloat16, float32 or float64"
        )
    if dense.shape[0] >= 2**31:
        raise ValueError(
            f"dense has {dense.shape[0]} elements; indices are int32, so split dense into parts of length below 2**31"
        )
    if values.ndim not in (1, 2) or values.shape != indices.shape:
        raise ValueError(
            f"values have shape {values.shape} and indices {indices.shape}; they must have the same shape: "
            "give one list (k,) or several (P, k)"
        )
    if indices.dtype != jnp.int32 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            f"values have type {values.dtype} and indices {indices.dtype}; values must be floats, "
            "indices int32: cast them"
        )
    scaled = (jnp.asarray(scale) * values).astype(dense.dtype)
    lists = (scaled, indices) if values.ndim == 2 else (scaled[None], indices[None])
    forms = {"xla": xla.add_sparse, "triton": _triton}
    return choose(implementation, forms, *alike((dense, *lists)), on_cuda=ON_CUDA)


def _triton(*args: jax.Array, interpret: bool = False) -> jax.Array:
    from . import triton  # Imports Pallas, which takes a while.

    return triton.add_sparse(*args, interpret=interpret)
