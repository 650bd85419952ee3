"""Stochastic top-k: random selection, with probabilities that grow with the magnitude."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap, norms, select_stochastic
from kernels_pallas.select_stochastic.xla import drawn

from .._vector.density import elements_kept
from .._vector.random import key_of, uniform, words_of
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report, take_members
from .bucketed import most_of, quotas
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

    With ``bucket=512`` it is the selector that the thesis implements and trains with. Each bucket
    of consecutive elements has its own norms, and its share of k in place of k. If more elements
    are drawn than its share, it sends the first of them; if fewer, places stay empty. So at most k
    elements are sent, and fewer than k in expectation. If the share is not a whole number, the
    buckets take turns with the elements that are left over. On a CPU this form needs memory for
    two copies of the vector. On a GPU a kernel reads the vector once, if a bucket has at most 8192
    elements.

    Attributes:
      density: k / n, above 0 and at most 1. With buckets it is the thesis's number of elements
        expected in each bucket, divided by ``bucket``.
      rule: ``"exact"`` or ``"capped"``, the two rules of the thesis.
      seed: an integer. In the same step on the same worker, equal seeds draw equal numbers.
        Workers draw different numbers.
      bucket: the length of a bucket, a multiple of 32; None for the whole vector as one.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 2.4.1, Theorem 2.1; section 4.3.3, with buckets.
    """

    rule: Literal["exact", "capped"] = "exact"
    seed: int = 0
    bucket: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.rule not in ("exact", "capped"):
            raise ValueError(f'rule is {self.rule!r}; choose "exact" or "capped"')
        if self.bucket is not None and (self.bucket < 1 or self.bucket % bitmap.WORD):
            raise ValueError(f"bucket is {self.bucket}; it must be a multiple of {bitmap.WORD}, such as 512, or None")

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        k = elements_kept(self.density, n)
        if k >= n:
            return take_above(acc, jnp.zeros((), acc.dtype), self.density, step)
        key = key_of(self.seed, step, rank)
        if self.bucket is not None:
            return self._of_each_bucket(acc, k, self.bucket, step, key)
        chosen = drawn(acc, uniform(key, n), k, n, *norms(acc), self.rule == "exact")
        capacity = min(n, k + math.ceil(MARGIN * math.sqrt(k)))
        return take_members(acc, bitmap.pack(chosen & (acc != 0)), capacity, bitmap.turn(step, capacity))

    def _of_each_bucket(
        self, acc: jax.Array, k: int, bucket: int, step: jax.Array, key: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        values, indices, count = select_stochastic(
            acc,
            quotas(n, k, bucket, step),
            words_of(key),
            block=bucket,
            most=most_of(n, k, bucket),
            capacity=k,
            exact=self.rule == "exact",
        )
        x = SparseVector(values, indices, n)
        return x, report(x, count)
