"""A parameter server: one worker sums all vectors and sends the sum to the others."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._comm.comm import Comm
from ..wire import Messages
from ._base import AllReduce
from ._pairs import receives, type_as_alike


class ParameterServerState(NamedTuple):
    """State of :class:`ParameterServer`.

    Attributes:
      waiting: this worker's last vectors, the oldest first, one for each step of staleness; each
        of shape ``(n,)``.
    """

    waiting: tuple[jax.Array, ...]

    of_elements = True


@dataclasses.dataclass(frozen=True)
class ParameterServer(AllReduce):
    """Sums dense vectors at the root, rank 0, which sends the sum to each other worker.

    The root adds the vectors in the order of ranks.

    Attributes:
      staleness: d, the delay in steps. The sum of a step is that of the vectors of d steps before,
        and zero in the first d steps. 0 is the synchronous server. With other values it behaves
        like an asynchronous server whose workers take steps together: gradients belong to
        parameters that have since been changed d times.

    **Cost**: ``2n (P-1)`` words in ``2 (P-1)`` messages, which pass through the root one after the
    other. They are counted for every worker, because all workers wait for them. Under
    ``check_vma=True`` there is also an all-gather of ``n (P-1)/P`` words, because JAX can't type
    what the root sent as alike on all workers.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 4.2.2, "ParameterServer synchronous" and "ParameterServer
      asynchronous".
    """

    sparse: ClassVar[bool] = False
    compresses: ClassVar[bool] = False

    staleness: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}; it is a number of steps, so it must be at least 0")

    def init(self, n: int, size: int, dtype: DTypeLike) -> ParameterServerState:
        return ParameterServerState(tuple(jnp.zeros(n, dtype) for _ in range(self.staleness)))

    def __call__(
        self, comm: Comm, x: jax.Array, state: ParameterServerState, *, step: jax.Array, wire: Messages
    ) -> tuple[jax.Array, jax.Array, ParameterServerState]:
        sent, *waiting = *state.waiting, x
        total = type_as_alike(comm, _distribute(comm, _reduce(comm, sent)), wire)
        return total, sent, ParameterServerState(tuple(waiting))


def _reduce(comm: Comm, x: jax.Array) -> jax.Array:
    """The sum over the workers, on the root."""
    total = x
    for worker in range(1, comm.size):
        total = total + comm.ppermute(x, [(worker, 0)])
    return total


def _distribute(comm: Comm, total: jax.Array) -> jax.Array:
    """The root's vector, on all workers."""
    x = total
    for worker in range(1, comm.size):
        pair = [(0, worker)]
        x = jnp.where(receives(comm, pair), comm.ppermute(total, pair), x)
    return x
