"""What selectors have in common."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from kernels_pallas import bitmap, select_above

from .._vector.density import check_density
from .._vector.sparse_vector import SparseVector


class Selector(Protocol):
    """Chooses the elements of a vector that are sent: a frozen dataclass of hyperparameters.

    Its state has at least the fields of :class:`SelectorState`. Zeros and NaN are never selected. At density 1 all
    other elements are.
    """

    def init(self, n: int, dtype: DTypeLike) -> Any:
        """The state for vectors of length ``n``: a NamedTuple of arrays, each with one axis."""
        ...

    def __call__(self, acc: jax.Array, state: Any, step: jax.Array, rank: jax.Array) -> tuple[SparseVector, Any]:
        """Selects.

        Args:
          acc: the vector, shape ``(n,)``, float32 or float64.
          state: from ``init`` or from the step before.
          step: int32 scalar, alike on all workers.
          rank: int32 scalar, this worker's number, for what is random and differs between workers.

        Returns:
          The selected elements, as one run, and the new state.
        """
        ...


class SelectorState(NamedTuple):
    """What a selector reports.

    Attributes:
      threshold: shape ``(1,)``: the magnitude at or above which elements qualified; the smallest selected one, where
        others of that magnitude may not have.
      selected: shape ``(1,)``, int32: how many qualified, including what overflowed the buffer.
    """

    threshold: jax.Array
    selected: jax.Array


@dataclasses.dataclass(frozen=True)
class ByDensity:
    """A selector of a share of the elements that keeps nothing from step to step but what it reports."""

    density: float

    def __post_init__(self):
        check_density(self.density)

    def init(self, n: int, dtype: DTypeLike) -> SelectorState:
        return SelectorState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32))


def report(x: SparseVector, selected: jax.Array) -> SelectorState:
    """The state after selecting ``x`` by other means than a threshold: its smallest magnitude, 0 if it is empty."""
    smallest = jnp.min(jnp.where(x.indices < x.n, jnp.abs(x.values), jnp.inf))
    return SelectorState(jnp.where(x.count > 0, smallest, 0)[None], selected[None])


def take_indices(acc: jax.Array, indices: jax.Array) -> tuple[SparseVector, SelectorState]:
    """The elements at ascending indices, padded with n, without those that are zero or NaN."""
    n = acc.shape[0]
    values, places, count = select_above(acc.at[indices].get(mode="fill", fill_value=0), 0, indices.shape[0])
    x = SparseVector(values, indices.at[places].get(mode="fill", fill_value=n), n)
    return x, report(x, count)


def take_members(
    acc: jax.Array, words: jax.Array, capacity: int, start: ArrayLike = 0
) -> tuple[SparseVector, SelectorState]:
    """The elements that a bitmap marks, without those that are zero or NaN; round a circle, if they are too many."""
    indices, count = bitmap.members(words, capacity, acc.shape[0], start)
    x, state = take_indices(acc, indices)
    return x, state._replace(selected=state.selected + jnp.maximum(count - capacity, 0))
