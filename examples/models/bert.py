"""BERT (Devlin et al. 2019), with the two heads of its pre-training (section 3.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from .classifier import cross_entropy, share_correct
from .transformer import Block

SEGMENTS = 2


class Bert(nnx.Module):
    """Predicts masked words, and whether the second segment follows the first.

    The decoder of the words has weights of its own. BERT-base, the default, has 133,547,324
    parameters.

    Args:
      words: in the vocabulary, with the special ones.
      width: of the embedding and of each block, a multiple of ``heads``.
      inner: width of the blocks' hidden layer.
      longest: the largest number of words in a row.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        words: int = 30522,
        width: int = 768,
        heads: int = 12,
        inner: int = 3072,
        layers: int = 12,
        longest: int = 512,
    ):
        self.word = nnx.Embed(words, width, rngs=rngs)
        self.position = nnx.Embed(longest, width, rngs=rngs)
        self.segment = nnx.Embed(SEGMENTS, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, inner, rngs, nnx.gelu) for _ in range(layers)])
        self.pool = nnx.Linear(width, width, rngs=rngs)
        self.follows = nnx.Linear(width, 2, rngs=rngs)
        self.transform = nnx.Linear(width, width, rngs=rngs)
        self.transform_norm = nnx.LayerNorm(width, rngs=rngs)
        self.decode = nnx.Linear(width, words, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of both heads.

        Args:
          x: words' numbers, int32 of shape ``(batch, time)``; none is padding.
          segments: 0 or 1 for each word, int32 of shape ``(batch, time)``.
          at: the places whose words are predicted, int32 of shape ``(batch, count)``.

        Returns:
          The words' logits, ``(batch, count, words)``, and those of "does not follow" and of
          "follows", ``(batch, 2)``.
        """
        place = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape)
        y = self.norm(self.word(x) + self.position(place) + self.segment(segments))
        for block in self.blocks:
            y = block(y)
        predicted = jnp.take_along_axis(y, at[..., None], axis=1)
        words = self.decode(self.transform_norm(nnx.gelu(self.transform(predicted))))
        return words, self.follows(jnp.tanh(self.pool(y[:, 0])))

    def loss(self, x: jax.Array, segments: jax.Array, masked: jax.Array, follows: jax.Array) -> jax.Array:
        """The sum of the mean losses of both heads.

        Args:
          x, segments: as above.
          masked: the words to predict, int32 of shape ``(batch, time)``; -1 where there is none.
            Where it has more than a third of a row, the last ones are not predicted.
          follows: 1 where the second segment follows the first, else 0: int32, ``(batch,)``.
        """
        at, masked = _places(masked)
        words, next_ = self(x, segments, at)
        return cross_entropy(words, jnp.maximum(masked, 0), masked >= 0) + cross_entropy(next_, follows)

    def accuracy(self, x: jax.Array, segments: jax.Array, masked: jax.Array, follows: jax.Array) -> jax.Array:
        """The share of the masked words that are predicted."""
        at, masked = _places(masked)
        return share_correct(self(x, segments, at)[0], masked, masked >= 0)


def _places(masked: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places of a row's masked words, the others after them, and what ``masked`` has there.

    There is room for a third of a row. The logits of all its words would take far longer.
    """
    at = jnp.argsort(masked < 0, axis=1, stable=True)[:, : -(-masked.shape[1] // 3)]
    return at, jnp.take_along_axis(masked, at, axis=1)
