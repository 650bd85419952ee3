"""Messages between workers that are numbered along several axes."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

Axis = str | tuple[str, ...]


def permute(x: jax.Array, axis: Axis, perm: Sequence[tuple[int, int]]) -> jax.Array:
    """``jax.lax.ppermute`` inside ``jax.shard_map``, by the ranks of ``jax.lax.axis_index``.

    By itself that function numbers the workers along several axes in the mesh's order, whatever
    the order of the axes in the tuple.
    """
    if isinstance(axis, tuple):
        names = jax.sharding.get_abstract_mesh().axis_names
        ordered = tuple(sorted(axis, key=names.index))
        ranks = np.arange(lax.axis_size(axis)).reshape([lax.axis_size(name) for name in axis])
        place = np.argsort(ranks.transpose([axis.index(name) for name in ordered]), axis=None)
        axis, perm = ordered, [(int(place[source]), int(place[target])) for source, target in perm]
    return lax.ppermute(x, axis, perm)
