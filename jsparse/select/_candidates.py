"""What selectors share that need, after one pass, only elements near the k largest of a vector."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import (
    Marked,
    bitmap,
    choose,
    count_above,
    kth_magnitude,
    sample_places,
    select_above,
    top_k_bound,
    top_k_sample,
    varying_as,
)

from .._vector.density import elements_kept
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ._base import Selector, SelectorState
from .fixed import take_above

# How many of the largest elements the candidates are to hold, as a multiple of k.
ABOUT = 2


class FromLargest(Selector):
    """A selector that rarely needs more than the elements that reach a bound.

    On a CPU a long vector is marked where it reaches the bound, while it is added up.
    """

    def reaching(self, n: int) -> int:
        """How many of n elements are to reach the bound, at least, if the estimate of it holds."""
        return ABOUT * elements_kept(self.density, n)

    def select(
        self, acc: jax.Array, marked: Marked | None, state: Any, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, Any]:
        """Selects as when called.

        Args:
          acc: the vector.
          marked: a bound, and what reaches it; None if nothing was marked.
          state, step, rank: as when called.
        """
        raise NotImplementedError

    def __call__(self, acc: jax.Array, state: Any, step: jax.Array, rank: jax.Array) -> tuple[SparseVector, Any]:
        return self.select(acc, None, state, step, rank)

    def accumulate_and_select(
        self, pending: Pending, state: Any, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, Any]:
        plain = super().accumulate_and_select
        n = pending.layout.n
        sample = top_k_sample(n, self.reaching(n))
        if sample is None or not pending.worth_marking():
            return plain(pending, state, step, rank)

        def marking(pending: Pending, *args: Any) -> tuple[jax.Array, SparseVector, Any]:
            bound = top_k_bound(pending.sample(sample.size), n, self.reaching(n))
            acc, words = pending.add_up_and_mark(bound)
            return acc, *self.select(acc, Marked(bound, words), *args)

        def on_gpu(*args: Any, interpret: bool = False) -> tuple[Leaf, SparseVector, Any]:
            return plain(*args)

        return choose(None, {"xla": marking, "triton": on_gpu}, pending, state, step, rank)


class Candidates:
    """A vector, and its elements that reach a bound: about 2k, which are listed once.

    What reaches a threshold at or above the bound is found among them. For one below it, or if
    they are more than there is room for, the whole vector is read. The results are the same.

    Args:
      acc: the vector.
      density: k / n.
      marked: the bound and what reaches it, if they are known.
      many: a multiple of k. Counts that are larger need not be exact, only larger.
    """

    def __init__(self, acc: jax.Array, density: float, marked: Marked | None, many: float = math.inf):
        n = acc.shape[0]
        self.acc, self.density, self.k = acc, density, elements_kept(density, n)
        sample = top_k_sample(n, ABOUT * self.k)
        self.listed = sample is not None
        if sample is None:
            return
        if marked is None:
            places = sample_places(lax.iota(jnp.uint32, sample.size), n, sample.size)
            self.bound = top_k_bound(acc[places.astype(jnp.int32)], n, ABOUT * self.k)
            self.values, self.indices, self.count = select_above(acc, self.bound, sample.room)
        else:
            self.bound = marked.threshold
            self.indices, self.count = bitmap.members(marked.words, sample.room, n)
            self.values = acc.at[self.indices].get(mode="fill", fill_value=0)
        self.complete = self.count <= sample.room
        self.are_many = self.complete & (self.count > many * self.k)

    def hold(self, threshold: jax.Array) -> jax.Array:
        """Whether all elements that reach a threshold are among the candidates."""
        return self.complete & (threshold >= self.bound)

    def count_above(self, threshold: jax.Array) -> jax.Array:
        """How many elements reach a threshold."""
        if not self.listed:
            return count_above(self.acc, threshold)
        return lax.cond(
            self.hold(threshold) | self.are_many,
            lambda: count_above(self.values, threshold),
            lambda: count_above(self.acc, threshold),
        )

    def scale(
        self, start: tuple[jax.Array, jax.Array], factor: float, outside: Callable[[jax.Array], jax.Array], rounds: int
    ) -> tuple[jax.Array, jax.Array]:
        """Multiplies a threshold by a factor while its count is outside the wanted range.

        Args:
          start: ``(threshold, count)``: the first threshold, and how many elements reach it.
          factor: the multiplier.
          outside: whether a count is outside the wanted range.
          rounds: the most multiplications.

        Returns:
          The last ``(threshold, count)``.
        """

        def proceed(carry):
            number, _, count = carry
            return (number < rounds) & outside(count)

        def multiply(carry):
            number, threshold, _ = carry
            threshold = factor * threshold
            return number + 1, threshold, self.count_above(threshold)

        return lax.while_loop(proceed, multiply, (varying_as(jnp.int32(0), self.acc), *start))[1:]

    def largest(self) -> jax.Array:
        """The largest magnitude. It is undefined if there is a NaN."""
        if not self.listed:
            return jnp.max(jnp.abs(self.acc))
        return lax.cond(
            self.complete & (self.count > 0),
            lambda: jnp.max(jnp.abs(self.values)),
            lambda: jnp.max(jnp.abs(self.acc)),
        )

    def kth_magnitude(self) -> jax.Array:
        """The k-th largest magnitude."""
        if not self.listed:
            return kth_magnitude(self.acc, self.k)
        return lax.cond(
            self.complete & (self.count >= self.k),
            lambda: kth_magnitude(self.values, self.k),
            lambda: kth_magnitude(self.acc, self.k),
        )

    def take_above(self, threshold: jax.Array, step: jax.Array) -> tuple[SparseVector, SelectorState]:
        """What reaches a threshold, in a buffer of k elements, as :func:`take_above` does."""
        if not self.listed:
            return take_above(self.acc, threshold, self.density, step)

        def among_candidates() -> tuple[SparseVector, SelectorState]:
            n = self.acc.shape[0]
            values, places, count = select_above(self.values, threshold, self.k, start=bitmap.turn(step, self.k))
            indices = self.indices.at[places].get(mode="fill", fill_value=n)
            return SparseVector(values, indices, n), SelectorState(threshold[None], count[None])

        return lax.cond(
            self.hold(threshold),
            among_candidates,
            lambda: take_above(self.acc, threshold, self.density, step),
        )
