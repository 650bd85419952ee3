"""The largest or smallest value at each index, over the workers that have the index."""

import jax
import jax.numpy as jnp

from kernels_pallas import bitmap

from .._comm.comm import CommLike, as_comm
from .._vector.sparse_vector import SparseVector
from ..wire import Full, Wire


def maximum(comm: CommLike, x: SparseVector, *, wire: Wire = Full()) -> SparseVector:
    """The elementwise maximum of the workers' sparse vectors.

    At each index it is the largest value among the workers that have the index. A worker that does
    not have the index is left out there: its value does not count as 0.

    Args:
      comm: a mesh axis name, a tuple of them, or a :class:`jsparse.Comm`.
      x: this worker's vector, one run.
      wire: the layout of the messages.

    Returns:
      One run of capacity ``min(P * capacity, n)``, the same bits on every worker.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker: one all-gather.

    References:
      Renggli, SparCML thesis, 2017, section 3.1: any coordinate-wise associative operation.
    """
    return _reduce(comm, x, wire, -jnp.inf, jax.ops.segment_max)


def minimum(comm: CommLike, x: SparseVector, *, wire: Wire = Full()) -> SparseVector:
    """The elementwise minimum of the workers' sparse vectors; see :func:`maximum`.

    Args:
      comm: a mesh axis name, a tuple of them, or a :class:`jsparse.Comm`.
      x: this worker's vector, one run.
      wire: the layout of the messages.

    Returns:
      One run of capacity ``min(P * capacity, n)``, the same bits on every worker.
    """
    return _reduce(comm, x, wire, jnp.inf, jax.ops.segment_min)


def _reduce(comm: CommLike, x: SparseVector, wire: Wire, neutral: float, combine) -> SparseVector:
    comm, messages = as_comm(comm), wire.at(jnp.int32(0))
    received = comm.all_gather(messages.encode(x))
    everyone = messages.decode(received, x.capacity, x.n, x.values.dtype)
    union, capacity = everyone.union(), min(everyone.values.size, x.n)
    indices, _ = bitmap.members(union, capacity, x.n)
    values = jnp.where(everyone.indices < x.n, everyone.values, neutral)
    places = everyone.ranks(union, capacity)
    best = combine(values.reshape(-1), places.reshape(-1), num_segments=capacity + 1)[:capacity]
    return SparseVector(jnp.where(indices < x.n, best, 0), indices, x.n)
