"""What all-reduces have in common."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages


class ReduceReport(NamedTuple):
    """What an all-reduce tells of its last call, beside its result.

    Attributes:
      overflowed: int32 scalar: elements of this worker that did not fit into a buffer.
      threshold: scalar: the magnitude that the sum's elements had to reach; 0 without a threshold.
    """

    overflowed: jax.Array
    threshold: jax.Array


class AllReduce:
    """Sums the workers' vectors: a frozen dataclass of hyperparameters. Inherit from this class.

    Attributes:
      sparse: whether the vectors are sparse, so that it needs a selector.
      unbiased: whether it rounds at random, right in expectation.
      staleness: by how many steps its sums are late.
    """

    sparse: ClassVar[bool] = True
    staleness = 0

    @property
    def unbiased(self) -> bool:
        return False

    def init(self, n: int, size: int, dtype: DTypeLike) -> Any:
        """The state for vectors of length ``n`` among ``size`` workers.

        A NamedTuple of arrays, each of which has an axis; by default it is empty. A state whose shape
        depends on ``size`` may have a method ``moved`` (see :class:`OkTopkState`).
        """
        return ()

    def __call__(
        self, comm: Comm, x: Any, state: Any, *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector | jax.Array, SparseVector | jax.Array, Any]:
        """Sums ``x`` over the workers, or as much of it as the algorithm's budget allows.

        Args:
          comm: the workers.
          x: this worker's vector. A sparse one is one run, whose capacity is the selector's k.
          state: from ``init`` or from the step before.
          step: int32 scalar, alike on all workers.
          wire: the messages of this step.

        Returns:
          ``(total, delivered, state)``. ``total`` has the same bits on every worker. ``delivered`` is
          this worker's share of it: the sum of all workers' shares is ``total``, so ``x - delivered``
          still has to be sent. The indices of ``delivered`` may stand in any order.
        """
        raise NotImplementedError

    def report(self, state: Any) -> ReduceReport:
        """What the call that returned ``state`` has to tell."""
        return ReduceReport(jnp.int32(0), jnp.zeros(()))
