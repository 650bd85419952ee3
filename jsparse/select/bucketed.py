"""Top-k within each of many short buckets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kernels_pallas import select_block_top_k

from .._vector.density import elements_kept
from .._vector.sparse_vector import SparseVector
from ._base import ByDensity, SelectorState, report
from .fixed import take_above


@dataclasses.dataclass(frozen=True)
class BucketedTopK(ByDensity):
    """Selects the largest elements of each bucket of 512 consecutive elements, k in all.

    Each bucket has its share of k. If that is not a whole number, the buckets take turns with the
    elements that are left over. Among equal magnitudes the lowest index is selected. On a CPU it
    sorts the buckets and not the whole vector, and needs memory for a copy of the magnitudes. On a
    GPU a kernel reads the vector once, if a bucket has at most 8192 elements.

    Attributes:
      density: k / n, above 0 and at most 1. It is the thesis's number of elements selected in
        each bucket, divided by ``bucket``.
      bucket: the length of a bucket, at least 1.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 4.3.1.
    """

    bucket: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket}; it must be a number of elements, at least 1, such as 512")

    def __call__(
        self, acc: jax.Array, state: SelectorState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, SelectorState]:
        n = acc.shape[0]
        k = elements_kept(self.density, n)
        if k >= n:
            return take_above(acc, jnp.zeros((), acc.dtype), self.density, step)
        quota, most = quotas(n, k, self.bucket, step), most_of(n, k, self.bucket)
        return take_largest(acc, self.bucket, quota, most, k)


def take_largest(
    acc: jax.Array, bucket: int, quota: ArrayLike, most: int, k: int
) -> tuple[SparseVector, SelectorState]:
    """Takes the largest elements of each bucket, except zeros and NaN.

    Args:
      acc: the vector.
      bucket: the length of a bucket.
      quota: int32, the number of elements to take of each bucket.
      most: the largest quota.
      k: the sum of all quotas.
    """
    values, indices, count = select_block_top_k(acc, quota, block=bucket, most=most, capacity=k)
    x = SparseVector(values, indices, acc.shape[0])
    return x, report(x, count)


def quotas(n: int, k: int, bucket: int, step: jax.Array) -> jax.Array:
    """The number of elements to select in each bucket, int32: by its length, and k in all."""
    ends = np.minimum(np.arange(1, -(-n // bucket) + 1) * bucket, n)
    whole, rest = np.divmod(ends * k, n)
    # The fractional parts of multiples of the golden ratio are spread evenly (Knuth's
    # multiplicative hash).
    turn = (step.astype(jnp.uint32) * jnp.uint32(2654435769) >> 8).astype(jnp.float32) * (n / 2**24)
    turn = jnp.minimum(turn.astype(jnp.uint32), n - 1)
    reached = whole.astype(np.int32) + (rest.astype(np.uint32) + turn >= n).astype(jnp.int32)
    return jnp.diff(reached, prepend=0)


def most_of(n: int, k: int, bucket: int) -> int:
    """The largest of the :func:`quotas`, in any step."""
    return min(bucket, -(-bucket * k // n))
