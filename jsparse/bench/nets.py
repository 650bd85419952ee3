"""The papers' nets, in Flax."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx

# Channels of VGG-16's convolutions; 0 stands for a pooling that halves the image.
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
CLASSES = 10


def flattened(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def dense(shape: Sequence[int], width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Dense layers with ReLU between them, over flattened images."""
    widths = itertools.pairwise([math.prod(shape), width, width, CLASSES])
    first, second, last = (nnx.Linear(a, b, rngs=rngs) for a, b in widths)
    return nnx.Sequential(flattened, first, nnx.relu, second, nnx.relu, last)


def vgg16(shape: Sequence[int], width: int, rngs: nnx.Rngs) -> nnx.Module:
    """VGG-16 for images of 32 x 32, as in the papers but without batch normalisation.

    It has 14,719,818 parameters, whatever ``width`` is.
    """
    he = nnx.initializers.he_normal()
    halve = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    layers: list[Callable[..., jax.Array]] = []
    inputs = shape[-1]
    for channels in VGG16:
        if not channels:
            layers.append(halve)
            continue
        layers += [nnx.Conv(inputs, channels, (3, 3), kernel_init=he, rngs=rngs), nnx.relu]
        inputs = channels
    return nnx.Sequential(*layers, flattened, nnx.Linear(inputs, CLASSES, rngs=rngs))


# The functions take the images' shape, the dense net's width, and random number generators. The
# SparCML thesis's net for MNIST is the dense one of width 4,096: 20,037,642 parameters.
NETS: dict[str, Callable[[Sequence[int], int, nnx.Rngs], nnx.Module]] = {"dense": dense, "vgg16": vgg16}
