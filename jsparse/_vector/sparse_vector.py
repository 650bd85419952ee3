"""The sparse vector: indices and values, in buffers of static length."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kernels_pallas import bitmap, varying_as

from .parts import Parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseVector:
    """A vector of length ``n`` as pairs of index and value, in buffers of static length.

    If its buffers have shape ``(capacity,)``, it is one *run*: the indices ascend, none occurs
    twice, and unused places hold index ``n`` and value 0. If they have shape ``(runs, capacity)``,
    it is the sum of its runs, added in order. An all-gather gives such a vector, and all workers
    compute the same sum of it.

    Attributes:
      values: shape ``(capacity,)`` or ``(runs, capacity)``.
      indices: int32, of the same shape; those of a run ascend, and are distinct.
      n: the vector's length, below ``2**31``.

    >>> x = SparseVector(jnp.array([2.0, 5.0, 0.0]), jnp.array([1, 3, 4]), 4)
    >>> x.to_dense()
    Array([0., 2., 0., 5.], dtype=float32)
    """

    values: jax.Array
    indices: jax.Array
    n: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int]:
        """That of the dense vector, ``(n,)``."""
        return (self.n,)

    @property
    def size(self) -> int:
        """The vector's length, as of an array."""
        return self.n

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def capacity(self) -> int:
        """The length of a run's buffers."""
        return self.values.shape[-1]

    @property
    def count(self) -> jax.Array:
        """How many places are in use: int32, a scalar or one for each run."""
        used = self.indices < self.n
        return bitmap.count_mask(used) if used.ndim == 1 else jax.vmap(bitmap.count_mask)(used)

    def where(self, keep: jax.Array) -> "SparseVector":
        """Keeps the elements where ``keep`` (broadcast) is true.

        The places of the others become unused.
        """
        return SparseVector(jnp.where(keep, self.values, 0), jnp.where(keep, self.indices, self.n), self.n)

    def to_dense(self) -> jax.Array:
        """The dense vector, shape ``(n,)``.

        Runs are added in order, so all workers get the same bits.
        """
        return self.add_into(jnp.zeros(self.n, self.values.dtype))

    def add_into(self, dense: jax.Array) -> jax.Array:
        """Adds this vector to ``dense``, run by run, and in place if XLA can."""
        if self.values.ndim == 1:
            return dense.at[self.indices].add(self.values, mode="drop", indices_are_sorted=True, unique_indices=True)
        start = varying_as(dense, self.values)
        return lax.scan(lambda total, run: (run.add_into(total), None), start, self)[0]

    def union(self, words: jax.Array | None = None) -> jax.Array:
        """The bitmap of the indices of all runs, added to the bitmap ``words`` if it is given.

        It has ``ceil(n / 32)`` words of uint32.
        """
        if words is None:
            words = varying_as(jnp.zeros(-(-self.n // bitmap.WORD), jnp.uint32), self.indices)
        if self.indices.ndim == 1:
            words = bitmap.mark(words, self.indices)
        else:
            words = lax.scan(lambda words, run: (bitmap.mark(words, run), None), words, self.indices)[0]
        # The index n of unused places may have set a bit of the last word.
        used = self.n % bitmap.WORD
        return words.at[-1].set(words[-1] & jnp.uint32(2**used - 1)) if used else words

    def beside(self, other: "SparseVector") -> "SparseVector":
        """Two runs of the same capacity as one vector of two runs: their sum, not yet merged."""
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), self, other)

    def followed_by(self, other: "SparseVector") -> "SparseVector":
        """The places of both vectors, one after another.

        The result is not a run. If no index occurs twice, ``join`` can take it.
        """
        return jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1), b.reshape(-1)]), self, other)

    def merge(
        self, *others: "SparseVector", union: jax.Array | None = None, capacity: int | None = None
    ) -> "SparseVector":
        """The sum of this vector and ``others``, as one run.

        Values with equal indices are added in the order of their runs.

        It needs ``n / 32`` words of scratch space and no sort: each element looks up its place in
        the union of the runs' indices.

        Args:
          others: further vectors of the same length.
          union: the bitmap of all indices, for a caller that already has it.
          capacity: length of the new buffers, static. They must hold all indices. By default they
            are as long as all buffers together, and at most ``n``.

        Returns:
          A vector with buffers of shape ``(capacity,)``.
        """
        vectors = (self, *others)
        if self.values.ndim == 1 and not others:
            return self
        if union is None:
            union = functools.reduce(lambda union, x: x.union(union), others, self.union())
        capacity = min(sum(x.values.size for x in vectors) if capacity is None else capacity, self.n)
        total = jnp.zeros(capacity, self.values.dtype)
        indices = jnp.full(capacity, self.n, jnp.int32)
        for x in vectors:
            places = x.ranks(union, capacity)
            total = SparseVector(x.values, places, capacity).add_into(total)
            indices = indices.at[places.reshape(-1)].set(x.indices.reshape(-1), mode="drop")
        return SparseVector(total, varying_as(indices, total), self.n)

    def ranks(self, union: jax.Array, capacity: int) -> jax.Array:
        """The place of each element in a run of all members of a bitmap.

        It is int32, of the shape of ``self.indices``; ``capacity`` for unused places.
        """
        return jnp.where(self.indices < self.n, bitmap.rank(union, self.indices), capacity)

    def concatenate(self, capacity: int) -> "SparseVector":
        """The same vector as one run, if each run's indices are above those of the run before."""
        count = self.count
        first = jnp.cumsum(count, dtype=jnp.int32) - count
        places = first[:, None] + lax.iota(jnp.int32, self.capacity)[None]
        places = jnp.where(self.indices < self.n, places, capacity)
        return self._place(places, capacity)

    @staticmethod
    def end_to_end(runs: Sequence["SparseVector"]) -> "SparseVector":
        """The vector whose parts, one after another, are those of these runs: as one run."""
        n, capacity = sum(x.n for x in runs), sum(x.capacity for x in runs)
        begin, first = 0, jnp.int32(0)
        values, indices, places = [], [], []
        for x in runs:
            used = x.indices < x.n
            values.append(x.values)
            indices.append(jnp.where(used, begin + x.indices, n))
            places.append(jnp.where(used, first + lax.iota(jnp.int32, x.capacity), capacity))
            begin, first = begin + x.n, first + x.count
        whole = SparseVector(jnp.concatenate(values), jnp.concatenate(indices), n)
        return whole._place(jnp.concatenate(places), capacity)

    def join(self, capacity: int) -> "SparseVector":
        """The same vector as one run, if no index occurs twice. The indices may have any order."""
        return self._place(bitmap.rank(self.union(), self.indices), capacity)

    def _place(self, places: jax.Array, capacity: int) -> "SparseVector":
        places = places.reshape(-1)
        values = jnp.zeros(capacity, self.values.dtype).at[places].set(self.values.reshape(-1), mode="drop")
        indices = jnp.full(capacity, self.n, jnp.int32).at[places].set(self.indices.reshape(-1), mode="drop")
        return SparseVector(values, indices, self.n)

    def pick(
        self, places: jax.Array, capacity: int, start: ArrayLike = 0, limit: ArrayLike | None = None
    ) -> "SparseVector":
        """Takes the elements of a run at some of its places, as a run.

        Args:
          places: a bitmap. If it has more than ``limit`` members, ``limit`` of them are taken,
            round a circle from the member of rank ``start`` on.
          capacity: length of the new buffers, static.
          start: int32 scalar.
          limit: int32, at most ``capacity``, which is the default.
        """
        taken, _ = bitmap.members(places, capacity, self.capacity, start, limit)
        values = self.values.at[taken].get(mode="fill", fill_value=0)
        return SparseVector(values, self.indices.at[taken].get(mode="fill", fill_value=self.n), self.n)

    def window(
        self, begin: jax.Array, length: jax.Array, capacity: int, start: ArrayLike = 0, limit: ArrayLike | None = None
    ) -> "SparseVector":
        """Takes stretches of a run, each as a run of its own.

        If a stretch is longer than ``limit``, ``limit`` elements of it are taken. They follow each
        other round a circle, from the stretch's element ``start`` (modulo its length) on.

        Args:
          begin: int32, a scalar or one for each stretch: its first place.
          length: int32, of the same shape: its length.
          capacity: length of the new buffers, static.
          start: the element of a longer stretch from which elements are taken.
          limit: int32, at most ``capacity``, which is the default.

        Returns:
          A vector with buffers of shape ``(*begin.shape, capacity)``.
        """
        limit = capacity if limit is None else limit
        place = lax.iota(jnp.int32, capacity)
        # Outside of the loop below, where it would be done for each stretch.
        wide = jax.tree.map(lambda buffer: jnp.pad(buffer, (0, capacity)), self)

        def one(stretch: tuple[jax.Array, jax.Array]) -> SparseVector:
            begin, length = stretch
            wrapped, gap = bitmap.circle(length, limit, start)

            def take(buffer: jax.Array) -> jax.Array:
                # Two slices, which are copied faster than as many single elements.
                first, second = (lax.dynamic_slice(buffer, (b,), (capacity,)) for b in (begin, begin + gap))
                return jnp.where(place < wrapped, first, second)

            return jax.tree.map(take, wide).where(place < jnp.minimum(length, limit))

        if not begin.ndim:
            return one((begin, length))
        # A CPU copies slices one after the other faster than a gather of them all.
        return lax.platform_dependent((begin, length), cpu=functools.partial(lax.map, one), default=jax.vmap(one))

    def resize(self, capacity: int) -> "SparseVector":
        """The same vector in buffers of another length.

        They must hold all elements of each run.
        """
        x = jax.tree.map(lambda buffer: buffer[..., :capacity], self)
        wide = [(0, 0)] * (self.values.ndim - 1) + [(0, max(0, capacity - self.capacity))]
        return SparseVector(jnp.pad(x.values, wide), jnp.pad(x.indices, wide, constant_values=self.n), self.n)


