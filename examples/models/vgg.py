"""VGG for images of 32 x 32 (Simonyan and Zisserman 2015, configuration D), with BatchNorm."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from jsparse.bench.nets import VGG16

from .classifier import Classifier, batch_norm


class VGG(Classifier):
    """Convolutions of 3 x 3, each with a bias, BatchNorm and ReLU, then one dense layer.

    VGG-16 has 14,728,266 parameters for CIFAR-10.

    Args:
      channels: of the convolutions; 0 stands for a pooling that halves the image. Five of them
        leave one pixel of 32 x 32.
      inputs: channels of an image.
    """

    def __init__(self, rngs: nnx.Rngs, channels: Sequence[int] = VGG16, inputs: int = 3, classes: int = 10):
        he = nnx.initializers.he_normal()
        widths = [inputs, *filter(None, channels)]
        self.channels = tuple(channels)
        self.convs = nnx.List(nnx.Conv(*pair, (3, 3), kernel_init=he, rngs=rngs) for pair in itertools.pairwise(widths))
        self.norms = nnx.List(batch_norm(width, rngs) for width in widths[1:])
        self.last = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, classes)``, of images, ``(batch, 32, 32, inputs)`` float32."""
        layers = zip(self.convs, self.norms, strict=True)
        for channels in self.channels:
            if channels:
                conv, norm = next(layers)
                x = nnx.relu(norm(conv(x)))
            else:
                x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        return self.last(x.reshape(x.shape[0], -1))
