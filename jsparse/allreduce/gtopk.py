"""gTop-k: the k largest elements of a sum, found by merging sparse vectors in pairs.

The paper's operator ``a ⊤ b`` (Definition 1) adds two sparse vectors and keeps the k largest
elements of the sum. Algorithm 3 applies it along a tree and broadcasts the result. Some of what it
cuts on the way is lost: Algorithm 4 (line 10) puts those elements back into a worker's residual
whose index is not in the *final* set of indices. But an element may be cut in an inner round while
its index comes back through another branch. Then the index is in the final set, although the
element is not in the sum. In this implementation, the worker that knows what was cut keeps it.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import bitmap, select_top_k

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._base import AllReduce
from ._gather import difference
from ._pairs import Pairs, among, butterfly, deliver, either, receives, type_as_alike

TOPOLOGIES = ("butterfly", "tree", "allgather")


@dataclasses.dataclass(frozen=True)
class GTopk(AllReduce):
    """Adds sparse vectors in pairs and keeps the k largest elements of each sum.

    k is the capacity of the workers' vectors.

    Attributes:
      topology: how the pairs are formed. ``"butterfly"``: in each round all workers exchange, and
        both workers of a pair compute the same merge, so no broadcast is needed. Workers beyond a
        power of two first send their elements to another worker, which tells them at the end what
        became of these elements. ``"tree"``: as published: one worker of a pair sends to the
        other, and the last one broadcasts. ``"allgather"``: the paper's naive version: every
        worker gathers all elements and keeps the k largest of the whole sum.
      put_back: what stays in the residual. ``"exact"``: everything that did not become part of the
        sum. In the tree, the worker that cuts a partial sum keeps what it cuts. ``"paper"``: the
        elements of a worker whose index is not in the result. This loses elements that were cut in
        a round, if their index came back through another pair.

    **Cost**: butterfly ``2k log P`` words and ``log P`` messages for float32 at full width. (If P
    is not a power of two, log is rounded down, and there are two messages more: ``4k`` words and a
    bit for each element.) Tree ``4k log P`` words and ``2 log P`` messages. All-gather
    ``2k (P-1)`` words. Under ``check_vma=True`` the first two gather their result once more, in
    parts, to type it as alike on all workers: ``2k (P-1)/P`` words.

    References:
      Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
      Bandwidth Networks, ICDCS 2019: Algorithm 3 and 4 (tree), Algorithm 2 (all-gather), Table I.
    """

    topology: Literal["butterfly", "tree", "allgather"] = "butterfly"
    put_back: Literal["exact", "paper"] = "exact"

    def __post_init__(self):
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology is {self.topology!r}; choose one of {', '.join(map(repr, TOPOLOGIES))}")
        if self.put_back not in ("exact", "paper"):
            raise ValueError(f'put_back is {self.put_back!r}; choose "exact" or "paper"')

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        match self.topology:
            case "butterfly":
                total, delivered = _butterfly(comm, x, wire)
            case "tree":
                total, delivered = _tree(comm, x, wire)
            case _:
                message = wire.encode(x)
                everyone = wire.decode(comm.all_gather(message), x.capacity, x.n, x.values.dtype)
                total = _largest(everyone.merge(), x.capacity)
                delivered = _within(wire.as_read(x, message), total)
        if self.put_back == "paper":
            delivered = _within(x, total)
        return total, delivered, state


def _butterfly(comm: Comm, x: SparseVector, wire: Messages) -> tuple[SparseVector, SparseVector]:
    """Every worker merges in every round.

    An element of a worker is delivered if its index survives all merges of that worker. All
    workers that hold the same sum round it alike when they send it. The first of them counts the
    rounding as elements of its own.
    """
    into, rounds, out = butterfly(comm.size)
    total = x
    # Elements that this worker answers for, and which of them are in the total.
    parts = [(x, x.indices < x.n)]

    def add_rounding(read: SparseVector, first: jax.Array) -> None:
        change = difference(read, total).where(first)
        parts.append((change, change.indices < x.n))

    def exchange(pairs: Pairs, holders: int) -> SparseVector:
        """Sends the total, and continues with it as others read it.

        ``holders`` workers have the same total.
        """
        nonlocal total
        read, arrived = deliver(comm, total, pairs, wire)
        if not wire.lossless:
            add_rounding(read, among(comm, (sender for sender, _ in pairs if sender % holders == 0)))
            total = either(among(comm, (sender for sender, _ in pairs)), read, total)
        return arrived

    def meet(other: SparseVector) -> None:
        nonlocal total, parts
        total = _largest(total.beside(other).merge(), x.capacity)
        union = total.union()
        parts = [(part, alive & bitmap.contains(union, part.indices)) for part, alive in parts]

    if into:
        guest = exchange(into, 1)
        parts.insert(0, (guest, guest.indices < x.n))
        meet(guest)
    for t, pairs in enumerate(rounds):
        meet(exchange(pairs, 1 << t))
    if out:
        # The guest gets the result, and one bit for each of its elements: whether it was
        # delivered.
        _, delivered = parts.pop(0)
        message = wire.encode(total)
        if not wire.lossless:
            read = wire.as_read(total, message)
            add_rounding(read, among(comm, [0]))
            total = read
        arrived = comm.ppermute(jnp.concatenate([message, bitmap.pack(delivered).view(jnp.int32)]), out)
        is_guest = receives(comm, out)
        result, fate = jnp.split(arrived, [message.size])
        total = either(is_guest, wire.decode(result, x.capacity, x.n, x.values.dtype), total)
        kept = bitmap.contains(fate.view(jnp.uint32), lax.iota(jnp.int32, x.capacity))
        parts = [(part, jnp.where(is_guest, kept, alive)) for part, alive in parts]
    return type_as_alike(comm, total, wire), _joined([part.where(alive) for part, alive in parts])


def _tree(comm: Comm, x: SparseVector, wire: Messages) -> tuple[SparseVector, SparseVector]:
    """Algorithm 3. A worker that rounds or cuts a sum has delivered the difference less."""
    size = comm.size
    distances = [1 << t for t in range((size - 1).bit_length())]
    total, parts = x, [x]
    for distance in distances:
        pairs = [(rank, rank - distance) for rank in range(distance, size, 2 * distance)]
        read, arrived = deliver(comm, total, pairs, wire)
        if not wire.lossless:
            parts.append(difference(read, total).where(among(comm, (sender for sender, _ in pairs))))
        whole = total.beside(arrived).merge()
        total = _largest(whole, x.capacity)
        cut = whole.where(~bitmap.contains(total.union(), whole.indices))
        parts.append(SparseVector(-cut.values, cut.indices, x.n))
    # The root's message is passed on unchanged.
    message = wire.encode(total)
    if not wire.lossless:
        parts.append(difference(wire.as_read(total, message), total).where(among(comm, [0])))
    for distance in reversed(distances):
        pairs = [(rank - distance, rank) for rank in range(distance, size, 2 * distance)]
        message = either(receives(comm, pairs), comm.ppermute(message, pairs), message)
    total = wire.decode(message, x.capacity, x.n, x.values.dtype)
    return type_as_alike(comm, total, wire), _joined(parts)


def _joined(parts: list[SparseVector]) -> SparseVector:
    return jax.tree.map(lambda *buffers: jnp.concatenate(buffers), *parts)


def _largest(x: SparseVector, k: int) -> SparseVector:
    """The k largest magnitudes of a run. The lowest index wins a tie."""
    values, places, _ = select_top_k(x.values, k)
    return SparseVector(values, x.indices.at[places].get(mode="fill", fill_value=x.n), x.n)


def _within(x: SparseVector, total: SparseVector) -> SparseVector:
    return x.where(bitmap.contains(total.union(), x.indices))
