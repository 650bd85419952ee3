"""What models share: the loss and the accuracy of a choice of classes, and BatchNorm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The mean cross entropy.

    Args:
      logits: float32 of shape ``(..., classes)``.
      labels: int32 of shape ``(...)``.
      weights: of the labels' shape; None weighs all labels alike.
    """
    return jnp.average(optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights=weights)


def share_correct(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The share of the labels with the largest logit; arguments as of :func:`cross_entropy`."""
    return jnp.average(jnp.argmax(logits, axis=-1) == labels, weights=weights)


def batch_norm(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """BatchNorm whose averages move by a tenth in each step, as in PyTorch."""
    return nnx.BatchNorm(width, momentum=0.9, rngs=rngs)


class Classifier(nnx.Module):
    """A model whose outputs are logits; a batch is its inputs and the labels."""

    __call__: Callable[..., jax.Array]

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(self(x), labels)

    def accuracy(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        return share_correct(self(x), labels)
