"""The Transformer's layers (Vaswani et al. 2017), and a language model of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .classifier import Classifier


class Block(nnx.Module):
    """Attention and a dense layer, each with a shortcut, then LayerNorm (section 3.1)."""

    def __init__(
        self, width: int, heads: int, inner: int, rngs: nnx.Rngs, activation: Callable[..., jax.Array] = nnx.relu
    ):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, inner, rngs=rngs)
        self.down = nnx.Linear(inner, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = self.norm1(x + self.attention(x, mask=mask))
        return self.norm2(x + self.down(self.activation(self.up(x))))


def positions(time: int, width: int) -> np.ndarray:
    """Sines and cosines of the positions (section 3.5): float32 of shape ``(1, time, width)``."""
    angle = np.arange(time)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(1, time, width).astype(np.float32)


class Transformer(Classifier):
    """Predicts the next word with a stack of blocks that see the words so far.

    Args:
      words: in the vocabulary.
      width: of the embedding and of each block; even, and a multiple of ``heads``.
      inner: width of the blocks' hidden layer.
    """

    def __init__(self, words: int, width: int, heads: int, inner: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(words, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, inner, rngs) for _ in range(layers)])
        self.last = nnx.Linear(width, words, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, time, words)``, of words' numbers, ``(batch, time)`` int32."""
        mask = nnx.make_causal_mask(x)
        y = self.embed(x)
        y *= y.shape[-1] ** 0.5
        y += jnp.broadcast_to(positions(*y.shape[1:]), y.shape)
        for block in self.blocks:
            y = block(y, mask)
        return self.last(y)
