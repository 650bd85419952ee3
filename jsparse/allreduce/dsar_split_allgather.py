"""DSAR_Split_AllGather: a sparse reduce-scatter into dense regions, then a dense gather."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._vector.arguments import check_count
from .._vector.sparse_vector import SparseVector, to_dense
from ..quantize import Exact, Quantizer
from ..quantize._base import check_quantizer
from ..wire import Messages
from ._base import AllReduce, check_keeps_zeros
from ._gather import gather_dense
from ._regions import in_order, index_of, split_and_reduce


@dataclasses.dataclass(frozen=True)
class DsarSplitAllGather(AllReduce):
    """Each worker sums its region of all vectors into a dense region; all gather these regions.

    It is for results that fill in: from δ elements on, the dense form of a vector takes fewer
    bytes than the sparse one. Everything that is selected is delivered.

    Attributes:
      group: the number of workers in a group, for early switching. It must divide the number of
        workers. The members of a group split the indices among themselves, and the sums of their
        regions are dense. The owners of the same region in different groups then reduce it by a
        dense reduce-scatter. With 1 there are no groups: all workers split at once.
      quantize: the layout of the dense regions when they are gathered; ``Exact()`` sends them
        unrounded.

    **Cost**: ``2k (P-1)/P + n (P-1)/P`` words and ``P - 1 + 3 log P`` messages; in groups of G
    ``2k (G-1)/G + n (P/G - 1)/P + n (P-1)/P`` words and ``G + P/G - 2 + 3 log P`` messages. The
    first term is without padding, as in :class:`SsarSplitAllGather`. If all elements of a worker
    had the same owner, it would be ``2k (P-1)``, and in groups ``2k (G-1)``.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.4, "DSAR_Split_AG" and "Early Switching DSAR",
      Figures 3.12 and 3.13; Renggli et al., SparCML, SC 2019 (the dense regions quantized).
    """

    group: int = 1
    quantize: Quantizer = Exact()

    def __post_init__(self):
        super().__post_init__()
        check_count("group", self.group, "a number of workers")
        check_quantizer("quantize", self.quantize)
        check_keeps_zeros(self.quantize)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.quantize.lossless

    @property
    def unbiased(self) -> bool:
        return self.quantize.unbiased

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[jax.Array, SparseVector, tuple[()]]:
        members, groups = self._members(comm.size)

        def exchange(messages: jax.Array) -> jax.Array:
            return comm.all_to_all(messages) if groups == 1 else _exchange(comm, messages, 1)

        x, mine = split_and_reduce(comm, x, wire, members, exchange)
        region = mine.to_dense()
        # The ranks of the owners of the same region differ by multiples of ``members``. Each of
        # them reduces a piece of the region.
        pieces = jnp.pad(region, (0, -region.size % groups)).reshape(groups, -1)
        reduced = functools.reduce(jnp.add, list(_exchange(comm, pieces, members)))
        everyone, read = gather_dense(comm, reduced, comm.size * reduced.size, self.quantize, step)
        total = in_order(to_dense(everyone).reshape(groups, members, -1).swapaxes(0, 1).reshape(members, -1), x.n)
        if self.quantize.lossless:
            return total, x, state
        places = comm.rank() // members * reduced.size + lax.iota(jnp.int32, reduced.size)
        rounding = SparseVector(read - reduced, index_of(places, comm.rank() % members, members, x.n), x.n)
        return total, x.followed_by(rounding), state

    def _members(self, size: int) -> tuple[int, int]:
        """How many workers split the indices among themselves, and how many groups of them."""
        if size % self.group:
            divisors = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
            raise ValueError(
                f"group is {self.group} with {size} workers; it must divide the number of workers: choose of {divisors}"
            )
        return (size, 1) if self.group == 1 else (self.group, size // self.group)


def _exchange(comm: Comm, rows: jax.Array, stride: int) -> jax.Array:
    """An all-to-all among as many workers as there are rows, as rotated exchanges.

    The ranks of these workers are ``stride`` apart. Row ``i`` goes to the ``i``-th of them, and
    row ``j`` of the result comes from the ``j``-th.
    """
    size, count = comm.size, rows.shape[0]
    place = comm.rank() // stride % count

    def target(rank: int, shift: int) -> int:
        own = rank // stride % count
        return rank + ((own + shift) % count - own) * stride

    arrived = [rows[place]]
    for shift in range(1, count):
        pairs = [(rank, target(rank, shift)) for rank in range(size)]
        arrived.append(comm.ppermute(rows[(place + shift) % count], pairs))
    by_sender = (place - jnp.arange(count)) % count
    return jnp.stack(arrived)[by_sender]
