"""SSAR_Split_AllGather and TopkDSA: a sparse reduce-scatter by regions, then a gather."""

import dataclasses

import jax

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._base import AllReduce
from ._regions import gather_regions, split_and_reduce


@dataclasses.dataclass(frozen=True)
class SsarSplitAllGather(AllReduce):
    """Each worker sums its region of all vectors; then all gather the regions, sparse or dense.

    Everything that is selected is delivered. The result *fills in*: it has up to ``P k`` elements.
    From δ elements on it is gathered densely. The data of each step decide which form is used.

    The thesis cuts the indices into P stretches. Here they are dealt to the workers like cards,
    by a hash, so that regions have about equal contents and messages little padding.

    **Cost**: ``2k (P-1)/P`` words for the split and ``2K (P-1)/P`` for the gather of a result of
    ``K`` elements, which costs at most ``n (P-1)/P`` if it may exceed δ; and padding, because all
    messages are as long as the longest, rounded up to one of a few static lengths. If all elements
    had the same owner, up to ``2k (P-1)`` for each. ``P - 1 + 4 log P`` messages.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3, "SSAR_Split_AlGa", with the switch to a dense
      format of section 4.1.2; Li and Hoefler, PPoPP 2022, Table 1, "TopkDSA".
    """

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector | jax.Array, SparseVector, tuple[()]]:
        x, mine = split_and_reduce(comm, x, wire, comm.size, comm.all_to_all)
        total, rounding = gather_regions(comm, x, mine, wire=wire)
        return total, x if rounding is None else x.followed_by(rounding), state
