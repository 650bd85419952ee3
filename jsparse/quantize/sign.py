"""The signs of values, with one scale for each bucket."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from ._base import Scaled, row_maximum, share, total


@dataclasses.dataclass(frozen=True)
class Sign(Scaled):
    """Replaces each value by its sign times one magnitude for all values in its bucket.

    It is biased, and needs error feedback to converge.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.
      zeros: whether zeros stay zeros. If true, zero is a third sign, a value takes 1.6 bits, and
        zeros do not count in the mean. If false, a value takes one bit, and zero counts as
        positive: parameters whose gradient is always zero then move to and fro.
      norm: the magnitude is the mean of the bucket's magnitudes (``"mean"``), which is nearest to
        the values; the root of the mean of their squares (``"rms"``), as in 1-bit Adam; or 1
        (``"one"``): each worker then has a vote, as in DisTrO, however large its values are. Take
        ``ErrorFeedback(subtract="sent")`` with it: by default 1 would be taken off the residual in
        place of the value.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
      ICML 2019, Algorithm 1 (EF-signSGD); Seide et al., 1-Bit Stochastic Gradient Descent,
      Interspeech 2014; Tang et al., 1-bit Adam, ICML 2021.
    """

    bucket: int | None = 512
    zeros: bool = True
    norm: Literal["mean", "rms", "one"] = "mean"

    def __post_init__(self):
        super().__post_init__()
        if self.norm not in ("mean", "rms", "one"):
            raise ValueError(f'norm is {self.norm!r}; choose "mean", "rms" or "one"')

    def _scales(self, rows: jax.Array, m: int) -> jax.Array:
        most = row_maximum(rows)
        if self.norm == "one":
            return jnp.where(jnp.isfinite(most), jnp.ones_like(most), most)
        if self.zeros:
            count = jnp.maximum(total((rows != 0).astype(rows.dtype)), 1)
        else:
            bucket = rows.shape[1]
            count = jnp.clip(m - bucket * jnp.arange(rows.shape[0]), 1, bucket).astype(rows.dtype)
        # Sum the shares, so that no sum overflows.
        shares = share(rows, most[:, None])
        rms = self.norm == "rms"
        mean = most * (jnp.sqrt(total(shares**2) / count) if rms else total(shares) / count)
        return jnp.where(jnp.isfinite(most), mean, most)

    def _digits(self, rows: jax.Array, scales: jax.Array, draws: jax.Array) -> jax.Array:
        digits = jnp.sign(rows) + 1 if self.zeros else rows >= 0
        return jnp.where(jnp.isfinite(rows), digits, 0)

    def _values(self, scales: jax.Array, digits: jax.Array, m: int) -> jax.Array:
        signs = digits - 1 if self.zeros else 2 * digits - 1
        return scales * signs.astype(scales.dtype)

    @property
    def _base(self) -> int:
        return 3 if self.zeros else 2
