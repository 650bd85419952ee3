"""The protocol of quantizers, and the functions that they share."""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

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

    @property
    def lossless(self) -> bool:
        return False

    @property
    def elementwise(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

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

    @property
    def lossless(self) -> bool:
        return True

    @property
    def elementwise(self) -> bool:
        return True

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(values, jnp.int32).reshape(-1)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        width = jnp.dtype(dtype).itemsize // 4
        message = message[: width * m]
        return lax.bitcast_convert_type(message.reshape(m, width) if width > 1 else message, dtype)

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
    stretches = digits.reshape(-1, words)
    total = stretches[0]
    for i in range(1, stretches.shape[0]):
        total = total + stretches[i] * jnp.uint32(base**i)
    return lax.bitcast_convert_type(total, jnp.int32)


def unpack_digits(words: jax.Array, m: int, base: int) -> jax.Array:
    """Unpacks the ``m`` digits of words that :func:`pack_digits` made: int32, shape ``(m,)``."""
    rest, stretches = lax.bitcast_convert_type(words[: packed_words(m, base)], jnp.uint32), []
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


def buckets(m: int, bucket: int | None) -> int:
    return -(-m // bucket_length(m, bucket))


def check_quantizer(name: str, quantize: Any) -> None:
    """Refuses what is no quantizer, such as a class of quantizers."""
    if not isinstance(quantize, Quantizer) or isinstance(quantize, type):
        raise ValueError(f"{name} is {quantize!r}; it must be a quantizer, such as quantize.Block8()")


def check_bucket(bucket: int | None) -> None:
    if bucket is not None and bucket < 1:
        raise ValueError(
            f"bucket is {bucket}; it must be the number of values that share a scale, at least 1, "
            "or None for one scale for all values"
        )


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The message of most quantizers: a scale for each bucket, and a digit for each value.

    Attributes:
      base: the number of values that a digit can have.
      bucket: the number of values that share a scale; None for one scale for all values.
    """

    base: int
    bucket: int | None

    def encode(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        """Encodes ``m`` values as words.

        Args:
          scales: shape ``(buckets,)``.
          digits: shape ``(buckets, bucket)``.
          m: the number of values.
        """
        head = lax.bitcast_convert_type(scales, jnp.int32).reshape(-1)
        return jnp.concatenate([head, pack_digits(digits.reshape(-1)[:m], self.base)])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Decodes ``(scales, digits)``, of shapes ``(buckets, 1)`` and ``(buckets, bucket)``."""
        count = buckets(m, self.bucket)
        head = count * jnp.dtype(dtype).itemsize // 4
        scales = Exact().decode(message[:head], count, dtype)
        return scales[:, None], in_buckets(unpack_digits(message[head:], m, self.base), self.bucket)

    def words(self, m: int, dtype: DTypeLike) -> int:
        return buckets(m, self.bucket) * jnp.dtype(dtype).itemsize // 4 + packed_words(m, self.base)


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


def check_levels(levels: int, most: int = 2**15) -> None:
    if not 1 <= levels <= most:
        raise ValueError(f"levels is {levels}; it must be the number of steps from zero to the scale, from 1 to {most}")


def variance_factor(m: int, levels: int) -> float:
    """ω, the bound of the variance of stochastic rounding to levels (QSGD, Lemma 3.1).

    The variance is at most ω times the square of the vector's norm.
    """
    return min(m / levels**2, math.sqrt(m) / levels)