# A leaf of a gradient; a sparse one has one axis.
Leaf: TypeAlias = SparseVector | jax.Array
# A vector over several leaves.
Vector: TypeAlias = SparseVector | Parts | jax.Array


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree and its definition. A :class:`SparseVector` is one leaf."""
    return jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, SparseVector))


def one_run(leaf: Leaf) -> Leaf:
    """A sparse leaf as one run, of at least float32, in which its runs were added."""
    if not isinstance(leaf, SparseVector):
        return leaf
    values = leaf.values.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return SparseVector(values, leaf.indices, leaf.n).merge()


def to_dense(x: Vector) -> jax.Array:
    """A leaf or a vector as one array."""
    if isinstance(x, Parts):
        return jnp.concatenate(x.arrays())
    return x.to_dense() if isinstance(x, SparseVector) else x


def first_from(indices: jax.Array, bounds: jax.Array) -> jax.Array:
    """The first place of ascending indices that is at least each bound: int32, as ``bounds``.

    It is ``jnp.searchsorted``, which fails in ``shard_map`` over some axes of a mesh.
    """
    n = indices.shape[0]
    places = jnp.zeros(bounds.shape, jnp.int32)
    for bit in reversed(range(n.bit_length())):
        further = places + (1 << bit)
        below = indices[jnp.minimum(further, n) - 1] < bounds
        places = jnp.where((further <= n) & below, further, places)
    return places
