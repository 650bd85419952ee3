"""The k largest of each block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .._vector.arguments import check_fields
from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import Selector, SelectorState
from .bucketed import take_largest
from .fixed import take_above


@dataclasses.dataclass(frozen=True)
class BlockTopK(Selector):
    """Selects exactly the k largest elements of each block of consecutive elements.

    Among equal magnitudes the lowest index is selected. If the last block is shorter, its k is
    scaled by its length, and is at least 1. On a CPU it sorts the blocks and not the whole
    vector, and needs memory for a copy of the magnitudes. On a GPU a kernel reads the vector once,
    if a block has at most 8192 elements. Every block has the same k in every step; of
    :class:`BucketedTopK` the buckets take turns, so that there are k of n in all.

    Attributes:
      k: the number of elements of a block, at least 1; from ``block`` on all of them are
        selected.
      block: the length of a block, at least 1.
      density: ``k / block``, at most 1.

    References:
      Peng et al., DeMo: Decoupled Momentum Optimization, 2024, and Sarfi et al., Communication
      Efficient LLM Pre-training with SparseLoCo, 2025: 32 or 64 of the 4096 elements of a tile of
      64 by 64.
    """

    k: int
    block: int = 4096

    def __post_init__(self):
        check_fields(self)
        if self.k < 1:
            raise ValueError(f"k is {self.k}; it must be the number of elements of a block, at least 1, such as 64")
        if self.block < 1:
            raise ValueError(f"block is {self.block}; it must be a number of elements, at least 1, such as 4096")

    @property
    def density(self) -> float:  # type: ignore[override]
        return min(1.0, self.k / self.block)

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        if self.k >= self.block:
            return take_above(acc, jnp.zeros((), acc.dtype), 1.0, step)
        quota = np.full(-(-n // self.block), self.k, np.int32)
        if n % self.block:
            quota[-1] = elements_kept(self.density, n % self.block)
        return take_largest(acc, self.block, quota, int(quota.max()), int(quota.sum()))
