"""DSAR_Split_AllGather: a sparse reduce-scatter into dense regions, then a dense gather."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..quantize import Exact, Quantizer
from ..wire import Messages
from ._base import AllReduce, check_keeps_zeros
from ._gather import gather_dense
from ._regions import (
    in_place,
    merge_region,
    regions,
    split_and_reduce,
    with_length,
)


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
    first term holds for elements that are evenly spread over the regions. If all elements of a
    worker are in one region, it is ``2k (P-1)``, and in groups ``2k (G-1)``.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.4, "DSAR_Split_AG" and "Early Switching DSAR",
      Figures 3.12 and 3.13; Renggli et al., SparCML, SC 2019 (the dense regions quantized).
    """

    group: int = 1
    quantize: Quantizer = Exact()

    def __post_init__(self):
        if self.group < 1:
            raise ValueError(f"group is {self.group}; it is a number of workers, so it must be at least 1")
        check_keeps_zeros(self.quantize)

    @property
    def unbiased(self) -> bool:
        return self.quantize.unbiased

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[jax.Array, SparseVector, tuple[()]]:
        size, members, groups = comm.size, self.group, self._groups(comm.size)
        if members == 1:
            x, mine = split_and_reduce(comm, x, wire)
            reduced = mine.to_dense()
        else:
            x, region = _reduce_in_group(comm, x, members, groups * -(-x.n // size), wire)
            # The ranks of the owners of the same region differ by multiples of ``members``. Each
            # of them reduces a piece of the region.
            pieces = _exchange(comm, list(region.reshape(groups, -1)), members)
            reduced = pieces[0]
            for other in pieces[1:]:
                reduced = reduced + other
        everyone, read = gather_dense(comm, reduced, self.quantize, step)
        if members > 1:
            everyone = everyone.reshape(groups, members, -1).swapaxes(0, 1)
        if self.quantize.lossless:
            return everyone.reshape(-1)[: x.n], x, state
        place = comm.rank() if members == 1 else comm.rank() % members * groups + comm.rank() // members
        indices = place * reduced.size + lax.iota(jnp.int32, reduced.size)
        rounding = SparseVector(read - reduced, jnp.minimum(indices, x.n), x.n)
        return everyone.reshape(-1)[: x.n], x.followed_by(rounding), state

    def _groups(self, size: int) -> int:
        if size % self.group:
            divisors = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
            raise ValueError(
                f"group is {self.group} with {size} workers; it must divide the number of workers: choose of {divisors}"
            )
        return size // self.group


def _reduce_in_group(
    comm: Comm, x: SparseVector, members: int, block: int, wire: Messages
) -> tuple[SparseVector, jax.Array]:
    """Sums the regions of a group's vectors on their owners.

    Returns:
      ``x`` as others read it; and this worker's region of the sum, dense: shape ``(block,)``.
    """
    first, counts = regions(x, members, block)
    capacity = min(members * x.capacity, block)

    def exchange(length: int) -> tuple[SparseVector, SparseVector]:
        rows = x.window(first, counts, length)
        messages = wire.encode(rows)
        arrived = wire.decode(jnp.stack(_exchange(comm, list(messages), 1)), length, x.n, x.values.dtype)
        mine = merge_region(arrived, comm.rank() % members, block).resize(capacity)
        return x if wire.lossless else in_place(x, first, wire.as_read(rows, messages)), mine

    read, mine = with_length(comm, jnp.max(counts), -(-x.capacity // members), x.capacity, exchange)
    return read, mine.to_dense()


def _exchange(comm: Comm, rows: list[jax.Array], stride: int) -> list[jax.Array]:
    """An all-to-all among as many workers as there are rows, as rotated exchanges.

    The ranks of these workers are ``stride`` apart. Row ``i`` goes to the ``i``-th of them, and
    row ``j`` of the result comes from the ``j``-th.
    """
    size, count = comm.size, len(rows)
    table = jnp.stack(rows)
    place = comm.rank() // stride % count

    def target(rank: int, shift: int) -> int:
        own = rank // stride % count
        return rank + ((own + shift) % count - own) * stride

    arrived = [table[place]]
    for shift in range(1, count):
        pairs = [(rank, target(rank, shift)) for rank in range(size)]
        arrived.append(comm.ppermute(table[(place + shift) % count], pairs))
    by_sender = (place - jnp.arange(count)) % count
    return list(jnp.stack(arrived)[by_sender])
