"""An encoder-decoder LSTM for ATIS: the intent of a sentence, and the slot of each word."""

import jax
import jax.numpy as jnp
from flax import nnx

from .classifier import cross_entropy, share_correct
from .lstm import LSTM


class Intent(nnx.Module):
    """Joint intent and slots (Liu and Lane 2016, section 3.1: aligned inputs, without attention).

    The encoder reads the words. The intent is read off its last state, from which the decoder
    begins. At each word the decoder takes the encoder's state there and the slot before.

    Args:
      words, slots, intents: the numbers of each.
      width: of the embeddings and of both LSTM layers.
    """

    def __init__(self, words: int, slots: int, intents: int, width: int, rngs: nnx.Rngs):
        self.word = nnx.Embed(words, width, rngs=rngs)
        self.slot = nnx.Embed(slots, width, rngs=rngs)
        self.encoder = LSTM(width, width, rngs)
        self.decoder = LSTM(2 * width, width, rngs)
        self.to_slot = nnx.Linear(width, slots, rngs=rngs)
        self.to_intent = nnx.Linear(width, intents, rngs=rngs)

    def __call__(self, x: jax.Array, lengths: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of the intent and of the slots.

        Args:
          x: words' numbers, int32 of shape ``(batch, time)``.
          lengths: of the sentences, int32 of shape ``(batch,)``; what follows is padding.
          slots: the true slots, int32 of shape ``(batch, time)``.

        Returns:
          Logits of shapes ``(batch, intents)`` and ``(batch, time, slots)``.
        """
        y = self.word(x)
        hs, cs = self.encoder.states(y, self.encoder.zero(y), self.encoder.zero(y))
        last = (lengths - 1)[:, None, None]
        h, c = (jnp.take_along_axis(states, last, axis=1)[:, 0] for states in (hs, cs))
        before = jnp.pad(slots, ((0, 0), (1, 0)))[:, :-1]
        decoded, _ = self.decoder.states(jnp.concatenate([hs, self.slot(before)], axis=-1), h, c)
        return self.to_intent(h), self.to_slot(decoded)

    def loss(self, x: jax.Array, lengths: jax.Array, slots: jax.Array, intents: jax.Array) -> jax.Array:
        """The sum of the mean losses of ``intents``, int32 of shape ``(batch,)``, and of slots."""
        of_intent, of_slot = self(x, lengths, slots)
        real = jnp.arange(x.shape[1])[None] < lengths[:, None]
        return cross_entropy(of_intent, intents) + cross_entropy(of_slot, slots, real)

    def accuracy(self, x: jax.Array, lengths: jax.Array, slots: jax.Array, intents: jax.Array) -> jax.Array:
        """The share of the sentences whose intent is predicted."""
        return share_correct(self(x, lengths, slots)[0], intents)
