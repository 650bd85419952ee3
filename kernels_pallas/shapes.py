"""The vectors on which the kernels are tested, compiled, tuned and timed: one list, so that what is timed is tested."""

from typing import NamedTuple

import jax.numpy as jnp


class Shape(NamedTuple):
    """A vector to select from.

    Attributes:
      name: whose gradient it is.
      n: its elements.
    """

    name: str
    n: int

    def k(self, density: float) -> int:
        """How many elements are kept at a density, at least 1 where there is one."""
        return min(max(round(density * self.n), 1), self.n)


# The models of the papers: Ok-Topk's table 2, and the Transformer of HiTopKComm's section 5.
MODELS = (
    Shape("1M", 1_000_000),
    Shape("VGG-16", 14_728_266),
    Shape("LSTM", 27_569_568),
    Shape("Transformer", 110_000_000),
    Shape("BERT", 133_547_324),
)
DENSITIES = (0.001, 0.01)
GRADIENTS = (jnp.float32, jnp.bfloat16)

# What an interpreter can run: nothing, less than a vector register, about a block of 1024, a few, and odd ends.
SMALL = (0, 1, 7, 1023, 1024, 1025, 4096, 10_007)
