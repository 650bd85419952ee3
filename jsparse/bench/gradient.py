"""A gradient as training makes it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

STEPS, BATCH, RATE = 20, 64, 0.05


def digits_gradient(size: int, seed: int) -> np.ndarray:
    """The gradient of a net with two hidden layers, as wide as ``size`` parameters allow, on scikit-learn's digits.

    Taken of a batch of 64 images after 20 such steps of SGD; float32, of at most ``size`` elements.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("--distribution digits needs scikit-learn: pip install scikit-learn") from error
    # width**2 + 76 width + 10 parameters.
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
