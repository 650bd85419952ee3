"""A random rotation before any other quantizer."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._vector.arguments import check_fields
from ._base import Quantizer, check_quantizer
from .codebook import Codebook


@dataclasses.dataclass(frozen=True)
class Rotated(Quantizer):
    """Rotates blocks of values at random, and quantizes the result by another quantizer.

    A block is multiplied by random signs and by a Hadamard matrix: an orthogonal product, of which
    each value depends on all values of the block. So a few large values are spread over the whole
    block, and a quantizer with one scale for many values rounds less. The signs come from ``seed``
    and are always the same, so they are not sent.

    Zeros do not stay zeros: rounding errors are spread over a block, so an element whose gradient
    is always zero moves a little. Nothing is gained where values are alike in size, as those of a
    top-k are. Magnitudes are clipped so that rotated ones are finite, with blocks of 1024 to 5e36.

    Attributes:
      quantize: the quantizer of the rotated values, such as ``quantize.Int4()``.
      block: the number of values in a block, a power of two, at least 2; fewer values are padded
        with zeros to a shorter block.
      seed: of the signs, at least 0.

    References:
      Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017 (random
      rotation); Jia et al., SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data
      Parallelism for LLM Training, NeurIPS 2024 (Hadamard before 4 bits).
    """

    quantize: Quantizer
    block: int = 1024
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        check_quantizer("quantize", self.quantize)
        if isinstance(self.quantize, Codebook):
            raise ValueError(
                f"quantize is {self.quantize}, whose magnitudes are for values that are not zero: rotated ones may be; "
                "use quantize.Int4() or quantize.Float4()"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.block < 2 or self.block & (self.block - 1):
            raise ValueError(f"block is {self.block}; it must be a power of two, at least 2, such as 1024")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.quantize.unbiased

    @property
    def unit(self) -> int | None:  # type: ignore[override]
        return self.quantize.unit and math.lcm(self.block, self.quantize.unit)

    def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
        whole, left = self._cut(values.shape[0])
        # A rotated value is at most the root of the block's length times the largest.
        most = jnp.finfo(values.dtype).max / (2 * math.sqrt(self.block))
        values = jnp.where(jnp.isfinite(values), jnp.clip(values, -most, most), values)
        parts = [values[: whole * self.block].reshape(whole, self.block), values[whole * self.block :]]
        parts[1] = jnp.pad(parts[1], (0, left - parts[1].shape[0]))[None]
        rotated = [_turned(part * self._signs(part)).reshape(-1) for part in parts]
        key = jax.random.fold_in(key, getattr(self.quantize, "seed", 0))
        return self.quantize.encode(jnp.concatenate(rotated), key)

    def decode(self, message: jax.Array, m: int, dtype: DTypeLike) -> jax.Array:
        whole, left = self._cut(m)
        values = self.quantize.decode(message, whole * self.block + left, dtype)
        parts = [values[: whole * self.block].reshape(whole, self.block), values[None, whole * self.block :]]
        turned = [(_turned(part, back=True) * self._signs(part)).reshape(-1) for part in parts]
        return jnp.concatenate(turned)[:m]

    def in_turn(self, m: int) -> bool:
        return self.quantize.in_turn(m)

    def words(self, m: int, dtype: DTypeLike) -> int:
        whole, left = self._cut(m)
        return self.quantize.words(whole * self.block + left, dtype)

    def _cut(self, m: int) -> tuple[int, int]:
        """How many whole blocks ``m`` values have, and how long the shorter one after them is."""
        whole, left = divmod(m, self.block)
        return whole, 1 << (left - 1).bit_length() if left else 0

    def _signs(self, rows: jax.Array) -> jax.Array:
        """The sign of each place in a block, in one row."""
        signs = np.random.default_rng(self.seed).integers(0, 2, self.block) * 2 - 1
        return jnp.asarray(signs[None, : rows.shape[1]], rows.dtype)


def _turned(rows: jax.Array, *, back: bool = False) -> jax.Array:
    """Each row times an orthonormal Hadamard matrix; or back.

    A row is seen as a matrix, which is multiplied by smaller Hadamard matrices from both sides:
    their Kronecker product is the large one. The result stands column by column, so that both
    products are of a matrix with few columns: the fastest on CPUs.
    """
    length = rows.shape[1]
    if not rows.size:
        return rows
    high = 1 << (length.bit_length() - 1) // 2
    sides = (length // high, high) if back else (high, length // high)
    first, second = (jnp.asarray(_hadamard(side), rows.dtype) for side in reversed(sides))
    blocks = jnp.dot(rows.reshape(-1, sides[1]), first, precision=lax.Precision.HIGHEST)
    blocks = blocks.reshape(-1, *sides).swapaxes(1, 2)
    return jnp.dot(blocks.reshape(-1, sides[0]), second, precision=lax.Precision.HIGHEST).reshape(rows.shape)


def _hadamard(side: int) -> np.ndarray:
    """The orthonormal Hadamard matrix of Sylvester's form; ``side`` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < side:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(side)
