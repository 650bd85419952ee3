"""The dense all-reduce."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._comm.metered import Cost, collective_cost, in_turn
from ..wire import Wire


@dataclasses.dataclass(frozen=True)
class Dense:
    """Sums dense vectors: the backend's own all-reduce, the baseline of every paper.

    **Cost**: ``2n (P-1)/P`` words and ``2 log P`` messages a worker.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "Dense".
    """

    sparse: ClassVar[bool] = False

    def init(self, n: int, size: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, x: jax.Array, state: tuple[()], *, step: jax.Array, wire: Wire
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
        return comm.psum(x), x, state

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        return in_turn(collective_cost("psum", n * jnp.dtype(dtype).itemsize, size))
