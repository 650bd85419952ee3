"""The state of a sharded model, cut into other shards; on the host, in NumPy.

What the devices of a worker hold of a leaf is put together, and cut again. The workers stay.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._engine.shards import Begun
from .._engine.state import ANEW, BucketState, SparseAllReduceState
from .._vector.buckets import Bucket
from .._vector.tiles import into_tiles, out_of_tiles
from .form import Site
from .redistribute import joined, nearest, parted

Window = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where the elements of each leaf stand in the vectors of a worker's devices.

    Attributes:
      count: the number of devices.
      paths, shapes: of the leaves.
      windows: for each leaf, the part of it that each device holds; empty if that is all of it.
      buckets: which leaves each vector holds. One that is marked whole the devices hold in parts.
      once: the state of a worker without others, in shapes.
    """

    count: int
    paths: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    windows: tuple[Sequence[Window], ...]
    buckets: tuple[Bucket, ...]
    once: SparseAllReduceState

    @classmethod
    def of(cls, site: Site, begun: Begun, once: SparseAllReduceState) -> "Shards":
        """Those of a synchronisation.

        Args:
          site: how a worker holds the parameters.
          begun: the synchronisation.
          once: its state on a worker without others, in shapes.

        Raises:
          ValueError: its vectors are not made of leaves one after another.
        """
        leaves = jax.tree_util.tree_leaves_with_path(begun.params)
        return cls(
            site.shards,
            tuple(path for path, _ in leaves),
            tuple(leaf.shape for _, leaf in leaves),
            tuple(site.windows(path, leaf.shape) or ((),) * site.shards for path, leaf in leaves),
            tuple(begun.synchroniser.buckets(begun.params)),
            once,
        )

    def length(self, number: int) -> int:
        """The length of a bucket's vector on one device, of which no other worker has a part."""
        bucket = self.buckets[number]
        return -(-bucket.layout.n // self.count) if bucket.whole else bucket.layout.n

    def vectors(self, number: int, bucket: BucketState) -> dict[str, Any]:
        """The arrays of a bucket's state that have an entry for each of its elements, by name.

        Args:
          number: which bucket it is.
          bucket: its state, or arrays in the places of it.
        """
        shapes = {name: leaf.shape for name, leaf in _elementwise(self.once.buckets[number])}
        n = self.count * self.length(number)
        return {name: leaf for name, leaf in _elementwise(bucket) if shapes[name] == (n,)}

    def place_of(self, leaf: int) -> tuple[int, slice] | None:
        """In which bucket a leaf is, and where in the vector; None if it has no elements."""
        for number, bucket in enumerate(self.buckets):
            if leaf in bucket.ids:
                begin, end = bucket.layout.offsets[(at := bucket.ids.index(leaf)) : at + 2]
                return number, slice(begin, end)
        return None

    def take(self, vectors: np.ndarray, leaf: int, place: tuple[int, slice]) -> np.ndarray:
        """A leaf of each node, from vectors of shape ``(nodes, devices, n)``."""
        nodes, windows, shape = len(vectors), self.windows[leaf], self.shapes[leaf]
        number, at = place
        if self.buckets[number].whole:
            return vectors.reshape(nodes, -1)[:, at].reshape(nodes, *shape)
        whole = np.empty((nodes, *shape), vectors.dtype)
        for device, window in enumerate(windows):
            for node in range(nodes):
                part = whole[node, *window, ...]
                part[...] = out_of_tiles(vectors[node, device, at].reshape(part.shape), self.buckets[number].tiles)
        return whole

    def put(self, vectors: np.ndarray, leaf: int, place: tuple[int, slice], whole: np.ndarray) -> None:
        """Puts a leaf of each node in its place: the inverse of :meth:`take`."""
        nodes, windows = len(vectors), self.windows[leaf]
        number, at = place
        if self.buckets[number].whole:
            vectors.reshape(nodes, -1)[:, at] = whole.reshape(nodes, -1)
            return
        for device, window in enumerate(windows):
            for node in range(nodes):
                part = into_tiles(whole[node, *window, ...], self.buckets[number].tiles)
                vectors[node, device, at] = part.reshape(-1)


def recut(
    state: SparseAllReduceState, old: Shards, new: Shards, workers: int, nodes: int, gpus: int
) -> SparseAllReduceState:
    """A state of the same workers, each of which holds the model in other shards.

    Every element of a residual or a velocity stays that of its parameter. What is not of single
    elements, such as a threshold, begins anew.

    Args:
      state: global arrays, in NumPy.
      old, new: the shards.
      workers: the number of workers.
      nodes: how many vectors there are of each kind.
      gpus: how many workers hold one of them in parts.

    Raises:
      ValueError: a leaf has something pending, and no residual in the new shards.
    """
    had = [
        {
            name: joined(leaf, nodes, gpus, old.count, old.length(number))
            for name, leaf in old.vectors(number, bucket).items()
        }
        for number, bucket in enumerate(state.buckets)
    ]
    have: list[dict[str, np.ndarray]] = [
        {
            name: np.zeros((nodes, new.count, new.length(number)), leaf.dtype)
            for name, leaf in new.vectors(number, bucket).items()
        }
        for number, bucket in enumerate(new.once.buckets)
    ]
    for leaf, path in enumerate(old.paths):
        before, after = old.place_of(leaf), new.place_of(leaf)
        if before is None or after is None:
            continue
        for name, vectors in had[before[0]].items():
            whole = old.take(vectors, leaf, before)
            if name in have[after[0]]:
                new.put(have[after[0]][name], leaf, after, whole)
            elif whole.any():
                raise ValueError(
                    f"leaf {jax.tree_util.keystr(path)} of shape {old.shapes[leaf]} has a {name.rsplit('/')[-1]}, and "
                    "in the new shards it has none, so that what is pending would be lost: a shard of it has fewer "
                    "elements than dense_below, and goes densely. Choose a number of shards in which each has as many"
                )

    def bucket(now: BucketState, vectors: Mapping[str, np.ndarray]) -> BucketState:
        def array(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return parted(vectors[name], gpus) if name in vectors else ANEW

        return jax.tree_util.tree_map_with_path(array, now)

    def of_devices(array: Any) -> Any:
        """For each new device of a worker, the entry of the old one over which it begins."""
        by_device = array.reshape(workers, old.count, -1).swapaxes(0, 1)
        return nearest(by_device, new.count).swapaxes(0, 1).reshape(-1)

    return SparseAllReduceState(
        step=of_devices(state.step),
        sizes=of_devices(state.sizes),
        shards=ANEW,
        elements=ANEW,
        dense_words=ANEW,
        buckets=tuple(map(bucket, new.once.buckets, have)),
        report=jax.tree.map(lambda _: ANEW, new.once.report)._replace(skipped=of_devices(state.report.skipped)),
    )


def _elementwise(bucket: BucketState) -> list[tuple[str, Any]]:
    """What may have an entry for each element: the memory, and what a reducer marks so."""
    marked = jax.tree.map(
        lambda node: node if getattr(node, "of_elements", False) else None,
        bucket.reducer,
        is_leaf=lambda node: hasattr(node, "of_elements"),
    )
    leaves = jax.tree_util.tree_leaves_with_path(BucketState(bucket.memory, marked))
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
