"""The papers' nets, in Flax."""

import itertools
from collections.abc import Callable, Sequence

import jax
from flax import nnx

# Channels of VGG-16's convolutions; 0 stands for a pooling that halves the image.
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
CLASSES = 10


class Dense(nnx.Module):
    """Dense layers with ReLU between them, over flattened images."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], rngs: nnx.Rngs):
        height, width, channels = shape
        widths = [height * width * channels, *hidden, CLASSES]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        x = x.reshape(x.shape[0], -1)
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


class Vgg16(nnx.Module):
    """VGG-16 for images of 32 x 32, as in the papers but without batch normalisation.

    It has 14,719,818 parameters.
    """

    def __init__(self, shape: Sequence[int], rngs: nnx.Rngs):
        channels = [shape[-1], *(c for c in VGG16 if c)]
        he = nnx.initializers.he_normal()
        self.convolutions = nnx.List(
            [nnx.Conv(a, b, (3, 3), kernel_init=he, rngs=rngs) for a, b in itertools.pairwise(channels)]
        )
        self.last = nnx.Linear(channels[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        convolutions = iter(self.convolutions)
        for channels in VGG16:
            x = nnx.relu(next(convolutions)(x)) if channels else nnx.max_pool(x, (2, 2), (2, 2))
        return self.last(x.reshape(x.shape[0], -1))


# The functions take the images' shape, the dense net's width, and random number generators. The
# SparCML thesis's net for MNIST is the dense one of width 4,096: 20,037,642 parameters.
NETS: dict[str, Callable[[Sequence[int], int, nnx.Rngs], nnx.Module]] = {
    "dense": lambda shape, width, rngs: Dense(shape, (width, width), rngs),
    "vgg16": lambda shape, width, rngs: Vgg16(shape, rngs),
}
