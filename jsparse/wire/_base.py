"""What wire formats have in common."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.sparse_vector import SparseVector


class Wire:
    """A layout of sparse vectors in messages: a frozen dataclass.

    A message is one buffer of 32-bit integers. So values and indices travel together, in as many
    bytes as they need, and no backend widens narrow floats on the way. Inherit from this class.

    Attributes:
      lossless: whether a reader gets what was written, to the bit.
      elementwise: whether a value that was read once is read unchanged when it is sent again,
        whatever stands beside it.
      unbiased: whether values are rounded at random, right in expectation.
    """

    lossless = False
    elementwise = False
    unbiased = False

    def encode(self, x: SparseVector, step: jax.Array) -> jax.Array:
        """Lays out each run as one row of int32.

        Equal runs are laid out alike on every worker.

        Args:
          x: values of shape ``(..., capacity)``.
          step: int32 scalar, alike on all workers. Random numbers are drawn from it.

        Returns:
          Shape ``(..., words)``.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.wire.Wire")

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        """Reads rows back, as vectors of length ``n`` with ``capacity`` values of ``dtype``."""
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.wire.Wire")

    def decode_values(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> jax.Array:
        """Reads the values alone: shape ``(..., capacity)``. Unused places may hold anything."""
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.wire.Wire")

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        """The length of a row for ``capacity`` values of ``dtype`` in a vector of length ``n``."""
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.wire.Wire")

    def at(self, step: jax.Array) -> "Messages":
        """The messages of one step in this format."""
        return Messages(self, step)


@dataclasses.dataclass(frozen=True)
class Messages:
    """The messages of one step: a wire format, and the step that its random numbers come from.

    An all-reduce is given one of these.

    Attributes:
      wire: the format.
      step: int32 scalar, alike on all workers.
    """

    wire: Wire
    step: jax.Array

    @property
    def lossless(self) -> bool:
        """Whether a reader gets what was written, to the bit."""
        return self.wire.lossless

    @property
    def elementwise(self) -> bool:
        """Whether a value that was read once is read unchanged when it is sent again."""
        return self.wire.elementwise

    def encode(self, x: SparseVector) -> jax.Array:
        """One row of int32 for each run: shape ``(..., words)``."""
        return self.wire.encode(x, self.step)

    def decode(self, message: jax.Array, capacity: int, n: int, dtype: DTypeLike) -> SparseVector:
        """Reads rows back, as vectors of length ``n`` with ``capacity`` values of ``dtype``."""
        return self.wire.decode(message, capacity, n, dtype)

    def words(self, capacity: int, n: int, dtype: DTypeLike) -> int:
        """The length of a row for ``capacity`` values of ``dtype`` in a vector of length ``n``."""
        return self.wire.words(capacity, n, dtype)

    def as_read(self, x: SparseVector, message: jax.Array) -> SparseVector:
        """What the receivers of ``message``, in which ``x`` was encoded, read of it."""
        if self.lossless:
            return x
        values = self.wire.decode_values(message, x.capacity, x.n, x.values.dtype)
        return SparseVector(jnp.where(x.indices < x.n, values, 0), x.indices, x.n)
