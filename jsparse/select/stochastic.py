"""Stochastic top-k: each element by itself, with a probability that grows with its magnitude."""

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

# How many standard deviations of the count the buffer has room for.
MARGIN = 4


@dataclasses.dataclass(frozen=True)
class StochasticTopK(ByDensity):
    """Selects k elements in expectation, each independently with a probability that grows with its magnitude.

    The probability of an element v is ``k |v| / ‖v‖₁``, where that is at most 1 for all. Otherwise, with
    ``rule="exact"``, it is ``k (|v| + ε) / (‖v‖₁ + n ε)`` with the least ε with which it is, so that k elements are
    selected in expectation, zeros among them, which are dropped; with ``rule="capped"`` it is cut to 1, so that fewer
    than k are.

    The buffer holds ``k + 4 √k``; what exceeds it waits its turn. Values are sent as they are, as in the thesis, not
    divided by their probabilities: what was not selected is in the residual.

    Attributes:
      density: k / n, above 0 and at most 1.
      rule: ``"exact"`` or ``"capped"``, the thesis's two.
      seed: an integer; equal seeds draw equal numbers in equal steps, others on each worker.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH Zurich, 2017, section
      2.4.1, Theorem 2.1.
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
        # |v| and ε over the largest magnitude, whose reciprocal can be too small to be a float. Other powers of two
        # than in norms: XLA would keep a product that both have, an array as long as acc.
        scale = jnp.where(largest > 1, 2.0**-60, 2.0**60).astype(acc.dtype)
        factor = share / jnp.where(largest > 0, largest * scale, 1)
        probability = jnp.abs(acc * scale) * factor + share * epsilon
        chosen = (uniform(key_of(self.seed, step, rank), n) < probability) | (probability >= 1)
        capacity = min(n, k + math.ceil(MARGIN * math.sqrt(k)))
        return take_members(acc, bitmap.pack(chosen & (acc != 0)), capacity, bitmap.turn(step, capacity))
