"""MSTopK: approximate top-k by multiple sampling of thresholds."""

import dataclasses

import jax

from kernels_pallas import select_ms_top_k

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report


@dataclasses.dataclass(frozen=True)
class MSTopK(ByDensity):
    """Selects k elements: all above a threshold that at most k reach, and some of those just below it.

    Algorithm 1 of the paper: N halvings of the interval between the mean and the largest magnitude leave a threshold
    that too few elements reach and one that too many do; of those between the two, a window fills the k places. Where
    it differs, so that k elements come of any vector, ties and one huge element among them:

    - Halves have as many floats each, not the same width: resolution is relative to the magnitude, and from N = 31
      on the k-th is found exactly. With N = 30, more than 99 % of the selected are among the k largest.
    - Where fewer than k reach the mean, the search goes on below it; where more than k tie with the largest, above.
    - The window is not drawn at random but moves on with the step, so that all get their turn.

    Reads the vector twice for the mean and the largest and once to compact; the searches run among what was compacted,
    a superset of the k largest that a sample delimits. Vectors of up to 262,144 elements, and those of which a single
    magnitude makes the superset too large, are searched whole: ``N / 2`` passes.

    Attributes:
      density: k / n, above 0 and at most 1.
      searches: N, at least 1.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021, section
      3.1, Algorithm 1.
    """

    searches: int = 30

    def __post_init__(self):
        super().__post_init__()
        if self.searches < 1:
            raise ValueError(f"searches is {self.searches}; it must be at least 1, such as the paper's 30")

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_ms_top_k(acc, elements_kept(self.density, n), searches=self.searches, turn=step)
        x = SparseVector(values, indices, n)
        return x, report(x, count)
