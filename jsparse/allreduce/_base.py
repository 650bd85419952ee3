"""What all-reduces have in common."""

from typing import Any, ClassVar, Protocol

import jax
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._comm.metered import Cost
from .._vector.sparse_vector import SparseVector
from ..wire import Wire


class AllReduce(Protocol):
    """Sums the workers' vectors: a frozen dataclass of hyperparameters.

    Attributes:
      sparse: whether the vectors are sparse, so that it needs a selector.
    """

    sparse: ClassVar[bool]

    def init(self, n: int, size: int, dtype: DTypeLike) -> Any:
        """The state for vectors of length ``n`` among ``size`` workers: a NamedTuple of arrays, each with an axis."""
        ...

    def __call__(
        self, comm: Comm, x: Any, state: Any, *, step: jax.Array, wire: Wire
    ) -> tuple[SparseVector | jax.Array, SparseVector | jax.Array, Any]:
        """Sums ``x`` over the workers, or as much of it as the algorithm's budget allows.

        Args:
          comm: the workers.
          x: this worker's vector: sparse, one run; dense for an all-reduce of dense vectors.
          state: from ``init`` or from the step before.
          step: int32 scalar, alike on all workers.
          wire: the layout of its messages.

        Returns:
          ``(total, delivered, state)``. ``total`` is the same bits on every worker. ``delivered`` is this worker's
          share of it: summed over workers it is ``total``, so that ``x - delivered`` is what has yet to be sent. Its
          indices may stand in any order.
        """
        ...

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        """What a worker sends in one call, at least and at most: what :func:`jsparse.traffic` reads off its program.

        Without what it costs some to type their result, under ``check_vma=True``.

        Args:
          n: the vectors' length.
          k: the capacity of a sparse vector, as the selector hands it over; ``n`` for a dense one.
          size: P.
          dtype: of the values.
          wire: the layout of its messages.
        """
        ...
