"""Two levels of a network: what is done inside a node before and after the all-reduce between nodes.

HiTopKComm (Algorithm 2 of the paper), and with a dense all-reduce the 2D torus. A worker's shard is the part of the
flat vector of its rank in the node, ``ceil(n / size)`` elements, padded with zeros at the end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._comm.metered import Cost, collective_cost
from .._vector.sparse_vector import SparseVector
from ..wire import Full


def scatter(intra: Comm, vector: jax.Array) -> jax.Array:
    """This worker's shard of the sum of the node's vectors (lines 2-4)."""
    width = -(-vector.shape[0] // intra.size)
    padded = jnp.pad(vector, (0, width * intra.size - vector.shape[0]))
    return intra.psum_scatter(padded.reshape(intra.size, width))


def gather(intra: Comm, total: SparseVector | jax.Array, n: int) -> SparseVector | jax.Array:
    """The vector of length ``n``, in one run if it is sparse, of which each worker has a shard (lines 21-23).

    Lossless whatever the wire between the nodes: what were rounded here, no residual would hold.
    """
    if not isinstance(total, SparseVector):
        return intra.all_gather(total).reshape(-1)[:n]
    part, wire = total.merge(), Full()
    parts = wire.decode(intra.all_gather(wire.encode(part)), part.capacity, part.n, part.values.dtype)
    begins = part.n * lax.iota(jnp.int32, intra.size)[:, None]
    indices = jnp.where(parts.indices < part.n, begins + parts.indices, n)
    return SparseVector(parts.values, indices, n).concatenate(min(indices.size, n))


def sends(total: SparseVector | jax.Array, n: int, size: int) -> Cost:
    """What a worker of a node of ``size`` sends inside it.

    Args:
      total: the sum of its shards between the nodes, or only shapes and types.
      n: the length of the vector.
      size: workers in the node.
    """
    values = total.values if isinstance(total, SparseVector) else total
    width = -(-n // size)
    gathered = values.size * values.dtype.itemsize
    if isinstance(total, SparseVector):
        gathered = 4 * Full().words(values.size if values.ndim == 1 else min(values.size, width), width, values.dtype)
    scattered = width * size * values.dtype.itemsize
    return collective_cost("psum_scatter", scattered, size) + collective_cost("all_gather", gathered, size)
