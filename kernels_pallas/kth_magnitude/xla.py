"""The exact k-th largest magnitude in plain JAX.

A magnitude's bits, read as an integer, order as the magnitude does, so that the k-th largest can be found bit by bit,
each time counting the elements at or above a candidate. On a long vector that is a pass a bit; instead a sample bounds
the k-th magnitude from below, one compaction takes everything at or above the bound, and the search runs inside that
superset. Whether the superset holds the k-th is checked, not assumed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._varying import varying_as
from ..select_above.xla import above, count_above, take

# Elements sampled. A vector of up to four times as many is searched whole.
SAMPLE = 65536
# How many standard deviations of the sampled rank the superset leaves on either side of k.
MARGIN = 4


def search(x: jax.Array, k: ArrayLike) -> jax.Array:
    """The k-th largest magnitude, by a counting pass for each bit."""
    bits = jnp.finfo(x.dtype).bits
    integer = jnp.dtype(f"int{bits}")

    def refine(i, found):
        candidate = found | (jnp.ones((), integer) << (bits - 2 - i).astype(integer))
        reached = count_above(x, lax.bitcast_convert_type(candidate, x.dtype))
        return jnp.where(reached >= k, candidate, found)

    found = lax.fori_loop(0, bits - 1, refine, varying_as(jnp.zeros((), integer), x))
    return lax.bitcast_convert_type(found, x.dtype)


class Primitives(NamedTuple):
    """What the algorithm is made of, which a CPU and a GPU are best at in different ways.

    Attributes:
      search: the k-th largest magnitude of a vector in passes over the whole of it.
      compact: ``(values, indices, count)`` of the elements that reach a threshold, in a given capacity.
    """

    search: Callable[[jax.Array, ArrayLike], jax.Array]
    compact: Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]]


PLAIN = Primitives(search, lambda x, threshold, capacity: take(x, above(x, threshold), capacity))


def kth_magnitude(x: jax.Array, k: int, primitives: Primitives = PLAIN) -> jax.Array:
    if k >= x.shape[0]:
        return jnp.zeros((), x.dtype)
    capacity = superset_capacity(x.shape[0], k)
    if capacity is None:
        return primitives.search(x, k)
    values, _, holds = superset(x, k, capacity, primitives)
    return lax.cond(holds, lambda: primitives.search(values, k), lambda: primitives.search(x, k))


def estimate_kth_magnitude(x: jax.Array, k: jax.Array, sample_size: int, primitives: Primitives = PLAIN) -> jax.Array:
    if x.shape[0] > 4 * sample_size:
        k = jnp.maximum(jnp.round(k * (sample_size / x.shape[0])).astype(jnp.int32), 1)
        x = sample(x, sample_size)
    return jnp.vectorize(lambda rank: primitives.search(x, rank))(k)


def superset_capacity(n: int, k: int) -> int | None:
    """How many elements the superset has room for; None where searching the whole vector is as good."""
    if n <= 4 * SAMPLE:
        return None
    expected = k / n * SAMPLE
    capacity = math.ceil((expected + 2 * MARGIN * math.sqrt(expected) + MARGIN**2) * n / SAMPLE)
    # A round number: the parts that XLA on a CPU cuts a loop into for its cores are far slower where they are unequal.
    capacity = -(-capacity // (SAMPLE // 32)) * (SAMPLE // 32)
    return capacity if capacity <= n // 4 else None


def superset(x: jax.Array, k: int, capacity: int, primitives: Primitives) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Everything at or above a sampled lower bound of the k-th magnitude.

    Returns:
      ``(values, indices, holds)``: shapes ``(capacity,)``; ``holds`` says that these elements include the ``k``
      largest, or every non-zero one.
    """
    expected = k / x.shape[0] * SAMPLE
    lower = primitives.search(sample(x, SAMPLE), math.ceil(expected + MARGIN * math.sqrt(expected) + 1))
    values, indices, count = primitives.compact(x, lower, capacity)
    return values, indices, (count <= capacity) & ((count >= k) | (lower <= jnp.finfo(x.dtype).tiny))


def in_superset(
    x: jax.Array,
    k: int,
    choose: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
    primitives: Primitives = PLAIN,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What ``choose`` writes down of a vector, chosen from the superset of its k largest where that is shorter.

    Args:
      choose: makes ``(values, indices, count)`` of a vector, and takes nothing that is not among its k largest but for
        what stands in every superset of them: the indices are then those in ``x``.
    """
    capacity = superset_capacity(x.shape[0], k)
    if capacity is None:
        return choose(x)
    values, indices, holds = superset(x, k, capacity, primitives)

    def of_superset():
        kept, places, count = choose(values)
        return kept, indices.at[places].get(mode="fill", fill_value=x.shape[0]), count

    return lax.cond(holds, of_superset, lambda: choose(x))


def sample(x: jax.Array, size: int) -> jax.Array:
    """One element from each of ``size`` nearly equal stretches, at places that follow no period."""
    length, longer = divmod(x.shape[0], size)
    stretch = lax.iota(jnp.uint32, size)
    begin = stretch * jnp.uint32(length) + jnp.minimum(stretch, jnp.uint32(longer))
    # Knuth's multiplicative hash (golden ratio), its high bits.
    place = ((stretch * jnp.uint32(2654435769)) >> 8) % jnp.uint32(length)
    return x[(begin + place).astype(jnp.int32)]
