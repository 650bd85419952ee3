"""QSGD and TernGrad: unbiased stochastic rounding to levels."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from ._base import Scaled, bucket_length, row_maximum, share, total

MOST_LEVELS = 2**15 - 1  # Two digits fill a word.


@dataclasses.dataclass(frozen=True)
class QSGD(Scaled):
    """Rounds each value at random to one of the two levels next to it, without bias.

    The expectation of the rounded value is the value. A value v in a bucket with scale s becomes
    ``sign(v) s l / levels``. Here ``l`` is one of the two whole numbers next to
    ``levels |v| / s``; the nearer one is the more probable. In sparse messages, the random
    numbers depend on the seed, the step and the values of the message, so equal messages are
    rounded alike. In dense messages, they depend on the seed, the step and the worker.

    Attributes:
      levels: the number of steps from zero to the scale, s in the paper, from 1 to 32,767. A value
        takes ``32 / d`` bits, where d digits to the base ``2 levels + 1`` fit into 32 bits: 3.2
        bits with 4 levels, 16 with 1,000.
      bucket: the number of values that share a scale; None for one scale for all values, as in
        TernGrad.
      scale: the scale of a bucket. ``"norm"`` is its Euclidean norm, as in the paper. ``"max"``
        is its largest magnitude, which gives smaller rounding errors.
      contract: whether to divide the decoded values by 1 + ω, where ω is the bound of the
        relative variance (Lemma 3.1). The result is then biased, but its mean square error is
        smaller. Error feedback needs this: without it, the residual grows without bound.
      seed: the seed of the random numbers.

    References:
      Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
      NIPS 2017, section 3.1 and 4; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
      Remark 7 (the division).
    """

    levels: int = 4
    bucket: int | None = 512
    scale: Literal["norm", "max"] = "norm"
    contract: bool = False
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.levels <= MOST_LEVELS:
            raise ValueError(
                f"levels is {self.levels}; it must be the number of steps from zero to the scale, "
                f"from 1 to {MOST_LEVELS}"
            )
        if self.scale not in ("norm", "max"):
            raise ValueError(f'scale is {self.scale!r}; it must be "norm" or "max"')

    @property
    def unbiased(self) -> bool:
        return not self.contract

    def _scales(self, rows: jax.Array, m: int) -> jax.Array:
        scale = row_maximum(rows)
        if self.scale == "max":
            return scale
        # Square the shares, so that no square overflows. The norm must not overflow either.
        norm = scale * jnp.sqrt(total(share(rows, scale[:, None]) ** 2))
        return jnp.where(jnp.isfinite(scale), jnp.minimum(norm, jnp.finfo(rows.dtype).max), scale)

    def _digits(self, rows: jax.Array, scales: jax.Array, draws: jax.Array) -> jax.Array:
        exact = self.levels * share(rows, scales)
        below = jnp.floor(exact)
        # A draw may be 1. A value that is a level stays there all the same, so zeros stay zeros.
        level = jnp.minimum(below + (draws > 1 - (exact - below)), self.levels)
        signed = jnp.where(rows < 0, -level, level)
        return jnp.where(jnp.isfinite(signed), signed, 0) + self.levels

    def _values(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        part = (digits - self.levels).astype(scales.dtype) / self.levels
        if self.contract:
            part = part / (1 + variance_factor(bucket_length(m, self.bucket), self.levels))
        return scales * part

    @property
    def _base(self) -> int:
        return 2 * self.levels + 1


@dataclasses.dataclass(frozen=True)
class TernGrad(QSGD):
    """Rounds each value at random to zero or plus or minus the largest magnitude, without bias.

    A value takes 1.6 bits. It is :class:`QSGD` with one level, and with the largest magnitude as
    scale. The paper has one scale for each layer: for that, pass ``scope="leaf"`` to the preset.

    Attributes:
      bucket, contract, seed: as in :class:`QSGD`; by default one scale for all values.

    References:
      Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
      Learning, NIPS 2017, equation 3.
    """

    levels: int = dataclasses.field(default=1, init=False)
    bucket: int | None = None
    scale: Literal["norm", "max"] = dataclasses.field(default="max", init=False)


def variance_factor(m: int, levels: int) -> float:
    """ω, the bound of the variance of stochastic rounding to levels (QSGD, Lemma 3.1).

    The variance is at most ω times the square of the vector's norm.
    """
    return min(m / levels**2, math.sqrt(m) / levels)
