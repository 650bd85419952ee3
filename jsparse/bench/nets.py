"""The papers' nets, in Flax."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

# Channels of VGG-16's convolutions; 0 stands for a pooling that halves the image.
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
CLASSES = 10
# Of LSTM-PTB.
WORDS, LSTM_WIDTH, LSTM_LAYERS = 10_000, 1500, 2


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


class Block(nnx.Module):
    """Two convolutions with normalisation, and a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.stride, self.more = outputs // inputs, outputs - inputs
        self.first = nnx.Sequential(*_convolution(inputs, outputs, self.stride, rngs))
        self.second = nnx.Sequential(*_convolution(outputs, outputs, 1, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.second(nnx.relu(self.first(x)))
        shortcut = x[:, :: self.stride, :: self.stride]
        return nnx.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (self.more // 2, self.more // 2))))


def _convolution(inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> tuple[nnx.Conv, nnx.GroupNorm]:
    he = nnx.initializers.he_normal()
    conv = nnx.Conv(inputs, outputs, (3, 3), strides=stride, use_bias=False, kernel_init=he, rngs=rngs)
    return conv, nnx.GroupNorm(outputs, num_groups=8, rngs=rngs)


def resnet20(shape: Sequence[int], width: int, rngs: nnx.Rngs) -> nnx.Module:
    """ResNet-20 for images of 32 x 32, with group normalisation in place of that of the batch.

    It has 269,722 parameters, whatever ``width`` is.
    """
    channels = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(inputs, outputs, rngs) for inputs, outputs in itertools.pairwise(channels)]
    last = nnx.Linear(channels[-1], CLASSES, rngs=rngs)
    return nnx.Sequential(
        *_convolution(shape[-1], channels[0], 1, rngs), nnx.relu, *blocks, lambda x: x.mean((1, 2)), last
    )


class LSTM(nnx.Module):
    """A layer of LSTM, from zeros on: ``(batch, time, width)`` to the same shape."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.input = nnx.Linear(width, 4 * width, rngs=rngs)
        self.state = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = state
            gates = jnp.split(given + self.state(h), 4, axis=-1)
            i, f, o = map(nnx.sigmoid, gates[:3])
            c = f * c + i * jnp.tanh(gates[3])
            h = o * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros_like(x[:, 0])
        _, states = lax.scan(step, (zeros, zeros), self.input(x).swapaxes(0, 1))
        return states.swapaxes(0, 1)


def lstm(shape: Sequence[int], width: int, rngs: nnx.Rngs) -> nnx.Module:
    """LSTM-PTB, Zaremba's large model: 10,000 words, two layers of 1,500.

    It has 66,022,000 parameters, whatever ``width`` is.
    """
    layers = [LSTM(LSTM_WIDTH, rngs) for _ in range(LSTM_LAYERS)]
    return nnx.Sequential(nnx.Embed(WORDS, LSTM_WIDTH, rngs=rngs), *layers, nnx.Linear(LSTM_WIDTH, WORDS, rngs=rngs))


# The functions take the shape of an image or a text, the dense net's width, and random number
# generators. The SparCML thesis's net for MNIST is the dense one of width 4,096: 20,037,642
# parameters.
NETS: dict[str, Callable[[Sequence[int], int, nnx.Rngs], nnx.Module]] = {
    "dense": dense,
    "vgg16": vgg16,
    "resnet20": resnet20,
    "lstm": lstm,
}
