"""The selector for the exact top-k."""

import dataclasses

import jax

from kernels_pallas import Marked, select_top_k

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report
from ._candidates import FromLargest


@dataclasses.dataclass(frozen=True)
class TopK(FromLargest, ByDensity):
    """Selects exactly the k elements of largest magnitude.

    Among equal magnitudes the lowest index is selected.

    Attributes:
      density: k / n, above 0 and at most 1.

    >>> select = TopK(0.5)
    >>> acc, state = jnp.array([3.0, -1.0, 0.5, -4.0]), select.init(4, jnp.float32)
    >>> x, state = select(acc, state, step=jnp.int32(0), rank=jnp.int32(0))
    >>> x.values, x.indices
    (Array([ 3., -4.], dtype=float32), Array([0, 3], dtype=int32))
    """

    def reaching(self, n: int) -> int:
        return elements_kept(self.density, n)

    def select(
        self, acc: jax.Array, marked: Marked | None, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_top_k(acc, elements_kept(self.density, n), marked=marked)
        x = SparseVector(values, indices, n)
        return x, report(x, count)
