"""The primitives of the exact k-th magnitude on a GPU.

They are counting passes that each find several bits, and the compaction kernel.
"""

import functools
import itertools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._varying import varying_as
from ..count_above_many.triton import SHORT, count_above_many
from ..select_above import select_above
from .xla import Primitives

Carry = TypeVar("Carry")


def primitives(interpret: bool = False) -> Primitives:
    compact = functools.partial(select_above, implementation="interpret" if interpret else "triton")
    return Primitives(functools.partial(search, interpret=interpret), compact)


def search(x: jax.Array, k: ArrayLike, *, interpret: bool = False) -> jax.Array:
    """The k-th largest magnitude of a vector of float32. Each counting pass finds several bits."""

    def refine(carry, bits):
        found, left = carry
        left -= bits
        candidates = found | (lax.iota(jnp.int32, 2**bits - 1) + 1 << left)
        counts = count_above_many(x, lax.bitcast_convert_type(candidates, x.dtype), interpret=interpret)
        # Counts fall as candidates rise. So the number of counts that reach k is the value of the
        # bits.
        return found | jnp.sum(counts >= k, dtype=jnp.int32) << left, left

    start = varying_as(jnp.int32(0), x), jnp.int32(31)
    found, _ = in_passes(x.shape[0], 31, refine, start)
    return lax.bitcast_convert_type(found, x.dtype)


def in_passes(n: int, bits: int, find: Callable[[Carry, int], Carry], carry: Carry) -> Carry:
    """Finds ``bits`` bits by passes over ``n`` elements. ``find(carry, width)`` is one pass.

    The number of passes does not depend on what they find, because a loop with such a condition
    would wait for the host after each pass. The passes over a short vector are unrolled, so that
    they can be launched as one graph.
    """
    for width, group in itertools.groupby(passes(n, bits)):
        carry = lax.fori_loop(
            0, len(list(group)), lambda _, carry, width=width: find(carry, width), carry, unroll=n <= SHORT
        )
    return carry


def passes(n: int, bits: int) -> list[int]:
    """The number of bits that each pass finds.

    A pass over few elements takes as long as its kernels take to start, so it finds up to 6 bits.
    A pass over many elements finds up to 3 bits: from about 7 thresholds on, comparisons and not
    reads determine its time.
    """
    count = -(-bits // (6 if n <= SHORT else 3))
    return [bits // count + (i < bits % count) for i in range(count)]
