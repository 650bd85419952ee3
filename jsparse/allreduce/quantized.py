"""All-reduce of dense vectors whose values take fewer bits."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as

from .._comm.comm import Comm
from .._vector.parts import Parts
from .._vector.sparse_vector import Vector
from ..quantize import Quantizer
from ..quantize._base import check_quantizer, in_turn_or_at_once
from ..quantize._coded import Coded
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
    ) -> tuple[Vector, Vector, tuple[()]]:
        if self.split == "ring":
            return *self._ring(comm, x, step), state
        if self.split:
            return *self.by_owners(comm, x, step), state
        message = self.quantize.encode(x, quantizer_key(self.quantize, step, comm.rank()))
        messages = comm.all_gather(message)
        total = self._sum(messages, x, lambda i, values, first: values)
        return total, self._coded(message[None], x.size, x), state

    def by_owners(
        self, comm: Comm, x: jax.Array, step: jax.Array, finish: Callable[[jax.Array], jax.Array] = lambda mine: mine
    ) -> tuple[Vector, Vector]:
        """Sums each part on one worker.

        Args:
          comm: the workers.
          x: this worker's vector.
          step: int32 scalar, alike on all workers.
          finish: what an owner makes of the sum of its part, before all others get it.

        Returns:
          The sum, and what is delivered of ``x``.
        """
        size, rank = comm.size, comm.rank()
        keys = jax.random.split(quantizer_key(self.quantize, step, rank), size)
        messages = self._encode_parts(x, keys)
        arrived = comm.all_to_all(messages)
        own = _part(x, rank, size)

        def addend(i: jax.Array, values: jax.Array, first: int | jax.Array) -> jax.Array:
            # A worker's own part is not sent, so it is not rounded.
            return jnp.where(i == rank, lax.dynamic_slice(own, (first,), values.shape), values)

        mine = finish(self._sum(arrived, own, addend))
        # ``~step`` in place of ``step``, so that the two roundings draw different random numbers.
        everyone, rounded = gather_dense(comm, mine, x.size, self.quantize, ~step)
        return everyone, self._coded(messages, x.size, own, (rank, own + (rounded - mine)))

    def _encode_parts(self, x: jax.Array, keys: jax.Array) -> jax.Array:
        """The message of each part, one in each row."""
        size = keys.shape[0]
        block, whole, last = _cut(x, size)

        def at_once() -> jax.Array:
            return jax.vmap(self.quantize.encode)(x[: whole * block].reshape(whole, block), keys[:whole])

        def in_turn() -> jax.Array:
            def encode(i: jax.Array) -> jax.Array:
                return self.quantize.encode(lax.dynamic_slice(x, (i * block,), (block,)), keys[i])

            return lax.map(encode, jnp.arange(whole))

        messages = [in_turn_or_at_once(self.quantize, block, in_turn, at_once)] if whole else []
        if whole < size:
            rest = jnp.pad(last, (0, (size - whole - 1) * block)).reshape(size - whole, block)
            messages.append(jax.vmap(self.quantize.encode)(rest, keys[whole:]))
        return jnp.concatenate(messages)

    def _ring(self, comm: Comm, x: jax.Array, step: jax.Array) -> tuple[Vector, Vector]:
        """As :meth:`by_owners`, but each part is summed on its way round the ring.

        It starts at its owner's successor and ends at its owner.
        """
        size, rank = comm.size, comm.rank()
        keys = jax.random.split(quantizer_key(self.quantize, step, rank), size)
        own = _part(x, (rank - 1) % size, size)

        def read(message: jax.Array) -> jax.Array:
            return self.quantize.decode(message, own.size, own.dtype)

        message = self.quantize.encode(own, keys[0])
        delivered = [read(message)]
        for hop in range(1, size):
            arrived = comm.ppermute(message, [(source, (source + 1) % size) for source in range(size)])
            own = _part(x, (rank - 1 - hop) % size, size)
            total = read(arrived) + own
            message = self.quantize.encode(total, keys[hop])
            delivered.append(own + (read(message) - total))
        everyone = self._coded(comm.all_gather(message), x.size, own)
        turned = jnp.stack(delivered)[(rank - 1 - lax.iota(jnp.int32, size)) % size]
        return everyone, turned.reshape(-1)[: x.size]

    def _sum(
        self,
        messages: jax.Array,
        like: jax.Array,
        addend: Callable[[jax.Array, jax.Array, int | jax.Array], jax.Array],
    ) -> jax.Array:
        """The sum of the vectors of all messages, in order, one message at a time.

        Args:
          messages: one in each row.
          like: of the sum's shape and type.
          addend: makes of a message's row, of a stretch of its values, and of the index of the
            first of these, what is added.
        """

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            def combine(window: jax.Array, values: jax.Array, first: int | jax.Array) -> jax.Array:
                return window + addend(i, values, first)

            return self.quantize.decode_into(total, jnp.minimum(i, 0), messages[i], total.size, total.size, combine)

        # ``zeros_like`` would vary as ``like`` does.
        return lax.fori_loop(0, messages.shape[0], add, varying_as(jnp.zeros(like.shape, like.dtype), messages))

    def _coded(
        self, messages: jax.Array, size: int, like: jax.Array, own: tuple[jax.Array, jax.Array] | None = None
    ) -> Parts:
        """The first ``size`` values of messages, as :class:`Coded` has them.

        Args:
          messages: one in each row.
          size: how many values are wanted.
          like: of the shape and type of one message's values.
          own: values that stand in place of a message's, as in :class:`Coded`.
        """
        return Parts([Coded.of(messages, self.quantize, like.size, size, like.dtype, own)])


def _cut(x: jax.Array, size: int) -> tuple[int, int, jax.Array]:
    """How a vector is cut into ``size`` parts.

    Returns:
      The length of a part: it is even, so that two values of half a word fill a word; how many
      parts are whole; and the part after these, padded with zeros. All parts after it are zeros.
    """
    block = -(-x.size // (2 * size)) * 2
    whole = x.size // max(block, 1)
    rest = x[whole * block :]
    return block, whole, jnp.pad(rest, (0, block - rest.size))


def _part(x: jax.Array, i: jax.Array, size: int) -> jax.Array:
    """The i-th of ``size`` parts, padded with zeros. Only an incomplete part is copied."""
    block, whole, last = _cut(x, size)
    last = jnp.where(i == whole, last, 0)
    return jnp.where(i < whole, lax.dynamic_slice(x, (i * block,), (block,)), last) if whole else last
