"""Vectors that are still messages of a quantizer."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._vector.layout import zero_of
from .._vector.parts import subtract_window
from ._base import Quantizer, where_pieces


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """The values of some messages, in their order, as a part of a vector.

    Where a quantizer works in pieces, they are decoded where they are wanted, some at a time while
    these are in cache; else all at once.

    Attributes:
      messages: int32, shape ``(rows, words)``.
      factor: scalar, of the values' type: what they are multiplied by. 0 makes zeros of all.
      quantize: what encoded the messages.
      length: the number of values in a message.
      size: how many of all values are wanted; those at the end are padding.
      own: values that stand in place of a message's, shape ``(length,)``; or None.
      rank: int32 scalar: the row of that message; or None.
    """

    messages: jax.Array
    factor: jax.Array
    quantize: Quantizer = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    own: jax.Array | None = None
    rank: jax.Array | None = None

    @staticmethod
    def of(
        messages: jax.Array,
        quantize: Quantizer,
        length: int,
        size: int,
        dtype: DTypeLike,
        own: tuple[jax.Array, jax.Array] | None = None,
    ) -> "Coded":
        """The values of messages in the type ``dtype``. ``own`` is the rank and the values."""
        rank, values = own or (None, None)
        return Coded(messages, jnp.ones((), dtype), quantize, length, size, values, rank)

    def whole(self) -> jax.Array:
        """The values, shape ``(size,)``."""

        def in_turn() -> jax.Array:
            start = jnp.zeros(self.size, self.factor.dtype)
            for leaf in jax.tree.leaves(self):
                start = varying_as(start, leaf)
            return self._into(start, zero_of(self.messages[0, 0] > 0), lambda window, values: values)

        return where_pieces(self.quantize, in_turn, self._at_once) if self.size else self._at_once()

    def rescale(self, scale: Callable[[jax.Array], jax.Array]) -> "Coded":
        """The values times a number, rounded: ``x / 3`` is ``x`` times a third here."""
        return dataclasses.replace(self, factor=scale(self.factor))

    def subtract_from(self, vector: jax.Array, begin: jax.Array) -> jax.Array:
        """Subtracts the values from a window of a vector, as ``Part.subtract_from`` says."""

        def in_turn(vector: jax.Array) -> jax.Array:
            return self._into(vector, begin, lambda window, values: window - values)

        def at_once(vector: jax.Array) -> jax.Array:
            return subtract_window(vector, begin, self._at_once())

        return where_pieces(self.quantize, in_turn, at_once, vector)

    def _at_once(self) -> jax.Array:
        values = jax.vmap(lambda row: self.quantize.decode(row, self.length, self.factor.dtype))(self.messages)
        if self.own is not None:
            values = values.at[self.rank].set(self.own)
        return self._scaled(values.reshape(-1)[: self.size])

    def _into(
        self, vector: jax.Array, begin: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """Combines a window of a vector with the values, message by message."""
        rows, left = divmod(self.size, self.length)

        def add(i: int | jax.Array, vector: jax.Array, size: int) -> jax.Array:
            def with_own(window: jax.Array, values: jax.Array, first: int | jax.Array) -> jax.Array:
                if self.own is not None:
                    mine = lax.dynamic_slice(self.own, (first,), values.shape)
                    values = jnp.where(i == self.rank, mine, values)
                return combine(window, self._scaled(values))

            here = begin + i * self.length
            return self.quantize.decode_into(vector, here, self.messages[i], self.length, size, with_own)

        if rows:
            vector = lax.fori_loop(0, rows, lambda i, vector: add(i, vector, self.length), vector)
        return add(rows, vector, left) if left else vector

    def _scaled(self, values: jax.Array) -> jax.Array:
        return jnp.where(self.factor == 0, 0, self.factor * values)
