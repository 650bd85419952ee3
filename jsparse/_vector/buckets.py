"""Which leaves of a gradient travel together."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, TypeVar

import jax

from .layout import Layout

T = TypeVar("T")
Scope = Literal["global", "leaf"]


class Bucket(NamedTuple):
    """Leaves that are synchronised as one vector.

    Attributes:
      ids: which leaves.
      layout: where each leaf stands in the vector.
      dense: whether the vector always goes densely, because nothing is to be selected from it.
      whole: whether each device of a worker has all of it, where it has only shards of others.
      tiles: the side of the square tiles in whose order its matrices are; None for their own.
    """

    ids: tuple[int, ...]
    layout: Layout
    dense: bool = False
    whole: bool = False
    tiles: int | None = None

    def take(self, leaves: Sequence[T]) -> list[T]:
        """Those of all leaves that are in this bucket."""
        return [leaves[i] for i in self.ids]


def divide(
    leaves: Sequence[jax.Array],
    *,
    scope: Scope = "global",
    dense_below: int = 0,
    whole: Collection[int] = (),
    bucket_bytes: int | None = None,
    tiles: int | None = None,
) -> list[Bucket]:
    """Divides leaves into buckets. Leaves without elements are in none.

    Args:
      leaves: arrays, or anything with their shape, size and dtype.
      scope: one bucket for all leaves, or one for each leaf.
      dense_below: leaves of fewer elements go into one bucket of their own, marked dense.
      whole: leaves, by number, that go into another one, marked dense and whole.
      bucket_bytes: cut the one bucket for all leaves into several of at most so many bytes (or of
        one leaf). They are cut from the last leaf to the first: the order of a backward pass.
      tiles: as in :class:`Bucket`, of those that are not marked dense.

    Raises:
      ValueError: a bucket would have ``2**31`` elements or more.
    """
    cut = [i for i, leaf in enumerate(leaves) if leaf.size and i not in whole]
    small = [i for i in cut if leaves[i].size < dense_below]
    large = [i for i in cut if leaves[i].size >= dense_below]
    groups = [[i] for i in large] if scope == "leaf" else _cut(large, leaves, bucket_bytes)
    result = [Bucket(tuple(ids), Layout.of([leaves[i] for i in ids]), tiles=tiles) for ids in groups]
    for ids, of_whole in ((small, False), ([i for i in whole if leaves[i].size], True)):
        if ids:
            result.append(Bucket(tuple(ids), Layout.of([leaves[i] for i in ids]), dense=True, whole=of_whole))
    for bucket in result:
        if bucket.layout.n >= 2**31:
            raise ValueError(
                f"{bucket.layout.n} elements in one bucket; indices are int32, so a bucket holds fewer than 2**31: "
                'select in every leaf for itself with scope="leaf", or give a dense all-reduce bucket_bytes'
            )
    return result


def _cut(ids: list[int], leaves: Sequence[jax.Array], bucket_bytes: int | None) -> list[list[int]]:
    if bucket_bytes is None:
        return [ids] if ids else []
    groups: list[list[int]] = []
    room = 0
    for i in reversed(ids):
        size = leaves[i].size * Layout.of([leaves[i]]).dtype.itemsize
        if size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(i)
        room -= size
    return groups
