"""Stochastic top-k: random selection, with probabilities that grow with the magnitude."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import bitmap, norms

from .._vector.density import elements_kept
from .._vector.random import key_of, uniform
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, take_members
from .bucketed import in_rows, quotas
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
    buckets take turns with the elements that are left over. This form needs memory for two copies
    of the vector.

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
        probability = self._probability(acc, k, n, *norms(acc))
        chosen = (uniform(key, n) < probability) | (probability >= 1)
        capacity = min(n, k + math.ceil(MARGIN * math.sqrt(k)))
        return take_members(acc, bitmap.pack(chosen & (acc != 0)), capacity, bitmap.turn(step, capacity))

    def _probability(
        self, x: jax.Array, k: int | jax.Array, n: int | np.ndarray, largest: jax.Array, total: jax.Array
    ) -> jax.Array:
        """The probability of each element, by what `norms` says of x, if k of n are expected."""
        none = jnp.zeros_like(total)
        epsilon = jnp.maximum(k - total, 0) / jnp.maximum(n - k, 1) if self.rule == "exact" else none
        share = k / jnp.maximum(total + n * epsilon, 1)
        # |v| and ε are relative to the largest magnitude. Its reciprocal can be too small for a
        # float, so both sides are scaled by a power of two first. These powers differ from those
        # in `norms`: a product that both had in common XLA would store, an array as long as x.
        scale = jnp.where(largest > 1, 2.0**-60, 2.0**60).astype(x.dtype)
        factor = share / jnp.where(largest > 0, largest * scale, 1)
        return jnp.abs(x * scale) * factor + share * epsilon

    def _of_each_bucket(
        self, acc: jax.Array, k: int, bucket: int, step: jax.Array, key: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n, rows = acc.shape[0], in_rows(acc, bucket, 0)
        lengths = np.minimum(bucket, n - bucket * np.arange(rows.shape[0]))[:, None]
        quota = quotas(n, k, bucket, step)[:, None]
        both = jax.vmap(functools.partial(norms, implementation="xla"))(rows)
        probability = self._probability(rows, quota, lengths, *(norm[:, None] for norm in both))
        chosen = (uniform(key, rows.size).reshape(rows.shape) < probability) | (probability >= 1) | (quota >= lengths)
        words = bitmap.pack((chosen & (rows != 0)).reshape(-1))
        first = jax.vmap(bitmap.take_first)(words.reshape(rows.shape[0], -1), quota[:, 0])
        x, state = take_members(acc, first.reshape(-1)[: -(-n // bitmap.WORD)], k)
        return x, state._replace(selected=bitmap.count(words)[None])
