"""Stochastic top-k: random selection, with probabilities that grow with the magnitude."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap, norms

from .._vector.density import elements_kept
from .._vector.random import key_of, uniform
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, take_members
from .fixed import take_above

# The room of the buffer above k, in standard deviations of the count, which are at most √k.
MARGIN = 4


@dataclasses.dataclass(frozen=True)
class StochasticTopK(ByDensity):
    """Selects each element independently, with a probability that grows with its magnitude.

    The probabilities are chosen for k selected elements in expectation. The probability of an
    element v is ``k |v| / ‖v‖₁``, if that is at most 1 for all elements. Otherwise it depends on
    the rule:

    - ``"exact"``: it is ``k (|v| + ε) / (‖v‖₁ + n ε)``, with the smallest ε for which it is at
      most 1 for all elements. The expected number of drawn elements is k. Zeros can be among
      them, and are dropped.
    - ``"capped"``: it is cut to 1. The expected number of selected elements is then less than k.

    The buffer holds ``k + 4 √k`` elements. If more are drawn, it holds a different part of them
    in each step. As in the thesis, values are not divided by their probabilities, because the
    elements that were not selected are in the residual.

    Attributes:
      density: k / n, above 0 and at most 1.
      rule: ``"exact"`` or ``"capped"``, the two rules of the thesis.
      seed: an integer. In the same step on the same worker, equal seeds draw equal numbers.
        Workers draw different numbers.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 2.4.1, Theorem 2.1.
    """

    rule: Literal["exact", "capped"] = "exact"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.rule not in ("exact", "capped"):
            raise ValueError(f'rule is {self.rule!r}; choose "exact" or "capped"')

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        k = elements_kept(self.density, n)
        if k >= n:
            return take_above(acc, jnp.zeros((), acc.dtype), self.density, step)
        largest, total = norms(acc)
        epsilon = jnp.maximum(k - total, 0) / (n - k) if self.rule == "exact" else jnp.zeros((), acc.dtype)
        share = k / jnp.maximum(total + n * epsilon, 1)
        # |v| and ε are relative to the largest magnitude. Its reciprocal can be too small for a
        # float, so both sides are scaled by a power of two first. These powers differ from those
        # in `norms`: a product that both had in common XLA would store, an array as long as acc.
        scale = jnp.where(largest > 1, 2.0**-60, 2.0**60).astype(acc.dtype)
        factor = share / jnp.where(largest > 0, largest * scale, 1)
        probability = jnp.abs(acc * scale) * factor + share * epsilon
        chosen = (uniform(key_of(self.seed, step, rank), n) < probability) | (probability >= 1)
        capacity = min(n, k + math.ceil(MARGIN * math.sqrt(k)))
        return take_members(acc, bitmap.pack(chosen & (acc != 0)), capacity, bitmap.turn(step, capacity))
