"""Error feedback: what was not delivered is kept and added to the next gradient.

One rule for every algorithm: ``residual' = acc - delivered`` with ``acc = residual + gradient``. Local top-k, global
top-k, a full buffer, a rounded value: whatever the reason that something did not arrive, it is still in ``acc``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from .._comm.comm import Comm
from .._vector.layout import Layout
from .._vector.sparse_vector import SparseVector


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """How a worker keeps what was not delivered: ``residual' = decay * (acc - subtracted)``.

    The default loses nothing and is what the papers do. ``error_feedback=True`` stands for it.

    Attributes:
      decay: what a step leaves of the residual, above 0 and at most 1. Below 1 gradient mass is lost on purpose, the
        older the more; and a step takes one more pass over n elements.
      subtract: ``"local"``: what this worker itself delivered: k elements change, in place. ``"mean"``: the update,
        ``total / P``, as one PowerSGD code does. Summed over workers both are the same, so that both lose nothing, the
        mean but to rounding; it makes the workers' residuals more alike, and changes them at every element of the sum.

    >>> tx = jsparse.sparse_allreduce(
    ...     "data", select=jsparse.select.TopK(0.01), allreduce=jsparse.allreduce.TopkAllGather(),
    ...     error_feedback=ErrorFeedback(decay=0.9),
    ... )
    """

    decay: float = 1.0
    subtract: Literal["local", "mean"] = "local"

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"decay is {self.decay}; it is what a step leaves of the residual, above 0 and at most 1: to keep "
                "nothing pass error_feedback=False"
            )
        if self.subtract not in ("local", "mean"):
            raise ValueError(f'subtract is {self.subtract!r}; choose "local" or "mean"')

    def retain(
        self,
        comm: Comm,
        acc: jax.Array,
        delivered: SparseVector | jax.Array,
        total: SparseVector | jax.Array,
        keep: jax.Array,
    ) -> jax.Array:
        """The new residual; where not ``keep``, of a step that delivered nothing, ``acc`` as it is."""
        if self.subtract == "mean":
            mean = (
                total / comm.size
                if isinstance(total, jax.Array)
                else dataclasses.replace(total, values=total.values / comm.size)
            )
            delivered = comm.varying(mean)
        residual = _subtract(acc, delivered)
        return residual if self.decay == 1 else residual * jnp.where(keep, self.decay, 1).astype(acc.dtype)


def accumulate(
    layout: Layout, residual: jax.Array | None, leaves: Sequence[jax.Array], keep: jax.Array, size: int
) -> jax.Array:
    """``acc``: the residual plus the gradient where ``keep``, in place of the residual when that may be overwritten.

    It saturates at the largest float over the number of workers: a sum of finite gradients that became infinite would
    stay in the residual for ever.
    """
    if residual is None:
        return jnp.where(keep, layout.ravel(leaves), 0)
    return layout.add_leaves(residual, leaves, keep, limit=largest(residual.dtype, size))


def largest(dtype: jnp.dtype, size: int) -> float:
    """The largest magnitude of which ``size`` workers have a finite sum."""
    return float(jnp.finfo(dtype).max) / size


def _subtract(acc: jax.Array, delivered: SparseVector | jax.Array) -> jax.Array:
    """``acc - delivered``: for a sparse vector in place, without a pass over ``acc``."""
    if isinstance(delivered, SparseVector):
        return acc.at[delivered.indices.reshape(-1)].add(-delivered.values.reshape(-1), mode="drop")
    return acc - delivered
