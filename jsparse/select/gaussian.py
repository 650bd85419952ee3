"""Gaussian-k: a threshold from the mean and the standard deviation."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

from kernels_pallas import choose, count_above, magnitude_statistics

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState
from .fixed import scale_threshold, take_above

# By what a threshold is scaled, and how often at most: to a thousandth, or a thousandfold.
SCALE = 0.9
ROUNDS = 66


@dataclasses.dataclass(frozen=True)
class GaussianThreshold(ByDensity):
    """Selects the elements beyond the ``1 - density / 2`` quantile of a normal distribution fitted to the vector.

    Gradients have other tails than that. The threshold is raised by a ninth at a time while more than 4k/3 elements
    reach it, as in the authors' code, then lowered by a tenth at a time until at least 3k/4 do (Ok-Topk, section 5.4).
    What exceeds k overflows the buffer, which then holds a different part in each step.

    Attributes:
      density: k / n, above 0 and at most 1.

    References:
      Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019, "Gaussiank"; Li and Hoefler,
      PPoPP 2022, section 5.4.
    """

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        k = elements_kept(self.density, acc.shape[0])
        quantile = statistics.NormalDist().inv_cdf(1 - self.density / 2)
        largest, mean, mean_square = choose(None, {"xla": _describe, "triton": _describe_in_one_read}, acc)
        estimate = jnp.abs(mean) + quantile * jnp.sqrt(jnp.maximum(mean_square - mean**2, 0))
        # What overflowed while it was squared, too.
        threshold = jnp.where(estimate < largest, estimate, largest)

        start = threshold, count_above(acc, threshold)
        raised = scale_threshold(acc, start, 1 / SCALE, lambda count: count > 4 / 3 * k, ROUNDS)
        threshold, _ = scale_threshold(acc, raised, SCALE, lambda count: count < 3 / 4 * k, ROUNDS)
        return take_above(acc, threshold, self.density, step)


def _describe(acc: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest magnitude, the mean and the mean square."""
    return jnp.max(jnp.abs(acc)), jnp.mean(acc), jnp.mean(acc**2)


def _describe_in_one_read(acc: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same on a GPU, to rounding."""
    found = magnitude_statistics(acc, implementation="interpret" if interpret else "triton")
    return found.largest, found.mean, found.mean_square
