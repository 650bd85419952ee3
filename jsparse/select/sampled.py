"""A threshold from a sample of the vector, taken anew in each step."""

import dataclasses

import jax

from kernels_pallas import estimate_kth_magnitude

from .._vector.density import elements_kept
from ._base import ByDensity
from .fixed import AboveThreshold


@dataclasses.dataclass(frozen=True)
class SampledThreshold(AboveThreshold, ByDensity):
    """Selects about k elements by a threshold that estimates the k-th magnitude.

    The estimate comes from a sample of 65,536 elements. The relative standard deviation of the
    count is ``1 / sqrt(65536 * density)``: 4 % at density 0.01, 12 % at 0.001. A vector of up to
    262,144 elements is searched whole instead. If more than k elements reach the threshold, the
    buffer holds a different part of them in each step.

    Attributes:
      density: k / n, above 0 and at most 1.
    """

    def threshold_of(self, acc: jax.Array) -> jax.Array:
        return estimate_kth_magnitude(acc, elements_kept(self.density, acc.shape[0]))
