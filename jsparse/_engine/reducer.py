"""Reducers: how one vector is summed over the workers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap

from .._comm.comm import Comm
from .._vector.layout import Layout
from .._vector.parts import rescale
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector, Vector, to_dense
from ..allreduce import AllReduce
from ..select import Selector
from ..wire import Full, Wire


class Counts(NamedTuple):
    """What a reducer tells of one call; all are scalars.

    Attributes:
      selected: int32: elements that qualified on this worker.
      overflowed: int32: those that did not fit into its buffers.
      delivered: int32: elements of this worker that became part of the sum. Those of sums that it
        rounded or took over count, too.
      threshold: the magnitude that elements had to reach on this worker; 0 without a threshold.
      global_threshold: the magnitude that they had to reach in the sum; 0 without a threshold.
    """

    selected: jax.Array
    overflowed: jax.Array
    delivered: jax.Array
    threshold: jax.Array
    global_threshold: jax.Array


class Reduced(NamedTuple):
    """What a reducer makes of a vector.

    A vector is an array of shape ``(n,)``, a :class:`SparseVector`, or :class:`Parts`, of which
    ``to_dense`` makes an array.

    Attributes:
      acc: the vector, shape ``(n,)``, or a run where nothing was kept.
      sent: what of it was sent.
      own: those of its elements that became part of the sum, at least in part; nothing in a step
        that does not count.
      delivered: this worker's share of the sum: what it has of ``own`` in it, and what it rounded,
        or took over, of sums of others. Nothing in a step that does not count.
      total: the sum, the same bits on every worker; anything in a step that does not count.
      counts: what it tells.
      state: for the next step.
    """

    acc: Leaf
    sent: Vector
    own: Vector
    delivered: Vector
    total: Vector
    counts: Counts
    state: Any


class Reducer:
    """Sums a vector over the workers: a frozen dataclass. Inherit from this class.

    Attributes:
      sparse: whether it selects elements. Then it has thresholds to report, its sum may fill in,
        and dense phases beside it take its memory over.
      unbiased: whether it rounds at random, right in expectation. Error feedback would blow up
        then.
      hands_over: whether a worker may keep sums of others' elements.
      of_the_sum: whether its result depends on the workers' vectors through their sum alone.
      of_any_vector: whether it takes vectors that go densely, too: its total is no sum, and leaves
        beside it must not be summed either.
      of_matrices: whether it takes leaves as the matrices that they are, in their own order.
      compresses: whether it sends less than a dense sum would.
      conserves: whether the workers' shares add up to its total, so that what is delivered and
        what is kept are all there was.
      staleness: by how many steps its sums are late.
    """

    sparse = False
    unbiased = False
    hands_over = False
    of_the_sum = False
    of_any_vector = False
    of_matrices = False
    compresses = True
    conserves = True
    staleness = 0

    def init(self, layout: Layout, size: int) -> Any:
        """The state for a vector of this layout among ``size`` workers: a NamedTuple of arrays."""
        raise NotImplementedError

    def check_layouts(self, layouts: Sequence[Layout]) -> None:
        """Refuses vectors of these layouts, if it can't make anything of all of them together."""

    def check_shard(self, name: str, shape: Sequence[int], shard: Sequence[int]) -> None:
        """Refuses a shard of which this reducer would make something else than of the leaf.

        Args:
          name: of the leaf.
          shape: of the leaf.
          shard: the shape of what a device holds of it.
        """

    def __call__(
        self, comm: Comm, pending: Pending, state: Any, *, layout: Layout, step: jax.Array, keep: jax.Array
    ) -> Reduced:
        """Sums.

        Args:
          comm: the workers that sum this vector.
          pending: this worker's vector.
          state: from ``init`` or from the step before.
          layout: the shapes of the arrays that the vector consists of.
          step: int32 scalar, alike on all workers.
          keep: bool scalar. Where it is false on any worker, this worker delivers nothing.
        """
        raise NotImplementedError


class SelectingState(NamedTuple):
    """The state of :class:`Selecting`.

    Attributes:
      select: the selector's.
      reduce: the all-reduce's.
    """

    select: Any
    reduce: Any


