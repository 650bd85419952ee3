"""All-reduce of dense vectors in fewer bits."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._comm import Comm
from .._ledger import Cost, collective_cost, in_turn
from ..quantize import Codebook, Quantizer
from ..wire import Wire
from ._gather import gather_dense, quantizer_key


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Sums dense vectors that every worker quantizes: in the order of ranks, each for itself.

    What rounding takes away is not delivered: with error feedback it is in the residual.

    Attributes:
      quantize: the quantizer.
      split: how they travel. False, as in QSGD: everyone's whole vector to everyone. True: each worker sums a part of
        the vector and quantizes the sum again, so that little more is sent however many workers there are. What that
        rounds away it has in its residual, unrounded until the next sum.

    **Cost**, with b bits a value: ``(P-1) n b/32`` words and ``log P`` messages; split ``2 (P-1)/P n b/32`` words and
    ``P - 1 + log P`` messages.

    References:
      Alistarh et al., QSGD, NIPS 2017, Algorithm 1; Tang et al., 1-bit Adam, ICML 2021 (split).
    """

    sparse: ClassVar[bool] = False

    quantize: Quantizer
    split: bool = False

    def __post_init__(self):
        if isinstance(self.quantize, Codebook):
            raise ValueError(
                f"quantize is {self.quantize}, in which a zero is not zero: it is for the values of sparse vectors, as "
                "wire.Compact(...); quantize a dense vector with quantize.Block8() or QSGD(levels=7), of 8 and 4 bits"
            )

    def init(self, n: int, size: int, dtype: DTypeLike) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, x: jax.Array, state: tuple[()], *, step: jax.Array, wire: Wire
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
        key = quantizer_key(self.quantize, step, comm.rank())
        n, size, dtype = x.shape[0], comm.size, x.dtype
        if not self.split:
            message = self.quantize.encode(x, key)
            rows = comm.all_gather(message)
            total = _sum(rows, lambda i: self.quantize.decode(rows[i], n, dtype), n, dtype)
            return total, self.quantize.decode(message, n, dtype), state
        block, rank = -(-n // size), comm.rank()
        parts = jnp.pad(x, (0, block * size - n)).reshape(size, block)
        messages = jax.vmap(self.quantize.encode)(parts, jax.random.split(key, size))
        arrived = comm.all_to_all(messages)

        def part(i):
            # What a worker does not send to another is not rounded.
            return jnp.where(i == rank, parts[rank], self.quantize.decode(arrived[i], block, dtype))

        mine = _sum(arrived, part, block, dtype)
        # Another step's number, so that the two roundings draw different numbers.
        everyone, rounded = gather_dense(comm, mine, self.quantize, ~step)
        read = jax.vmap(lambda message: self.quantize.decode(message, block, dtype))(messages)
        own = lax.iota(jnp.int32, size)[:, None] == rank
        delivered = jnp.where(own, parts + (rounded - mine)[None], read)
        return everyone.reshape(-1)[:n], delivered.reshape(-1)[:n], state

    def sends(self, n: int, k: int, size: int, *, dtype: DTypeLike, wire: Wire) -> tuple[Cost, Cost]:
        row = 4 * self.quantize.words(-(-n // size) if self.split else n, dtype)
        gather = collective_cost("all_gather", row, size)
        return in_turn(collective_cost("all_to_all", size * row, size), gather) if self.split else in_turn(gather)


def _sum(rows: jax.Array, read: Callable[[jax.Array], jax.Array], m: int, dtype: DTypeLike) -> jax.Array:
    """The sum of what is read of each row, by its number: in their order, one vector at a time."""
    start = varying_as(jnp.zeros(m, dtype), rows)
    return lax.fori_loop(0, rows.shape[0], lambda i, total: total + read(i), start)
