"""Spaces: where leaves become vectors, and sums of vectors become leaves again.

A worker's memory, its selection and its messages all live in the coordinates of a space.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._vector.arguments import check_fields
from .._vector.buckets import Bucket, Scope, divide
from .._vector.layout import Layout
from .._vector.parts import Parts
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector, Vector, to_dense
from .._vector.tiles import has_tiles, into_tiles, out_of_tiles
from ..wire import Full


class Space:
    """Where leaves become vectors, and back: a frozen dataclass.

    Inherit from this class. By default a vector is a bucket's leaves one after another.

    Attributes:
      comms: the networks that entering and leaving use, beside the reducer's.
      model: the networks inside a worker whose devices hold a model in shards. They agree whether
        a gradient is finite. What is sent there is not counted.
      whole: the leaves, by number, of which each of these devices has all.
      shared: those of them that go densely, of which each device sends a part. The others each
        device synchronises as it does its shards, all of them alike.
      as_leaves: whether a vector is its bucket's leaves one after another, element by element in
        the order that the bucket says, so that it can be cut into other shards.
    """

    comms: tuple[Comm, ...] = ()
    model: tuple[Comm, ...] = ()
    whole: tuple[int, ...] = ()
    as_leaves: ClassVar[bool] = False

    @property
    def shared(self) -> tuple[int, ...]:
        return self.whole

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "Space":
        """The same space for the shards that one device of a worker holds."""
        raise ValueError(f"{self} does not say how it treats the shards of a sharded model: define its on_shards")

    def over(self, *comms: Comm) -> "Space":
        """The same space over other networks, as many as ``comms``."""
        return self

    def buckets(self, leaves: Sequence[jax.Array]) -> list[Bucket]:
        """Which leaves travel together. Leaves may be arrays, or their shapes and types."""
        raise NotImplementedError

    def layout(self, bucket: Bucket) -> Layout:
        """Where the parts that :meth:`enter` returns stand in the bucket's vector."""
        return bucket.layout

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        """The vector of a bucket, as parts that lie end to end. It may communicate.

        Args:
          comms: this space's networks, in a form that counts what is sent.
          bucket: the bucket.
          leaves: its gradients.
          keep: bool scalar: whether they count; where not, they may be left as they are.
          limit: magnitudes that are summed here are clipped to this.
        """
        return leaves

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: Vector) -> Vector:
        """A sum of vectors in the order of the bucket's leaves.

        It is linear, and it may communicate.
        """
        return total

    def norm(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The Euclidean norm of a worker's gradient, whose shards its devices hold, as a product.

        The norm and the squares of finite gradients may be infinite, and those of small ones zero.

        Args:
          leaves: what this device holds, all of one type.

        Returns:
          The largest magnitude, 1 where that is 0; and the norm divided by it, float32 at least.
        """
        peaks = [jnp.max(jnp.abs(leaf)) for leaf in leaves if leaf.size]
        peak = functools.reduce(jnp.maximum, peaks, jnp.zeros((), leaves[0].dtype))
        for comm in self.model:
            peak = comm.pmax(peak)
        unit = jnp.where(peak > 0, peak, 1)
        wide = jnp.promote_types(unit.dtype, jnp.float32)
        squares = [self.once(i, jnp.sum(over(leaf, unit).astype(wide) ** 2)) for i, leaf in enumerate(leaves)]
        total = functools.reduce(jnp.add, squares)
        for comm in self.model:
            total = comm.psum(total)
        return unit, jnp.sqrt(total)

    def once(self, leaf: int, figure: Any) -> Any:
        """A figure of a leaf, to be added up over a worker's devices.

        Of a leaf of which each device has all, one of them counts it, and for the others it is 0.
        """
        if leaf not in self.whole:
            return figure
        return jnp.where(functools.reduce(operator.and_, [comm.rank() == 0 for comm in self.model]), figure, 0)


def over(x: jax.Array, unit: jax.Array) -> jax.Array:
    """``x / unit``, from -1 to 1, for a ``unit`` above 0 that no magnitude exceeds.

    XLA multiplies by the reciprocal, which is 0 for the largest floats: it is less than the
    smallest normal number. So both are brought nearer to 1 first.
    """
    nearer = jnp.where(unit > 1, 0.125, 8).astype(unit.dtype)
    return (x * nearer) / (unit * nearer)


@dataclasses.dataclass(frozen=True)
class Flat(Space):
    """The leaves one after another: the space of most methods.

    Attributes:
      scope: one vector for all leaves, or one for each.
      dense_below: leaves of fewer elements go densely, all together.
      bucket_bytes: cut the one vector into several of at most so many bytes.
      tiles: matrices are in the order of square tiles of this side, where elements are selected.
      share_whole: whether a worker's devices share the leaves of which each has all. If not, each
        synchronises all of them: for reducers that need leaves in their own shapes.
      model, whole: as in :class:`Space`.
    """

    as_leaves: ClassVar[bool] = True

    scope: Scope = "global"
    dense_below: int = 0
    bucket_bytes: int | None = None
    tiles: int | None = None
    share_whole: bool = True
    model: tuple[Comm, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def shared(self) -> tuple[int, ...]:
        return self.whole if self.share_whole else ()

    def __post_init__(self):
        check_fields(self)
        if self.scope not in ("global", "leaf"):
            raise ValueError(f'scope is {self.scope!r}; choose "global" or "leaf"')
        if self.dense_below < 0:
            raise ValueError(f"dense_below is {self.dense_below}; it is a number of elements, at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes, at least 1, or None")
        if self.tiles is not None and self.tiles < 1:
            raise ValueError(f"tiles is {self.tiles}; it is the side of a tile, at least 1, such as 64, or None")

    def buckets(self, leaves: Sequence[jax.Array]) -> list[Bucket]:
        return divide(
            leaves,
            scope=self.scope,
            dense_below=self.dense_below,
            whole=self.shared,
            bucket_bytes=self.bucket_bytes,
            tiles=self.tiles,
        )

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "Flat":
        return dataclasses.replace(self, model=model, whole=whole)

    def layout(self, bucket: Bucket) -> Layout:
        return _part(bucket.layout, self.model) if bucket.whole else bucket.layout

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        """The leaves in the order of tiles; of those that devices share, this device's part."""
        if not bucket.whole:
            return [leaf if isinstance(leaf, SparseVector) else into_tiles(leaf, bucket.tiles) for leaf in leaves]
        return [self._part_of(bucket.layout.ravel(leaves))]

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: Vector) -> Vector:
        if bucket.whole:
            return self._joined(to_dense(total), bucket.layout.n)
        alike = [i in self.whole for i in bucket.ids]
        if not any(alike) and not any(has_tiles(shape, bucket.tiles) for shape in bucket.layout.shapes):
            return total
        leaves = bucket.layout.windows(total if isinstance(total, Parts) else to_dense(total))
        leaves = [out_of_tiles(leaf, bucket.tiles).reshape(-1) for leaf in leaves]
        # Each device has a sum of its own of these. Put together of parts of all, it is one.
        one = [
            self._joined(self._part_of(leaf), leaf.size) if whole else leaf
            for leaf, whole in zip(leaves, alike, strict=True)
        ]
        return Parts(one)

    def _part_of(self, vector: jax.Array) -> jax.Array:
        """This device's part of a vector that all devices of a worker have."""
        rank, size = jnp.int32(0), 1
        for comm in self.model:
            rank, size = rank * comm.size + comm.rank(), size * comm.size
        width = -(-vector.size // size)
        vector = jnp.pad(vector, (0, size * width - vector.size))
        return lax.dynamic_slice_in_dim(vector, rank * width, width)

    def _joined(self, vector: jax.Array, n: int) -> jax.Array:
        """The vector of length n of which each device of a worker has a part."""
        for comm in reversed(self.model):
            vector = comm.all_gather(vector)
        return vector.reshape(-1)[:n]


@dataclasses.dataclass(frozen=True)
class Shards(Flat):
    """Two levels: the workers of a node sum their vectors, and each gets a shard of the sum.

    HiTopKComm (Algorithm 2 of the paper); with a dense all-reduce it is the 2D torus. A worker's
    shard is the part of the vector that belongs to its rank in the node: ``ceil(n / size)``
    elements, padded with zeros at the end. Between nodes, workers with the same shard sum.

    Attributes:
      intra: the workers of a node.
    """

    intra: Comm = dataclasses.field(kw_only=True)

    @property
    def comms(self) -> tuple[Comm, ...]:
        return (self.intra,)

    def over(self, *comms: Comm) -> "Shards":
        return dataclasses.replace(self, intra=comms[0])

    def layout(self, bucket: Bucket) -> Layout:
        return _part(super().layout(bucket), [self.intra])

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        """This worker's shard of the sum of the node's vectors (lines 2-4)."""
        (intra,) = comms
        leaves = super().enter(comms, bucket, leaves, keep, limit)
        whole = Pending(None, leaves, keep, super().layout(bucket)).add_up()
        if math.isfinite(limit):
            whole = jnp.clip(whole, -limit, limit)
        (width,) = self.layout(bucket).shapes[0]
        padded = jnp.pad(whole, (0, width * intra.size - whole.shape[0]))
        return [intra.psum_scatter(padded.reshape(intra.size, width))]

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: Vector) -> Vector:
        """The whole vector, of which each worker of the node has a shard (lines 21-23).

        A sparse sum becomes one run, or a dense vector if that takes no more words. It is always
        sent losslessly: a value that were rounded here would be in no residual.
        """
        (intra,) = comms
        n = super().layout(bucket).n
        return super().leave(comms, bucket, self._gathered(intra, n, total))

    def _gathered(self, intra: Comm, n: int, total: Vector) -> Vector:
        """The vector of length n of which each worker of the node has a shard."""
        wire = Full()
        if isinstance(total, SparseVector):
            capacity, dtype = min(total.values.size, total.n), total.values.dtype
            if wire.words(capacity, total.n, dtype) >= total.n * dtype.itemsize // 4:
                total = total.to_dense()
        if not isinstance(total, SparseVector):
            return intra.all_gather(to_dense(total)).reshape(-1)[:n]
        part = total.merge()
        message = wire.encode(part, jnp.int32(0))
        parts = wire.decode(intra.all_gather(message), part.capacity, part.n, part.values.dtype)
        begins = part.n * lax.iota(jnp.int32, intra.size)[:, None]
        indices = jnp.where(parts.indices < part.n, begins + parts.indices, n)
        return SparseVector(parts.values, indices, n).concatenate(min(indices.size, n))


def _part(layout: Layout, comms: Sequence[Comm]) -> Layout:
    """The layout of the part of a vector that one member of these networks has.

    The last parts are filled up with zeros.
    """
    width = -(-layout.n // math.prod(comm.size for comm in comms))
    return Layout(((width,),), (layout.dtype,), (0, width))
