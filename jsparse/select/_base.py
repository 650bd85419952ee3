"""What selectors have in common."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from kernels_pallas import bitmap, select_above

from .._vector.arguments import check_fields
from .._vector.density import check_density
from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector


class Selector:
    """Chooses the elements of a vector that are sent: a frozen dataclass of hyperparameters.

    Inherit from this class. Zeros and NaN are never selected. At density 1 all other elements are.

    Attributes:
      density: k / n, above 0 and at most 1.
    """

    density: float

    def __post_init__(self):
        check_fields(self)
        check_density(self.density)

    def init(self, n: int, dtype: DTypeLike) -> Any:
        """The state for vectors of length ``n``.

        A NamedTuple of arrays, each with one axis. It has at least the fields of
        :class:`SelectorState`, and by default these alone.
        """
        return SelectorState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32))

    def __call__(self, acc: jax.Array, state: Any, step: jax.Array, rank: jax.Array) -> tuple[SparseVector, Any]:
        """Selects.

        Args:
          acc: the vector, shape ``(n,)``, float32 or float64.
          state: from ``init`` or from the step before.
          step: int32 scalar, alike on all workers.
          rank: int32 scalar: this worker's number, for random choices that differ between workers.

        Returns:
          The selected elements, as one run, and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.select.Selector")

    def init_for(self, layout: Layout) -> Any:
        """The state for vectors of this layout: by default that for their length."""
        return self.init(layout.n, layout.dtype)

    def accumulate_and_select(
        self, pending: Pending, state: Any, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, Any]:
        """Adds the vector up and selects from it.

        A selector that can do both in one pass overrides this.

        Args:
          pending: the vector.
          state, step, rank: as when called.

        Returns:
          The vector, shape ``(n,)``, or a run if ``pending.run()`` has one; the selected elements;
          and the new state.
        """
        acc = pending.add_up()
        return acc, *self(acc, state, step, rank)

    def select_per_leaf(
        self, pending: Pending, states: Sequence[Any], step: jax.Array, rank: jax.Array
    ) -> tuple[jax.Array, SparseVector, Sequence[Any]]:
        """Adds the vector up and selects from each of its leaves, as :class:`PerLeaf` asks.

        A selector that can select from all leaves at once overrides this.

        Args:
          pending: the vector. Its layout says where the leaves are.
          states: one for each leaf, from ``init`` or from the step before.
          step, rank: as when called.

        Returns:
          The vector; the selected elements of all leaves, as one run; and the new states.
        """
        acc = pending.add_up()
        leaves = [leaf.reshape(-1) for leaf in pending.layout.windows(acc)]
        selected = [self(leaf, state, step, rank) for leaf, state in zip(leaves, states, strict=True)]
        return acc, SparseVector.end_to_end([x for x, _ in selected]), [state for _, state in selected]


class SelectorState(NamedTuple):
    """What a selector reports.

    Attributes:
      threshold: shape ``(1,)``: elements of at least this magnitude qualified. Where others of the
        same magnitude may not have qualified, it is the smallest selected magnitude.
      selected: int32, shape ``(1,)``: how many qualified, those that overflowed the buffer
        included.
    """

    threshold: jax.Array
    selected: jax.Array


@dataclasses.dataclass(frozen=True)
class ByDensity(Selector):
    """A selector that is given a density and keeps nothing from step to step but its report."""

    density: float


def report(x: SparseVector, selected: jax.Array) -> SelectorState:
    """The state of a selector without a threshold.

    It reports the smallest magnitude of ``x``, or 0.
    """
    smallest = jnp.min(jnp.where(x.indices < x.n, jnp.abs(x.values), jnp.inf))
    return SelectorState(jnp.where(x.count > 0, smallest, 0)[None], selected[None])


def take_indices(acc: jax.Array, indices: jax.Array) -> tuple[SparseVector, SelectorState]:
    """Takes the elements at these indices, except zeros and NaN.

    The indices ascend and end with padding.
    """
    n = acc.shape[0]
    values, places, count = select_above(acc.at[indices].get(mode="fill", fill_value=0), 0, indices.shape[0])
    x = SparseVector(values, indices.at[places].get(mode="fill", fill_value=n), n)
    return x, report(x, count)


def take_members(
    acc: jax.Array, words: jax.Array, capacity: int, start: ArrayLike = 0
) -> tuple[SparseVector, SelectorState]:
    """Takes the elements that a bitmap marks, except zeros and NaN.

    If they are too many, it takes ``capacity`` of them, round a circle that begins at ``start``.
    """
    indices, count = bitmap.members(words, capacity, acc.shape[0], start)
    x, state = take_indices(acc, indices)
    return x, state._replace(selected=state.selected + jnp.maximum(count - capacity, 0))
