"""The selector for the exact top-k."""

import dataclasses
from typing import Any

import jax

from kernels_pallas import Marked, choose, select_top_k, top_k_bound, top_k_sample

from .._vector.density import elements_kept
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ._base import ByDensity, SelectorState, report


@dataclasses.dataclass(frozen=True)
class TopK(ByDensity):
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

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        return self._select(acc)

    def _select(self, acc: jax.Array, marked: Marked | None = None) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_top_k(acc, elements_kept(self.density, n), marked=marked)
        x = SparseVector(values, indices, n)
        return x, report(x, count)

    def accumulate_and_select(
        self, pending: Pending, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, SelectorState]:
        """As in :class:`Selector`. On a CPU a long vector is marked while it is added up."""
        plain = super().accumulate_and_select
        n = pending.layout.n
        k = elements_kept(self.density, n)
        sample = top_k_sample(n, k)
        if sample is None or not pending.worth_marking():
            return plain(pending, state, step, rank)

        def marking(pending: Pending, *_: jax.Array) -> tuple[jax.Array, SparseVector, SelectorState]:
            bound = top_k_bound(pending.sample(sample), n, k)
            acc, words = pending.add_up_and_mark(bound)
            return acc, *self._select(acc, Marked(bound, words))

        def on_gpu(*args: Any, interpret: bool = False) -> tuple[Leaf, SparseVector, SelectorState]:
            return plain(*args)

        return choose(None, {"xla": marking, "triton": on_gpu}, pending, state, step, rank)
