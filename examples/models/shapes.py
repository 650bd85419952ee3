"""The shapes of large models' parameters, for what depends on sizes alone: no model is built.

Kernels are ``(height, width, inputs, outputs)`` or ``(inputs, outputs)``, as in Flax. BatchNorm
and LayerNorm have a scale and a bias.
"""

import itertools
from collections.abc import Iterable

Shapes = list[tuple[int, ...]]


def convolution(size: int, inputs: int, outputs: int) -> Shapes:
    return [(size, size, inputs, outputs), (outputs,)]


def dense(*widths: int) -> Shapes:
    """Layers with biases between these widths."""
    return [shape for a, b in itertools.pairwise(widths) for shape in ((a, b), (b,))]


def norm(width: int) -> Shapes:
    return [(width,), (width,)]


def joined(parts: Iterable[Shapes]) -> Shapes:
    return list(itertools.chain.from_iterable(parts))


def resnet50() -> Shapes:
    """ResNet-50 for ImageNet (He et al. 2016, table 1): 25,557,032 parameters."""

    def normalised(size: int, inputs: int, outputs: int) -> Shapes:
        return [(size, size, inputs, outputs), *norm(outputs)]

    found = normalised(7, 3, 64)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            found += normalised(1, inputs, width) + normalised(3, width, width) + normalised(1, width, 4 * width)
            if not block:
                found += normalised(1, inputs, 4 * width)
            inputs = 4 * width
    return found + dense(inputs, 1000)


def vgg19() -> Shapes:
    """VGG-19 for ImageNet (Simonyan and Zisserman 2015, configuration E): 143,667,240."""
    channels = [3, 64, 64, 128, 128, *[256] * 4, *[512] * 8]
    convolutions = (convolution(3, a, b) for a, b in itertools.pairwise(channels))
    return joined(convolutions) + dense(7 * 7 * 512, 4096, 4096, 1000)


def alexnet() -> Shapes:
    """AlexNet (Krizhevsky et al. 2012, section 3.5): 60,965,224 parameters.

    The second, fourth and fifth convolution see half of the channels each.
    """
    sizes = ((11, 3, 96), (5, 48, 256), (3, 256, 384), (3, 192, 384), (3, 192, 256))
    return joined(convolution(*size) for size in sizes) + dense(6 * 6 * 256, 4096, 4096, 1000)


def transformer_base(words: int = 37000) -> Shapes:
    """The base Transformer (Vaswani et al. 2017, table 3, which gives 65 million parameters).

    The six layers each of encoder and decoder have 44,138,496 parameters. One embedding serves
    both sides and the outputs (section 3.4): with 37,000 words there are 63,082,496.
    """
    attention = 4 * dense(512, 512) + norm(512)
    inner = dense(512, 2048, 512) + norm(512)
    return [(words, 512), *6 * (attention + inner), *6 * (2 * attention + inner)]
