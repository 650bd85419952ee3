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

from kernels_pallas import bitmap, select_above

from .._comm.comm import Comm
from .._vector.density import check_steps
from .._vector.sparse_vector import SparseVector
from ..wire import Messages
from ._base import AllReduce, ReduceReport
from ._gather import gather_parts
from ._threshold import global_threshold


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
    kept. A worker sends at most k/P elements to a region in a step. The rest waits in the
    residual, and no element waits for ever.

    Attributes:
      tau_threshold: τ', the number of steps between exact evaluations of the global threshold. In
        between the threshold is interpolated from the magnitudes at a few ranks on each worker,
        which are sent together with the counts.
      tau_region: τ, the number of steps between repartitions of the regions.
      split: how regions are sent: ``"all_to_all"``, or ``"rotate"``, which makes P-1 shifted
        exchanges. That is the paper's destination rotation. XLA can overlap these exchanges with
        the union of their indices. Both give the same bits.
      balance_above: the largest part, in k/P, for which the parts are gathered as they are. If a
        part is longer, the parts are balanced first. At 2.0 they are balanced when that sends no
        more words. 4.0 is the paper's rule, with which the bound below does not hold.

    **Cost**: at most ``6k (P-1)/P + 16P + 512`` words for float32 values at full width, in every
    step; ``P - 1 + 2 log P`` messages, to balance ``P - 1 + log P`` more, for new regions
    ``2 log P`` more, for an exact threshold ``63 log P`` more.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022,
      Algorithm 1.
    """

    tau_threshold: int = 32
    tau_region: int = 64
    split: Literal["all_to_all", "rotate"] = "all_to_all"
    balance_above: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        check_steps("tau_threshold", self.tau_threshold)
        check_steps("tau_region", self.tau_region)
        if self.split not in ("all_to_all", "rotate"):
            raise ValueError(f'split is {self.split!r}; choose "all_to_all" or "rotate"')
        if not 1 <= self.balance_above < math.inf:
            raise ValueError(f"balance_above is {self.balance_above}; choose a finite multiple of k/P, at least 1")

    def init(self, n: int, size: int, dtype: DTypeLike) -> OkTopkState:
        none = jnp.zeros(1, jnp.int32)
        return OkTopkState(_even_regions(n, size), jnp.zeros(1, dtype), none, none)

    def __call__(
        self, comm: Comm, x: SparseVector, state: OkTopkState, *, step: jax.Array, wire: Messages
    ) -> tuple[SparseVector, SparseVector, OkTopkState]:
        k = x.capacity
        share = -(-k // comm.size)
        starts = state.starts
        if k < x.n:
            # Lines 5-7.
            due = step % self.tau_region == 0
            starts = comm.switch(
                due.astype(jnp.int32), [lambda: state.starts, lambda: _space_repartition(comm, x, state.starts)]
            )
        # Line 8.
        sent, reduced = _split_and_reduce(comm, x, starts, share, rotate=self.split == "rotate", step=step, wire=wire)
        # Lines 9-12.
        if k < x.n:
            expected = jnp.maximum(state.part[0], share // 4)
            due = step % self.tau_threshold == 0
            threshold, parts = global_threshold(comm, reduced.values, k, expected, due)
        else:
            threshold, parts = jnp.zeros((), x.values.dtype), comm.all_gather(reduced.count)
        # Line 13.
        values, places, part = select_above(reduced.values, threshold, reduced.capacity)
        indices = reduced.indices.at[places].get(mode="fill", fill_value=x.n)
        total, rounding = gather_parts(
            comm,
            SparseVector(values, indices, x.n),
            parts,
            share,
            balance_above=self.balance_above,
            step=step,
            wire=wire,
        )
        # Line 14.
        overflowed = x.count - jnp.sum(sent.count, dtype=jnp.int32)
        delivered = sent if rounding is None else sent.followed_by(rounding)
        delivered = delivered.where(bitmap.contains(total.union(), delivered.indices))
        return total, delivered, OkTopkState(starts, threshold[None], part[None], overflowed[None])

    def report(self, state: OkTopkState) -> ReduceReport:
        return ReduceReport(state.overflowed[0], state.threshold[0])


def _even_regions(n: int, size: int) -> jax.Array:
    return jnp.array([n * rank // size for rank in range(size)], jnp.int32)


def _space_repartition(comm: Comm, x: SparseVector, starts: jax.Array) -> jax.Array:
    """Cuts each worker's selected indices into P equal parts, and averages the cuts (line 6)."""
    count, parts = x.count, lax.iota(jnp.int32, comm.size)
    # This is parts * count // P, without overflow of the product.
    ends = parts * (count // comm.size) + parts * (count % comm.size) // comm.size
    cuts = x.indices[ends].at[0].set(0)
    cuts = jnp.where(count >= comm.size, cuts, starts)
    # A sum of quotients. The quotient of a sum would overflow from P * n = 2**31 on.
    return comm.psum(cuts // comm.size)


def _split_and_reduce(
    comm: Comm, x: SparseVector, starts: jax.Array, share: int, *, rotate: bool, step: jax.Array, wire: Messages
) -> tuple[SparseVector, SparseVector]:
    """Sends each region's elements to its owner, and sums what arrives (line 8).

    Returns:
      This worker's elements as others read them, a run for each region; and the sum over its own
      region, one run.
    """
    edges = jnp.searchsorted(x.indices, jnp.append(starts, x.n)).astype(jnp.int32)
    sent = x.window(edges[:-1], edges[1:] - edges[:-1], share, bitmap.turn(step, share))
    messages = wire.encode(sent)
    sent = wire.as_read(sent, messages)
    if not rotate:
        return sent, wire.decode(comm.all_to_all(messages), share, x.n, x.values.dtype).merge()

    # In the s-th exchange worker i sends to i + s (the paper's destination rotation). The union
    # takes up what has arrived while the next exchange is under way.
    rank, size = comm.rank(), comm.size
    arrived, union = [], None
    for shift in range(size):
        message = messages[(rank + shift) % size]
        if shift:
            message = comm.ppermute(message, [(source, (source + shift) % size) for source in range(size)])
        run = wire.decode(message, share, x.n, x.values.dtype)
        union = run.union(union)
        arrived.append(run)
    by_rank = (rank - lax.iota(jnp.int32, size)) % size
    return sent, jax.tree.map(lambda *runs: jnp.stack(runs)[by_rank], *arrived).merge(union)
