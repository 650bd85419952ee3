"""Gaussian-k: a threshold from the mean and the standard deviation of the vector."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

from kernels_pallas import choose, count_above, magnitude_statistics

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState
from .fixed import scale_threshold, take_above

# The factor by which a threshold is scaled, and how often at most: down to a thousandth, or up to
# a thousandfold.
SCALE = 0.9
ROUNDS = 66


@dataclasses.dataclass(frozen=True)
class GaussianThreshold(ByDensity):
    """Selects by a threshold from a normal distribution that is fitted to the vector.

    The threshold is its ``1 - density / 2`` quantile. Gradients have other tails than a normal
    distribution, so the threshold is adjusted. While more than 4k/3 elements reach it, it is
    raised by a ninth at a time, as in the authors' code. Then it is lowered by a tenth at a time
    until at least 3k/4 elements reach it (Ok-Topk, section 5.4). Both have a limit of 66 times.
    If more than k elements reach it, they overflow the buffer, which then holds a different part
    of them in each step.

    Attributes:
      density: k / n, above 0 and at most 1.

    References:
      Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019,
      "Gaussiank"; Li and Hoefler, PPoPP 2022, section 5.4.
    """

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        k = elements_kept(self.density, acc.shape[0])
        quantile = statistics.NormalDist().inv_cdf(1 - self.density / 2)
        largest, mean, mean_square = choose(None, {"xla": _describe, "triton": _describe_in_one_read}, acc)
        estimate = jnp.abs(mean) + quantile * jnp.sqrt(jnp.maximum(mean_square - mean**2, 0))
        # The largest magnitude also replaces an estimate that overflowed in the squares.
        threshold = jnp.where(estimate < largest, estimate, largest)

        start = threshold, count_above(acc, threshold)
        raised = scale_threshold(acc, start, 1 / SCALE, lambda count: count > 4 / 3 * k, ROUNDS)
        threshold, _ = scale_threshold(acc, raised, SCALE, lambda count: count < 3 / 4 * k, ROUNDS)
        return take_above(acc, threshold, self.density, step)


def _describe(acc: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest magnitude, the mean and the mean square."""
    return jnp.max(jnp.abs(acc)), jnp.mean(acc), jnp.mean(acc**2)


def _describe_in_one_read(acc: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same figures on a GPU, up to rounding."""
    found = magnitude_statistics(acc, implementation="interpret" if interpret else "triton")
    return found.largest, found.mean, found.mean_square
