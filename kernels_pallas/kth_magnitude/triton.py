"""What the exact k-th magnitude is made of on a GPU: passes that find several bits at once, and a kernel that compacts.

The passes are unrolled: a loop that ends when something is found would wait for the host each time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..count_above_many.triton import SHORT, count_above_many
from ..select_above import select_above
from .xla import Primitives


def primitives(interpret: bool = False) -> Primitives:
    compact = functools.partial(select_above, implementation="interpret" if interpret else "triton")
    return Primitives(functools.partial(search, interpret=interpret), compact)


def search(x: jax.Array, k: ArrayLike, *, interpret: bool = False) -> jax.Array:
    """The k-th largest magnitude of a vector of float32, by a counting pass for several bits at a time."""
    found, left = jnp.zeros((), jnp.int32), 31
    for bits in passes(x.shape[0], left):
        left -= bits
        candidates = found | (lax.iota(jnp.int32, 2**bits - 1) + 1 << left)
        counts = count_above_many(x, lax.bitcast_convert_type(candidates, x.dtype), interpret=interpret)
        # Counts fall as candidates rise.
        found |= jnp.sum(counts >= k, dtype=jnp.int32) << left
    return lax.bitcast_convert_type(found, x.dtype)


def passes(n: int, bits: int) -> list[int]:
    """How many bits are found in each pass over ``n`` elements.

    A pass over few takes as long as its kernels take to start, one over many is bound by comparisons from about 7
    thresholds on.
    """
    count = -(-bits // (6 if n <= SHORT else 3))
    return [bits // count + (i < bits % count) for i in range(count)]
