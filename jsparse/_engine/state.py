"""The state of a synchronisation: its contents, its placement, its move to other workers."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

# A mark in place of an array that is moved: use what a new run would begin with.
ANEW: Any = object()


@runtime_checkable
class WorkerState(Protocol):
    """A state that differs between workers: every leaf's leading axis concatenates over workers.

    States of this form tell how they are placed and how they go to another number of workers.
    """

    def specs(self, axis: Any) -> Any:
        """The state with a PartitionSpec in place of every leaf.

        Args:
          axis: the mesh axis, or axes, along which the workers stand.
        """
        ...

    def moved(self, old: Any, once: Any, move: Any) -> Any:
        """The state among other workers.

        Called on the shapes that one of the new workers has.

        Args:
          old: the state as global arrays, in NumPy.
          once: the shapes that a worker without others would have.
          move: from how many workers to how many; its methods move single arrays.
        """
        ...


class BucketState(NamedTuple):
    """What is carried for the leaves that are synchronised as one vector.

    Attributes:
      memory: what the worker keeps of the vector.
      reducer: the state of its reducer.
    """

    memory: Any
    reducer: Any

    @property
    def residual(self) -> jax.Array | None:
        """What was accumulated and not yet delivered, shape ``(n,)``.

        It is None without error feedback.
        """
        return self.memory.residual


class Report(NamedTuple):
    """What the last synchronisation did, and how many were skipped; leaves have shape ``(1,)``.

    Attributes:
      selected: int32: elements that qualified on this worker.
      overflowed: int32: those of them that did not fit into its buffers.
      delivered: int32: elements of this worker that became part of the update. Those of sums that
        it rounded or took over count, too.
      updated: int32: elements of the update that are not zero. Over n, that is the density to
        which the update has filled in. An all-gather counts an index once for each worker that
        sent it.
      words: uint32: 4-byte words that this worker sent. A round in which pairs exchange counts for
        all workers, also for those that have no part in it: what is counted is the busiest path.
      messages: uint32: messages that this worker sent, counted likewise.
      skipped: int32: synchronisations so far that met a non-finite gradient and were undone.
      thresholds: of each bucket that may be selected from, the magnitude that elements had to
        reach on this worker; 0 without a threshold.
      global_thresholds: likewise, the magnitude that they had to reach in the sum.
    """

    selected: jax.Array
    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array
    words: jax.Array
    messages: jax.Array
    skipped: jax.Array
    thresholds: tuple[jax.Array, ...]
    global_thresholds: tuple[jax.Array, ...]


class SparseAllReduceState(NamedTuple):
    """State of a synchronisation: every leaf's leading axis concatenates over workers.

    Attributes:
      step: int32, shape ``(1,)``: synchronisations so far, without those that met a non-finite
        gradient.
      sizes: int32, shape ``(levels,)``: how many workers synchronise, level by level.
      shards: int32, shape ``(1,)``: how many devices share a worker's gradient; 1 unless the model
        is sharded.
      elements: uint32, shape ``(1,)``: elements of this device's share. It stays at its maximum
        from 2**32 on.
      dense_words: uint32, shape ``(1,)``: 4-byte words that this device would send if one dense
        all-reduce summed the gradients in their own types. It stays at its maximum likewise.
      buckets: one for each vector that is synchronised.
      report: what the last step did.
    """

    step: jax.Array
    sizes: jax.Array
    shards: jax.Array
    elements: jax.Array
    dense_words: jax.Array
    buckets: tuple[BucketState, ...]
    report: Report

    def specs(self, axis: Any) -> Any:
        """As in :class:`WorkerState`."""
        return jax.tree.map(lambda _: PartitionSpec(axis), self)

    def moved(self, old: "SparseAllReduceState", once: Any, move: Any) -> "SparseAllReduceState":
        """As in :class:`WorkerState`: residuals and velocities keep their sum over P."""
        shards = self.step.shape[0]

        def bucket(now: BucketState, old: BucketState, once: BucketState) -> BucketState:
            n = next((leaf.shape[0] // shards for leaf in jax.tree.leaves(now.memory)), None)

            def part(now, old):
                return now.moved(old, move, n) if hasattr(now, "moved") else move.of_each(now, old, own=True)

            memory = jax.tree.map(lambda *leaf: move.vector(*leaf, shards), now.memory, old.memory, once.memory)
            reducer = jax.tree.map(part, now.reducer, old.reducer, is_leaf=lambda x: hasattr(x, "moved"))
            return BucketState(memory, reducer)

        return SparseAllReduceState(
            step=move.of_each(self.step, old.step),
            sizes=ANEW,
            shards=ANEW,
            elements=ANEW,
            dense_words=ANEW,
            buckets=tuple(map(bucket, self.buckets, old.buckets, once.buckets)),
            report=jax.tree.map(move.of_each, self.report, old.report),
        )


def check_not_donated(tree: Any, name: str = "the optimizer state") -> None:
    """Refuses a state, called ``name``, of which an array was donated.

    To compute with a deleted array ends the process in some versions of jaxlib.
    """
    if any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    ):
        raise ValueError(
            f"{name} was donated to a step, which overwrote its arrays: take the one that this step returned"
        )


def states_in(tree: Any, kind: type = SparseAllReduceState) -> list[Any]:
    """The states of a kind in a tree, by default those of all synchronisations."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
