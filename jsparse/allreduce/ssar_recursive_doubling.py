"""SSAR_Rec_Dbl: sparse vectors are merged in pairs, in log P rounds."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._base import AllReduce
from ._gather import delta, difference, fitting, lengths_between
from ._pairs import Pairs, among, butterfly, deliver, either, receives, type_as_alike
from ._regions import with_length


class Filling(NamedTuple):
    """A vector that may have become dense.

    Attributes:
      values: shape ``(n,)``.
      union: bitmap of its indices.
      count: the number of its indices; n once it has been sent densely.
    """

    values: jax.Array
    union: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class SsarRecursiveDoubling(AllReduce):
    """In round t, workers ``2**(t-1)`` apart exchange all that they have, and both merge it.

    Everything that is selected is delivered. In each round, a vector with more than δ elements is
    sent densely, and stays dense from then on. Workers beyond a power of two first send their
    elements to another worker, and get the result from it.

    **Cost**: with messages as long as the data, ``2k log P`` words if all workers have the same
    indices, ``2k (P-1)`` if no two workers share one, and in each round at most ``n``; ``log P``
    messages, and ``2 log P`` more for each round that has to agree on a length, which is each but
    the first. If P is not a power of two, log is rounded down and there are two rounds more: one
    of k elements, and one of the whole result. Messages have one of a few static lengths, each √2
    times the one before. The worker with most to send decides which. Under ``check_vma=True`` the
    result is gathered once more, in parts, to type it as alike on all workers: ``(P-1)/P`` of its
    words and ``3 log P`` messages, ``log P`` if it is dense.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3, "SSAR_Rec_Dbl", Figure 3.9, with the switch to
      a dense format of section 4.1.2 and the summations of 4.1.3.
    """

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector | jax.Array, SparseVector | jax.Array, tuple[()]]:
        into, rounds, out = butterfly(comm.size)
        k, total = x.capacity, self._settle(x, wire)
        rounded: list[SparseVector | jax.Array] = []

        for t, pairs in enumerate([into, *rounds] if into else rounds):
            read, other = self._send(comm, total, k, pairs, wire)
            if not wire.lossless:
                # So many workers have the same total. They continue with it as others read it, and
                # the first of them counts the rounding.
                holders = 1 << max(t - bool(into), 0)
                first = among(comm, (sender for sender, _ in pairs if sender % holders == 0))
                rounded.append(_change(read, total, first))
                total = either(among(comm, (sender for sender, _ in pairs)), read, total)
            if isinstance(total, SparseVector) and isinstance(other, SparseVector):
                total = self._settle(total.beside(other).merge(), wire)
            elif isinstance(total, Filling) and isinstance(other, Filling):
                union = total.union | other.union
                count = jnp.where(other.count == x.n, x.n, bitmap.count(union))
                total = Filling(total.values + other.values, union, count)
        if out:
            read, arrived = self._send(comm, total, k, out, wire)
            if not wire.lossless:
                rounded.append(_change(read, total, among(comm, [0])))
            total = either(receives(comm, out), arrived, read)
        delivered = _sum(x, rounded) if rounded else x
        if isinstance(total, SparseVector):
            return _type_as_alike(comm, total, k, wire), delivered, state
        return type_as_alike(comm, total.values, wire), delivered, state

    def _settle(self, x: SparseVector, wire: Messages) -> SparseVector | Filling:
        """The vector in the form that it keeps: dense if its capacity is above δ, else sparse."""
        if x.capacity <= delta(x.n, x.values.dtype, wire):
            return x
        return Filling(x.to_dense(), x.union(), x.count)

    def _send(
        self, comm: Comm, x: SparseVector | Filling, k: int, pairs: Pairs, wire: Messages
    ) -> tuple[SparseVector | Filling, SparseVector | Filling]:
        """Sends ``x``. Returns it as others read it, and what arrived here."""
        if isinstance(x, Filling):
            return self._send_filling(comm, x, k, pairs, wire)

        def send(length: int) -> tuple[SparseVector, SparseVector]:
            read, arrived = deliver(comm, x.resize(length), pairs, wire)
            return x if wire.lossless else read.resize(x.capacity), arrived.resize(x.capacity)

        return with_length(comm, x.count, lengths_between(k, x.capacity), send)

    def _send_filling(self, comm: Comm, x: Filling, k: int, pairs: Pairs, wire: Messages) -> tuple[Filling, Filling]:
        """Exchanges vectors sparsely, or densely if any worker's has more than δ elements."""
        n, dtype = x.values.shape[0], x.values.dtype
        most = delta(n, dtype, wire)

        def sparsely(length: int) -> tuple[Filling, Filling]:
            indices, _ = bitmap.members(x.union, length, n)
            values = x.values.at[indices].get(mode="fill", fill_value=0)
            read, arrived = deliver(comm, SparseVector(values, indices, n), pairs, wire)
            own = x
            if not wire.lossless:
                own = x._replace(values=x.values.at[indices].set(read.values, mode="drop"))
            return own, Filling(arrived.to_dense(), arrived.union(), arrived.count)

        def densely() -> tuple[Filling, Filling]:
            arrived = comm.ppermute(x.values, pairs)
            return x, Filling(arrived, jnp.zeros_like(x.union), jnp.int32(n))

        lengths = lengths_between(min(k, most), most)
        forms = [*(functools.partial(sparsely, length) for length in lengths), densely]
        return comm.switch(fitting(comm.pmax(x.count), lengths), forms)


def _change(read: SparseVector | Filling, x: SparseVector | Filling, keep: jax.Array) -> SparseVector | jax.Array:
    """What rounding changed, if ``keep``; otherwise nothing."""
    if isinstance(read, SparseVector) and isinstance(x, SparseVector):
        return difference(read, x).where(keep)
    return jnp.where(keep, read.values - x.values, 0)


def _sum(x: SparseVector, others: list[SparseVector | jax.Array]) -> SparseVector | jax.Array:
    """The sum of vectors: dense if one of them is, else sparse with all their places."""
    sparse = functools.reduce(SparseVector.followed_by, [y for y in others if isinstance(y, SparseVector)], x)
    dense = [y for y in others if not isinstance(y, SparseVector)]
    if not dense:
        return sparse
    return sum(dense[1:], dense[0]).at[sparse.indices].add(sparse.values, mode="drop")


def _type_as_alike(comm: Comm, x: SparseVector, k: int, wire: Messages) -> SparseVector:
    if not comm.typed:
        return x
    lengths = lengths_between(k, x.capacity)
    ways = [lambda length=length: type_as_alike(comm, x.resize(length), wire).resize(x.capacity) for length in lengths]
    return comm.switch(fitting(comm.pmax(x.count), lengths), ways, replicated=True)
