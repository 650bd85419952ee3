"""Counts at many thresholds on a GPU, by the kernel of ``magnitude_statistics``."""

import jax

from ..magnitude_statistics import triton
from .xla import count_at_once

# Up to this length XLA's single comparison is as fast: the time is that of starting it. From
# longer vectors XLA loads 4 bytes at a time, unless their length has convenient factors.
SHORT = 2**21


def count_above_many(x: jax.Array, thresholds: jax.Array, *, interpret: bool = False) -> jax.Array:
    if x.shape[0] <= SHORT or not thresholds.shape[0]:
        return count_at_once(x, thresholds)
    return triton.read(x, thresholds, describe=False, interpret=interpret)[1]
