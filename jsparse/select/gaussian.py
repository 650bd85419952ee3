"""Gaussian-k: a threshold from the mean and the standard deviation."""

import dataclasses
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import count_above, varying_as

from .._density import check_density, elements_kept
from .._sparse_vector import SparseVector
from ._base import SelectorState, initial_state
from .fixed import take_above

# By what a threshold is scaled, and how often at most: to a thousandth, or a thousandfold.
SCALE = 0.9
ROUNDS = 66


@dataclasses.dataclass(frozen=True)
class GaussianThreshold:
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

    density: float

    def __post_init__(self):
        check_density(self.density)

    def init(self, n: int, dtype: DTypeLike) -> SelectorState:
        return initial_state(dtype)

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        k = elements_kept(self.density, acc.shape[0])
        quantile = statistics.NormalDist().inv_cdf(1 - self.density / 2)
        mean, largest = jnp.mean(acc), jnp.max(jnp.abs(acc))
        estimate = jnp.abs(mean) + quantile * jnp.sqrt(jnp.maximum(jnp.mean(acc**2) - mean**2, 0))
        # What overflowed while it was squared, too.
        threshold = jnp.where(estimate < largest, estimate, largest)

        raised = _scale(acc, (threshold, count_above(acc, threshold)), 1 / SCALE, lambda count: count > 4 / 3 * k)
        threshold, _ = _scale(acc, raised, SCALE, lambda count: count < 3 / 4 * k)
        return take_above(acc, threshold, self.density, step)


def _scale(
    acc: jax.Array,
    start: tuple[jax.Array, jax.Array],
    factor: float,
    outside: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Multiplies the threshold, the first of ``(threshold, count)``, while the count is outside."""

    def proceed(carry):
        number, _, count = carry
        return (number < ROUNDS) & outside(count)

    def scale(carry):
        number, threshold, _ = carry
        threshold = factor * threshold
        return number + 1, threshold, count_above(acc, threshold)

    _, threshold, count = lax.while_loop(proceed, scale, (varying_as(jnp.int32(0), acc), *start))
    return threshold, count
