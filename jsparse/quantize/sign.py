"""The signs of values, with one scale for each bucket."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import Scaled, in_buckets, row_maximum, share, total


@dataclasses.dataclass(frozen=True)
class Sign(Scaled):
    """Replaces each value by its sign times the mean magnitude of the values in its bucket.

    It is biased, and needs error feedback to converge.

    Attributes:
      bucket: the number of values that share a scale; None for one scale for all values.
      zeros: whether zeros stay zeros. If true, zero is a third sign, a value takes 1.6 bits, and
        zeros do not count in the mean. If false, a value takes one bit, and zero counts as
        positive: parameters whose gradient is always zero then move to and fro.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
      ICML 2019, Algorithm 1 (EF-signSGD); Seide et al., 1-Bit Stochastic Gradient Descent,
      Interspeech 2014.
    """

    bucket: int | None = 512
    zeros: bool = True

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        rows, m = in_buckets(values, self.bucket), values.shape[0]
        most = row_maximum(rows)
        members = rows != 0 if self.zeros else in_buckets(jnp.ones_like(values), self.bucket)
        count = jnp.maximum(jnp.sum(members, axis=1, dtype=values.dtype), 1)
        # Sum the shares, so that no sum overflows.
        mean = most * (total(share(rows, most)) / count)
        scale = jnp.where(jnp.isfinite(most), mean, most)
        digits = jnp.sign(rows) + 1 if self.zeros else rows >= 0
        return self._pack(scale, jnp.where(jnp.isfinite(rows), digits, 0), m)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        scale, digits = self._unpack(message, m, dtype)
        signs = digits - 1 if self.zeros else 2 * digits - 1
        return (scale * signs.astype(dtype)).reshape(-1)[:m]

    @property
    def _base(self) -> int:
        return 3 if self.zeros else 2
