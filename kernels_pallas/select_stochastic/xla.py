"""Random selection in plain JAX: a bitmap of what is drawn, and the first of each block."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import bitmap, hashing
from ..select_above.xla import reaches, take
from ..select_block_top_k.xla import in_rows


def select_stochastic(
    x: jax.Array, quota: jax.Array, words: jax.Array, *, block: int, most: int, capacity: int, exact: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    n, rows, quota = x.shape[0], in_rows(x, block, 0), quota[:, None]
    length = np.minimum(block, n - block * np.arange(rows.shape[0], dtype=np.int32))[:, None]
    largest, total = norms_of_rows(rows)
    numbers = hashing.uniform(lax.iota(jnp.uint32, rows.size), words[0], words[1]).reshape(rows.shape)
    hits = drawn(rows, numbers, quota, length, largest, total, exact) | (quota >= length)
    members = bitmap.pack((hits & reaches(rows, 0)).reshape(-1))
    of_blocks = members.reshape(rows.shape[0], -1)
    first = jax.vmap(bitmap.take_first)(of_blocks, jnp.minimum(quota[:, 0], most)).reshape(-1)
    values, indices, _ = take(x, first[: -(-n // bitmap.WORD)], capacity)
    return values, indices, bitmap.count(members)


def norms_of_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude of each row, and the sum of the magnitudes divided by it.

    NaN counts as 0. The sum adds the halves of a row to each other, then the halves of that, and
    so on. So it has the same bits in every form.

    Args:
      rows: shape ``(rows, block)``.

    Returns:
      Two arrays of shape ``(rows, 1)``. In a row of zeros both are 0. In a row with an infinity
      the sum is NaN.
    """
    largest = jnp.max(jnp.where(jnp.isnan(rows), 0, jnp.abs(rows)), axis=1, keepdims=True)
    # With these powers of two the sum does not overflow, and the reciprocal of the divisor is not
    # flushed to zero. The sum makes magnitudes anew: XLA would keep those of the maximum, an array
    # as long as x.
    scale = jnp.where(largest > 1, 2.0**-64, 2.0**63).astype(rows.dtype)
    sums = jnp.where(jnp.isnan(rows), 0, jnp.abs(rows * scale))
    while (width := sums.shape[1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        left, right = lax.split(sums, (half, width - half), axis=1)
        sums = left + (jnp.pad(right, ((0, 0), (0, 2 * half - width))) if width < 2 * half else right)
    return largest, sums / jnp.where(largest > 0, largest * scale, 1)


def drawn(
    x: jax.Array,
    numbers: jax.Array,
    k: int | jax.Array,
    n: int | np.ndarray | jax.Array,
    largest: jax.Array,
    total: jax.Array,
    exact: bool,
) -> jax.Array:
    """Whether each element is drawn: its number is below its probability.

    The probability of an element v is ``k |v| / ‖v‖₁``, if that is at most 1 for all elements.
    Otherwise it is cut to 1; or if ``exact``, it is ``k (|v| + ε) / (‖v‖₁ + n ε)``, with the
    smallest ε for which it is at most 1 for all elements. With ``total = ‖v‖₁ / ‖v‖∞`` that is
    ``((n - k) |v| / ‖v‖∞ + k - total) / (n - total)``.

    Args:
      x: the elements.
      numbers: random numbers from 0 to 1, float32, in the shape of ``x``.
      k: the number of elements to draw, less than ``n``.
      n: the number of elements.
      largest, total: the norms of the ``n`` elements, as from :func:`kernels_pallas.norms`.
      exact: whether the expected number of drawn elements is k in every case.
    """
    raised = (total < k) if exact else jnp.zeros_like(total, bool)
    # The total is 0, at least 1, or NaN: then nothing is drawn.
    divisor = jnp.where(raised, n - total, jnp.where(total < 1, 1, total))
    share = jnp.where(raised, n - k, k).astype(x.dtype) / divisor
    least = jnp.where(raised, k - total, 0) / divisor
    # The reciprocal of the largest magnitude can be too small for a float, so both sides are
    # scaled by a power of two first. These powers differ from those in `norms`: a product that
    # both had in common XLA would store, an array as long as x.
    scale = jnp.where(largest > 1, 2.0**-60, 2.0**60).astype(x.dtype)
    factor = share / jnp.where(largest > 0, largest * scale, 1)
    # The probability is `least + part`. No product is added to anything: one form of an operation
    # could round it first, and another not.
    part = jnp.abs(x * scale) * factor
    limit = jnp.where(raised, largest * scale * factor, 1)
    return (numbers - least < part) | (part >= limit)
