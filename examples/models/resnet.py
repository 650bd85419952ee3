"""Residual nets for images of 32 x 32 (He et al. 2016, section 4.2)."""

import jax
import jax.numpy as jnp
from flax import nnx

from .classifier import Classifier, batch_norm


def convolution(inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    he = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    # Explicit padding: "SAME" pads other sides where the stride is 2.
    padding = ((1, 1), (1, 1))
    return nnx.Conv(inputs, outputs, (3, 3), strides=stride, padding=padding, use_bias=False, kernel_init=he, rngs=rngs)


class Block(nnx.Module):
    """Two convolutions with BatchNorm, and a shortcut without parameters (option A)."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.stride = 1 if inputs == outputs else 2
        self.grow = outputs - inputs
        self.conv1 = convolution(inputs, outputs, self.stride, rngs)
        self.norm1 = batch_norm(outputs, rngs)
        self.conv2 = convolution(outputs, outputs, 1, rngs)
        self.norm2 = batch_norm(outputs, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        before = self.grow // 2
        shortcut = x[:, :: self.stride, :: self.stride]
        return nnx.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (before, self.grow - before))))


class ResNet(Classifier):
    """A convolution, three stages of blocks, mean over the pixels, and one dense layer.

    The stages have images of 32, 16 and 8 pixels a side. ResNet-20 (3 blocks a stage) has 269,722
    parameters, ResNet-110 (18) 1,727,962.

    Args:
      blocks: in each stage; the net has ``6 blocks + 2`` layers.
      width: channels of the first stage; the others have twice and four times as many.
      inputs: channels of an image.
    """

    def __init__(self, blocks: int, rngs: nnx.Rngs, width: int = 16, inputs: int = 3, classes: int = 10):
        self.first = convolution(inputs, width, 1, rngs)
        self.norm = batch_norm(width, rngs)
        stages = []
        before = width
        for channels in (width, 2 * width, 4 * width):
            for _ in range(blocks):
                stages.append(Block(before, channels, rngs))
                before = channels
        self.stages = nnx.Sequential(*stages)
        self.last = nnx.Linear(before, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, classes)``, of images, ``(batch, 32, 32, inputs)`` float32."""
        x = self.stages(nnx.relu(self.norm(self.first(x))))
        return self.last(x.mean((1, 2)))
