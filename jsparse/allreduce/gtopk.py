"""gTop-k: the k largest elements of a sum, found by merging sparse vectors in pairs.

The paper's operator ``a ⊤ b`` (Definition 1) adds two sparse vectors and keeps the k largest
elements of the sum. Algorithm 3 applies it along a tree and broadcasts the result. Some of what it
cuts on the way is lost: Algorithm 4 (line 10) puts those elements back into a worker's residual
whose index is not in the *final* set of indices. But an element may be cut in an inner round while
its index comes back through another branch. Then the index is in the final set, although the
element is not in the sum. In this implementation, a worker that knows what was cut keeps it.
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
PUT_BACK = ("exact", "owner", "paper")


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
      put_back: who keeps what did not become part of the sum. ``"exact"``: the workers that sent
        it. In the tree it is the worker that cuts, because the senders do not learn of it.
        ``"owner"``: one worker takes over each partial sum that is cut, and all that sent a part
        of it have delivered theirs. Of the workers that cut it, it is the one whose rank equals
        the index, modulo their number; in the tree nothing changes. With both, elements that add
        up to exactly 0 are delivered. ``"paper"``: each worker keeps its elements whose index is
        not in the result. This loses elements that were cut in a round, if their index came back
        through another pair; and elements that add up to 0 are sent again in every step.

    **Cost**: butterfly ``2k log P`` words and ``log P`` messages for float32 at full width. (If P
    is not a power of two, log is rounded down, and there are two messages more: ``4k`` words and,
    without an owner, a bit for each element.) Tree ``4k log P`` words and ``2 log P`` messages.
    All-gather ``2k (P-1)`` words. Under ``check_vma=True`` the first two gather their result once
    more, in parts, to type it as alike on all workers: ``2k (P-1)/P`` words.

    References:
      Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
      Bandwidth Networks, ICDCS 2019: Algorithm 3 and 4 (tree), Algorithm 2 (all-gather), Table I.
    """

    topology: Literal["butterfly", "tree", "allgather"] = "butterfly"
    put_back: Literal["exact", "owner", "paper"] = "exact"

    def __post_init__(self):
        super().__post_init__()
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology is {self.topology!r}; choose one of {', '.join(map(repr, TOPOLOGIES))}")
        if self.put_back not in PUT_BACK:
            raise ValueError(f"put_back is {self.put_back!r}; choose one of {', '.join(map(repr, PUT_BACK))}")

    @property
    def hands_over(self) -> bool:  # type: ignore[override]
        return self.topology == "tree" or self.put_back != "exact"

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        match self.topology:
            case "butterfly":
                total, delivered = _butterfly(comm, x, wire, self.put_back == "owner")
            case "tree":
                total, delivered = _tree(comm, x, wire)
            case _:
                total, delivered = _all_gather(comm, x, wire, self.put_back == "owner")
        if self.put_back == "paper":
            delivered = x.where(bitmap.contains(total.union(), x.indices))
        return total, delivered, state


