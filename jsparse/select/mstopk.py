"""MSTopK: approximate top-k by multiple sampling of thresholds."""

import dataclasses

import jax

from kernels_pallas import select_ms_top_k

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report


@dataclasses.dataclass(frozen=True)
class MSTopK(ByDensity):
    """Selects k elements: all above a threshold that at most k reach, and some just below it.

    This is Algorithm 1 of the paper. It halves the interval between the mean and the largest
    magnitude N times. That leaves two thresholds: at most k elements reach one, and more than k
    reach the other. The elements that reach the first are selected, and a window of consecutive
    elements between the two fills the other places. The algorithm differs from the paper's in
    three ways, so that it selects k elements of any vector, also of one with ties or with one
    huge element:

    - The two halves of an interval have the same number of floats, and not the same width. So the
      resolution is relative to the magnitude, and from N = 31 on (in float64 from 63 on) the k-th
      magnitude is found exactly. With N = 30, more than 99 % of the selected elements are among
      the k largest.
    - If fewer than k elements reach the mean, the search continues below it. If more than k
      elements are equal to the largest magnitude, it continues above it.
    - The window is not drawn at random. It moves on with the step, so that every element gets its
      turn.

    It reads the vector twice for the mean and the largest magnitude, and once to compact it. The
    searches run on the compacted elements: a superset of the k largest, whose lower bound comes
    from a sample. A vector is searched whole, in ``N / 2`` passes or on a GPU in fewer, if it has
    up to 65,536 elements (262,144 on a GPU), or if the superset would be too large: because of k,
    or because a single magnitude is too frequent.

    Attributes:
      density: k / n, above 0 and at most 1.
      searches: N, the number of halvings, at least 1.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters,
      MLSys 2021, section 3.1, Algorithm 1.
    """

    searches: int = 30

    def __post_init__(self):
        super().__post_init__()
        if self.searches < 1:
            raise ValueError(f"searches is {self.searches}; it must be at least 1, such as 30, as in the paper")

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_ms_top_k(acc, elements_kept(self.density, n), searches=self.searches, turn=step)
        x = SparseVector(values, indices, n)
        return x, report(x, count)
