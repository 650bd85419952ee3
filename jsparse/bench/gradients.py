"""Gradients and other vectors to measure with: random ones, and one of a net in training."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

DISTRIBUTIONS = ("gaussian", "heavy", "layered", "periodic", "ties", "digits")
# The net of `digits_gradient`: SGD steps before its gradient is taken, examples a step, learning
# rate.
STEPS, BATCH, RATE = 20, 64, 0.05
# The gradients of `worker_gradients`: how many, and how many layers each consists of.
GRADIENTS, LAYERS = 3, 50
# Channels of VGG-16's convolutions.
VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def draw(distribution: str, n: int, seed: int) -> np.ndarray:
    """A float32 vector of n elements to select from.

    Args:
      distribution: one of ``DISTRIBUTIONS``. ``"digits"`` is :func:`digits_gradient`, of at most n
        elements.
      n: its length.
      seed: of the random numbers.
    """
    if distribution == "digits":
        return digits_gradient(n, seed)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n, np.float32)
    match distribution:
        case "heavy":
            return x / np.sqrt(rng.standard_gamma(1.0, n, np.float32) + np.float32(1e-6))
        case "layered":
            scale = np.exp(rng.normal(0, 2, 64)).astype(np.float32)
            return x * np.repeat(scale, -(-n // 64))[:n]
        case "periodic":
            return x * (np.arange(n) % 256 < 3) + np.float32(1e-3) * x
        case "ties":
            return np.round(8 * x).astype(np.float32)
    return x


def digits_gradient(size: int, seed: int) -> np.ndarray:
    """The gradient of a net that learns scikit-learn's digits.

    The net has two hidden layers, as wide as ``size`` parameters allow. It takes 20 steps of SGD
    with batches of 64 images; the gradient is that of the next batch.

    Args:
      size: the largest number of parameters.
      seed: of the parameters and batches.

    Returns:
      A float32 vector of at most ``size`` elements.

    Raises:
      ValueError: scikit-learn is missing, or ``size`` is too small for any such net.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("--distribution digits needs scikit-learn: pip install scikit-learn") from error
    # A net of this width has width**2 + 76 width + 10 parameters.
    width = math.isqrt(max(size + 38**2 - 10, 0)) - 38
    if width < 1:
        raise ValueError(f"--size is {size}; the smallest net for --distribution digits has 87 parameters")
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    shapes = [(64, width), (width, width), (width, 10)]
    params = [
        (jnp.asarray(rng.standard_normal(shape, np.float32) * math.sqrt(2 / shape[0])), jnp.zeros(shape[1]))
        for shape in shapes
    ]

    def loss(params, x, y):
        *hidden, (weights, bias) = params
        for w, b in hidden:
            x = jax.nn.relu(x @ w + b[None])
        logits = jax.nn.log_softmax(x @ weights + bias[None])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    @jax.jit
    def step(params, x, y):
        gradient = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), gradient

    gradient = params
    for _ in range(STEPS + 1):
        batch = rng.choice(len(labels), BATCH, replace=False)
        params, gradient = step(params, (images[batch] / 16).astype(np.float32), labels[batch].astype(np.int32))
    return np.asarray(ravel_pytree(gradient)[0])


def worker_gradients(n: int, rank: int, count: int = GRADIENTS) -> list[np.ndarray]:
    """Random gradients of one worker, which it uses in turn: float32, shape ``(n,)``.

    Each element is normal. Its scale is the same on all workers and in all steps: a log-normal
    number of its own times a log-normal number of its layer. So magnitudes are heavy-tailed,
    workers agree somewhat on which elements are large, regions hold different numbers of large
    elements, and the residual grows as it does in training.

    Args:
      n: the gradient's length.
      rank: the worker's number, which seeds what differs between workers.
      count: how many gradients.
    """
    shared = np.random.default_rng(0)
    scale = shared.standard_normal(n, np.float32)
    layers = shared.standard_normal(LAYERS).astype(np.float32)
    for number, part in enumerate(np.array_split(scale, LAYERS)):
        part += layers[number]
    np.exp(0.5 * scale, out=scale)
    own = np.random.default_rng(1 + rank)
    return [scale * own.standard_normal(n, np.float32) for _ in range(count)]


def vgg16() -> list[tuple[int, ...]]:
    """The parameters' shapes of VGG-16 for CIFAR-10, with batch normalisation, in PyTorch's order.

    They have 14,728,266 elements.
    """
    shapes: list[tuple[int, ...]] = []
    channels = 3
    for width in VGG16:
        shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
        channels = width
    return [*shapes, (10, 512), (10,)]


def leaves_of(size: int) -> list[tuple[int, ...]]:
    """Shapes of ``size`` elements in all.

    They are VGG-16's where the size is VGG-16's, else a square matrix and a vector of the rest.
    """
    shapes = vgg16()
    if sum(map(math.prod, shapes)) == size:
        return shapes
    side = math.isqrt(size)
    return [(side, side), (size - side * side,)][: 1 + (size > side * side)]


def in_leaves(x: np.ndarray) -> list[np.ndarray]:
    """A vector as leaves of :func:`leaves_of`, in Flax's order: outputs are the last axis."""
    shapes = [(*shape[2:], *shape[1::-1]) for shape in leaves_of(x.size)]
    parts = np.split(x, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
