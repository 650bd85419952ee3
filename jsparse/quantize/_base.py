"""The protocol of quantizers, and the functions that they share."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._vector.arguments import check_fields
from .._vector.random import uniform

WORD = 32
# The number of digits in a stretch of packed digits.
STRETCH = 256
# About how many values are coded at once on CPUs, and up to how many a whole message is few.
PIECE, FEW = 2**16, 2**12
# The number of parts of a row that are compared or added first.
PARTS = 16
Combine: TypeAlias = Callable[[jax.Array, jax.Array, int | jax.Array], jax.Array]


class Quantizer:
    """Encodes values in fewer bits than they have: a frozen dataclass of hyperparameters.

    A message consists of int32 words, so that no backend widens it on the way. Zeros stay zeros,
    unless a class says otherwise. If a value is not finite, its whole bucket is not finite after
    decoding; with an elementwise quantizer, only the value itself.

    Attributes:
      lossless: whether ``decode`` returns the encoded values bit for bit.
      elementwise: whether a value that was rounded once does not change when it is rounded again,
        whatever the other values of the message are.
      unbiased: whether the expectation of the decoded values is the encoded values.
      unit: from the first value on, so many are coded together, and depend on no others. None: all
        values depend on each other.
    """

    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    unit: ClassVar[int | None] = 1

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Encodes values as a message of int32 words.

        Args:
          values: float32 or float64, shape ``(m,)``.
          key: a random key, for quantizers that draw random numbers.
        """
        raise NotImplementedError(self._to_define)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        """Decodes the ``m`` values of a message, in the type ``dtype``."""
        raise NotImplementedError(self._to_define)

    def words(self, m: int, dtype: DTypeLike) -> int:
        """The length in words of a message of ``m`` values of ``dtype``.

        ``decode`` reads only this many words of a longer message.
        """
        raise NotImplementedError(self._to_define)

    def in_turn(self, m: int) -> bool:
        """Whether CPUs do best to code messages of ``m`` values one after the other.

        They do where ``decode_into`` is faster than ``decode`` and a later pass over all values,
        or where decoding needs much memory.
        """
        return False

    def decode_into(
        self, vector: jax.Array, begin: jax.Array, message: jax.Array, m: int, size: int, combine: Combine
    ) -> jax.Array:
        """Combines a window of a vector with the first ``size`` of the ``m`` values of a message.

        This is in place if the vector may be overwritten, and XLA does not know ``begin``.

        Args:
          vector: of the type in which the values are decoded, shape ``(n,)``. It varies over as
            many mesh axes as the message and what ``combine`` adds.
          begin: int32 or int64 scalar: where the window begins.
          message: from ``encode``.
          m: the number of the message's values.
          size: the window's length, at most ``m``.
          combine: makes of a stretch of the window, of the same stretch of the values, and of the
            index of its first value in the message (an int, or an integer scalar), what stands
            there afterwards; element by element.

        Returns:
          The vector, shape ``(n,)``.
        """
        return _combined(vector, begin, self.decode(message, m, vector.dtype)[:size], 0, combine)

    @property
    def _to_define(self) -> str:
        return f"{type(self).__name__} has to define this: see jsparse.quantize.Quantizer"


@dataclasses.dataclass(frozen=True)
class Exact(Quantizer):
    """Sends values as they are, lossless: 4 bytes each for float32, 8 bytes for float64."""

    lossless = True
    elementwise = True

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        return values.view(jnp.int32)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        return message[: self.words(m, dtype)].view(dtype)

    def words(self, m: int, dtype: DTypeLike) -> int:
        return m * jnp.dtype(dtype).itemsize // 4


def digits_in_word(base: int) -> int:
    """The number of digits that fit into 32 bits: 32 of base 2, 20 of base 3, 10 of base 9.

    >>> [digits_in_word(base) for base in (2, 3, 9, 15, 16, 255, 65536)]
    [32, 20, 10, 8, 8, 4, 2]
    """
    return next(count for count in range(WORD, 0, -1) if base**count <= 2**WORD)


