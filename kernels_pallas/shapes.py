"""The vector lengths on which the kernels are tested, compiled, tuned and timed.

All of these uses take their lengths from this one list.
"""

from typing import NamedTuple

import jax.numpy as jnp


class Shape(NamedTuple):
    """The length of a vector to select from.

    Attributes:
      name: the model whose gradient has this length.
      n: the number of elements.
    """

    name: str
    n: int

    def k(self, density: float) -> int:
        """The number of elements kept at a density: at least 1, unless the vector is empty."""
        return min(max(round(density * self.n), 1), self.n)


# The models of the papers: table 2 of Ok-Topk, and the Transformer of section 5 of HiTopKComm.
MODELS = (
    Shape("1M", 1_000_000),
    Shape("VGG-16", 14_728_266),
    Shape("LSTM", 27_569_568),
    Shape("Transformer", 110_000_000),
    Shape("BERT", 133_547_324),
)
DENSITIES = (0.001, 0.01)
GRADIENTS = (jnp.float32, jnp.bfloat16)

# Lengths that Pallas's interpreter can run: empty, shorter than a vector register, around a block
# of 1024, a few blocks, and a few blocks with a ragged end.
SMALL = (0, 1, 7, 1023, 1024, 1025, 4096, 10_007)
