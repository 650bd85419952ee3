"""All elements that are not zero, for gradients that are sparse by themselves."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas import bitmap, select_above

from .._vector.density import elements_kept
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ._base import SelectorState
from .fixed import AboveThreshold


@dataclasses.dataclass(frozen=True)
class NonZero(AboveThreshold):
    """Selects all elements that are not zero.

    It is for gradients that are sparse by themselves, as those of linear models on sparse data. If
    such a gradient is given as a :class:`jsparse.SparseVector`, and nothing is kept from step to
    step (``error_feedback=False``), no array of length n is formed or read.

    If more elements are not zero than the buffer holds, it takes different ones in each step, so
    that every element gets its turn. Then keep the others by error feedback.

    Attributes:
      density: the buffer's length divided by n, above 0 and at most 1.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, sections 2.2 and 5.3 (natural sparsity).
    """

    density: float

    def init(self, n: int, dtype: DTypeLike) -> SelectorState:
        return SelectorState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32))

    def threshold_of(self, acc: jax.Array) -> jax.Array:
        return jnp.zeros((), acc.dtype)

    def accumulate_and_select(
        self, pending: Pending, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, SelectorState]:
        run = pending.run()
        if run is None:
            return super().accumulate_and_select(pending, state, step, rank)
        k = elements_kept(self.density, run.n)
        run = run.resize(max(k, run.capacity))
        values, places, count = select_above(run.values, 0, k, start=bitmap.turn(step, k))
        indices = run.indices.at[places].get(mode="fill", fill_value=run.n)
        return run, SparseVector(values, indices, run.n), SelectorState(jnp.zeros(1, run.dtype), count[None])
