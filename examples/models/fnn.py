"""FNN-3 and the SparCML thesis's net for MNIST: dense layers with ReLU between them."""

from collections.abc import Sequence

import jax
from flax import nnx

from jsparse.bench.nets import dense

from .classifier import Classifier


class FNN(Classifier):
    """Two hidden layers of one width, and ten classes.

    For images of 28 x 28 it has 199,210 parameters at width 200 (FNN-3: Shi et al. 2019,
    "Understanding Top-k Sparsification"), and 20,037,642 at width 4,096 (the SparCML thesis).

    Args:
      shape: of an image, ``(height, width, channels)``.
      width: of the hidden layers.
    """

    def __init__(self, shape: Sequence[int], width: int, rngs: nnx.Rngs):
        self.layers = dense(shape, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, 10)``, of images, ``(batch, *shape)`` float32."""
        return self.layers(x)  # pyright: ignore[reportCallIssue]
