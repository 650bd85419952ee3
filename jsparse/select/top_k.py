"""Exact top-k."""

import dataclasses

import jax

from kernels_pallas import select_top_k

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report


@dataclasses.dataclass(frozen=True)
class TopK(ByDensity):
    """Selects the k elements of largest magnitude, exactly; ties go to the lowest index.

    Attributes:
      density: k / n, above 0 and at most 1.

    >>> x, _ = TopK(0.5)(jnp.array([3.0, -1.0, 0.5, -4.0]), TopK(0.5).init(4, jnp.float32), jnp.int32(0), jnp.int32(0))
    >>> x.values, x.indices
    (Array([ 3., -4.], dtype=float32), Array([0, 3], dtype=int32))
    """

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_top_k(acc, elements_kept(self.density, n))
        x = SparseVector(values, indices, n)
        return x, report(x, count)
