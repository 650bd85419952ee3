"""Dense vectors in parts, which need not be arrays yet: a matrix may be given by its factors."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as

T = TypeVar("T")
# Up to this rank a product of factors is written out as a sum of outer products, except on CPUs.
UNROLLED = 8
# How many elements of a matrix are read or written at a time on CPUs: as many as a core's cache
# holds. A block has at least so many rows, and with higher ranks than this it is the whole matrix:
# then most time goes into products, and the factors would be read anew for each block.
BLOCK = 2**16
FEW = 32


class Part(Protocol):
    """A part that is not an array yet: a pytree."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        ...

    def whole(self) -> jax.Array:
        """The part as an array."""
        ...

    def subtract_from(self, vector: jax.Array, begin: jax.Array) -> jax.Array:
        """Subtracts the part from a window of a vector.

        This is in place if the vector may be overwritten, and XLA does not know ``begin``.

        Args:
          vector: shape ``(n,)``.
          begin: int32 scalar: where the window begins.

        Returns:
          The vector, shape ``(n,)``.
        """
        ...

    def rescale(self, scale: Callable[[jax.Array], jax.Array]) -> Any:
        """The part times a number.

        Args:
          scale: multiplies an array by the number. If that is 0, all elements of a finite part
            become 0. If it is NaN, all become NaN.
        """
        ...


