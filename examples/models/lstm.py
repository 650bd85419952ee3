"""LSTM layers with two bias vectors, as in cuDNN, and a language model of them."""

import jax
import jax.numpy as jnp
from flax import nnx

from .classifier import Classifier


class LSTM(nnx.Module):
    """An LSTM layer (Zaremba et al. 2014, section 3.1) with biases for inputs and for states.

    Flax's own cells have one bias vector; the published counts are of two. All parameters begin
    uniform in ``±width**-0.5``, as in PyTorch.
    """

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
        def uniform(key, shape, dtype=jnp.float32):
            return jax.random.uniform(key, shape, dtype, -(width**-0.5), width**-0.5)

        self.width = width
        self.input = nnx.Linear(inputs, 4 * width, kernel_init=uniform, bias_init=uniform, rngs=rngs)
        self.state = nnx.Linear(width, 4 * width, kernel_init=uniform, bias_init=uniform, rngs=rngs)

    def states(self, x: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs the layer from a state.

        Args:
          x: inputs, float32 of shape ``(batch, time, inputs)``.
          h, c: the state before the first input, ``(batch, width)`` each.

        Returns:
          The states h and c after each input, ``(batch, time, width)`` each.
        """

        def step(state, gates):
            h, c = state
            i, f, g, o = jnp.split(gates + self.state(h), 4, axis=-1)
            c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
            h = nnx.sigmoid(o) * jnp.tanh(c)
            return (h, c), (h, c)

        _, (hs, cs) = jax.lax.scan(step, (h, c), self.input(x).swapaxes(0, 1))
        return hs.swapaxes(0, 1), cs.swapaxes(0, 1)

    def zero(self, x: jax.Array) -> jax.Array:
        """Zeros of shape ``(batch, width)``, which differ between workers if ``x`` does."""
        return jnp.zeros_like(x, shape=(x.shape[0], self.width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the states h, ``(batch, time, width)``, from zero states on."""
        return self.states(x, self.zero(x), self.zero(x))[0]


class LanguageModel(Classifier):
    """Predicts the next word with layers of LSTM, whose width is the embedding's too.

    LSTM-PTB (Zaremba et al. 2014, the large model: 10,000 words, 2 layers of 1,500) has 66,034,000
    parameters.
    """

    def __init__(self, words: int, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(words, width, rngs=rngs)
        self.layers = nnx.Sequential(*(LSTM(width, width, rngs) for _ in range(layers)))
        self.last = nnx.Linear(width, words, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits, ``(batch, time, words)``, of words' numbers, ``(batch, time)`` int32."""
        return self.last(self.layers(self.embed(x)))
