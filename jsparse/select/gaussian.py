"""Gaussian-k: a threshold from the mean and the standard deviation of the vector."""

import dataclasses
import statistics
import sys
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas import Marked, choose, magnitude_statistics

from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState
from ._candidates import Candidates, FromLargest

# By rule: the factor by which the threshold is lowered, how often at most, and the least and the
# largest wanted count, relative to k. By "enough" it goes down to a thousandth, or up to a
# thousandfold. "oktopk" has the figures of Ok-Topk's VGG/compression.py, "never" no rounds.
RULES = {"enough": (0.9, 66, 3 / 4, 4 / 3), "oktopk": (1 / 1.02, 20, 3 / 4, 5 / 4), "never": (1, 0, 0, 1)}


@dataclasses.dataclass(frozen=True)
class GaussianThreshold(FromLargest, ByDensity):
    """Selects by a threshold from a normal distribution that is fitted to the vector.

    The threshold is its ``1 - density / 2`` quantile (the mean counts by its magnitude), or the
    largest magnitude of the vector if that is less. Gradients have other tails than a normal
    distribution, so the threshold is adjusted, by one of three rules:

    - ``"enough"``: while more than 4k/3 elements reach it, it is raised by a ninth at a time. Then
      it is lowered by a tenth at a time until at least 3k/4 elements reach it (Ok-Topk, section
      5.4). Both have a limit of 66 times.
    - ``"oktopk"``, as in Ok-Topk's code: while more than 5k/4 elements reach it, it is multiplied
      by 1.02. Then it is divided by 1.02 until at least 3k/4 elements reach it. Both have a limit
      of 20 times, a factor of 1.49 in all, so the count may stay outside these bounds.
    - ``"never"``: it stays as it is. Ok-Topk's section 5.2 counts what this selects.

    If more than k elements reach the threshold, they overflow the buffer, which then holds a
    different part of them in each step. (Ok-Topk's code sends all of them, adds the mean with its
    sign, never lowers a threshold that it raised, and may select nothing where the quantile is
    above the largest magnitude. The code of Gaussian-k itself multiplies the threshold by 0.5 or
    1.5, and counts three times at most.)

    Attributes:
      density: k / n, above 0 and at most 1.
      adjust: ``"enough"``, ``"oktopk"`` or ``"never"``.

    References:
      Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019,
      "Gaussiank"; Li and Hoefler, PPoPP 2022, sections 5.2 and 5.4, and the authors'
      ``VGG/compression.py``.
    """

    adjust: Literal["enough", "oktopk", "never"] = "enough"

    def __post_init__(self):
        super().__post_init__()
        if self.adjust not in tuple(RULES):
            raise ValueError(f'adjust is {self.adjust!r}; choose "enough", "oktopk" or "never"')

    def select(
        self, acc: jax.Array, marked: Marked | None, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        factor, rounds, least, most = RULES[self.adjust]
        candidates = Candidates(acc, self.density, marked, most)
        quantile = -statistics.NormalDist().inv_cdf(max(self.density / 2, sys.float_info.min))
        largest = candidates.largest()
        mean, mean_square = choose(None, {"xla": _describe, "triton": _describe_in_one_read}, acc)
        estimate = jnp.abs(mean) + quantile * jnp.sqrt(jnp.maximum(mean_square - mean**2, 0))
        # The largest magnitude also replaces an estimate that overflowed in the squares.
        threshold = jnp.where(estimate < largest, estimate, largest)
        least, most = least * candidates.k, most * candidates.k
        start = threshold, candidates.count_above(threshold)
        raised = candidates.scale(start, 1 / factor, lambda count: count > most, rounds)
        threshold, _ = candidates.scale(raised, factor, lambda count: count < least, rounds)
        return candidates.take_above(threshold, step)


def _describe(acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean and the mean square."""
    return jnp.mean(acc), jnp.mean(acc**2)


def _describe_in_one_read(acc: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The same figures on a GPU, up to rounding."""
    found = magnitude_statistics(acc, implementation="interpret" if interpret else "triton")
    return found.mean, found.mean_square