class Factored(NamedTuple):
    """The matrix ``left right^T``, as its two factors.

    Attributes:
      left: shape ``(rows, rank)``.
      right: shape ``(columns, rank)``.
    """

    left: jax.Array
    right: jax.Array

    @property
    def size(self) -> int:
        """The number of the matrix's elements."""
        return self.left.shape[0] * self.right.shape[0]

    def whole(self) -> jax.Array:
        """The matrix, shape ``(rows, columns)``."""
        stored = functools.partial(multiply, axes=(1, 1))
        return lax.platform_dependent(*self, cpu=stored, default=_outer)

    def rescale(self, scale: Callable[[jax.Array], jax.Array]) -> "Factored":
        """The matrix times a number: its right factor is."""
        return self._replace(right=scale(self.right))

    def subtract_from(self, vector: jax.Array, begin: jax.Array) -> jax.Array:
        """Subtracts the matrix from a window of a vector, as :meth:`Part.subtract_from` says."""
        columns = self.right.shape[0]

        def in_turn(vector: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
            def add(vector: jax.Array, first: int | jax.Array, size: int) -> jax.Array:
                rows = lax.dynamic_slice_in_dim(left, first, size)
                return subtract_window(vector, begin + first * columns, multiply(rows, right, (1, 1)))

            return _by_blocks(add, vector, left.shape[0], columns)

        def at_once(vector: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
            return subtract_window(vector, begin, _outer(left, right))

        on_cpu = in_turn if self.right.shape[1] <= FEW else at_once
        return lax.platform_dependent(vector, *self, cpu=on_cpu, default=at_once)


class Parts(NamedTuple):
    """A dense vector that is not yet one array.

    Attributes:
      parts: arrays of any shapes, and parts that are not arrays yet. They lie end to end.
    """

    parts: Sequence[jax.Array | Part]

    @property
    def size(self) -> int:
        """The vector's length."""
        return sum(part.size for part in self.parts)

    def arrays(self) -> list[jax.Array]:
        """The parts as arrays of one axis."""
        wholes = (part if isinstance(part, jax.Array) else part.whole() for part in self.parts)
        return [whole.reshape(-1) for whole in wholes]

    def subtract_from(self, vector: jax.Array, zero: jax.Array) -> jax.Array:
        """``vector - self``, in place if the vector may be overwritten.

        Args:
          vector: of the same length.
          zero: int32 scalar: a zero that XLA does not know to be constant.
        """
        begins = itertools.accumulate((part.size for part in self.parts), initial=0)
        for part, begin in zip(self.parts, begins, strict=False):
            if isinstance(part, jax.Array):
                vector = subtract_window(vector, begin + zero, part)
            else:
                vector = part.subtract_from(vector, begin + zero)
        return vector


def rescale(x: Any, scale: Callable[[jax.Array], jax.Array]) -> Any:
    """A dense vector, or a part of one, times a number.

    Args:
      x: an array, :class:`Parts`, or one of these.
      scale: as :meth:`Part.rescale` takes it.
    """
    if isinstance(x, Parts):
        return Parts([rescale(part, scale) for part in x.parts])
    return scale(x) if isinstance(x, jax.Array) else x.rescale(scale)


def multiply(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product of two matrices, summed over an axis of each, in full precision.

    The result has their other axes, that of ``a`` first.
    """
    over = (axes[:1], axes[1:])
    return lax.dot_general(a, b, (over, ((), ())), precision=lax.Precision.HIGHEST)


def multiply_window(vector: jax.Array, begin: int, shape: tuple[int, int], other: jax.Array, axis: int) -> jax.Array:
    """The product of a matrix that stands in a vector, and another one.

    Args:
      vector: shape ``(n,)``.
      begin: where the matrix begins.
      shape: ``(rows, columns)`` of the matrix.
      other: shape ``(rows, rank)`` for axis 0, ``(columns, rank)`` for axis 1.
      axis: of the matrix, over which is summed.

    Returns:
      An array of shape ``(columns, rank)`` for axis 0, ``(rows, rank)`` for axis 1.
    """
    rows, columns = shape

    def at_once(vector: jax.Array, other: jax.Array) -> jax.Array:
        return multiply(vector[begin : begin + rows * columns].reshape(shape), other, (axis, 0))

    def in_turn(vector: jax.Array, other: jax.Array) -> jax.Array:
        # XLA:CPU copies what it multiplies: out of the vector, and then into an order of its own.
        # A few rows stay in cache meanwhile.
        def add(total: jax.Array, first: int | jax.Array, size: int) -> jax.Array:
            block = lax.dynamic_slice(vector, (begin + first * columns,), (size * columns,)).reshape(size, columns)
            if axis == 0:
                return total + multiply(lax.dynamic_slice_in_dim(other, first, size), block, (0, 0))
            return lax.dynamic_update_slice_in_dim(total, multiply(block, other, (1, 0)), first, 0)

        rank = other.shape[1]
        start = jnp.zeros((rank, columns) if axis == 0 else (rows, rank), vector.dtype)
        total = _by_blocks(add, varying_as(start, vector), rows, columns)
        return total.T if axis == 0 else total

    return lax.platform_dependent(vector, other, cpu=in_turn if other.shape[1] <= FEW else at_once, default=at_once)


def _outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """``left right^T``, on other devices than CPUs.

    A sum of few outer products is elementwise, so XLA forms it where it is read. A product of
    matrices is stored first.
    """
    if right.shape[1] > UNROLLED:
        return multiply(left, right, (1, 1))
    columns = [left[:, k : k + 1] * right[:, k : k + 1].T for k in range(right.shape[1])]
    return functools.reduce(jnp.add, columns)


def subtract_window(vector: jax.Array, begin: jax.Array, part: jax.Array) -> jax.Array:
    """Subtracts an array from a window of a vector, as :meth:`Part.subtract_from` says."""
    window = lax.dynamic_slice(vector, (begin,), (part.size,))
    return lax.dynamic_update_slice(vector, window - part.reshape(-1), (begin,))


def _by_blocks(add: Callable[[T, int | jax.Array, int], T], carry: T, rows: int, columns: int) -> T:
    """Goes over a matrix in blocks of rows: ``carry = add(carry, first row, how many rows)``."""
    size = min(max(BLOCK // columns, FEW), rows)
    count, left = divmod(rows, size)
    carry = lax.fori_loop(0, count, lambda i, carry: add(carry, i * size, size), carry)
    return add(carry, count * size, left) if left else carry
