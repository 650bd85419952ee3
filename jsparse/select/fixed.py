"""A fixed threshold."""

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas import accumulate_and_select, bitmap, choose, select_above

from .._vector.density import elements_kept
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector, to_dense
from ._base import Selector, SelectorState


class AboveThreshold(Selector):
    """A selector whose threshold depends on few elements of the vector, or on none.

    On a GPU, one kernel then adds the gradient to the residual and selects from the sum, in one
    pass over memory.
    """

    def threshold_of(self, acc: jax.Array) -> jax.Array:
        """The threshold: a scalar of the type of ``acc``."""
        raise NotImplementedError

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        return take_above(acc, self.threshold_of(acc), self.density, step)

    def accumulate_and_select(
        self, pending: Pending, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, SelectorState]:
        """As in :class:`Selector`. The kernel is used if one part is added to one vector."""
        plain = super().accumulate_and_select
        if pending.vector is None or len(pending.parts) != 1 or isinstance(pending.parts[0], SparseVector):
            return plain(pending, state, step, rank)
        forms = {"xla": plain, "triton": self._in_one_pass}
        return choose(None, forms, pending, state, step, rank)

    def _in_one_pass(
        self, pending: Pending, state: SelectorState, step: jax.Array, rank: jax.Array, *, interpret: bool = False
    ) -> tuple[jax.Array, SparseVector, SelectorState]:
        residual, keep, limit = pending.vector, pending.keep, pending.limit
        assert residual is not None
        grad, n = to_dense(pending.parts[0]).reshape(-1), residual.shape[0]
        # XLA computes only the elements that ``threshold_of`` reads; this vector is never formed
        # as a whole.
        acc = jnp.clip(residual + jnp.where(keep, grad.astype(residual.dtype), 0), -limit, limit)
        threshold, k = _threshold_for(self.threshold_of(acc), self.density, n)
        values, indices, count, acc = accumulate_and_select(
            grad,
            residual,
            threshold,
            k,
            start=bitmap.turn(step, k),
            keep=keep,
            limit=limit,
            clear=False,
            implementation="interpret" if interpret else "triton",
        )
        return acc, SparseVector(values, indices, n), SelectorState(threshold[None], count[None])


@dataclasses.dataclass(frozen=True)
class FixedThreshold(AboveThreshold):
    """Selects the elements of magnitude at least ``threshold``.

    If more elements qualify than the buffer holds, it takes different ones in each step, so that
    every element gets its turn.

    Attributes:
      threshold: at least 0.
      density: the buffer's length divided by n, above 0 and at most 1. With 1 there is room for
        all elements, and all are selected, whatever the threshold is.
    """

    threshold: float
    density: float

    def __post_init__(self):
        super().__post_init__()
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it is a magnitude, so it must be at least 0")

    def threshold_of(self, acc: jax.Array) -> jax.Array:
        return jnp.asarray(self.threshold, acc.dtype)


def take_above(
    acc: jax.Array, threshold: jax.Array, density: float, step: jax.Array
) -> tuple[SparseVector, SelectorState]:
    """Selects the elements at or above a threshold, in a buffer of k elements."""
    n = acc.shape[0]
    threshold, k = _threshold_for(threshold, density, n)
    values, indices, count = select_above(acc, threshold, k, start=bitmap.turn(step, k))
    return SparseVector(values, indices, n), SelectorState(threshold[None], count[None])


def _threshold_for(threshold: jax.Array, density: float, n: int) -> tuple[jax.Array, int]:
    """The threshold, which is 0 if all elements are kept, and the number of elements kept."""
    k = elements_kept(density, n)
    return jnp.zeros_like(threshold) if k >= n else threshold, k
