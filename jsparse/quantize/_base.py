"""What quantizers have in common."""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

WORD = 32


class Quantizer(Protocol):
    """Lays values out in fewer bits than they have: a frozen dataclass of hyperparameters.

    A message is int32 words, so that no backend widens it on its way. Zeros stay zeros, but where a class says
    otherwise; a value that is not finite makes its whole bucket not finite (an elementwise one: itself).

    Attributes:
      lossless: whether ``decode`` gives back what ``encode`` was given, to the bit.
      elementwise: whether a value that was rounded once stays as it is when it is rounded again, whatever stands
        beside it.
      unbiased: whether the expectation of what is decoded is what was encoded.
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
        """Values of shape ``(m,)``, float32 or float64, as int32 words; ``key`` is for what is drawn at random."""
        ...

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        """The ``m`` values of a message, of ``dtype``."""
        ...

    def words(self, m: int, dtype: DTypeLike) -> int:
        """The length of a message of ``m`` values of ``dtype``; what is beyond ``m`` in a longer one is not read."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact(Quantizer):
    """Values as they are: 4 bytes each for float32, 8 for float64."""

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
    """How many digits of a base fit into 32 bits: 32 of base 2, 20 of base 3, 10 of base 9.

    >>> [digits_in_word(base) for base in (2, 3, 9, 15, 16, 255, 65536)]
    [32, 20, 10, 8, 8, 4, 2]
    """
    return next(count for count in range(WORD, 0, -1) if base**count <= 2**WORD)


def packed_words(m: int, base: int) -> int:
    """How many words ``m`` digits take."""
    return -(-m // digits_in_word(base))


def pack_digits(digits: jax.Array, base: int) -> jax.Array:
    """Packs digits, shape ``(m,)``, integers from 0 to ``base - 1``, into int32 words.

    The first word holds the first digit of each of as many equal stretches as it has places, and so on: stretches are
    added up as vectors, where neighbouring digits would be one by one.
    """
    words = packed_words(digits.shape[0], base)
    digits = jnp.pad(digits.astype(jnp.uint32), (0, words * digits_in_word(base) - digits.shape[0]))
    stretches = digits.reshape(-1, words)
    total = stretches[0]
    for i in range(1, stretches.shape[0]):
        total = total + stretches[i] * jnp.uint32(base**i)
    return lax.bitcast_convert_type(total, jnp.int32)


def unpack_digits(words: jax.Array, m: int, base: int) -> jax.Array:
    """The ``m`` digits of words that :func:`pack_digits` made: int32."""
    rest, stretches = lax.bitcast_convert_type(words[: packed_words(m, base)], jnp.uint32), []
    for _ in range(digits_in_word(base)):
        stretches.append((rest % base).astype(jnp.int32))
        rest = rest // base
    return jnp.concatenate(stretches)[:m]


def in_buckets(values: jax.Array, bucket: int | None) -> jax.Array:
    """The values in rows of a bucket each, the last padded with zeros: shape ``(buckets, bucket)``."""
    bucket = bucket_length(values.shape[0], bucket)
    return jnp.pad(values, (0, -values.shape[0] % bucket)).reshape(-1, bucket)


def bucket_length(m: int, bucket: int | None) -> int:
    """The length of a bucket: ``bucket``, or all ``m`` values where it is None."""
    return max(m, 1) if bucket is None else bucket


def buckets(m: int, bucket: int | None) -> int:
    return -(-m // bucket_length(m, bucket))


def check_bucket(bucket: int | None) -> None:
    if bucket is not None and bucket < 1:
        raise ValueError(f"bucket is {bucket}; it is a number of values with one scale, at least 1, or None for all")


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Digits with one scale for each bucket of values: what most quantizers send.

    Attributes:
      base: how many values a digit has.
      bucket: values with one scale; None gives all of them one.
    """

    base: int
    bucket: int | None

    def encode(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        """Scales of shape ``(buckets,)`` and digits ``(buckets, bucket)``, of ``m`` values, as words."""
        head = lax.bitcast_convert_type(scales, jnp.int32).reshape(-1)
        return jnp.concatenate([head, pack_digits(digits.reshape(-1)[:m], self.base)])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """``(scales, digits)`` of a message, shapes ``(buckets, 1)`` and ``(buckets, bucket)``."""
        count = buckets(m, self.bucket)
        head = count * jnp.dtype(dtype).itemsize // 4
        scales = Exact().decode(message[:head], count, dtype)
        return scales[:, None], in_buckets(unpack_digits(message[head:], m, self.base), self.bucket)

    def words(self, m: int, dtype: DTypeLike) -> int:
        return buckets(m, self.bucket) * jnp.dtype(dtype).itemsize // 4 + packed_words(m, self.base)


def row_maximum(rows: jax.Array) -> jax.Array:
    """The largest magnitude of each row; NaN where one is not finite, which a maximum by itself may pass over."""
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=1), jnp.max(jnp.abs(rows), axis=1), jnp.nan)


def total(rows: jax.Array) -> jax.Array:
    """The sum of each row, by halves: in an order that does not depend on what the compiler makes of the rest."""
    while rows.shape[1] > 1:
        half = -(-rows.shape[1] // 2)
        rows = rows[:, :half] + jnp.pad(rows[:, half:], ((0, 0), (0, rows.shape[1] % 2)))
    return rows[:, 0]


def share(rows: jax.Array, whole: jax.Array) -> jax.Array:
    """``|rows| / whole``, from 0 to 1; 0 in a row whose whole is 0, or too small to divide by."""
    # Eighths: the reciprocal of the largest floats is too small to be one.
    whole = whole / 8
    return jnp.abs(rows / 8) / jnp.where(whole < jnp.finfo(whole.dtype).tiny, 1, whole)[:, None]


def check_levels(levels: int, most: int = 2**15) -> None:
    if not 1 <= levels <= most:
        raise ValueError(f"levels is {levels}; it is the number of steps from zero to the scale, from 1 to {most}")


def variance_factor(m: int, levels: int) -> float:
    """ω: the variance of stochastic rounding to levels, at most ω times the vector's square (QSGD, Lemma 3.1)."""
    return min(m / levels**2, math.sqrt(m) / levels)
