"""The largest element of each of k chunks."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, take_indices


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(ByDensity):
    """Selects the largest element of each of k chunks of consecutive elements.

    The lengths of the chunks differ by at most one. Among equal magnitudes the lowest index is
    selected. A chunk of zeros gives nothing. It reads the vector once. If the elements are in
    random order, about 63 % of the selected ones are among the k largest; if layers differ in
    scale, fewer are.

    Attributes:
      density: k / n, above 0 and at most 1.

    References:
      Chern et al., TPU-KNN: K Nearest Neighbor Search at Peak FLOP/s, NeurIPS 2022, section 5,
      with k bins.
    """

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        k = min(elements_kept(self.density, n), n)
        length, longer = divmod(n, k)
        split = longer * (length + 1)
        parts = [(0, longer, length + 1), (split, k - longer, length)]
        return take_indices(acc, jnp.concatenate([_largest(acc, *part) for part in parts]))


def _largest(acc: jax.Array, begin: int, chunks: int, length: int) -> jax.Array:
    """The index of the largest magnitude in each of ``chunks`` chunks, from index ``begin`` on."""
    rows = acc[begin : begin + chunks * length].reshape(chunks, length)
    magnitudes = jnp.where(jnp.isnan(rows), 0, jnp.abs(rows))
    place = lax.argmax(magnitudes, 1, jnp.int32) if chunks else jnp.zeros(0, jnp.int32)
    return begin + length * lax.iota(jnp.int32, chunks) + place
