"""Memories with momentum: what is fed back is made of a momentum, not of the gradient alone."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.arguments import check_fields
from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector, to_dense
from .mean import Quotient
from .memory import ErrorFeedback, Memory, Norm, largest_addend
from .reducer import Reduced
from .space import over


class Velocity(NamedTuple):
    """The state of a memory with momentum.

    Attributes:
      velocity: shape ``(n,)``: the momentum.
      kept: the state of the error feedback.
    """

    velocity: jax.Array
    kept: Any

    @property
    def residual(self) -> jax.Array | None:
        """What was accumulated and not yet delivered."""
        return self.kept.residual


@dataclasses.dataclass(frozen=True)
class WithMomentum(Memory):
    """Error feedback of something that a momentum makes of the gradient. Inherit from this class.

    Attributes:
      momentum: m, at least 0 and below 1.
      feedback: how what was not delivered is kept.
    """

    momentum: float
    feedback: Memory = ErrorFeedback()

    def __post_init__(self):
        check_fields(self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it is at least 0 and below 1, such as 0.9")

    @property
    def feeds_back(self) -> bool:
        return self.feedback.feeds_back

    @property
    def subtracts_mean(self) -> bool:
        return self.feedback.subtracts_mean

    @property
    def subtracts_sent(self) -> bool:
        return self.feedback.subtracts_sent

    def init(self, n: int, dtype: DTypeLike) -> Velocity:
        return Velocity(jnp.zeros(n, dtype), self.feedback.init(n, dtype))

    def limit(self, dtype: DTypeLike, size: int) -> float:
        return self.feedback.limit(dtype, size)

    def prepare(self, leaves: Sequence[Leaf], size: int, norm: Norm) -> Sequence[Leaf]:
        return list(map(to_dense, leaves))  # Every element of a velocity changes in every step.

    def push(
        self, state: Velocity, velocity: jax.Array, vector: jax.Array, layout: Layout, keep: jax.Array, size: int
    ) -> tuple[Pending, Velocity]:
        """What :meth:`accumulate` returns, where ``vector`` is added to the residual."""
        # By windows, as a gradient comes in leaves: they are added to the residual in place.
        windows = [vector[begin:end] for begin, end in itertools.pairwise(layout.offsets)]
        pending, kept = self.feedback.accumulate(state.kept, layout, windows, keep, size)
        return pending, Velocity(velocity, kept)

    def retain(
        self, state: Velocity, done: Reduced, mean: Quotient, keep: jax.Array, size: int
    ) -> tuple[Velocity, Quotient]:
        kept, mean = self.feedback.retain(state.kept, done, mean, keep, size)
        return Velocity(state.velocity, kept), mean

    def for_dense(self) -> "WithMomentum":
        return dataclasses.replace(self, feedback=self.feedback.for_dense())

    def in_dense_phase(self, flush: bool) -> "WithMomentum":
        return dataclasses.replace(self, feedback=self.feedback.in_dense_phase(flush))


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(WithMomentum):
    """Momentum before selection, as in :func:`jsparse.dgc`: ``velocity' = m velocity + gradient``.

    A worker accumulates its velocity, not its gradient, and selects from that. So the residual
    takes up what momentum SGD would apply: Deep Gradient Compression, sections 3.1 to 3.3.

    Attributes:
      momentum, feedback: as in :class:`WithMomentum`.
      nesterov: whether ``m * velocity' + gradient`` is accumulated in place of ``velocity'``.
      factor_masking: whether the velocity becomes 0 where an element that the worker sent was
        delivered.
      clip_norm: the norm to which the sum of the workers' gradients is clipped: each worker clips
        its own to ``clip_norm / sqrt(P)``. None does not clip.
    """

    nesterov: bool = False
    factor_masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it is the norm of a gradient, above 0, or None")

    def prepare(self, leaves: Sequence[Leaf], size: int, norm: Norm) -> Sequence[Leaf]:
        arrays = list(map(to_dense, leaves))
        return arrays if self.clip_norm is None else _clip(arrays, self.clip_norm / size**0.5, norm)

    def accumulate(
        self, state: Velocity, layout: Layout, parts: Sequence[Leaf], keep: jax.Array, size: int
    ) -> tuple[Pending, Velocity]:
        limit = largest_addend(state.velocity.dtype, size)

        def blend(velocity):
            decayed = velocity * jnp.where(keep, self.momentum, 1).astype(velocity.dtype)
            return layout.add_leaves(decayed, parts, keep, limit)

        velocity = blend(state.velocity)
        pushed = blend(velocity) if self.nesterov else velocity
        return self.push(state, velocity, pushed, layout, keep, size)

    def retain(
        self, state: Velocity, done: Reduced, mean: Quotient, keep: jax.Array, size: int
    ) -> tuple[Velocity, Quotient]:
        (velocity, kept), mean = super().retain(state, done, mean, keep, size)
        # Where everything is sent, nothing is masked: that is momentum SGD, as in their code.
        sparsely = isinstance(done.sent, SparseVector) and done.sent.capacity < done.sent.n
        if self.factor_masking and sparsely and isinstance(done.own, SparseVector):
            velocity = velocity.at[done.own.indices.reshape(-1)].set(0, mode="drop")
        return Velocity(velocity, kept), mean


def _clip(leaves: Sequence[jax.Array], limit: float, norm: Norm) -> list[jax.Array]:
    """A worker's gradient, scaled to a Euclidean norm of at most ``limit``.

    It has the type of its flat vector.
    """
    if not leaves:
        return []
    dtype = Layout.of(leaves).dtype
    wide = [leaf.astype(dtype) for leaf in leaves]
    unit, length = norm(wide)
    # A gradient that is not finite has no norm, and stays as it is.
    long, scale = length > limit / unit.astype(length.dtype), (limit / length).astype(dtype)
    return [jnp.where(long, over(leaf, unit) * scale, leaf) for leaf in wide]
