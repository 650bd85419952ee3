"""Random selection in blocks on a GPU, by the kernels of ``select_block_top_k``.

The kernel that reads the vector computes the norms and the random numbers of its elements: each
number is a hash of the element's index.
"""

import functools

import jax
import jax.numpy as jnp

from .. import hashing
from ..select_above.xla import reaches
from ..select_block_top_k.triton import BlocksPlan, Held, select_in_blocks
from .xla import drawn, norms_of_rows

# A single warp that sums by halves would need more registers than there are.
PROGRAM = 2048


def select_stochastic(
    x: jax.Array,
    quota: jax.Array,
    words: jax.Array,
    *,
    block: int,
    most: int,
    capacity: int,
    exact: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    plan = BlocksPlan.of_blocks(x.shape[0], capacity, block, most, PROGRAM)
    find = functools.partial(_draw, exact=exact)
    values, indices, _, found = select_in_blocks(find, x, quota, words, plan=plan, interpret=interpret)
    return values, indices, jnp.sum(found, dtype=jnp.int32)


def _draw(held: Held, words, *, exact: bool) -> list[jax.Array]:
    largest, total = norms_of_rows(held.values)
    hits = []
    for j, column in enumerate(held.columns):
        index = (held.begin + held.places + j).astype(jnp.uint32)
        numbers = hashing.uniform(index, words[0], words[1])
        hit = drawn(column, numbers, held.quota, held.length, largest, total, exact)
        hits.append((hit | (held.quota >= held.length)) & reaches(column, 0))
    return hits
