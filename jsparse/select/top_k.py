"""The selector for the exact top-k."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import (
    Marked,
    choose,
    segment_top_k_bounds,
    segment_top_k_samples,
    segments_fit,
    select_segment_top_k,
    select_top_k,
)

from .._vector.density import elements_kept
from .._vector.pending import Pending
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

    def select_per_leaf(
        self, pending: Pending, states: Sequence[SelectorState], step: jax.Array, rank: jax.Array
    ) -> tuple[jax.Array, SparseVector, Sequence[SelectorState]]:
        """Selects from all leaves at once on a CPU, and from one after another on a GPU."""
        one_by_one = super().select_per_leaf

        def at_once(pending: Pending, *_: Any) -> tuple[jax.Array, SparseVector, Sequence[SelectorState]]:
            lengths = pending.layout.lengths
            if not segments_fit(lengths):
                return one_by_one(pending, states, step, rank)
            quota = [min(elements_kept(self.density, n), n) for n in lengths]
            samples, marked = segment_top_k_samples(lengths, quota), None
            if samples is None or not pending.worth_marking():
                acc = pending.add_up()
            else:
                bounds = segment_top_k_bounds(pending.samples(samples), lengths, quota)
                acc, words = pending.add_up_and_mark(bounds)
                marked = Marked(bounds, words)
            values, indices, counts, smallest = select_segment_top_k(acc, lengths=lengths, quota=quota, marked=marked)
            thresholds = jnp.where(counts > 0, smallest, 0)
            reports = [SelectorState(thresholds[i : i + 1], counts[i : i + 1]) for i in range(len(lengths))]
            return acc, SparseVector(values, indices, acc.shape[0]), reports

        def on_gpu(*args: Any, interpret: bool = False) -> tuple[jax.Array, SparseVector, Sequence[SelectorState]]:
            return one_by_one(*args)

        return choose(None, {"xla": at_once, "triton": on_gpu}, pending, states, step, rank)
