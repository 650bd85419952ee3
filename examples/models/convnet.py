"""The demo's net."""

import functools

import jax
from flax import nnx

from .classifier import Classifier


class ConvNet(Classifier):
    """Two convolutions with pooling and two dense layers, for ten classes."""

    def __init__(self, height: int, width: int, channels: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(channels, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(64 * (height // 4) * (width // 4), 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, 10)``, of images, ``(batch, height, width, channels)``."""
        pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        x = pool(nnx.relu(self.conv1(x)))
        x = pool(nnx.relu(self.conv2(x)))
        x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
        return self.dense2(x)
