"""SSAR_Split_AllGather and TopkDSA: a sparse reduce-scatter by equal regions, then a gather of what they hold."""

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._comm.metered import Cost, in_turn
from .._vector.operator import Operator, check_operator
from .._vector.sparse_vector import SparseVector
from ..wire import Wire
from ._regions import gather_regions, gather_regions_sends, split_and_reduce, split_and_reduce_sends


@dataclasses.dataclass(frozen=True)
class SsarSplitAllGather:
    """Each worker combines what all have of its region; then all gather the regions, sparse or dense.

    Everything that is selected is delivered. The result *fills in*: it has up to ``P k`` elements. From δ elements on
    it is gathered densely; which it is, each step's data say. Regions of unequal contents are balanced before they are
    gathered, when that is fewer bytes.

    Attributes:
      operator: ``"sum"``, ``"max"`` or ``"min"``, over the workers that have an index. Gradients are summed.

    **Cost**: where elements lie evenly over the regions, ``2k (P-1)/P`` words for the split and ``2K (P-1)/P`` for the
    gather of a result of ``K`` elements. Where they crowd in one region, up to ``2k (P-1)`` for the split and about
    twice that for the gather, balanced; a result that may exceed δ costs at most ``n (P-1)/P``. ``P - 1 + 4 log P``
    messages, and ``P - 1`` more to balance. Messages have one of a few static lengths, each √2 times the one before,
    and the one with most to send decides.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3, "SSAR_Split_AlGa", with the switch to a dense format of section
      4.1.2; Li and Hoefler, PPoPP 2022, Table 1, "TopkDSA".
    """

    sparse: ClassVar[bool] = True

    operator: Operator = "sum"

    def __post_init__(self):
        check_operator(self.operator)

    def init(self, n: int, size: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Wire
    ) -> tuple[SparseVector | jax.Array, SparseVector, tuple[()]]:
        x, mine = split_and_reduce(comm, x, self.operator, wire)
        total, rounding = gather_regions(comm, mine, x.n, x.capacity, self.operator, step=step, wire=wire)
        return total, x if rounding is None else x.followed_by(rounding), state

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        split = split_and_reduce_sends(n, k, size, dtype=dtype, wire=wire)
        return in_turn(split, gather_regions_sends(n, k, size, dtype=dtype, wire=wire))
