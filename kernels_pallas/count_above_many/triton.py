"""Counts at many thresholds on a GPU: the kernel of the statistics, without them."""

import jax

from ..magnitude_statistics import triton
from .xla import count_at_once

# Up to here XLA's one comparison is as good: it takes as long to start. Of longer vectors it loads 4 bytes at a time,
# unless their length has convenient factors.
SHORT = 2**21


def count_above_many(x: jax.Array, thresholds: jax.Array, *, interpret: bool = False) -> jax.Array:
    if x.shape[0] <= SHORT or not thresholds.shape[0]:
        return count_at_once(x, thresholds)
    return triton.read(x, thresholds, describe=False, interpret=interpret)[1]
