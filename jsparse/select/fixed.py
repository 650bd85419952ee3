"""A fixed threshold."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import bitmap, count_above, select_above, varying_as

from .._density import check_density, elements_kept
from .._sparse_vector import SparseVector
from ._base import SelectorState


@dataclasses.dataclass(frozen=True)
class FixedThreshold:
    """Selects the elements of magnitude at least ``threshold``.

    When more qualify than the buffer holds, it holds a different part of them each step, so that all get their turn.

    Attributes:
      threshold: at least 0.
      density: the buffer's length over n, above 0 and at most 1.
    """

    threshold: float
    density: float

    def __post_init__(self):
        check_density(self.density)
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it is a magnitude, so it must be at least 0")

    def init(self, n: int, dtype: DTypeLike) -> SelectorState:
        return SelectorState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32))

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        return take_above(acc, jnp.asarray(self.threshold, acc.dtype), self.density, step)


def take_above(
    acc: jax.Array, threshold: jax.Array, density: float, step: jax.Array
) -> tuple[SparseVector, SelectorState]:
    """The elements at or above a threshold, in a buffer of k."""
    n = acc.shape[0]
    k = elements_kept(density, n)
    if k >= n:
        threshold = jnp.zeros_like(threshold)
    values, indices, count = select_above(acc, threshold, k, start=bitmap.turn(step, k))
    return SparseVector(values, indices, n), SelectorState(threshold[None], count[None])


def scale_threshold(
    acc: jax.Array,
    start: tuple[jax.Array, jax.Array],
    factor: float,
    outside: Callable[[jax.Array], jax.Array],
    rounds: int,
) -> tuple[jax.Array, jax.Array]:
    """Multiplies the threshold, the first of ``(threshold, count)``, while the count is outside, so often at most."""

    def proceed(carry):
        number, _, count = carry
        return (number < rounds) & outside(count)

    def scale(carry):
        number, threshold, _ = carry
        threshold = factor * threshold
        return number + 1, threshold, count_above(acc, threshold)

    return lax.while_loop(proceed, scale, (varying_as(jnp.int32(0), acc), *start))[1:]
