"""The k largest of each block in plain JAX: sorts each block."""

import jax
import jax.numpy as jnp
from jax import lax

from .. import bitmap
from ..select_above.xla import take


def select_block_top_k(
    x: jax.Array, quota: jax.Array, *, block: int, most: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    magnitudes = jnp.where(jnp.isnan(x), 0, jnp.abs(x))
    largest, places = lax.top_k(in_rows(magnitudes, block, -1), min(most, block))
    places += block * lax.iota(jnp.int32, places.shape[0])[:, None]
    taken = (lax.broadcasted_iota(jnp.int32, places.shape, 1) < quota[:, None]) & (largest >= jnp.finfo(x.dtype).tiny)
    places = jnp.where(taken, places, 2**31 - 1)
    words = bitmap.mark(jnp.zeros(-(-x.shape[0] // bitmap.WORD), jnp.uint32), places.reshape(-1))
    return take(x, words, capacity)


def in_rows(x: jax.Array, block: int, fill: float) -> jax.Array:
    """The vector with a row for each block; ``fill`` is past its end."""
    return jnp.pad(x, (0, -x.shape[0] % block), constant_values=fill).reshape(-1, block)
