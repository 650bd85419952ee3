"""The threshold of Deep Gradient Compression: from a strided sample, then adjusted."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import Marked, kth_magnitude

from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState
from ._candidates import Candidates, FromLargest

# The least and the largest accepted count, as multiples of k, and how often the threshold is
# lowered at most. These are the authors' defaults. LOWER is also the factor by which it is
# lowered.
LOWER, UPPER, ROUNDS = 0.8, 1.3, 10


@dataclasses.dataclass(frozen=True)
class DgcThreshold(FromLargest, ByDensity):
    """Selects about k elements by a threshold from a strided sample.

    The sample has every s-th element, from another first element in each step. The threshold is
    the smallest magnitude of the top elements of the sample, at the same density. While fewer
    than 0.8 k elements reach it, it is multiplied by 0.8, ten times at most. If more than 1.3 k
    elements reach it, the k largest of them are selected (hierarchical selection): that is the
    exact top-k, except for ties. If k to 1.3 k elements reach it, the buffer holds k of them, a
    different part in each step (in the authors' code, the first k).

    Attributes:
      density: k / n, above 0 and at most 1.
      sample: the share of the elements in the sample, above 0 and at most 1. The sample has at
        least ``2 / density`` elements, if the vector has so many.

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 5 and the authors'
      ``dgc/compression.py``.
    """

    sample: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample is {self.sample}; it must be a share of the elements, above 0 and at most 1")

    def select(
        self, acc: jax.Array, marked: Marked | None, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        candidates = Candidates(acc, self.density, marked, UPPER)
        sample = _strided(acc, max(self.sample * acc.shape[0], 2 / self.density), step)
        threshold = kth_magnitude(sample, math.ceil(self.density * sample.shape[0]))
        start = threshold, candidates.count_above(threshold)
        threshold, count = candidates.scale(start, LOWER, lambda count: count < LOWER * candidates.k, ROUNDS)
        threshold = lax.cond(count > UPPER * candidates.k, candidates.kth_magnitude, lambda: threshold)
        return candidates.take_above(threshold, step)


def _strided(acc: jax.Array, least: float, step: jax.Array) -> jax.Array:
    """A sample of at least ``least`` elements of ``acc``, at equal distances; all if it has fewer.

    The first element changes with the step.
    """
    stride = max(1, math.floor(acc.shape[0] / least))
    if stride == 1:
        return acc
    # Make the stride odd: the lengths of layers are mostly multiples of even numbers, and an odd
    # stride does not keep step with those.
    stride -= 1 - stride % 2
    # By Knuth's multiplicative hash, the first elements of successive steps are far apart.
    first = (step.astype(jnp.uint32) * jnp.uint32(2654435769) >> 8) % jnp.uint32(stride)
    return acc[first.astype(jnp.int32) + stride * lax.iota(jnp.int32, acc.shape[0] // stride)]
