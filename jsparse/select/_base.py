"""What selectors have in common."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._sparse_vector import SparseVector


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
      threshold: shape ``(1,)``: the magnitude at or above which elements qualified.
      selected: shape ``(1,)``, int32: how many qualified, including what overflowed the buffer.
    """

    threshold: jax.Array
    selected: jax.Array


def initial_state(dtype: DTypeLike) -> SelectorState:
    return SelectorState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32))
