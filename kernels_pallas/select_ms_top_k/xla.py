"""MSTopK in plain JAX: Algorithm 1 of the paper, with counts at several thresholds at once.

The paper bisects the interval of values between the mean and the maximum. This code bisects the
representable numbers between them, which takes as many steps on a vector with one huge element as
on any other vector. The counts are taken in the superset that :mod:`kernels_pallas.kth_magnitude`
compacts: above the k-th magnitude they are the same there as in the whole vector.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import bitmap
from .._varying import varying_as
from ..count_above_many.xla import count_above_many
from ..kth_magnitude import xla as kth_magnitude
from ..norms.xla import norms
from ..select_above.xla import above, take

# The number of searches in one pass, which counts at ``2**AT_ONCE - 1`` thresholds. The number of
# searches is rounded up to a multiple of it.
AT_ONCE = 2


class Bracket(NamedTuple):
    """An interval of magnitudes that holds the k-th magnitude.

    Attributes:
      lower: a magnitude that more than k elements reach, the paper's ``thres2``, as the integer
        of its bits.
      upper: a magnitude that at most k elements reach, the paper's ``thres1``, as the integer of
        its bits.
      count: the number of elements that reach ``upper``.
    """

    lower: jax.Array
    upper: jax.Array
    count: jax.Array


def searches_in_turn(
    narrow: Callable[[Bracket, int], Bracket],
    is_open: Callable[[Bracket], jax.Array],
    bracket: Bracket,
    searches: int,
    n: int,
) -> Bracket:
    """Halves a bracket in a loop, ``searches`` times at most, and stops once it is not open."""
    number = varying_as(jnp.int32(0), bracket.lower)
    return lax.while_loop(
        lambda carry: (carry[0] < searches // AT_ONCE) & is_open(carry[1]),
        lambda carry: (carry[0] + 1, narrow(carry[1], AT_ONCE)),
        (number, bracket),
    )[1]


class Primitives(NamedTuple):
    """The parts of the algorithm that are faster in one way on a CPU, and in another on a GPU.

    Attributes:
      norms: like :func:`kernels_pallas.norms`.
      count: like :func:`kernels_pallas.count_above_many`.
      halve: like :func:`searches_in_turn`, for a vector of ``n`` elements. It may go on when the
        bracket is no longer open.
      superset: the parts of the search in the superset.
    """

    norms: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    count: Callable[[jax.Array, jax.Array], jax.Array]
    halve: Callable[..., Bracket]
    superset: kth_magnitude.Primitives


PLAIN = Primitives(norms, count_above_many, searches_in_turn, kth_magnitude.PLAIN)


def select_ms_top_k(
    x: jax.Array, turn: ArrayLike, k: int, searches: int, primitives: Primitives = PLAIN
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k >= x.shape[0]:
        return primitives.superset.compact(x, jnp.zeros((), x.dtype), k)
    # Lines 1 to 3 of Algorithm 1.
    largest, total = primitives.norms(x)
    mean = largest * (total / x.shape[0])

    def choose(vector: jax.Array):
        return _take(vector, k, _search(vector, k, mean, largest, searches, primitives), turn)

    return kth_magnitude.in_superset(x, k, choose, primitives.superset)


def _take(x: jax.Array, k: int, found: Bracket, turn: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects the elements, by lines 25 to 29 of Algorithm 1."""
    upper = above(x, lax.bitcast_convert_type(found.upper, x.dtype))
    between = above(x, lax.bitcast_convert_type(found.lower, x.dtype)) & ~upper
    missing = k - found.count
    window = bitmap.take_circle(between, missing, bitmap.turn(jnp.asarray(turn), missing))
    return take(x, upper | window, k)


def _search(
    x: jax.Array, k: int, mean: jax.Array, largest: jax.Array, searches: int, primitives: Primitives
) -> Bracket:
    """Searches for the threshold, by lines 4 to 24 of Algorithm 1."""
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    tiny, infinite = (
        lax.bitcast_convert_type(jnp.asarray(end, x.dtype), integer) for end in (jnp.finfo(x.dtype).tiny, jnp.inf)
    )

    def narrow(bracket: Bracket, thresholds: jax.Array) -> Bracket:
        counts = primitives.count(x, lax.bitcast_convert_type(thresholds, x.dtype))
        enough = counts <= k
        return Bracket(
            jnp.maximum(bracket.lower, jnp.max(jnp.where(enough, bracket.lower, thresholds))),
            jnp.minimum(bracket.upper, jnp.min(jnp.where(enough, thresholds, bracket.upper))),
            jnp.maximum(bracket.count, jnp.max(jnp.where(enough, counts, 0))),
        )

    def is_open(bracket: Bracket) -> jax.Array:
        return (bracket.upper - bracket.lower > 1) & (bracket.upper > tiny) & (bracket.count < k)

    # The norms of a vector with NaN are undefined. They only decide where the search begins.
    ends = [lax.bitcast_convert_type(jnp.where(jnp.isfinite(norm), norm, 0), integer) for norm in (mean, largest)]
    start = Bracket(jnp.zeros((), integer), infinite + 1, jnp.zeros((), jnp.int32))
    start = jax.tree.map(lambda leaf: varying_as(leaf, x), start)
    start = narrow(start, jnp.maximum(jnp.stack([tiny, ends[0], ends[1] + 1]), tiny))
    searches = math.ceil(searches / AT_ONCE) * AT_ONCE
    return primitives.halve(
        lambda bracket, halvings: narrow(bracket, _halves(bracket, halvings)), is_open, start, searches, x.shape[0]
    )


def _halves(bracket: Bracket, halvings: int) -> jax.Array:
    """All thresholds that ``halvings`` successive searches could try, whatever each one finds."""
    ends = jnp.stack([bracket.lower, bracket.upper])
    for _ in range(halvings):
        middle = ends[:-1] + (ends[1:] - ends[:-1]) // 2
        ends = jnp.append(jnp.stack([ends[:-1], middle], axis=1).reshape(-1), ends[-1])
    return ends[1:-1]
