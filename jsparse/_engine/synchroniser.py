"""Synchronisers: how the workers' gradients become their mean.

Everything else knows a synchroniser by its base class alone: the optax transformation, ``sync``,
phases, the training step, the accounting of traffic.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._comm.comm import Comm, axes_of
from .._comm.metered import Metered
from .._vector.buckets import Bucket
from .._vector.parts import rescale
from .._vector.sparse_vector import Leaf, SparseVector, flatten, one_run
from ..allreduce import Dense
from .agreement import agree, check, not_finite, pmax_over
from .mean import Mean, Quotient, over_contributors, over_workers
from .memory import Memory, NoMemory
from .outcome import Outcome, begin, conclude
from .reducer import Reducer, Whole, count, count_filled
from .space import Flat, Space
from .state import BucketState, SparseAllReduceState


class Synchroniser:
    """Makes the mean of the workers' gradients: a frozen dataclass. Inherit from this class.

    Attributes:
      levels: the networks that a worker is in.
      model: the networks inside a worker whose devices hold a model in shards.
      alike: whether updates are the same on all workers.
    """

    alike = True
    levels: tuple[Comm, ...]
    model: tuple[Comm, ...] = ()

    @property
    def by_senders(self) -> bool:
        """Whether some elements are divided by the number of workers that sent them."""
        return False

    def over(self, *comms: Comm) -> "Synchroniser":
        """The same over other networks, as many as ``levels``."""
        raise NotImplementedError

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "Synchroniser":
        """The same for the shards of a sharded model that one device of a worker holds.

        Args:
          model: the networks inside a worker.
          whole: the leaves, by number, of which each device has all.
        """
        raise NotImplementedError

    def init(self, params: Any) -> SparseAllReduceState:
        """The state before the first step."""
        raise NotImplementedError

    def buckets(self, params: Any) -> list[Bucket]:
        """Which leaves are one vector, one after another, for each of the state's ``buckets``.

        Args:
          params: as of :meth:`init`, or their shapes and types.

        Raises:
          ValueError: vectors are made of leaves in another way.
        """
        return []

    def compressed(self, params: Any) -> tuple[list[int], list[int]]:
        """The leaves, by number, that are to send less than a dense sum would, and some of them.

        The latter go densely nevertheless, because each device of a worker has all of them.

        Args:
          params: as of :meth:`init`, or their shapes and types.
        """
        return [], []

    def check_shard(self, name: str, shape: Sequence[int], shard: Sequence[int]) -> None:
        """Refuses a shard, as :meth:`Reducer.check_shard` does."""

    def check_like(self, grads: Any, params: Any) -> None:
        """Refuses gradients that are not those of these parameters, if their shapes tell."""

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        """The mean, in the shapes and types of the gradients, and the state after the step."""
        raise NotImplementedError

    def reduce(self, grads: Any, state: SparseAllReduceState) -> tuple["Means", SparseAllReduceState]:
        """The mean of each vector, before it is laid out in leaves.

        Raises:
          ValueError: this synchroniser has no such vectors.
        """
        raise ValueError("sync returns the mean of one vector, and this transformation has none: use tx.update")


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

    def leaves(self, like: Sequence[Leaf]) -> list[jax.Array]:
        """The means in the shapes and types of these leaves; NaN after a non-finite gradient."""
        means = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in like]
        for bucket, quotient in zip(self.buckets, self.quotients, strict=True):
            for i, part in zip(bucket.ids, self._parts(bucket, quotient), strict=True):
                means[i] = part
        return means

    def _parts(self, bucket: Bucket, quotient: Quotient) -> list[jax.Array]:
        layout = bucket.layout
        if not isinstance(quotient.total, SparseVector):
            return layout.unravel(rescale(quotient.value(), lambda x: jnp.where(self.bad, jnp.nan, x)))
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
        if self.memory.feeds_back and self.reducer.staleness:
            raise ValueError(
                f"{self.reducer} with error feedback: what is on its way would stay in the residual, too, and be sent "
                "again: pass error_feedback=False; nothing is lost, as all is delivered later"
            )
        if self.memory.subtracts_sent and not self.reducer.sparse:
            raise ValueError(
                f"subtract is 'sent' with {self.reducer}, which sends all elements, so that nothing would be fed back: "
                "take ErrorFeedback(subtract='local')"
            )
        if self.memory.subtracts_sent and self.reducer.hands_over:
            raise ValueError(
                f"subtract is 'sent' with {self.reducer}, where a worker keeps sums of what others sent, "
                "which would be lost: take put_back='exact' with GTopk's butterfly or all-gather, put_back='senders' "
                "with OkTopk, or ErrorFeedback(subtract='local')"
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
    def model(self) -> tuple[Comm, ...]:  # type: ignore[override]
        return self.space.model

    @property
    def by_senders(self) -> bool:
        return self.mean is over_contributors

    @property
    def workers(self) -> int:
        """How many workers sum a gradient, on all levels together."""
        return math.prod(comm.size for comm in self.levels)

    def over(self, *comms: Comm) -> "Composition":
        return dataclasses.replace(self, comm=comms[0], space=self.space.over(*comms[1:]))

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "Composition":
        return dataclasses.replace(self, space=self.space.on_shards(model, whole))

    def parts(self, bucket: Bucket) -> tuple[Reducer, Memory]:
        """How a bucket is summed, and what is kept of it."""
        if self.reducer.of_any_vector:
            return self.reducer, self.memory
        if bucket.whole:  # It has a residual for what was pending in other shards of the model.
            return Whole(Dense()), self.memory.in_dense_phase(flush=True)
        if bucket.dense:
            return Whole(Dense()), self.memory.for_dense()
        return self.reducer, self.memory

    def selects(self, bucket: Bucket) -> bool:
        """Whether elements of a bucket are selected, so that it has thresholds to report."""
        return self.reducer.sparse and not bucket.dense

    def buckets(self, params: Any) -> list[Bucket]:
        if not self.space.as_leaves:
            raise ValueError(
                f"the vectors of {self.space} are not leaves one after another, so that they can't be cut into other "
                "shards: keep the mesh's axes within a worker and the specs as they were, and change the number of "
                "workers alone; or begin with the state that init makes on the new mesh, without what the workers held "
                "back, and put the other states of the chain, such as Adam's, beside it"
            )
        return self.space.buckets(flatten(params)[0])

    def compressed(self, params: Any) -> tuple[list[int], list[int]]:
        leaves, _ = flatten(params)
        buckets = self.space.buckets(leaves) if self.reducer.compresses else []
        short = getattr(self.space, "dense_below", 0)
        kept = [i for bucket in buckets if self.parts(bucket)[0] == self.reducer for i in bucket.ids]
        missed = {i for bucket in buckets if bucket.whole for i in bucket.ids if leaves[i].size >= short} - {*kept}
        return [*kept, *missed], [*missed]

    def check_shard(self, name: str, shape: Sequence[int], shard: Sequence[int]) -> None:
        self.reducer.check_shard(name, shape, shard)

    def init(self, params: Any) -> SparseAllReduceState:
        leaves, _ = flatten(params)
        buckets = self.space.buckets(leaves)
        own = [bucket for bucket in buckets if self.parts(bucket)[0] == self.reducer]
        if own:
            self.reducer.check_layouts([self.space.layout(bucket) for bucket in own])
        states = []
        for bucket in buckets:
            reducer, memory = self.parts(bucket)
            layout = self.space.layout(bucket)
            states.append(BucketState(memory.init(layout.n, layout.dtype), reducer.init(layout, self.comm.size)))
        thresholds = [jnp.zeros(1, bucket.layout.dtype) for bucket in buckets if self.selects(bucket)]
        return begin(self.levels, self.space, leaves, states, thresholds)

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        means, state = self.reduce(grads, state)
        leaves, treedef = flatten(grads)
        return jax.tree.unflatten(treedef, means.leaves(leaves)), state

    def reduce(self, grads: Any, state: SparseAllReduceState) -> tuple[Means, SparseAllReduceState]:
        levels = [Metered(comm) for comm in self.levels]
        everyone = [*levels, *self.model]
        check(self, grads, state)
        leaves, _ = flatten(grads)
        buckets = self.space.buckets(leaves)
        leaves = self.prepared(leaves)

        step, bad = state.step[0], jnp.array(False)
        remembering = [bucket for bucket, before in zip(buckets, state.buckets, strict=True) if jax.tree.leaves(before)]
        # What every device has is short, and may wait.
        stateful = sum(not bucket.whole for bucket in remembering) or len(remembering)
        if stateful == 1:
            step, bad = agree(everyone, step, leaves)
        left_out = [bad] * len(buckets)
        if stateful > 1:
            # Several vectors do not wait for each other's gradients. A worker leaves out a vector
            # whose gradients are not finite. Once all workers have told, the step is undone.
            step = pmax_over(everyone, step)
            left_out = [not_finite(bucket.take(leaves)) for bucket in buckets]

        outcomes = self.synchronise(levels, buckets, leaves, state.buckets, left_out, step)
        if stateful > 1:
            # Only after the agreed step: XLA would merge both exchanges, and wait for the last
            # gradient.
            wrong = jnp.where(jnp.any(jnp.stack(left_out)), step + 1, 0)
            bad = pmax_over(everyone, wrong) > 0
        selects = map(self.selects, buckets)
        state = conclude(levels, self.model, state, outcomes, selects, bad, step, undo=stateful > 1)
        return Means(buckets, [outcome.quotient for outcome in outcomes], bad), state

    def prepared(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """What is made of a worker's gradients before they become vectors."""
        return self.memory.prepare(list(map(one_run, leaves)), self.workers, self.space.norm)

    def synchronise(
        self,
        levels: Sequence[Metered],
        buckets: list[Bucket],
        leaves: Sequence[Leaf],
        states: Sequence[BucketState],
        left_out: Sequence[jax.Array],
        step: jax.Array,
    ) -> list[Outcome]:
        """Accumulates, sums and retains every vector; the outcomes are in the buckets' order.

        Nothing of a vector that is left out is delivered.

        Args:
          levels: the networks.
          buckets: which leaves travel together.
          leaves: this worker's gradients.
          states: of the buckets.
          left_out: bool scalars, one for each bucket.
          step: int32 scalar, alike on all workers.
        """
        comm, *inner = levels
        outcomes: dict[int, Outcome] = {}
        for level in levels:
            level.next_bucket()
        # In the order in which a backward pass has them ready.
        for i in sorted(range(len(buckets)), key=lambda i: buckets[i].ids[0], reverse=True):
            for level in levels:
                level.next_bucket()
            bucket, before, keep = buckets[i], states[i], ~left_out[i]
            reducer, memory = self.parts(bucket)
            layout, limit = self.space.layout(bucket), memory.limit(bucket.layout.dtype, self.workers)
            parts = self.space.enter(inner, bucket, bucket.take(leaves), keep, limit)
            pending, kept = memory.accumulate(before.memory, layout, parts, keep, comm.size)
            done = reducer(comm, pending, before.reducer, layout=layout, step=step, keep=keep)
            # Every worker contributes to what goes densely.
            mean = self.mean if reducer is self.reducer else over_workers
            kept, quotient = memory.retain(kept, done, mean(done.total, self.workers), keep, comm.size)
            total = self.space.leave(inner, bucket, quotient.total)
            updated = count_filled(total) if reducer.sparse else count(total)
            outcomes[i] = Outcome(quotient._replace(total=total), BucketState(kept, done.state), done.counts, updated)
        return [outcomes[i] for i in range(len(buckets))]
