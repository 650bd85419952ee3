"""Spaces: where leaves become vectors, and sums of vectors become leaves again.

A worker's memory, its selection and its messages all live in the coordinates of a space.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._vector.arguments import check_fields
from .._vector.buckets import Bucket, Scope, divide
from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ..wire import Full


class Space:
    """Where leaves become vectors, and back: a frozen dataclass.

    Inherit from this class. By default a vector is a bucket's leaves one after another.

    Attributes:
      comms: the networks that entering and leaving use, beside the reducer's.
      agree_over: further networks over which workers agree whether a gradient is finite.
    """

    comms = ()
    agree_over = ()

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

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: SparseVector | jax.Array) -> SparseVector | jax.Array:
        """A sum of vectors in the order of the bucket's leaves.

        It is linear, and it may communicate.
        """
        return total


@dataclasses.dataclass(frozen=True)
class Flat(Space):
    """The leaves one after another: the space of most methods.

    Attributes:
      scope: one vector for all leaves, or one for each.
      dense_below: leaves of fewer elements go densely, all together.
      bucket_bytes: cut the one vector into several of at most so many bytes.
    """

    scope: Scope = "global"
    dense_below: int = 0
    bucket_bytes: int | None = None

    def __post_init__(self):
        check_fields(self)
        if self.scope not in ("global", "leaf"):
            raise ValueError(f'scope is {self.scope!r}; choose "global" or "leaf"')
        if self.dense_below < 0:
            raise ValueError(f"dense_below is {self.dense_below}; it is a number of elements, at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes, at least 1, or None")

    def buckets(self, leaves: Sequence[jax.Array]) -> list[Bucket]:
        return divide(leaves, scope=self.scope, dense_below=self.dense_below, bucket_bytes=self.bucket_bytes)


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
        width = -(-bucket.layout.n // self.intra.size)
        return Layout(((width,),), (bucket.layout.dtype,), (0, width))

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        """This worker's shard of the sum of the node's vectors (lines 2-4)."""
        (intra,) = comms
        whole = Pending(None, leaves, keep, bucket.layout).add_up()
        if math.isfinite(limit):
            whole = jnp.clip(whole, -limit, limit)
        (width,) = self.layout(bucket).shapes[0]
        padded = jnp.pad(whole, (0, width * intra.size - whole.shape[0]))
        return [intra.psum_scatter(padded.reshape(intra.size, width))]

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: SparseVector | jax.Array) -> SparseVector | jax.Array:
        """The whole vector, of which each worker of the node has a shard (lines 21-23).

        A sparse sum becomes one run, or a dense vector if that takes no more words. It is always
        sent losslessly: a value that were rounded here would be in no residual.
        """
        (intra,) = comms
        n, wire = bucket.layout.n, Full()
        if isinstance(total, SparseVector):
            capacity, dtype = min(total.values.size, total.n), total.values.dtype
            if wire.words(capacity, total.n, dtype) >= total.n * dtype.itemsize // 4:
                total = total.to_dense()
        if not isinstance(total, SparseVector):
            return intra.all_gather(total).reshape(-1)[:n]
        part = total.merge()
        message = wire.encode(part, jnp.int32(0))
        parts = wire.decode(intra.all_gather(message), part.capacity, part.n, part.values.dtype)
        begins = part.n * lax.iota(jnp.int32, intra.size)[:, None]
        indices = jnp.where(parts.indices < part.n, begins + parts.indices, n)
        return SparseVector(parts.values, indices, n).concatenate(min(indices.size, n))
