"""QSGD and TernGrad: stochastic rounding to levels, right in expectation."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.random import uniform
from ._base import (
    Quantizer,
    Scaled,
    bucket_length,
    check_bucket,
    check_levels,
    in_buckets,
    row_maximum,
    share,
    total,
    variance_factor,
)


@dataclasses.dataclass(frozen=True)
class QSGD(Quantizer):
    """Rounds each value at random to one of two neighbouring levels, so that its expectation is the value.

    A value v of a bucket with scale s becomes ``sign(v) s l / levels``, with ``l`` one of the whole numbers next to
    ``levels |v| / s``, the nearer the likelier. The messages of one step draw from one seed, the step and their own
    values: equal messages are rounded alike.

    Attributes:
      levels: s of the paper, steps from zero to the scale; a value takes ``log2(2 levels + 1)`` bits, and a bit.
      bucket: values with one scale; None gives all of them one, as TernGrad does.
      scale: the bucket's Euclidean norm (``"norm"``, the paper's), or its largest magnitude (``"max"``), which rounds
        less.
      contract: whether to divide what is decoded by 1 + ω, ω the bound of the relative variance (Lemma 3.1). No longer
        right in expectation, it is nearer in the mean square, and what error feedback needs: without, the residual
        grows without bound.
      seed: of the random numbers.

    References:
      Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS 2017, section 3.1
      and 4; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, Remark 7 (the division).
    """

    levels: int = 4
    bucket: int | None = 512
    scale: Literal["norm", "max"] = "norm"
    contract: bool = False
    seed: int = 0

    def __post_init__(self):
        check_levels(self.levels)
        check_bucket(self.bucket)
        if self.scale not in ("norm", "max"):
            raise ValueError(f'scale is {self.scale!r}; choose "norm" or "max"')

    @property
    def unbiased(self) -> bool:
        return not self.contract

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        rows = in_buckets(values, self.bucket)
        scale = row_maximum(rows)
        if self.scale == "norm":
            # Of shares, so that no square overflows; nor must the norm.
            norm = scale * jnp.sqrt(total(share(rows, scale) ** 2))
            scale = jnp.where(jnp.isfinite(scale), jnp.minimum(norm, jnp.finfo(values.dtype).max), scale)
        exact = self.levels * share(rows, scale)
        draw = uniform(key, rows.size).reshape(rows.shape).astype(values.dtype)
        level = jnp.minimum(jnp.floor(exact + draw), self.levels)
        signed = jnp.where(rows < 0, -level, level)
        return self._layout.encode(scale, jnp.where(jnp.isfinite(signed), signed, 0) + self.levels, values.shape[0])

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        scale, digits = self._layout.decode(message, m, dtype)
        part = (digits - self.levels).astype(dtype) / self.levels
        if self.contract:
            part = part / (1 + variance_factor(bucket_length(m, self.bucket), self.levels))
        return (scale * part).reshape(-1)[:m]

    def words(self, m: int, dtype: DTypeLike) -> int:
        return self._layout.words(m, dtype)

    @property
    def _layout(self) -> Scaled:
        return Scaled(2 * self.levels + 1, self.bucket)


@dataclasses.dataclass(frozen=True)
class TernGrad(QSGD):
    """Each value becomes plus or minus the largest magnitude, or zero, right in expectation: 1.6 bits a value.

    It is :class:`QSGD` with one level and that scale. The paper has one scale for each layer: ``scope="leaf"``.

    References:
      Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NIPS 2017,
      equation 3.
    """

    levels: int = dataclasses.field(default=1, init=False)
    bucket: int | None = None
    scale: Literal["norm", "max"] = dataclasses.field(default="max", init=False)