@dataclasses.dataclass(frozen=True)
class Selecting(Reducer):
    """A selector, an all-reduce of what it selects, and a wire format.

    Attributes:
      select: which elements are sent.
      allreduce: how they are summed.
      wire: how they are laid out in messages.
    """

    sparse = True

    select: Selector
    allreduce: AllReduce
    wire: Wire = Full()

    def __post_init__(self):
        self.allreduce.check_wire(self.wire)

    @property
    def unbiased(self) -> bool:
        return self.allreduce.unbiased or self.wire.unbiased

    @property
    def staleness(self) -> int:
        return self.allreduce.staleness

    @property
    def hands_over(self) -> bool:
        return self.allreduce.hands_over

    def init(self, layout: Layout, size: int) -> SelectingState:
        n, dtype = layout.n, layout.dtype
        return SelectingState(self.select.init_for(layout), self.allreduce.init(n, size, dtype))

    def __call__(
        self, comm: Comm, pending: Pending, state: Any, *, layout: Layout, step: jax.Array, keep: jax.Array
    ) -> Reduced:
        acc, x, selected = self.select.accumulate_and_select(pending, state.select, step, comm.rank())
        left = selected.selected[0] - x.count
        x = x.where(keep)
        held = {"held": to_dense(acc)} if self.allreduce.takes_held else {}
        total, delivered, reduced = self.allreduce(comm, x, state.reduce, step=step, wire=self.wire.at(step), **held)
        told = self.allreduce.report(reduced)
        counts = Counts(
            selected.selected[0],
            left + told.overflowed,
            count(delivered),
            selected.threshold[0],
            told.threshold.astype(acc.dtype),
        )
        own = self._own(x, delivered, total)
        return Reduced(acc, x, own, delivered, total, counts, SelectingState(selected, reduced))

    def _own(self, x: SparseVector, delivered: Vector, total: Vector) -> Vector:
        """A worker's elements that became part of the total. Few memories ask for them."""
        exact = self.allreduce.lossless and self.wire.lossless and not self.hands_over
        if exact or not isinstance(delivered, SparseVector):
            return delivered
        # Elements of sums that this worker rounded are delivered, too.
        own = x.where(_among(x, delivered))
        if self.hands_over and isinstance(total, SparseVector):
            # So is what was cut, which one worker takes over.
            own = own.where(bitmap.contains(total.union(), own.indices))
        return own


def _among(x: SparseVector, others: SparseVector) -> jax.Array:
    """Which places of a run have an index that is among others, which may occur several times."""
    members = x.union()
    found = bitmap.contains(members, others.indices)
    places = jnp.where(found, bitmap.rank(members, others.indices), x.capacity)
    return jnp.zeros(x.capacity, bool).at[places.reshape(-1)].set(True, mode="drop")


@dataclasses.dataclass(frozen=True)
class Whole(Reducer):
    """An all-reduce of dense vectors.

    Attributes:
      allreduce: how they are summed; without a state where ``unit`` is not 1.
      unit: leaves, and the workers' parts of a vector, begin at multiples of this in what is
        summed. So no unit of a quantizer crosses leaves.
    """

    allreduce: AllReduce
    unit: int = 1

    @property
    def unbiased(self) -> bool:
        return self.allreduce.unbiased

    @property
    def compresses(self) -> bool:
        return self.allreduce.compresses

    @property
    def staleness(self) -> int:
        return self.allreduce.staleness

    def init(self, layout: Layout, size: int) -> Any:
        return self.allreduce.init(layout.n, size, layout.dtype)

    def __call__(
        self, comm: Comm, pending: Pending, state: Any, *, layout: Layout, step: jax.Array, keep: jax.Array
    ) -> Reduced:
        acc = pending.add_up()
        # The workers' parts have an even length.
        multiple = math.lcm(self.unit, 2) * comm.size
        summed = acc if self.unit == 1 else layout.align(acc, self.unit, multiple)
        total, delivered, state = self.allreduce(comm, summed, state, step=step, wire=Full().at(step))
        if self.unit > 1:
            total, delivered = (layout.unalign(to_dense(each), self.unit) for each in (total, delivered))
        delivered = rescale(delivered, lambda x: jnp.where(keep, x, 0))
        return Reduced(acc, acc, delivered, delivered, total, counts_of_whole(acc), state)


def counts_of_whole(acc: jax.Array) -> Counts:
    """What is told of a vector of which nothing is selected, and all is delivered."""
    none, zero = jnp.int32(0), jnp.zeros((), acc.dtype)
    return Counts(none, none, count(acc), zero, zero)


def count(x: Vector) -> jax.Array:
    """How many elements a vector has: int32 scalar."""
    if isinstance(x, SparseVector):
        return jnp.sum(x.count, dtype=jnp.int32)
    return jnp.int32(x.size)


def count_filled(x: Vector) -> jax.Array:
    """The number of elements of a sum that are not zero: int32 scalar."""
    values = x.values.reshape(-1) if isinstance(x, SparseVector) else to_dense(x)
    return bitmap.count_mask(values != 0)
