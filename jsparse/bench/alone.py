"""A worker without the others."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)  # One of two levels is not the other.
class Alone:
    """Worker 0 of ``size`` without the others: a :class:`jsparse.Comm` over which what it sends comes back.

    A program over it computes what it would among others, on messages of the same lengths, without a network. What it
    receives is not known to the compiler to be its own.
    """

    size: int
    typed = False

    def rank(self):
        return lax.optimization_barrier(jnp.int32(0))

    def psum(self, x):
        return lax.optimization_barrier(x) * jnp.asarray(self.size, x.dtype)

    def pmax(self, x):
        return lax.optimization_barrier(x)

    def all_gather(self, x):
        return lax.optimization_barrier(jnp.broadcast_to(x, (self.size, *x.shape)))

    def all_to_all(self, x):
        return lax.optimization_barrier(x)

    def psum_scatter(self, x):
        return self.psum(x[0])

    def ppermute(self, x, perm):
        return lax.optimization_barrier(x)

    def switch(self, index, branches, *, replicated=False):
        # Not a constant, so that the branch is chosen as in a cluster.
        return lax.switch(lax.optimization_barrier(index), branches)

    def repeat(self, count, body, start):
        return lax.fori_loop(0, count, body, start)

    def varying(self, tree: jax.Array):
        return tree

    def may_differ(self, x):
        return True
