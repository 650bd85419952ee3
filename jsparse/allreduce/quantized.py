"""All-reduce of dense vectors whose values take fewer bits."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as

from .._comm.comm import Comm
from ..quantize import Quantizer
from ..quantize._base import check_quantizer
from ..wire import Messages
from ._base import AllReduce, check_keeps_zeros
from ._gather import gather_dense, quantizer_key


@dataclasses.dataclass(frozen=True)
class Quantized(AllReduce):
    """Sums dense vectors that every worker quantizes.

    Without ``split``, every worker adds all vectors by itself, in the order of ranks. What
    rounding removes is not delivered. With error feedback it stays in the residual.

    Attributes:
      quantize: the quantizer.
      split: how the vectors are sent. False, as in QSGD: every worker sends its whole vector to
        every other. True: each worker gets one part of all vectors by an all-to-all, sums it, and
        quantizes the sum. So the number of words hardly depends on the number of workers.
        ``"ring"``: each part goes round all workers. Every worker adds its own values and
        quantizes the sum so far, so this is for quantizers with small rounding errors. What a
        worker rounds away from a sum goes into its own residual, unrounded.

    **Cost**, with b bits a value: ``(P-1) n b/32`` words and ``log P`` messages; with ``split``,
    also in a ring, ``2 (P-1)/P n b/32`` words and ``P - 1 + log P`` messages.

    References:
      Alistarh et al., QSGD, NIPS 2017, Algorithm 1; Tang et al., 1-bit Adam, ICML 2021 (split);
      Patarasuk and Yuan, JPDC 2009 (the ring).
    """

    sparse: ClassVar[bool] = False

    quantize: Quantizer
    split: bool | Literal["ring"] = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.split, bool) and self.split != "ring":
            raise ValueError(f'split is {self.split!r}; choose False, True or "ring"')
        check_quantizer("quantize", self.quantize)
        check_keeps_zeros(self.quantize)

    @property
    def unbiased(self) -> bool:
        return self.quantize.unbiased

    def __call__(
        self, comm: Comm, x: jax.Array, state: tuple[()], *, step: jax.Array, wire: Messages
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
        key = quantizer_key(self.quantize, step, comm.rank())
        if self.split:
            ring = self.split == "ring"
            everyone, delivered = self._ring(comm, x, key) if ring else self.by_owners(comm, x, step)
            return everyone.reshape(-1)[: x.size], delivered.reshape(-1)[: x.size], state
        message = self.quantize.encode(x, key)
        rows = comm.all_gather(message)
        total = _sum(rows, lambda i: self._read(rows[i], x), x)
        return total, self._read(message, x), state

    def by_owners(
        self, comm: Comm, x: jax.Array, step: jax.Array, finish: Callable[[jax.Array], jax.Array] = lambda mine: mine
    ) -> tuple[jax.Array, jax.Array]:
        """Sums each part on one worker.

        Args:
          comm: the workers.
          x: this worker's vector.
          step: int32 scalar, alike on all workers.
          finish: what an owner makes of the sum of its part, before all others get it.

        Returns:
          The parts of the sum, and those of what is delivered of ``x``, one in each row. The last
          ones are padded.
        """
        size, rank = comm.size, comm.rank()
        key = quantizer_key(self.quantize, step, rank)
        parts = jnp.stack([_part(x, jnp.int32(i), size) for i in range(size)])
        messages = jax.vmap(self.quantize.encode)(parts, jax.random.split(key, size))
        arrived = comm.all_to_all(messages)
        own = _part(x, rank, size)

        # A worker's own part is not sent, so it is not rounded.
        mine = finish(_sum(arrived, lambda i: jnp.where(i == rank, own, self._read(arrived[i], own)), own))
        # ``~step`` in place of ``step``, so that the two roundings draw different random numbers.
        everyone, rounded = gather_dense(comm, mine, self.quantize, ~step)
        read = jax.vmap(self._read)(messages, parts)
        return everyone, read.at[rank].set(own + (rounded - mine))

    def _ring(self, comm: Comm, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As :meth:`by_owners`, but each part is summed on its way round the ring.

        It starts at its owner's successor and ends at its owner.
        """
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
    """The length of a part. It is even, so that two values of half a word fill a word."""
    return -(-n // (2 * size)) * 2


def _part(x: jax.Array, i: jax.Array, size: int) -> jax.Array:
    """The i-th of ``size`` parts, padded with zeros. Only an incomplete part is copied."""
    block = _block(x.shape[0], size)
    whole, rest = divmod(x.shape[0], block)
    last = jnp.where(i == whole, jnp.pad(x[whole * block :], (0, block - rest)), 0)
    return jnp.where(i < whole, lax.dynamic_slice(x, (i * block,), (block,)), last) if whole else last


def _sum(rows: jax.Array, read: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The sum over all rows of ``read(row number)``, in order, one vector at a time.

    The result has the shape and type of ``like``.
    """
    start = varying_as(jnp.zeros(like.shape, like.dtype), rows)
    return lax.fori_loop(0, rows.shape[0], lambda i, total: total + read(i), start)
