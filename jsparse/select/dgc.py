"""Deep Gradient Compression's threshold: of a strided sample, adjusted, then resampled."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import count_above, kth_magnitude

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState
from .fixed import scale_threshold, take_above

# What a count is of k at least and at most, and how often the threshold is lowered: the authors' defaults.
LOWER, UPPER, ROUNDS = 0.8, 1.3, 10


@dataclasses.dataclass(frozen=True)
class DgcThreshold(ByDensity):
    """Selects about k elements: those above the k-th magnitude as a strided sample tells it.

    Every so many-th element is looked at, beginning elsewhere in each step, and the top-k of these has the threshold
    as its smallest. While fewer than 0.8 k elements reach it, it is scaled by 0.8, ten times at most. If more than
    1.3 k do, the k largest of them are selected (hierarchical selection): the exact top-k, but for ties. Up to 1.3 k
    are left at that; the buffer holds k of them, a different part in each step (in the authors' code, the first k).

    Attributes:
      density: k / n, above 0 and at most 1.
      sample: the sample's share of the elements, above 0 and at most 1; at least ``2 / density`` are looked at.

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 5 and the authors' ``dgc/compression.py``.
    """

    sample: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample is {self.sample}; it is a share of the elements, above 0 and at most 1")

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        k = elements_kept(self.density, acc.shape[0])
        sample = _strided(acc, max(self.sample * acc.shape[0], 2 / self.density), step)
        threshold = kth_magnitude(sample, math.ceil(self.density * sample.shape[0]))
        threshold, count = scale_threshold(
            acc, (threshold, count_above(acc, threshold)), LOWER, lambda count: count < LOWER * k, ROUNDS
        )
        threshold = lax.cond(count > UPPER * k, lambda: kth_magnitude(acc, k), lambda: threshold)
        return take_above(acc, threshold, self.density, step)


def _strided(acc: jax.Array, least: float, step: jax.Array) -> jax.Array:
    """At least so many elements, all if there are not, at equal distances from a first that turns with the step."""
    stride = max(1, math.floor(acc.shape[0] / least))
    if stride == 1:
        return acc
    # An odd stride: it does not keep step with what the lengths of layers mostly are multiples of.
    stride -= 1 - stride % 2
    # Knuth's multiplicative hash: the first elements of successive steps lie far apart.
    first = (step.astype(jnp.uint32) * jnp.uint32(2654435769) >> 8) % jnp.uint32(stride)
    return acc[first.astype(jnp.int32) + stride * lax.iota(jnp.int32, acc.shape[0] // stride)]
