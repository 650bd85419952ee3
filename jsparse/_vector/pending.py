"""A vector that a worker has to send, before it is added up."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .layout import Layout
from .sparse_vector import Leaf, SparseVector, to_dense


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """``vector + parts``: what a worker kept, and what a step adds to it.

    It is not yet added up, so that a kernel can add and select in one pass over memory.

    Attributes:
      vector: shape ``(n,)``: what was kept; None stands for zeros.
      parts: arrays or sparse vectors of n elements in all; empty adds nothing.
      keep: bool scalar: whether the parts count. Where not, they are left out, whatever they hold.
      layout: where each part stands in the vector.
      limit: magnitudes of the sum are clipped to this; infinity does not clip.
    """

    vector: jax.Array | None
    parts: Sequence[Leaf]
    keep: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    limit: float = dataclasses.field(default=math.inf, metadata={"static": True})

    def add_up(self) -> jax.Array:
        """The sum, shape ``(n,)``: in place of ``vector`` where that may be overwritten."""
        if self.vector is None:
            return jnp.where(self.keep, self.layout.ravel(self.parts), 0)
        return self.layout.add_leaves(self.vector, self.parts, self.keep, self.limit)

    def worth_marking(self) -> bool:
        """Whether :meth:`add_up_and_mark` is faster than :meth:`add_up` and a later pass."""
        return self.vector is not None and self.layout.has_long_leaves(self.parts)

    def sample(self, size: int) -> jax.Array:
        """The sum at ``kernels_pallas.sample_places``, shape ``(size,)``."""
        assert self.vector is not None
        return self.layout.add_sample(self.vector, self._arrays(), self.keep, self.limit, size)

    def samples(self, sizes: Sequence[int]) -> jax.Array:
        """The sum at ``kernels_pallas.sample_places`` of each part, in which they are so many."""
        assert self.vector is not None
        return self.layout.add_samples(self.vector, self._arrays(), self.keep, self.limit, sizes)

    def add_up_and_mark(self, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum, and the bitmap of its elements that reach a threshold, in one pass.

        The threshold is a scalar, or one for each part.
        """
        assert self.vector is not None
        return self.layout.add_and_mark(self.vector, self._arrays(), self.keep, self.limit, threshold)

    def _arrays(self) -> list[jax.Array]:
        return [to_dense(part) for part in self.parts]

    def run(self) -> SparseVector | None:
        """The sum as one run, where nothing was kept and a part is sparse; else None."""
        if self.vector is not None or not any(isinstance(part, SparseVector) for part in self.parts):
            return None
        return self.layout.run(self.parts).where(self.keep)
