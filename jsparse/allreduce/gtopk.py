"""gTop-k: the k largest elements of a sum, found by merging sparse vectors in pairs.

The paper's operator ``a ⊤ b`` (Definition 1) adds two sparse vectors and keeps the k largest of the sum. Algorithm 3
applies it along a tree and broadcasts the result. Some of what it cuts on the way is lost there: Algorithm 4 (line 10)
puts back into a worker's residual what is not in the *final* set of indices, but an element cut in an inner round whose
index comes back through another branch is in that set, and was never added. Here whoever knows what was cut keeps it.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import bitmap, select_top_k

from .._comm import Comm
from .._ledger import Cost, collective_cost, in_turn
from .._sparse_vector import SparseVector
from ..wire import Wire
from ._pairs import butterfly, choose, deliver, receives, replicate

TOPOLOGIES = ("butterfly", "tree", "allgather")


@dataclasses.dataclass(frozen=True)
class GTopk:
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

    sparse: ClassVar[bool] = True

    topology: Literal["butterfly", "tree", "allgather"] = "butterfly"
    put_back: Literal["exact", "paper"] = "exact"

    def __post_init__(self):
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology is {self.topology!r}; choose one of {', '.join(map(repr, TOPOLOGIES))}")
        if self.put_back not in ("exact", "paper"):
            raise ValueError(f'put_back is {self.put_back!r}; choose "exact" or "paper"')

    def init(self, n: int, size: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Wire
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        match self.topology:
            case "butterfly":
                total, delivered = _butterfly(comm, x, wire)
            case "tree":
                total, delivered = _tree(comm, x, wire)
            case _:
                everyone = wire.decode(comm.all_gather(wire.encode(x)), x.n, x.values.dtype)
                total = _largest(everyone.merge(), x.capacity)
                delivered = _within(x, total)
        if self.put_back == "paper":
            delivered = _within(x, total)
        return total, delivered, state

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        row = 4 * wire.words(k, dtype)
        message = collective_cost("ppermute", row, size)
        match self.topology:
            case "butterfly":
                into, rounds, out = butterfly(size)
                fate = collective_cost("ppermute", row + 4 * -(-k // bitmap.WORD), size)
                return in_turn(*[message for _ in into[:1]], *[message for _ in rounds], *[fate for _ in out[:1]])
            case "tree":
                return in_turn(message * (2 * (size - 1).bit_length()))
            case _:
                return in_turn(collective_cost("all_gather", row, size))


def _butterfly(comm: Comm, x: SparseVector, wire: Wire) -> tuple[SparseVector, SparseVector]:
    """Every worker merges in every round; its elements are delivered if their indices survive all of its merges."""
    into, rounds, out = butterfly(comm.size)
    total, followed = x, x.indices[None]
    survived = followed < x.n

    def meet(other: SparseVector) -> tuple[SparseVector, jax.Array]:
        merged = _largest(total.beside(other).merge(), x.capacity)
        return merged, survived & bitmap.contains(merged.union(), followed)

    if into:
        guest = deliver(comm, x, into, wire)
        followed = jnp.stack([x.indices, guest.indices])
        survived = followed < x.n
        total, survived = meet(guest)
    for perm in rounds:
        total, survived = meet(deliver(comm, total, perm, wire))
    own = survived[0]
    if out:
        # The guest gets the result, and a bit for each of its elements.
        fate = lax.bitcast_convert_type(bitmap.pack(survived[1]), jnp.int32)
        message = comm.ppermute(jnp.concatenate([wire.encode(total), fate]), out)
        is_guest = receives(comm, out)
        result, fate = jnp.split(message, [message.size - fate.size])
        total = choose(is_guest, wire.decode(result, x.n, x.values.dtype), total)
        bits = lax.bitcast_convert_type(fate, jnp.uint32)
        own = jnp.where(is_guest, bitmap.contains(bits, lax.iota(jnp.int32, x.capacity)), own)
    return replicate(comm, total, wire), x.where(own)


def _tree(comm: Comm, x: SparseVector, wire: Wire) -> tuple[SparseVector, SparseVector]:
    """Algorithm 3. Who receives keeps what it cuts: it has delivered that much less."""
    size = comm.size
    distances = [1 << t for t in range((size - 1).bit_length())]
    total, parts = x, [x]
    for distance in distances:
        pairs = [(rank, rank - distance) for rank in range(distance, size, 2 * distance)]
        whole = total.beside(deliver(comm, total, pairs, wire)).merge()
        total = _largest(whole, x.capacity)
        cut = whole.where(~bitmap.contains(total.union(), whole.indices))
        parts.append(SparseVector(-cut.values, cut.indices, x.n))
    for distance in reversed(distances):
        pairs = [(rank - distance, rank) for rank in range(distance, size, 2 * distance)]
        total = choose(receives(comm, pairs), deliver(comm, total, pairs, wire), total)
    return replicate(comm, total, wire), jax.tree.map(lambda *buffers: jnp.concatenate(buffers), *parts)


def _largest(x: SparseVector, k: int) -> SparseVector:
    """The k largest magnitudes of a run; the lowest index wins a tie."""
    values, places, _ = select_top_k(x.values, k)
    return SparseVector(values, x.indices.at[places].get(mode="fill", fill_value=x.n), x.n)


def _within(x: SparseVector, total: SparseVector) -> SparseVector:
    return x.where(bitmap.contains(total.union(), x.indices))
