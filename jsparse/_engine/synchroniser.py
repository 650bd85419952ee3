"""Synchronisers: how the workers' gradients become their mean.

Everything else knows a synchroniser by its base class alone: the optax transformation, ``sync``,
phases, the training step, the accounting of traffic.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._comm.comm import Comm, axes_of
from .._comm.metered import Metered
from .._vector.buckets import Bucket
from .._vector.sparse_vector import SparseVector
from ..allreduce import Dense
from .agreement import agree, check, check_floats, not_finite, pmax_over
from .mean import Mean, Quotient, over_workers
from .memory import Memory, NoMemory
from .outcome import Outcome, begin, conclude, report_of, thresholds_of
from .reducer import Counts, Reducer, Whole, count, count_filled
from .space import Flat, Space
from .state import BucketState, SparseAllReduceState


class Synchroniser:
    """Makes the mean of the workers' gradients: a frozen dataclass. Inherit from this class.

    Attributes:
      levels: the networks that a worker is in.
      agree_over: further networks over which workers agree whether a gradient is finite.
      alike: whether all workers get the same update.
    """

    agree_over = ()
    alike = True

    @property
    def levels(self) -> tuple[Comm, ...]:
        raise NotImplementedError

    def over(self, *comms: Comm) -> "Synchroniser":
        """The same over other networks, as many as ``levels``."""
        raise NotImplementedError

    def init(self, params: Any) -> SparseAllReduceState:
        """The state before the first step."""
        raise NotImplementedError

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        """The mean, in the shapes and types of the gradients, and the state after the step."""
        raise NotImplementedError

    def reduce(self, grads: Any, state: SparseAllReduceState) -> tuple["Means", SparseAllReduceState]:
        """The mean of each vector, before it is laid out in leaves.

        Raises:
          ValueError: this synchroniser has no such vectors.
        """
        raise ValueError("sync returns the mean as one sparse vector, and this transformation has none: use tx.update")


class Means(NamedTuple):
    """The means of a synchronisation, before they are laid out in leaves.

    Attributes:
      buckets: which leaves each is for.
      quotients: the means.
      bad: bool scalar: a gradient was not finite somewhere, and the means are void.
    """

    buckets: list[Bucket]
    quotients: list[Quotient]
    bad: jax.Array

    def leaves(self, like: Sequence[jax.Array]) -> list[jax.Array]:
        """The means in the shapes and types of these leaves; NaN after a non-finite gradient."""
        means = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in like]
        for bucket, quotient in zip(self.buckets, self.quotients, strict=True):
            for i, part in zip(bucket.ids, self._parts(bucket, quotient), strict=True):
                means[i] = part
        return means

    def _parts(self, bucket: Bucket, quotient: Quotient) -> list[jax.Array]:
        layout = bucket.layout
        if not isinstance(quotient.total, SparseVector):
            return layout.unravel(jnp.where(self.bad, jnp.nan, quotient.value()))
        # One run is divided before it becomes dense, several after they are added: both round
        # once.
        one_run = quotient.total.values.ndim == 1
        total = quotient.value() if one_run else quotient.total
        fill = jnp.where(self.bad, jnp.nan, 0)
        parts = layout.add_sparse([jnp.full(shape, fill, layout.dtype) for shape in layout.shapes], total)
        if not one_run:
            parts = [part / quotient.divisor for part in parts]
        return [part.astype(dtype) for part, dtype in zip(parts, layout.dtypes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Composition(Synchroniser):
    """A synchroniser of four choices: reducer, memory, space and mean.

    Attributes:
      comm: the workers that sum a vector.
      reducer: how a vector is summed.
      memory: what a worker keeps of it.
      space: where leaves become vectors.
      mean: what is made of the sum.
    """

    comm: Comm
    reducer: Reducer
    memory: Memory = NoMemory()
    space: Space = Flat()
    mean: Mean = over_workers

    def __post_init__(self):
        axes = [name for comm in self.levels for name in axes_of(comm)]
        if len(set(axes)) < len(axes) or self.comm in self.space.comms:
            raise ValueError(
                f"the axes are {axes or self.levels}, one of them twice; name each once: over two levels, inter is the "
                "axis along which the nodes stand, and intra the one along which a node's workers do"
            )
        if self.memory.feeds_back and self.reducer.unbiased:
            raise ValueError(
                f"{self.reducer} rounds at random, and with error feedback its residual grows without bound: shrink "
                "what the quantizer decodes with contract=True, or, where dense vectors are summed, pass "
                "error_feedback=False"
            )
        if self.memory.subtracts_mean and not self.reducer.of_the_sum:
            raise ValueError(
                f"subtract is 'mean' with {self.reducer}: what a worker sends depends on its own residual, and there "
                "all that differs between workers would pile up, so that elements never arrive, or are rounded ever "
                "more coarsely: take ErrorFeedback(subtract='local')"
            )

    @property
    def levels(self) -> tuple[Comm, ...]:
        return (self.comm, *self.space.comms)

    @property
    def agree_over(self) -> tuple[Comm, ...]:
        return self.space.agree_over

    def over(self, *comms: Comm) -> "Composition":
        return dataclasses.replace(self, comm=comms[0], space=self.space.over(*comms[1:]))

    def parts(self, bucket: Bucket) -> tuple[Reducer, Memory]:
        """How a bucket is summed, and what is kept of it."""
        if bucket.dense:
            return Whole(Dense()), self.memory.for_dense()
        return self.reducer, self.memory

    def first(self, buckets: Sequence[Bucket]) -> tuple[BucketState, ...]:
        """The buckets' states before the first step."""
        states = []
        for bucket in buckets:
            reducer, memory = self.parts(bucket)
            layout = self.space.layout(bucket)
            states.append(BucketState(memory.init(layout.n, layout.dtype), reducer.init(layout, self.comm.size)))
        return tuple(states)

    def selects(self, buckets: Sequence[Bucket]) -> list[bool]:
        """Which buckets are selected from, and so have thresholds to report."""
        return [self.reducer.sparse and not bucket.dense for bucket in buckets]

    def init(self, params: Any) -> SparseAllReduceState:
        check_floats(params)
        buckets = self.space.buckets(jax.tree.leaves(params))
        return begin(self, self.first(buckets), thresholds_of(buckets, self.selects(buckets)))

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        means, state = self.reduce(grads, state)
        leaves, treedef = jax.tree.flatten(grads)
        return jax.tree.unflatten(treedef, means.leaves(leaves)), state

    def reduce(self, grads: Any, state: SparseAllReduceState) -> tuple[Means, SparseAllReduceState]:
        levels = [Metered(comm) for comm in self.levels]
        further = [Metered(comm) for comm in self.agree_over]
        buckets = self.space.buckets(jax.tree.leaves(grads))
        check(levels, grads, state, functools.partial(self.first, buckets))
        leaves = self.prepare(levels, grads)

        step, bad = state.step[0], jnp.array(False)
        left_out = [bad] * len(buckets)
        stateful = sum(bool(jax.tree.leaves(before)) for before in state.buckets)
        if stateful == 1:
            step, bad = agree([*levels, *further], step, leaves)
            left_out = [bad] * len(buckets)
        elif stateful:
            # Several vectors do not wait for each other's gradients. A worker leaves out a vector
            # whose gradients are not finite. Once all workers have told, the step is undone.
            step = pmax_over([*levels, *further], step)
            left_out = [not_finite(bucket.take(leaves)) for bucket in buckets]

        told = self.selects(buckets)
        outcome = self.synchronise(levels, buckets, leaves, state.buckets, left_out, step, told)
        if stateful > 1:
            # Only after the agreed step: XLA would merge both exchanges, and wait for the last
            # gradient.
            wrong = jnp.where(jnp.any(jnp.stack(left_out)), step + 1, 0)
            bad = pmax_over([*levels, *further], wrong) > 0
        state = conclude(self, [*levels, *further], state, outcome, bad, step, undo=stateful > 1)
        return Means(buckets, outcome.quotients, bad), state

    def prepare(self, levels: Sequence[Comm], grads: Any) -> Sequence[jax.Array]:
        """A worker's gradients as they enter the space."""
        return self.memory.prepare(jax.tree.leaves(grads), math.prod(level.size for level in levels))

    def synchronise(
        self,
        levels: Sequence[Metered],
        buckets: list[Bucket],
        leaves: Sequence[jax.Array],
        states: Sequence[BucketState],
        left_out: Sequence[jax.Array],
        step: jax.Array,
        selects: Sequence[bool],
    ) -> Outcome:
        """Accumulates, sums and retains every vector.

        Nothing of a vector that is left out is delivered.

        Args:
          levels: the networks.
          buckets: which leaves travel together.
          leaves: this worker's gradients.
          states: of the buckets.
          left_out: bool scalars, one for each bucket.
          step: int32 scalar, alike on all workers.
          selects: which buckets have thresholds to report.
        """
        comm, *inner = levels
        workers = math.prod(level.size for level in levels)
        quotients: dict[int, Quotient] = {}
        after: dict[int, BucketState] = {}
        counts: dict[int, Counts] = {}
        updated = jnp.int32(0)
        for level in levels:
            level.next_bucket()
        # In the order in which a backward pass has them ready.
        for i in sorted(range(len(buckets)), key=lambda i: buckets[i].ids[0], reverse=True):
            for level in levels:
                level.next_bucket()
            bucket, before, keep = buckets[i], states[i], ~left_out[i]
            reducer, memory = self.parts(bucket)
            layout, limit = self.space.layout(bucket), memory.limit(bucket.layout.dtype, workers)
            parts = self.space.enter(inner, bucket, bucket.take(leaves), keep, limit)
            pending, kept = memory.accumulate(before.memory, layout, parts, keep, comm.size)
            done = reducer(comm, pending, before.reducer, layout=layout, step=step, keep=keep)
            kept, quotient = memory.retain(kept, done, self.mean(done.total, workers), keep, comm.size)
            total = self.space.leave(inner, bucket, quotient.total)
            quotients[i], counts[i] = quotient._replace(total=total), done.counts
            after[i] = BucketState(kept, done.state)
            updated += count_filled(total) if reducer.sparse else count(total)
        order = range(len(buckets))
        report = report_of([counts[i] for i in order], selects, updated)
        return Outcome([quotients[i] for i in order], [after[i] for i in order], report)
