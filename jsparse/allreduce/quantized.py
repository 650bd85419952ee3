"""All-reduce of dense vectors in fewer bits."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._comm.comm import Comm
from ..quantize import Codebook, Quantizer
from ..wire import Messages
from ._base import AllReduce
from ._gather import gather_dense, quantizer_key


@dataclasses.dataclass(frozen=True)
class Quantized(AllReduce):
    """Sums dense vectors that every worker quantizes: in the order of ranks, each for itself.

    What rounding takes away is not delivered: with error feedback it is in the residual.

    Attributes:
      quantize: the quantizer.
      split: how they travel. False, as in QSGD: everyone's whole vector to everyone. True: each worker sums a part of
        the vector, which an all-to-all brings, and quantizes the sum again, so that little more is sent however many
        workers there are. ``"ring"``: each part goes round, and every worker adds its own and quantizes what it has so
        far; for quantizers that round little. What a worker rounds away of a sum it has in its residual, unrounded
        until the next sum.

    **Cost**, with b bits a value: ``(P-1) n b/32`` words and ``log P`` messages; split, in a ring too,
    ``2 (P-1)/P n b/32`` words and ``P - 1 + log P`` messages.

    References:
      Alistarh et al., QSGD, NIPS 2017, Algorithm 1; Tang et al., 1-bit Adam, ICML 2021 (split);
      Patarasuk and Yuan, JPDC 2009 (the ring).
    """

    sparse: ClassVar[bool] = False

    quantize: Quantizer
    split: bool | Literal["ring"] = False

    def __post_init__(self):
        if self.split not in (False, True, "ring"):
            raise ValueError(f'split is {self.split!r}; choose False, True or "ring"')
        if isinstance(self.quantize, Codebook):
            raise ValueError(
                f"quantize is {self.quantize}, in which a zero is not zero: it is for the values of sparse vectors, as "
                "wire.Compact(...); quantize a dense vector with quantize.Block8() or QSGD(levels=7), of 8 and 4 bits"
            )

    @property
    def unbiased(self) -> bool:
        return self.quantize.unbiased

    def __call__(
        self, comm: Comm, x: jax.Array, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
        key = quantizer_key(self.quantize, step, comm.rank())
        n, dtype = x.shape[0], x.dtype
        if self.split:
            ring = self.split == "ring"
            everyone, delivered = self._ring(comm, x, key) if ring else self._owners(comm, x, key, step)
            return everyone.reshape(-1)[:n], delivered.reshape(-1)[:n], state
        message = self.quantize.encode(x, key)
        rows = comm.all_gather(message)
        total = _sum(rows, lambda i: self.quantize.decode(rows[i], n, dtype), n, dtype)
        return total, self.quantize.decode(message, n, dtype), state

    def _owners(self, comm: Comm, x: jax.Array, key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums each part on one worker: the sum's parts, and those of what is delivered of ``x``, in rows."""
        size, rank, dtype = comm.size, comm.rank(), x.dtype
        block = _block(x.shape[0], size)
        parts = jnp.pad(x, (0, block * size - x.shape[0])).reshape(size, block)
        messages = jax.vmap(self.quantize.encode)(parts, jax.random.split(key, size))
        arrived = comm.all_to_all(messages)
        own = _part(x, rank, size)

        # What a worker does not send to another is not rounded.
        mine = _sum(arrived, lambda i: jnp.where(i == rank, own, self._read(arrived[i], own)), block, dtype)
        # Another step's number, so that the two roundings draw different numbers.
        everyone, rounded = gather_dense(comm, mine, self.quantize, ~step)
        read = jax.vmap(self._read)(messages, parts)
        is_own = lax.iota(jnp.int32, size)[:, None] == rank
        return everyone, jnp.where(is_own, parts + (rounded - mine)[None], read)

    def _ring(self, comm: Comm, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Likewise, each part summed on its way round, from its owner's successor to its owner."""
        size, rank = comm.size, comm.rank()
        keys = jax.random.split(key, size)
        own = _part(x, (rank - 1) % size, size)
        message = self.quantize.encode(own, keys[0])
        delivered = [self._read(message, own)]
        for hop in range(1, size):
            arrived = comm.ppermute(message, [(source, (source + 1) % size) for source in range(size)])
            own = _part(x, (rank - 1 - hop) % size, size)
            total = self._read(arrived, own) + own
            message = self.quantize.encode(total, keys[hop])
            delivered.append(own + (self._read(message, own) - total))
        everyone = jax.vmap(lambda row: self._read(row, own))(comm.all_gather(message))
        return everyone, jnp.stack(delivered)[(rank - 1 - lax.iota(jnp.int32, size)) % size]

    def _read(self, message: jax.Array, like: jax.Array) -> jax.Array:
        return self.quantize.decode(message, like.shape[0], like.dtype)


def _block(n: int, size: int) -> int:
    """The length of a part: even, so that two values of half a word fill words."""
    return -(-n // (2 * size)) * 2


def _part(x: jax.Array, i: jax.Array, size: int) -> jax.Array:
    """The i-th of ``size`` parts, zeros at the end; only what is no whole part is copied."""
    block = _block(x.shape[0], size)
    whole, rest = divmod(x.shape[0], block)
    last = jnp.where(i == whole, jnp.pad(x[whole * block :], (0, block - rest)), 0)
    return jnp.where(i < whole, lax.dynamic_slice(x, (i * block,), (block,)), last) if whole else last


def _sum(rows: jax.Array, read: Callable[[jax.Array], jax.Array], m: int, dtype: DTypeLike) -> jax.Array:
    """The sum of what is read of each row, by its number: in their order, one vector at a time."""
    start = varying_as(jnp.zeros(m, dtype), rows)
    return lax.fori_loop(0, rows.shape[0], lambda i, total: total + read(i), start)
