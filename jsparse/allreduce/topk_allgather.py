"""TopkA: an all-gather of every worker's sparse vector."""

import dataclasses

import jax

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._base import AllReduce


@dataclasses.dataclass(frozen=True)
class TopkAllGather(AllReduce):
    """Gathers every worker's elements on all workers; each sums them in the order of ranks.

    Everything that is selected is delivered. The sum has up to ``P k`` elements.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkA"; Renggli et al., SparCML, SC 2019.
    """

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        message = wire.encode(x)
        total = wire.decode(comm.all_gather(message), x.capacity, x.n, x.values.dtype)
        return total, wire.as_read(x, message), state
