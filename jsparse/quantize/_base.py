"""The protocol of quantizers, and the functions that they share."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.arguments import check_fields

WORD = 32


@runtime_checkable
class Quantizer(Protocol):
    """Encodes values in fewer bits than they have: a frozen dataclass of hyperparameters.

    A message consists of int32 words, so that no backend widens it on the way. Zeros stay zeros,
    unless a class says otherwise. If a value is not finite, its whole bucket is not finite after
    decoding; with an elementwise quantizer, only the value itself.

    Attributes:
      lossless: whether ``decode`` returns the encoded values bit for bit.
      elementwise: whether a value that was rounded once does not change when it is rounded again,
        whatever the other values of the message are.
      unbiased: whether the expectation of the decoded values is the encoded values.
    """

    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Encodes values as a message of int32 words.

        Args:
          values: float32 or float64, shape ``(m,)``.
          key: a random key, for quantizers that draw random numbers.
        """
        ...

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        """Decodes the ``m`` values of a message, in the type ``dtype``."""
        ...

    def words(self, m: int, dtype: DTypeLike) -> int:
        """The length in words of a message of ``m`` values of ``dtype``.

        ``decode`` reads only this many words of a longer message.
        """
        ...


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

    The digits are cut into segments of equal length, as many as a word has places for digits.
    Word j holds the j-th digit of each segment. So whole segments are added as vectors. If a word
    held neighbouring digits, they would be added one by one.
    """
    words = packed_words(digits.shape[0], base)
    digits = jnp.pad(digits.astype(jnp.uint32), (0, words * digits_in_word(base) - digits.shape[0]))
    stretches = digits.reshape(digits_in_word(base), words)
    total = stretches[0]
    for i in range(1, stretches.shape[0]):
        total = total + stretches[i] * jnp.uint32(base**i)
    return total.view(jnp.int32)


def unpack_digits(words: jax.Array, m: int, base: int) -> jax.Array:
    """Unpacks the ``m`` digits of words that :func:`pack_digits` made: int32, shape ``(m,)``."""
    rest, stretches = words[: packed_words(m, base)].view(jnp.uint32), []
    for _ in range(digits_in_word(base)):
        stretches.append((rest % base).astype(jnp.int32))
        rest = rest // base
    return jnp.concatenate(stretches)[:m]


def in_buckets(values: jax.Array, bucket: int | None) -> jax.Array:
    """The values in one row for each bucket, shape ``(buckets, bucket)``.

    The last row is padded with zeros.
    """
    bucket = bucket_length(values.shape[0], bucket)
    return jnp.pad(values, (0, -values.shape[0] % bucket)).reshape(-1, bucket)


def bucket_length(m: int, bucket: int | None) -> int:
    """The length of a bucket: ``bucket``, or if that is None, all ``m`` values; at least 1."""
    return max(m, 1) if bucket is None else bucket


def check_quantizer(name: str, quantize: Any) -> None:
    """Refuses what is no quantizer, such as a class of quantizers."""
    if not isinstance(quantize, Quantizer) or isinstance(quantize, type):
        raise ValueError(f"{name} is {quantize!r}; it must be a quantizer, such as quantize.Block8()")


class Scaled(Quantizer):
    """A quantizer whose message has a scale for each bucket, and a digit for each value.

    A subclass has ``bucket``, the number of values that share a scale (None for one scale for all
    values), and ``_base``, the number of values that a digit can have.
    """

    bucket: int | None
    _base: int

    def __post_init__(self):
        check_fields(self)
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(
                f"bucket is {self.bucket}; it must be the number of values that share a scale, at least 1, "
                "or None for one scale for all values"
            )

    def words(self, m: int, dtype: DTypeLike) -> int:
        return self._scale_words(m, dtype) + packed_words(m, self._base)

    def _pack(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        """Packs ``m`` values into words.

        Args:
          scales: shape ``(buckets,)``.
          digits: shape ``(buckets, bucket)``.
          m: the number of values.
        """
        return jnp.concatenate([scales.view(jnp.int32), pack_digits(digits.reshape(-1)[:m], self._base)])

    def _unpack(self, message: jax.Array, m: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Unpacks ``(scales, digits)``, of shapes ``(buckets, 1)`` and ``(buckets, bucket)``."""
        head = self._scale_words(m, dtype)
        digits = unpack_digits(message[head:], m, self._base)
        return message[:head].view(dtype)[:, None], in_buckets(digits, self.bucket)

    def _scale_words(self, m: int, dtype: DTypeLike) -> int:
        return Exact().words(-(-m // bucket_length(m, self.bucket)), dtype)


def row_maximum(rows: jax.Array) -> jax.Array:
    """The largest magnitude of each row, or NaN if an element of the row is not finite.

    A maximum by itself can miss a NaN.
    """
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=1), jnp.max(jnp.abs(rows), axis=1), jnp.nan)


def total(rows: jax.Array) -> jax.Array:
    """The sum of each row, computed by adding halves.

    The order of the additions is fixed, so that it does not depend on how the rest of the program
    is compiled.
    """
    while rows.shape[1] > 1:
        half = -(-rows.shape[1] // 2)
        rows = rows[:, :half] + jnp.pad(rows[:, half:], ((0, 0), (0, rows.shape[1] % 2)))
    return rows[:, 0]


def share(rows: jax.Array, whole: jax.Array) -> jax.Array:
    """``|rows| / whole``, from 0 to 1, with one ``whole`` for each row.

    In a row whose whole is 0, or too small to divide by, the results are 0, or below the smallest
    normal number.
    """
    # Divide both by 8 first: the reciprocal of the largest floats is below the smallest normal
    # number.
    whole = whole / 8
    return jnp.abs(rows / 8) / jnp.where(whole < jnp.finfo(whole.dtype).tiny, 1, whole)[:, None]