def _butterfly(comm: Comm, x: SparseVector, wire: Messages, owner: bool) -> tuple[SparseVector, SparseVector]:
    """Every worker merges in every round.

    All workers that hold the same sum round it alike when they send it. The first of them counts
    the rounding as elements of its own. With ``owner``, one of them takes over each sum that they
    cut. Otherwise each worker follows its own elements: one is delivered if the total holds its
    index after all merges of this worker, or up to a merge in which the sum at this index is 0.
    """
    into, rounds, out = butterfly(comm.size)
    total = x
    # This worker's elements; which of them the total holds; which of them were cancelled.
    mine = [_followed(x)]

    def exchange(pairs: Pairs, holders: int) -> SparseVector:
        """Sends the total, and continues with it as others read it.

        ``holders`` workers have the same total.
        """
        nonlocal total
        read, arrived = deliver(comm, total, pairs, wire)
        if not wire.lossless:
            first = among(comm, (sender for sender, _ in pairs if sender % holders == 0))
            mine.append(_followed(difference(read, total).where(first)))
            total = either(among(comm, (sender for sender, _ in pairs)), read, total)
        return arrived

    def meet(other: SparseVector, holders: int) -> None:
        """Merges. Then ``holders`` workers have the same total."""
        nonlocal total, mine
        whole = total.beside(other).merge()
        total = _largest(whole, x.capacity)
        if owner:
            mine.append(_followed(_taken_over(comm, whole, total, holders)))
            return
        kept, zeros = total.union(), whole.where(whole.values == 0).union()
        mine = [
            (part, held & bitmap.contains(kept, part.indices), gone | (held & bitmap.contains(zeros, part.indices)))
            for part, held, gone in mine
        ]

    if into:
        guest = exchange(into, 1)
        mine.insert(0, _followed(guest))
        meet(guest, 1)
    for t, pairs in enumerate(rounds):
        meet(exchange(pairs, 1 << t), 2 << t)
    if out:
        message = wire.encode(total)
        if not wire.lossless:
            read = wire.as_read(total, message)
            mine.append(_followed(difference(read, total).where(among(comm, [0]))))
            total = read
        _, held, gone = mine.pop(0)
        # The guest gets the result, and one bit for each of its elements: whether it was
        # delivered. With an owner all were.
        fate = [] if owner else [lax.bitcast_convert_type(bitmap.pack(held | gone), jnp.int32)]
        arrived = comm.ppermute(jnp.concatenate([message, *fate]), out)
        is_guest = receives(comm, out)
        result, fate = jnp.split(arrived, [message.size])
        total = either(is_guest, wire.decode(result, x.capacity, x.n, x.values.dtype), total)
        if not owner:
            bits = lax.bitcast_convert_type(fate, jnp.uint32)
            kept = bitmap.contains(bits, lax.iota(jnp.int32, x.capacity))
            mine = [(part, jnp.where(is_guest, kept, held), gone & ~is_guest) for part, held, gone in mine]
    return type_as_alike(comm, total, wire), _joined([part.where(held | gone) for part, held, gone in mine])


def _followed(part: SparseVector) -> tuple[SparseVector, jax.Array, jax.Array]:
    """Elements that enter the total: which of them it holds, and which were cancelled."""
    used = part.indices < part.n
    return part, used, jnp.zeros_like(used)


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
        parts.append(_taken_over(comm, whole, total, 1))
    # The root's message is passed on unchanged.
    message = wire.encode(total)
    if not wire.lossless:
        parts.append(difference(wire.as_read(total, message), total).where(among(comm, [0])))
    for distance in reversed(distances):
        pairs = [(rank - distance, rank) for rank in range(distance, size, 2 * distance)]
        message = either(receives(comm, pairs), comm.ppermute(message, pairs), message)
    total = wire.decode(message, x.capacity, x.n, x.values.dtype)
    return type_as_alike(comm, total, wire), _joined(parts)


def _all_gather(comm: Comm, x: SparseVector, wire: Messages, owner: bool) -> tuple[SparseVector, SparseVector]:
    """Algorithm 2. Every worker knows all that is cut."""
    message = wire.encode(x)
    whole = wire.decode(comm.all_gather(message), x.capacity, x.n, x.values.dtype).merge()
    total, read = _largest(whole, x.capacity), wire.as_read(x, message)
    if owner:
        return total, _joined([read, _taken_over(comm, whole, total, comm.size)])
    arrived = total.union(whole.where(whole.values == 0).union())
    return total, read.where(bitmap.contains(arrived, read.indices))


def _joined(parts: list[SparseVector]) -> SparseVector:
    return jax.tree.map(lambda *buffers: jnp.concatenate(buffers), *parts)


def _largest(x: SparseVector, k: int) -> SparseVector:
    """The k largest magnitudes of a run. The lowest index wins a tie."""
    values, places, _ = select_top_k(x.values, k)
    return SparseVector(values, x.indices.at[places].get(mode="fill", fill_value=x.n), x.n)


def _taken_over(comm: Comm, whole: SparseVector, total: SparseVector, holders: int) -> SparseVector:
    """What this worker takes over of the sums that were cut: negated, so as to be delivered.

    ``holders`` workers of consecutive ranks have cut ``whole`` to ``total``. Of these an index
    goes to the one whose rank equals it modulo ``holders``: to the same one in every step, so that
    what comes later adds up with it there.
    """
    mine = whole.indices % holders == comm.rank() % holders
    return SparseVector(-whole.values, whole.indices, whole.n).where(
        mine & ~bitmap.contains(total.union(), whole.indices)
    )
