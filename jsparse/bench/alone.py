"""Worker 0 without the other workers: its computation, and no network."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)  # Two instances stand for two levels.
class Alone:
    """A :class:`jsparse.Comm` for worker 0 alone, which receives what it sends itself.

    A program does the same computation over it as among ``size`` workers, on messages of the same
    lengths, but without a network. Optimization barriers hide from the compiler that the received
    messages are the worker's own.
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
        # The barrier hides a constant index, so that the branch is chosen at run time as in a
        # cluster.
        return lax.switch(lax.optimization_barrier(index), branches)

    def repeat(self, count, body, start):
        return lax.fori_loop(0, count, body, start)

    def varying(self, tree: jax.Array):
        return tree

    def may_differ(self, x):
        return True
