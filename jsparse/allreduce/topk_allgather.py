"""TopkA: all-gather of everyone's sparse vector."""

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._comm.metered import Cost, collective_cost, in_turn
from .._vector.sparse_vector import SparseVector
from ..wire import Wire
from ..wire.formats import as_read


@dataclasses.dataclass(frozen=True)
class TopkAllGather:
    """Gathers every worker's elements everywhere; each sums them for itself, in the order of ranks.

    Everything that is selected is delivered. The sum has up to ``P k`` elements.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkA"; Renggli et al., SparCML, SC 2019.
    """

    sparse: ClassVar[bool] = True

    def init(self, n: int, size: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Wire
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        message = wire.encode(x)
        total = wire.decode(comm.all_gather(message), x.capacity, x.n, x.values.dtype)
        return total, as_read(wire, x, message), state

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        return in_turn(collective_cost("all_gather", 4 * wire.words(k, n, dtype), size))
