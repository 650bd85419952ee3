"""Ok-Topk's O(k) sparse all-reduce.

Algorithm 1 of the paper, line by line::

     1  inputs: gradient, iteration t, k, tau, tau'
     2  if (t-1) mod tau' == 0:                          the selector, before this
     3      local_th = th_re_evaluate(gradient, k)         (jsparse.select.TopK, SampledThreshold
     4                                                      or ReusedThreshold)
     5  if (t-1) mod tau == 0:                           OkTopk.__call__
     6      boundaries = space_repartition(...)            _space_repartition
     7
     8  reduced_topk, local_topk_indexes
            = split_and_reduce(...)                      _split_and_reduce
     9  if (t-1) mod tau' == 0:                          global_threshold
    10      all_reduced_topk = allgatherv(reduced_topk)    (a distributed search, which sends 62
    11      global_th = th_re_evaluate(..., k)              words, not all of it)
    12
    13  u_t, global_topk_indexes
            = balance_and_allgatherv(...)                gather_parts
    14  indexes = local_topk_indexes ∩ global_topk_indexes
    15  return u_t, indexes

The paper's messages are as long as their contents, and XLA's messages have static lengths. So
every buffer here has the length that the bound allows. What does not fit is not delivered, and
stays in the residual.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import bitmap, reaches, select_above

from .._comm.comm import Comm
from .._vector.density import check_steps
from .._vector.sparse_vector import SparseVector, first_from
from ..wire import Full, Messages, Wire
from ._base import AllReduce, ReduceReport
from ._gather import gather_parts
from ._threshold import global_threshold, reused_threshold


class OkTopkState(NamedTuple):
    """State of :class:`OkTopk`.

    For another number of workers, the boundaries of the regions are interpolated, so that the new
    regions hold equal parts of what the old ones held.

    Attributes:
      starts: int32, shape ``(P,)``: the first index of each worker's region.
      threshold: shape ``(1,)``: the last global threshold.
      part: int32, shape ``(1,)``: how many elements of this worker's region reached the threshold.
      overflowed: int32, shape ``(1,)``: how many selected elements did not fit into the message of
        their region.
    """

    starts: jax.Array
    threshold: jax.Array
    part: jax.Array
    overflowed: jax.Array

    def moved(self, old: "OkTopkState", move: Any, n: int) -> "OkTopkState":
        """This state for another number of workers: see :meth:`AllReduce.init`."""
        others = [move.of_each(*leaves) for leaves in zip(self[1:], old[1:], strict=True)]
        return OkTopkState(move.boundaries(old.starts, n), *others)


@dataclasses.dataclass(frozen=True)
class OkTopk(AllReduce):
    """Nearly the k largest elements of the sum: reduced by regions, selected, and gathered.

    Each worker owns a region of the indices. It sums what all workers send of its region, and
    keeps the elements that reach a global threshold. All workers then gather what the regions
    kept.

    Attributes:
      tau_threshold: τ', the number of steps between exact evaluations of the global threshold. In
        between the threshold is interpolated from the magnitudes at a few ranks on each worker,
        which are sent together with the counts.
      tau_region: τ, the number of steps between repartitions of the regions. None leaves the
        regions equal. The regions of a step are cut by what the workers selected in the step
        before. The cuts ride on messages that are sent anyway: ``2(P-1)`` words in each step.
      split: how regions are sent: ``"all_to_all"``; or ``"rotate"``, which makes P-1 shifted
        exchanges, the paper's destination rotation. XLA can overlap these exchanges with the union
        of their indices. ``"ragged"`` sends messages as long as their contents, by
        ``jax.lax.ragged_all_to_all``, for which their lengths are exchanged first. It runs on GPUs
        only, at full width. All give the same bits.
      put_back: who keeps a sum that does not reach the global threshold. ``"senders"`` is the
        paper's rule: each worker that sent a part of it puts this part back into its residual.
        With ``"owner"`` the worker that owns the region takes over the whole sum into its own
        residual. With ``"server"``, in addition, what an owner holds at the indices that arrive
        joins their sums. All send the same bytes and lose nothing.
      room: the longest message of a region, in k/P, from 1 to 2. What does not fit waits in the
        residual, in turns. None stands for ``1.25 + log2(P) / 8``, at most 2, since more regions
        are less alike.
      correct: whether the threshold is corrected in each step. False reuses it as it is for
        ``tau_threshold`` steps, which is the paper's plain rule.
      balance_above: the largest part, in k/P and at least 1, that is gathered as it is. If a part
        is longer, the parts are balanced first. With None a step balances where that saves more
        than an eighth of the words. 4.0 is the paper's rule, with which the bound below does not
        hold. ``math.inf`` never balances.

    **Cost**: at most ``8k (P-1)/P + 16P + 512`` words for float32 values at full width, in every
    step; ``P - 1 + 2 log P`` messages, to balance ``P - 1 + log P`` more, in the first step
    ``2 log P`` more, for an exact threshold ``63 log P`` more.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022,
      Algorithm 1.
    """

    tau_threshold: int = 32
    tau_region: int | None = 1
    split: Literal["all_to_all", "rotate", "ragged"] = "all_to_all"
    put_back: Literal["senders", "owner", "server"] = "senders"
    room: float | None = None
    correct: bool = True
    balance_above: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_steps("tau_threshold", self.tau_threshold)
        if self.tau_region is not None:
            check_steps("tau_region", self.tau_region)
        if self.split not in ("all_to_all", "rotate", "ragged"):
            raise ValueError(f'split is {self.split!r}; choose "all_to_all", "rotate" or "ragged"')
        if self.put_back not in ("senders", "owner", "server"):
            raise ValueError(f'put_back is {self.put_back!r}; choose "senders", "owner" or "server"')
        if self.room is not None and not 1 <= self.room <= 2:
            raise ValueError(f"room is {self.room}; choose a multiple of k/P, from 1 to 2, or None")
        if self.balance_above is not None and not self.balance_above >= 1:
            raise ValueError(f"balance_above is {self.balance_above}; choose a multiple of k/P, at least 1, or None")

    def check_wire(self, wire: Wire) -> None:
        if self.split == "ragged" and not isinstance(wire, Full):
            raise ValueError(f'split="ragged" sends elements at full width, and the wire is {wire}: leave wire out')

    @property
    def takes_held(self) -> bool:
        return self.put_back == "server"

    @property
    def hands_over(self) -> bool:  # type: ignore[override]
        return self.put_back != "senders"

    def init(self, n: int, size: int, dtype: DTypeLike) -> OkTopkState:
        none = jnp.zeros(1, jnp.int32)
        return OkTopkState(_even_regions(n, size), jnp.zeros(1, dtype), none, none)

    def __call__(
        self,
        comm: Comm,
        x: SparseVector,
        state: OkTopkState,
        *,
        step: jax.Array,
        wire: Messages,
        held: jax.Array | None = None,
    ) -> tuple[SparseVector, SparseVector, OkTopkState]:
        k, size = x.capacity, comm.size
        share = -(-k // size)
        # Lines 5-7. No columns if the regions stay as they are. Fewer than P elements can't be cut
        # into P equal parts.
        starts, cuts = state.starts, jnp.zeros((size, 0), jnp.int32)
        tau_region = self.tau_region if size <= k < x.n else None
        if tau_region is not None:
            cuts = _cut(x, starts)[:, None]
            first = [lambda: state.starts, lambda: comm.psum(cuts[:, 0] // size)]
            starts = comm.switch((step == 0).astype(jnp.int32), first)
        # Line 8.
        room = math.ceil((self.room or min(2, 1.25 + math.log2(size) / 8)) * share)
        room = min(k, room, max(share, 2 * k // size))
        own_room = room if self.put_back == "senders" else k
        sent, own, reduced, cut = _split_and_reduce(
            comm, x, starts, cuts, (room, own_room), split=self.split, step=step, wire=wire
        )
        delivered = sent.followed_by(own)
        overflowed = x.count - delivered.count
        if held is not None:
            # What this worker itself selected is in the sum already.
            joins = ~bitmap.contains(own.union(), reduced.indices)
            values = jnp.where(joins, held.at[reduced.indices].get(mode="fill", fill_value=0), 0)
            reduced = SparseVector(reduced.values + values, reduced.indices, x.n)
            delivered = delivered.followed_by(SparseVector(values, reduced.indices, x.n))
        # Lines 9-12.
        candidates = _name_cancelled(reduced, share, step) if self.put_back == "senders" else reduced.values
        if k < x.n:
            due = step % self.tau_threshold == 0
            if self.correct:
                expected = jnp.maximum(state.part[0], share // 4)
                threshold, parts, cut = global_threshold(comm, candidates, k, expected, due, cut)
            else:
                threshold, parts, cut = reused_threshold(comm, candidates, k, state.threshold[0], due, cut)
        else:
            threshold, parts = jnp.zeros((), x.values.dtype), comm.all_gather(reduced.count)
        # Line 13.
        chosen = bitmap.pack(reaches(candidates, threshold))
        total, rounding = gather_parts(
            comm, reduced, chosen, parts, share, balance_above=self.balance_above, step=step, wire=wire
        )
        # Line 14.
        reached = total.union()
        if self.put_back == "senders":
            delivered = delivered.where(bitmap.contains(reached, delivered.indices))
        else:
            over = reduced.where(~bitmap.contains(reached, reduced.indices))
            delivered = delivered.followed_by(SparseVector(-over.values, over.indices, x.n))
        if rounding is not None:
            delivered = delivered.followed_by(rounding.where(bitmap.contains(reached, rounding.indices)))
        if tau_region is not None:
            starts = jnp.where((step + 1) % tau_region == 0, cut[:, 0], starts)
        return total, delivered, OkTopkState(starts, threshold[None], bitmap.count(chosen)[None], overflowed[None])

    def report(self, state: OkTopkState) -> ReduceReport:
        return ReduceReport(state.overflowed[0], state.threshold[0])


def _even_regions(n: int, size: int) -> jax.Array:
    return jnp.array([n * rank // size for rank in range(size)], jnp.int32)


def _cut(x: SparseVector, starts: jax.Array) -> jax.Array:
    """Where regions begin that hold equal parts of this worker's elements: int32, shape ``(P,)``.

    A worker that has too few elements is content with ``starts``.
    """
    size, count = starts.shape[0], x.count
    rank = lax.iota(jnp.int32, size)
    # This is rank * count // P, without overflow of the product.
    ends = rank * (count // size) + rank * (count % size) // size
    return jnp.where(count >= size, x.indices[ends].at[0].set(0), starts)


def _split_and_reduce(
    comm: Comm,
    x: SparseVector,
    starts: jax.Array,
    cuts: jax.Array,
    rooms: tuple[int, int],
    *,
    split: str,
    step: jax.Array,
    wire: Messages,
) -> tuple[SparseVector, SparseVector, SparseVector, jax.Array]:
    """Sends each region's elements to its owner, and sums what arrives (line 8).

    Args:
      comm: the workers.
      x: this worker's elements, one run.
      starts: int32, shape ``(P,)``: where the regions begin.
      cuts: int32, shape ``(P, 0)`` or ``(P, 1)``: what goes to each owner beside its elements.
      rooms: the most elements that go to another worker, and that this worker keeps of its own
        region. Those are not sent.
      split: how to exchange, as in :class:`OkTopk`.
      step: int32 scalar, alike on all workers.
      wire: the layout of the messages.

    Returns:
      This worker's elements as others read them, a run for each region; those of its own region,
      one run; the sum over its own region, one run; and the mean of the cuts that it received.
    """
    rank, size, (room, own_room) = comm.rank(), comm.size, rooms
    edges = first_from(x.indices, jnp.append(starts, x.n))
    begins, lengths = edges[:-1], edges[1:] - edges[:-1]
    own = x.window(begins[rank], lengths[rank], own_room, bitmap.turn(step, own_room))
    sent = x.window(begins, lengths.at[rank].set(0), room, bitmap.turn(step, room))
    messages = wire.encode(sent)
    sent = wire.as_read(sent, messages)
    words = messages.shape[1]
    messages = jnp.concatenate([messages, cuts], axis=1)
    union = own.union()
    if split != "rotate":
        messages = _exchange(comm, messages, sent, wire) if split == "ragged" else comm.all_to_all(messages)
        runs = wire.decode(messages[:, :words], room, x.n, x.values.dtype)
        union = runs.union(union)
    else:
        # In the s-th exchange worker i sends to i + s (the paper's destination rotation). The
        # union takes up what has arrived while the next exchange is under way.
        arrived = []
        for shift in range(size):
            message = messages[(rank + shift) % size]
            if shift:
                message = comm.ppermute(message, [(source, (source + shift) % size) for source in range(size)])
            run = wire.decode(message[:words], room, x.n, x.values.dtype)
            union = run.union(union)
            arrived.append((run, message))
        by_rank = (rank - lax.iota(jnp.int32, size)) % size
        runs, messages = jax.tree.map(lambda *each: jnp.stack(each)[by_rank], *arrived)
    # This worker's own row is empty.
    reduced = runs.merge(own, union=union, capacity=(size - 1) * room + own_room)
    cuts = messages[:, words:]
    # A sum of quotients and remainders. The sum itself would overflow from P * n = 2**31 on.
    mean = jnp.sum(cuts // size, axis=0, dtype=jnp.int32) + jnp.sum(cuts % size, axis=0, dtype=jnp.int32) // size
    return sent, own, reduced, mean


def _exchange(comm: Comm, messages: jax.Array, sent: SparseVector, wire: Messages) -> jax.Array:
    """What ``comm.all_to_all(messages)`` gives, without sending the messages' unused places."""
    size, room = sent.indices.shape
    words = wire.words(room, sent.n, sent.values.dtype)
    values, indices, cuts = jnp.split(messages, [words - room, words], axis=1)
    elements = jnp.concatenate([values.reshape(size, room, -1), indices[..., None]], axis=2)
    lengths = sent.count
    told = comm.all_to_all(jnp.concatenate([lengths[:, None], cuts], axis=1))
    unused = jnp.zeros_like(elements).at[..., -1].set(sent.n)
    elements = comm.ragged_all_to_all(elements, lengths, told[:, 0], unused)
    return jnp.concatenate([elements[..., :-1].reshape(size, -1), elements[..., -1], told[:, 1:]], axis=1)


def _name_cancelled(reduced: SparseVector, share: int, step: jax.Array) -> jax.Array:
    """The values by which sums are selected: some that are exactly 0 are raised, in turns.

    Elements that cancel arrived, so they are delivered. Their senders learn this when the index is
    among the gathered ones. Otherwise they would select them for ever. A step names at most a
    sixteenth of a share.
    """
    most = max(1, share // 16)
    cancelled = (reduced.values == 0) & (reduced.indices < reduced.n)
    _, named, _ = select_above(cancelled.astype(reduced.values.dtype), 1, most, start=bitmap.turn(step, most))
    largest = jnp.max(jnp.abs(reduced.values))
    return reduced.values.at[named].set(jnp.where(largest > 0, largest, 1), mode="drop")