def packed_words(m: int, base: int) -> int:
    """The number of words that ``m`` digits take."""
    return -(-m // digits_in_word(base))


def pack_digits(digits: jax.Array, base: int) -> jax.Array:
    """Packs digits, integers from 0 to ``base - 1``, shape ``(m,)``, into int32 words.

    The digits are cut into blocks, and a block into as many stretches as a word has places. Word j
    of a block holds the j-th digit of each stretch. So whole stretches are added as vectors. If a
    word held neighbouring digits, they would be added one by one. A stretch has ``STRETCH``
    digits; in what is left over after the last whole block, as many as are needed.
    """
    places = digits_in_word(base)
    whole = digits.shape[0] // block_length(base) * block_length(base)
    left = digits[whole:]
    left = jnp.pad(left, (0, -left.shape[0] % places))
    blocks = [digits[:whole].reshape(-1, places, STRETCH), left.reshape(1, places, left.shape[0] // places)]
    return jnp.concatenate([_packed(block.astype(jnp.int32).view(jnp.uint32), base) for block in blocks])


def _packed(blocks: jax.Array, base: int) -> jax.Array:
    """Packs blocks of digits, uint32, shape ``(blocks, places, stretch)``."""
    powers = jnp.array([base**i for i in range(blocks.shape[1])], jnp.uint32)
    return jnp.sum(blocks * powers[None, :, None], axis=1, dtype=jnp.uint32).reshape(-1).view(jnp.int32)


def unpack_digits(words: jax.Array, m: int, base: int) -> jax.Array:
    """Unpacks the ``m`` digits of words that :func:`pack_digits` made: int32, shape ``(m,)``."""
    words = words[: packed_words(m, base)].view(jnp.uint32)
    whole = m // block_length(base) * STRETCH
    blocks = [words[:whole].reshape(-1, STRETCH), words[whole:][None]]
    return jnp.concatenate([_unpacked(block, base) for block in blocks])[:m]


def _unpacked(words: jax.Array, base: int) -> jax.Array:
    """The digits of blocks of words, shape ``(blocks, stretch)``: int32, in one row."""
    places = digits_in_word(base)
    if base & (base - 1) == 0:
        shifts = jnp.arange(places, dtype=jnp.uint32) * (base.bit_length() - 1)
        return (words[:, None] >> shifts[None, :, None] & (base - 1)).astype(jnp.int32).reshape(-1)
    # To divide by constants is many times as fast as by a variable.
    narrow = jnp.uint8 if base <= 2**8 else jnp.uint16
    digits = [(words // base**i % base).astype(narrow) for i in range(places)]
    return jnp.stack(digits, axis=1).reshape(-1).astype(jnp.int32)


def block_length(base: int) -> int:
    """The number of digits in a block of :func:`pack_digits`."""
    return digits_in_word(base) * STRETCH


def in_buckets(values: jax.Array, bucket: int | None) -> jax.Array:
    """The values in one row for each bucket, shape ``(buckets, bucket)``.

    The last row is padded with zeros.
    """
    bucket = bucket_length(values.shape[0], bucket)
    return jnp.pad(values, (0, -values.shape[0] % bucket)).reshape(-1, bucket)


def in_stretches(rows: jax.Array) -> jax.Array:
    """Cuts rows into stretches: shape ``(rows, stretches, STRETCH)``, or one stretch a row.

    Packed digits come in such stretches. XLA:CPU works on many elements at a time where it makes
    an array of the same last axis as those that it reads.
    """
    length = rows.shape[1]
    return rows.reshape(rows.shape[0], length // STRETCH, STRETCH) if length % STRETCH == 0 else rows[:, None]


def bucket_length(m: int, bucket: int | None) -> int:
    """The length of a bucket: ``bucket``, or if that is None, all ``m`` values; at least 1."""
    return max(m, 1) if bucket is None else bucket


def check_quantizer(name: str, quantize: Any) -> None:
    """Refuses what is no quantizer, such as a class of quantizers."""
    if not isinstance(quantize, Quantizer):
        raise ValueError(
            f"{name} is {quantize!r}; it must be a quantizer, such as quantize.Block8(), or of a class of your own "
            "that inherits from quantize.Quantizer"
        )


class Scaled(Quantizer):
    """A quantizer whose message has a scale for each bucket, and a digit for each value.

    A subclass has ``bucket``, the number of values that share a scale (None for one scale for all
    values); ``_base``, the number of values that a digit can have; and the methods ``_scales``,
    ``_digits`` and ``_values``. A message holds the digits of all whole pieces, their scales, the
    digits of what is left over, and its scales, or the one that all share.
    """

    bucket: int | None
    _base: int

    @property
    def unit(self) -> int | None:  # type: ignore[override]
        return self.bucket

    def __post_init__(self):
        check_fields(self)
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(
                f"bucket is {self.bucket}; it must be the number of values that share a scale, at least 1, "
                "or None for one scale for all values"
            )

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        m, dtype = values.shape[0], values.dtype
        count, piece = self._pieces(m)
        common = self._scales(values[None], m) if m and self.bucket is None else None

        def coded(begin: int | jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
            """The words of ``size`` values from a place on: their digits, and their own scales."""
            rows = in_buckets(lax.dynamic_slice(values, (begin,), (size,)), self.bucket)
            scales = self._scales(rows, size) if common is None else common
            # XLA:CPU draws one number at a time where it packs digits in the same loop.
            draws = _apart(uniform(key, size, begin).astype(dtype), begin)
            digits = self._digits(rows, scales[:, None], in_buckets(draws, self.bucket)).reshape(-1)[:size]
            return pack_digits(digits, self._base), Exact().encode(scales if common is None else scales[:0], key)

        rest = [*coded(count * piece, m - count * piece), *([] if common is None else [Exact().encode(common, key)])]

        def at_once() -> jax.Array:
            return jnp.concatenate([*coded(0, count * piece), *rest])

        def in_turn() -> jax.Array:
            def add(rows: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
                words, scales = coded(i * piece, piece)
                return _write_rows(rows, words, i), scales

            rows, scales = lax.scan(add, _rows(self.words(m, dtype), jnp.int32, values), jnp.arange(count))
            message = rows.reshape(-1)[: self.words(m, dtype)]
            follow = jnp.concatenate([scales.reshape(-1), *rest])
            return lax.dynamic_update_slice(message, follow, (message.shape[0] - follow.shape[0],))

        return lax.platform_dependent(cpu=in_turn, default=at_once) if count else jnp.concatenate(rest)

    def in_turn(self, m: int) -> bool:
        return m > FEW

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        def in_turn(message: jax.Array) -> jax.Array:
            zeros = varying_as(jnp.zeros(m, dtype), message)
            return self._decode_in_turn(zeros, unknown_zero(), message, m, m, lambda window, values, first: values)

        def at_once(message: jax.Array) -> jax.Array:
            return self._decode_at_once(message, m, dtype)

        return lax.platform_dependent(message, cpu=in_turn, default=at_once)

    def decode_into(
        self, vector: jax.Array, begin: jax.Array, message: jax.Array, m: int, size: int, combine: Combine
    ) -> jax.Array:
        def in_turn(vector: jax.Array) -> jax.Array:
            return self._decode_in_turn(vector, begin, message, m, size, combine)

        def at_once(vector: jax.Array) -> jax.Array:
            return _combined(vector, begin, self._decode_at_once(message, m, vector.dtype)[:size], 0, combine)

        return lax.platform_dependent(vector, cpu=in_turn, default=at_once)

    def _decode_in_turn(
        self, vector: jax.Array, begin: jax.Array, message: jax.Array, m: int, size: int, combine: Combine
    ) -> jax.Array:
        whole, read, rest = self._reader(message, m, vector.dtype, begin)
        piece = self._pieces(m)[1]

        def add(vector: jax.Array, first: int | jax.Array, values: jax.Array) -> jax.Array:
            return _combined(vector, begin, values, first, combine)

        count, left = divmod(min(size, whole), piece) if whole else (0, 0)
        # First what is not a whole piece. After the loop, whatever reads the vector would look at
        # each element whether it is one of these.
        if left:
            vector = add(vector, count * piece, read(count * piece, piece)[:left])
        if size > whole:
            vector = add(vector, whole, rest()[: size - whole])
        if not count:
            return vector
        return lax.fori_loop(0, count, lambda i, vector: add(vector, i * piece, read(i * piece, piece)), vector)

    def _decode_at_once(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        whole, read, rest = self._reader(message, m, dtype, 0)
        return jnp.concatenate([read(0, whole), rest()] if whole else [rest()])

    def _reader(
        self, message: jax.Array, m: int, dtype: DTypeLike, begin: int | jax.Array
    ) -> tuple[int, Callable[[int | jax.Array, int], jax.Array], Callable[[], jax.Array]]:
        """How a message is read.

        ``begin`` is where its values go. If that is not constant, they are stored before they are
        used.

        Returns:
          How many of its values are in whole pieces; a function that decodes one of these pieces
          or several, of the index of the first value and the number of values; and a function that
          decodes the values after them.
        """
        count, piece = self._pieces(m)
        whole = count * piece
        own = Exact().words(whole // self.bucket if self.bucket else 0, dtype)
        lengths = packed_words(whole, self._base), own, packed_words(m - whole, self._base)
        digits, *others = jnp.split(message[: self.words(m, dtype)], list(itertools.accumulate(lengths)))
        scales, last_digits, last_scales = others[0].view(dtype), others[1], others[2].view(dtype)

        def values(words: jax.Array, scales: jax.Array, size: int, place: int | jax.Array) -> jax.Array:
            rows = in_stretches(in_buckets(unpack_digits(words, size, self._base), self.bucket))
            return _apart(self._values(scales[:, None, None], rows, m), place).reshape(-1)[:size]

        def read(first: int | jax.Array, size: int) -> jax.Array:
            words, own = (_stretch(x, first, size, whole) for x in (digits, scales))
            return values(words, last_scales if self.bucket is None else own, size, begin + first)

        def rest() -> jax.Array:
            return values(last_digits, last_scales, m - whole, begin)

        return whole, read, rest

    def words(self, m: int, dtype: DTypeLike) -> int:
        return self._scale_words(m, dtype) + packed_words(m, self._base)

    def _scale_words(self, m: int, dtype: DTypeLike) -> int:
        return Exact().words(-(-m // bucket_length(m, self.bucket)), dtype)

    def _pieces(self, m: int) -> tuple[int, int]:
        """How many pieces ``m`` values have, and how long they are.

        On CPUs they are coded one after the other, each while it is in cache. They end where a
        bucket ends, and a block of digits. What is left over after them is coded by itself.
        """
        unit = math.lcm(self.bucket or 1, block_length(self._base))
        piece = PIECE // unit * unit
        return m // piece if piece else 0, piece

    def _scales(self, rows: jax.Array, m: int) -> jax.Array:
        """The scale of each bucket, shape ``(buckets,)``.

        Args:
          rows: the values, shape ``(buckets, bucket)``.
          m: the number of values; zeros that fill the last row come after them.
        """
        raise NotImplementedError

    def _digits(self, rows: jax.Array, scales: jax.Array, draws: jax.Array) -> jax.Array:
        """The digit of each value, a number of any type, in the shape of ``rows``.

        Args:
          rows: the values, shape ``(buckets, bucket)``.
          scales: shape ``(buckets, 1)``.
          draws: a random number from 0 to 1 for each value.
        """
        raise NotImplementedError

    def _values(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        """The values of digits, in the type of ``scales``.

        Args:
          scales: shape ``(buckets, 1, 1)``.
          digits: int32, shape ``(buckets, stretches, stretch)``.
          m: the number of values of the message.
        """
        raise NotImplementedError


def _rows(m: int, dtype: DTypeLike, like: jax.Array) -> jax.Array:
    """Room for ``m`` elements, in rows of one stretch, typed as varying as ``like`` does.

    XLA:CPU writes into rows many elements at a time, and into a vector one at a time.
    """
    return varying_as(jnp.zeros((-(-m // STRETCH), STRETCH), dtype), like)


def _write_rows(rows: jax.Array, piece: jax.Array, i: jax.Array) -> jax.Array:
    """Writes the i-th of equal pieces."""
    piece = piece.reshape(-1, STRETCH)
    return lax.dynamic_update_slice(rows, piece, (i * piece.shape[0], 0))


def in_turn_or_at_once(
    quantize: Quantizer,
    m: int,
    in_turn: Callable[..., jax.Array],
    at_once: Callable[..., jax.Array],
    *operands: jax.Array,
) -> jax.Array:
    """Codes messages of ``m`` values one after the other where that is best, else all at once."""
    if not quantize.in_turn(m):
        return at_once(*operands)
    return lax.platform_dependent(*operands, cpu=in_turn, default=at_once)


def unknown_zero() -> jax.Array:
    """A zero that XLA does not know to be constant, for places in a vector that is made here.

    In a vector that was given, such as the residual, ``zero_of`` is for that. It depends on the
    data; with a zero that does not, XLA:CPU copies the residual (measured with Ok-Topk).
    """
    return lax.optimization_barrier(jnp.int32(0))


def _stretch(x: jax.Array, first: int | jax.Array, size: int, whole: int) -> jax.Array:
    """What of ``x`` stands for ``size`` of ``whole`` values, from the value ``first`` on.

    Equally many elements of ``x`` stand for each piece of the values.
    """
    length = x.shape[0] * size // whole
    return lax.dynamic_slice(x, (first // size * length,), (length,))


def _apart(x: jax.Array, place: int | jax.Array) -> jax.Array:
    """``x``, stored before it is used. ``place`` is not negative, which XLA does not know.

    XLA:CPU otherwise puts the loops of what makes ``x`` and of what uses it together. Then it
    rounds a product and a sum once in place of twice, and may work on one element at a time.
    """
    return lax.cond(place < 0, jnp.zeros_like, lambda x: x, x)


def _combined(
    vector: jax.Array, begin: jax.Array, values: jax.Array, first: int | jax.Array, combine: Combine
) -> jax.Array:
    """Combines values with a window of a vector; the window of value 0 begins at ``begin``."""
    window = lax.dynamic_slice(vector, (begin + first,), values.shape)
    return lax.dynamic_update_slice(vector, combine(window, values, first), (begin + first,))


def row_maximum(rows: jax.Array) -> jax.Array:
    """The largest magnitude of each row, or NaN if an element of the row is not finite.

    The bits of magnitudes are integers in the same order, and those of infinities and NaNs come
    after all others. XLA:CPU finds the largest of integers faster than that of floats.
    """
    kind = jnp.finfo(rows.dtype)
    integer = jnp.dtype(f"int{kind.bits}")
    bits = jnp.abs(rows).view(integer)
    start = bits.shape[1] // PARTS * PARTS
    most, left = _folded(jnp.maximum, bits[:, :start]), bits[:, start:]
    most = jnp.maximum(jnp.max(most, axis=1, initial=0), jnp.max(left, axis=1, initial=0))
    largest = np.array(kind.max).view(integer)
    return jnp.where(most > largest, jnp.nan, most.view(rows.dtype))


def _folded(combine: Callable[[jax.Array, jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Cuts each row into ``PARTS`` parts, and combines these, element by element.

    XLA:CPU does so many elements at a time.
    """
    parts = rows.reshape(rows.shape[0], PARTS, rows.shape[1] // PARTS)
    return functools.reduce(combine, [parts[:, i] for i in range(PARTS)])


def total(rows: jax.Array) -> jax.Array:
    """The sum of each row.

    The order of the additions is fixed, so that it does not depend on how the rest of the program
    is compiled. Parts of each row are added first, where it divides into them, and then halves.
    """
    if rows.shape[1] % PARTS == 0:
        rows = _folded(jnp.add, rows)
    while rows.shape[1] > 1:
        half = -(-rows.shape[1] // 2)
        rows = rows[:, :half] + jnp.pad(rows[:, half:], ((0, 0), (0, rows.shape[1] % 2)))
    return rows[:, 0]


def share(rows: jax.Array, whole: jax.Array) -> jax.Array:
    """``|rows| / whole``, from 0 to 1, with one ``whole`` for each row: shape ``(rows, 1)``.

    In a row whose whole is 0, or too small to divide by, the results are 0, or below the smallest
    normal number.
    """
    # Divide both by 8 first: the reciprocal of the largest floats is below the smallest normal
    # number.
    whole = whole / 8
    return jnp.abs(rows / 8) / jnp.where(whole < jnp.finfo(whole.dtype).tiny, 1, whole)
