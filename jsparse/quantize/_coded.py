"""Vectors that are still messages of a quantizer."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._vector.parts import subtract_window
from ._base import Quantizer, in_turn_or_at_once, unknown_zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """The values of some messages, in their order, as a part of a vector.

    On CPUs a quantizer may decode them where they are wanted, a few at a time, which stay in cache
    (``Quantizer.in_turn``). Otherwise they are decoded all at once.

    Attributes:
      messages: int32, shape ``(rows, words)``.
      factor: scalar, of the values' type: what they are multiplied by. 0 makes zeros of all.
      quantize: what encoded the messages.
      length: the number of values in a message.
      size: how many of all values are wanted; those at the end are padding.
      own: int32 scalar and shape ``(length,)``: the row of a message, and the values that stand in
        its place; or None.
    """

    messages: jax.Array
    factor: jax.Array
    quantize: Quantizer = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    own: tuple[jax.Array, jax.Array] | None = None

    @staticmethod
    def of(
        messages: jax.Array,
        quantize: Quantizer,
        length: int,
        size: int,
        dtype: DTypeLike,
        own: tuple[jax.Array, jax.Array] | None = None,
    ) -> "Coded":
        """The values of messages, in the type ``dtype``."""
        return Coded(messages, jnp.ones((), dtype), quantize, length, size, own)

    def whole(self) -> jax.Array:
        """The values, shape ``(size,)``."""

        def in_turn() -> jax.Array:
            zeros = jnp.zeros(self.size, self.factor.dtype)
            start = functools.reduce(varying_as, jax.tree.leaves(self), zeros)
            return self._into(start, unknown_zero(), lambda window, values: values)

        return in_turn_or_at_once(self.quantize, self.length, in_turn, self._at_once)

    def rescale(self, scale: Callable[[jax.Array], jax.Array]) -> "Coded":
        """The values times a number, as ``Part.rescale`` says.

        Where ``scale`` divides by a number, they are multiplied by its rounded reciprocal.
        """
        return dataclasses.replace(self, factor=scale(self.factor))

    def subtract_from(self, vector: jax.Array, begin: jax.Array) -> jax.Array:
        """Subtracts the values from a window of a vector, as ``Part.subtract_from`` says."""

        def in_turn(vector: jax.Array) -> jax.Array:
            return self._into(vector, begin, lambda window, values: window - values)

        def at_once(vector: jax.Array) -> jax.Array:
            return subtract_window(vector, begin, self._at_once())

        return in_turn_or_at_once(self.quantize, self.length, in_turn, at_once, vector)

    def _at_once(self) -> jax.Array:
        values = jax.vmap(lambda row: self.quantize.decode(row, self.length, self.factor.dtype))(self.messages)
        if self.own is not None:
            rank, own = self.own
            values = values.at[rank].set(own)
        return self._scaled(values.reshape(-1)[: self.size])

    def _into(
        self, vector: jax.Array, begin: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """Combines a window of a vector with the values, message by message."""
        rows, left = divmod(self.size, max(self.length, 1))

        def add(i: int | jax.Array, vector: jax.Array, size: int) -> jax.Array:
            def with_own(window: jax.Array, values: jax.Array, first: int | jax.Array) -> jax.Array:
                if self.own is not None:
                    rank, own = self.own
                    values = jnp.where(i == rank, lax.dynamic_slice(own, (first,), values.shape), values)
                return combine(window, self._scaled(values))

            here = begin + i * self.length
            return self.quantize.decode_into(vector, here, self.messages[i], self.length, size, with_own)

        if rows:
            vector = lax.fori_loop(0, rows, lambda i, vector: add(i, vector, self.length), vector)
        if left:
            vector = add(rows, vector, left)
        return vector

    def _scaled(self, values: jax.Array) -> jax.Array:
        return jnp.where(self.factor == 0, 0, self.factor * values)
