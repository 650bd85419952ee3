"""Random-k: k elements chosen at random."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import bitmap, varying_as

from .._vector.density import elements_kept
from .._vector.random import key_of
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, take_members
from .fixed import take_above


@dataclasses.dataclass(frozen=True)
class RandomK(ByDensity):
    """Selects k elements at random. All sets of k elements are equally probable.

    If an element is zero, it has nothing to send. It is dropped, and fewer than k are selected.
    Values are not scaled by ``n / k``, because the elements that were not selected are in the
    residual.

    Attributes:
      density: k / n, above 0 and at most 1.
      shared: whether all workers select the same elements. These follow from the seed and the
        step, without communication. If false, each worker selects elements of its own.
      seed: an integer. In the same step, equal seeds select the same elements.

    References:
      Stich et al., Sparsified SGD with Memory, NeurIPS 2018, "rand_k".
    """

    shared: bool = True
    seed: int = 0

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        k = elements_kept(self.density, n)
        if k >= n:
            return take_above(acc, jnp.zeros((), acc.dtype), self.density, step)
        key = key_of(self.seed, step) if self.shared else key_of(self.seed, step, rank)
        if 2 * k <= n:
            words = _draw(key, n, k)
        else:
            words = bitmap.take_first(~_draw(key, n, n - k), k)
        return take_members(acc, words, k)


def _draw(key: jax.Array, n: int, k: int) -> jax.Array:
    """The bitmap of k of n indices, k at most n / 2.

    Indices are drawn with replacement, as many as are missing, until none is missing. Every round
    treats all indices alike, so all sets of k indices are equally probable.
    """
    past = bitmap.WORD * -(-n // bitmap.WORD)

    def add(words, missing, number, length):
        drawn = jax.random.randint(jax.random.fold_in(key, number), (length,), 0, n)
        drawn = jnp.sort(jnp.where(lax.iota(jnp.int32, length) < missing, drawn, past))
        again = jnp.concatenate([jnp.zeros(1, bool), drawn[1:] == drawn[:-1]])
        return bitmap.mark(words, jnp.where(again, past, drawn))

    def proceed(carry):
        return carry[1] > 0

    def more(carry):
        words, missing, number = carry
        words = add(words, missing, number, k // 4 + 1)
        return words, k - bitmap.count(words), number + 1

    words = add(jnp.zeros(past // bitmap.WORD, jnp.uint32), k, 0, k)
    return lax.while_loop(proceed, more, (words, k - bitmap.count(words), varying_as(jnp.int32(1), words)))[0]
