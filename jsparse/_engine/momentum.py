"""Momentum correction: a worker accumulates its velocity, not its gradient, and selects from that.

Deep Gradient Compression, section 3.1 to 3.3: what is added to the residual is what momentum SGD would apply.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._vector.layout import Layout
from .._vector.sparse_vector import SparseVector
from .memory import largest


@dataclasses.dataclass(frozen=True)
class Momentum:
    """Momentum before selection, as in :func:`jsparse.dgc`.

    Attributes:
      decay: m, at least 0 and below 1: ``velocity' = m * velocity + gradient``.
      nesterov: whether ``m * velocity' + gradient`` is accumulated in place of ``velocity'``.
      factor_masking: whether the velocity becomes 0 where an element was delivered.
    """

    decay: float
    nesterov: bool = False
    factor_masking: bool = True

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise ValueError(f"momentum is {self.decay}; it is at least 0 and below 1, such as 0.9")

    def correct(
        self, layout: Layout, velocity: jax.Array, leaves: Sequence[jax.Array], keep: jax.Array, size: int
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The new velocity, where ``keep``; and what is accumulated in place of the gradient, by leaves."""
        limit = largest(velocity.dtype, size)

        def blend(vector):
            return layout.add_leaves(vector * jnp.where(keep, self.decay, 1).astype(vector.dtype), leaves, keep, limit)

        velocity = blend(velocity)
        pushed = blend(velocity) if self.nesterov else velocity
        # Added to the residual in windows, as a gradient is: in place.
        return velocity, [pushed[begin:end] for begin, end in itertools.pairwise(layout.offsets)]

    def mask(self, velocity: jax.Array, sent: SparseVector, delivered: SparseVector | jax.Array) -> jax.Array:
        """The velocity after a step: 0 where something of this worker's was delivered.

        Where everything is sent it is left as it is, as at density 1 in the authors' code: that is momentum SGD.
        """
        if not self.factor_masking or sent.capacity >= sent.n or not isinstance(delivered, SparseVector):
            return velocity
        return velocity.at[delivered.indices.reshape(-1)].set(0, mode="drop")


def clip(leaves: Sequence[jax.Array], limit: float) -> list[jax.Array]:
    """A worker's gradient, scaled to a Euclidean norm of at most ``limit``, in the type of its flat vector."""
    dtype = Layout.of(leaves).dtype
    wide = [leaf.astype(dtype) for leaf in leaves]
    # Squares of finite gradients may be infinite, and those of small ones zero.
    peak = jnp.max(jnp.stack([jnp.zeros((), dtype), *(jnp.max(jnp.abs(leaf)) for leaf in wide if leaf.size)]))
    unit = jnp.where(peak > 0, peak, 1)
    norm = unit * jnp.sqrt(sum((jnp.sum((leaf / unit) ** 2) for leaf in wide), jnp.zeros((), dtype)))
    # One that is not finite has no norm, and stays as it is.
    scale = jnp.where(norm > limit, limit / norm, 1)
    return [leaf * scale for leaf in wide]
