"""Means: what is made of a sum over the workers."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from .._vector.parts import rescale
from .._vector.sparse_vector import SparseVector, Vector


class Quotient(NamedTuple):
    """A mean that is not yet divided.

    A sum of several sparse runs is divided after they are added up, so that it is rounded once.

    Attributes:
      total: the sum.
      divisor: what it is to be divided by.
    """

    total: Vector
    divisor: float

    def value(self) -> Any:
        """``total / divisor``, in the form of the total; runs are divided one by one."""
        if isinstance(self.total, SparseVector):
            return SparseVector(self.total.values / self.divisor, self.total.indices, self.total.n)
        return rescale(self.total, lambda x: x / self.divisor)


Mean: TypeAlias = Callable[[Vector, int], Quotient]


def over_workers(total: Vector, workers: int) -> Quotient:
    """The sum divided by the number of workers: gradient mass is kept."""
    return Quotient(total, workers)


def undivided(total: Vector, workers: int) -> Quotient:
    """The sum as it is: of reducers that make the update themselves, as a vote does."""
    return Quotient(total, 1)


def over_contributors(total: Vector, workers: int) -> Quotient:
    """Each element divided by the number of workers that sent it.

    This is what the codes of DeMo and SparseLoCo do.

    It takes a sum that still shows who sent what: one run for each worker, as an all-gather makes
    it.

    Raises:
      ValueError: the sum is of another form.
    """
    if not isinstance(total, SparseVector) or total.values.ndim == 1:
        raise ValueError(
            'mean="contributors" counts who sent an element, and this all-reduce no longer knows it: '
            "take allreduce=TopkAllGather()"
        )
    ones = jnp.where(total.indices < total.n, 1, 0).astype(total.values.dtype)
    union = total.union()
    ones = SparseVector(ones, total.indices, total.n)
    sums, counts = total.merge(union=union), ones.merge(union=union)
    return Quotient(SparseVector(sums.values / jnp.maximum(counts.values, 1), sums.indices, sums.n), 1)
