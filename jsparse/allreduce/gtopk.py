"""gTop-k: the k largest elements of a sum, found by merging sparse vectors in pairs.

The paper's operator ``a ⊤ b`` (Definition 1) adds two sparse vectors and keeps the k largest of the sum. Algorithm 3
applies it along a tree and broadcasts the result. Some of what it cuts on the way is lost there: Algorithm 4 (line 10)
puts back into a worker's residual what is not in the *final* set of indices, but an element cut in an inner round whose
index comes back through another branch is in that set, and was never added. Here whoever knows what was cut keeps it.
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
    """Adds sparse vectors in pairs and keeps the k largest elements of each sum; k is the length of their buffers.

    Attributes:
      topology: how the pairs are formed.
        ``"butterfly"``: in each round all workers exchange, and both of a pair compute the same merge; no broadcast.
        Workers beyond a power of two hand their elements to another first, and learn from it what became of them.
        ``"tree"``: as published: one of a pair sends to the other; the last one broadcasts.
        ``"allgather"``: the paper's naive version: everyone gathers all and keeps the k largest of the whole sum.
      put_back: what stays in the residual. ``"exact"``: everything that did not become part of the sum; in the tree the
        worker that cuts a partial sum keeps it. ``"paper"``: a worker's elements whose index is not in the result,
        which loses those that were cut in a round and whose index came back through another pair.

    **Cost**: butterfly ``2k log P`` words and ``log P`` messages for float32 at full width (for P no power of two, log
    rounded down, and two messages more: ``4k`` words and a bit for each element); tree ``4k log P`` words and
    ``2 log P`` messages; all-gather ``2k (P-1)`` words. Under ``check_vma=True`` the first two gather their result once
    more, in parts, ``2k (P-1)/P`` words, to type it as alike on all workers.

    References:
      Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
      ICDCS 2019: Algorithm 3 and 4 (tree), Algorithm 2 (all-gather), Table I.
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
    """Every worker merges in every round; its elements are delivered if their indices survive all of its merges.

    All that hold the same sum round it alike when they send it; the first of them has that among its elements.
    """
    into, rounds, out = butterfly(comm.size)
    total, guest = x, None
    mine, survived = [x], [x.indices < x.n]

    def exchange(pairs: Pairs, holders: int) -> SparseVector:
        """Sends the total, and goes on with what others read of it; ``holders`` have the same one."""
        nonlocal total
        read, arrived = deliver(comm, total, pairs, wire)
        if not wire.lossless:
            first = among(comm, (sender for sender, _ in pairs if sender % holders == 0))
            mine.append(difference(read, total).where(first))
            survived.append(mine[-1].indices < x.n)
            total = either(among(comm, (sender for sender, _ in pairs)), read, total)
        return arrived

    def meet(other: SparseVector) -> None:
        nonlocal total, survived
        total = _largest(total.beside(other).merge(), x.capacity)
        union = total.union()
        survived = [alive & bitmap.contains(union, part.indices) for alive, part in zip(survived, mine, strict=True)]

    if into:
        guest = exchange(into, 1)
        mine.insert(1, guest)
        survived.insert(1, guest.indices < x.n)
        meet(guest)
    for t, pairs in enumerate(rounds):
        meet(exchange(pairs, 1 << t))
    if guest is not None:
        # The guest gets the result, and a bit for each of its elements.
        mine.pop(1)
        fate = lax.bitcast_convert_type(bitmap.pack(survived.pop(1)), jnp.int32)
        message = wire.encode(total)
        if not wire.lossless:
            read = wire.as_read(total, message)
            mine.append(difference(read, total).where(among(comm, [0])))
            survived.append(mine[-1].indices < x.n)
            total = read
        arrived = comm.ppermute(jnp.concatenate([message, fate]), out)
        is_guest = receives(comm, out)
        result, fate = jnp.split(arrived, [message.size])
        total = either(is_guest, wire.decode(result, x.capacity, x.n, x.values.dtype), total)
        bits = lax.bitcast_convert_type(fate, jnp.uint32)
        kept = bitmap.contains(bits, lax.iota(jnp.int32, x.capacity))
        survived = [jnp.where(is_guest, kept, alive) for alive in survived]
    return type_as_alike(comm, total, wire), _joined(
        [part.where(alive) for part, alive in zip(mine, survived, strict=True)]
    )


def _tree(comm: Comm, x: SparseVector, wire: Messages) -> tuple[SparseVector, SparseVector]:
    """Algorithm 3. Who rounds or cuts a sum keeps what that takes away: it has delivered that much less."""
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
    # The root's message goes on as it is.
    message = wire.encode(total)
    if not wire.lossless:
        parts.append(difference(wire.as_read(total, message), total).where(among(comm, [0])))
    for distance in reversed(distances):
        pairs = [(rank - distance, rank) for rank in range(distance, size, 2 * distance)]
        message = either(receives(comm, pairs), comm.ppermute(message, pairs), message)
    total = wire.decode(message, x.capacity, x.n, x.values.dtype)
    return type_as_alike(comm, total, wire), _joined(parts)


def _joined(parts: list[SparseVector]) -> SparseVector:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *buffers: jnp.concatenate(buffers), *parts)


def _largest(x: SparseVector, k: int) -> SparseVector:
    """The k largest magnitudes of a run; the lowest index wins a tie."""
    values, places, _ = select_top_k(x.values, k)
    return SparseVector(values, x.indices.at[places].get(mode="fill", fill_value=x.n), x.n)


def _within(x: SparseVector, total: SparseVector) -> SparseVector:
    return x.where(bitmap.contains(total.union(), x.indices))
