"""MSTopK in plain JAX: Algorithm 1 of the paper, with counts taken at several thresholds at once.

The paper bisects the values between the mean and the maximum. Here the representable numbers between them are
bisected, which takes as many steps on a vector with one huge element as on any other. As every count above the k-th
magnitude is the same in the superset that :mod:`kernels_pallas.kth_magnitude` compacts, it is taken there.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import bitmap
from .._varying import varying_as
from ..count_above_many.xla import count_above_many
from ..kth_magnitude.xla import in_superset
from ..norms.xla import norms
from ..select_above.xla import above, take

# Searches in one pass, which counts at one less than 2 to that many thresholds.
AT_ONCE = 2


class Bracket(NamedTuple):
    """Two magnitudes as the integers of their bits, and how many elements reach the upper one.

    More than k reach the lower one, the paper's ``thres2``, at most k the upper one, its ``thres1``.
    """

    lower: jax.Array
    upper: jax.Array
    count: jax.Array


def select_ms_top_k(x: jax.Array, k: int, searches: int, turn: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return take(x, above(x, 0), k)
    # Lines 1-3.
    largest, total = norms(x)
    mean = largest * (total / x.shape[0])
    return in_superset(x, k, functools.partial(_choose, k=k, mean=mean, largest=largest, searches=searches, turn=turn))


def _choose(
    x: jax.Array, k: int, mean: jax.Array, largest: jax.Array, searches: int, turn: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    found = _search(x, k, mean, largest, searches)
    # Lines 25-29.
    upper = above(x, lax.bitcast_convert_type(found.upper, x.dtype))
    between = above(x, lax.bitcast_convert_type(found.lower, x.dtype)) & ~upper
    missing = k - found.count
    window = bitmap.take_circle(between, missing, bitmap.turn(jnp.asarray(turn), missing))
    return take(x, upper | window, k)


def _search(x: jax.Array, k: int, mean: jax.Array, largest: jax.Array, searches: int) -> Bracket:
    """Lines 4-24."""
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    tiny, infinite = (
        lax.bitcast_convert_type(jnp.asarray(end, x.dtype), integer) for end in (jnp.finfo(x.dtype).tiny, jnp.inf)
    )

    def narrow(bracket: Bracket, thresholds: jax.Array) -> Bracket:
        counts = count_above_many(x, lax.bitcast_convert_type(thresholds, x.dtype))
        enough = counts <= k
        return Bracket(
            jnp.maximum(bracket.lower, jnp.max(jnp.where(enough, bracket.lower, thresholds))),
            jnp.minimum(bracket.upper, jnp.min(jnp.where(enough, thresholds, bracket.upper))),
            jnp.maximum(bracket.count, jnp.max(jnp.where(enough, counts, 0))),
        )

    def proceed(carry):
        number, bracket = carry
        open = (bracket.upper - bracket.lower > 1) & (bracket.upper > tiny) & (bracket.count < k)
        return (number < math.ceil(searches / AT_ONCE)) & open

    def search(carry):
        number, bracket = carry
        parts = 2**AT_ONCE
        cut = lax.iota(integer, parts - 1) + 1
        whole, rest = jnp.divmod(bracket.upper - bracket.lower, parts)
        return number + 1, narrow(bracket, bracket.lower + whole * cut + rest * cut // parts)

    # Norms of a vector with NaN in it are any numbers or none: nothing rests on them but where to look first.
    ends = [lax.bitcast_convert_type(jnp.where(jnp.isfinite(norm), norm, 0), integer) for norm in (mean, largest)]
    start = Bracket(jnp.zeros((), integer), infinite + 1, jnp.zeros((), jnp.int32))
    start = jax.tree.map(lambda leaf: varying_as(leaf, x), start)
    start = narrow(start, jnp.maximum(jnp.stack([tiny, ends[0], ends[1] + 1]), tiny))
    return lax.while_loop(proceed, search, (varying_as(jnp.int32(0), x), start))[1]
