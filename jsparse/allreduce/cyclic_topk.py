"""CLT-k: one worker chooses the elements, and all workers send theirs."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Full, Messages, Wire
from ._base import AllReduce


@dataclasses.dataclass(frozen=True)
class CyclicTopK(AllReduce):
    """Sums the elements that one worker, the leader, has selected. The workers take turns.

    In step t the leader is worker ``t mod P``. It sends the indices of its k elements to all, and
    one dense all-reduce sums what the workers have at these k indices. So a sum has k elements,
    whatever P is, and everything at these indices is delivered. An element that is large on one
    worker alone waits until this worker leads.

    It suits workers whose residuals are alike: with unlike data the leader's choice means little
    to the others. All workers select, and the choice of one counts. Values are summed at full
    width, so it takes no wire but ``wire.Full()``.

    **Cost**: ``4k (P-1)/P`` words and ``4 log P`` messages a worker: two all-reduces, one of
    indices, in which all but the leader give zeros, and one of values.

    References:
      Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
      Distributed Training, NeurIPS 2020, equation 3 (CLT-k) and Algorithm 1.
    """

    takes_held: ClassVar[bool] = True  # type: ignore[misc]

    def check_wire(self, wire: Wire) -> None:
        if wire != Full():
            raise ValueError(f"wire is {wire}, and CyclicTopK sums values at full width: take wire.Full(), the default")

    def __call__(
        self, comm: Comm, x: SparseVector, state: tuple[()], *, step: jax.Array, wire: Messages, held: jax.Array
    ) -> tuple[SparseVector, SparseVector, tuple[()]]:
        if x.capacity < x.n:
            leads = comm.rank() == step % comm.size
            indices = comm.psum(jnp.where(leads, x.indices, 0))
        else:  # All elements, if any worker has selected one.
            indices = jnp.where(comm.pmax(x.count) > 0, lax.iota(jnp.int32, x.n), x.n)
        values = held.at[indices].get(mode="fill", fill_value=0)
        total = SparseVector(comm.psum(values), indices, x.n)
        return total, SparseVector(values, indices, x.n), state
