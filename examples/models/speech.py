"""Deep Speech 2 (Amodei et al. 2016) in the form of deepspeech.pytorch, trained on AN4."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .classifier import batch_norm
from .lstm import LSTM


def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 20)


def look_ahead(y: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums of each frame and those after it, for each feature by itself.

    On CPUs XLA's convolutions in groups take several times as long.

    Args:
      y: features, of shape ``(batch, frames, width)``.
      weights: of shape ``(frames of a sum, width)``.
    """
    after = jnp.pad(y, ((0, 0), (0, len(weights) - 1), (0, 0)))
    return sum((after[:, i : i + y.shape[1]] * weights[None, None, i] for i in range(len(weights))), jnp.zeros_like(y))


def edit_distance(path: jax.Array, labels: jax.Array, count: jax.Array) -> jax.Array:
    """Insertions, deletions and replacements between what a path of labels says and the truth.

    A path says its labels without blanks (0) and without repetitions (Graves et al. 2006).

    Args:
      path: the label at each frame, int32 of shape ``(frames,)``.
      labels: the truth, int32 of shape ``(longest,)``; only the first ``count`` count.
    """
    place = jnp.arange(labels.size + 1)

    def step(row, said):
        before, label = said
        # Row j: the distance to the first j true labels.
        changed = jnp.concatenate([row[:1] + 1, jnp.minimum(row[1:] + 1, row[:-1] + (labels != label))])
        longer = jax.lax.cummin(changed - place) + place
        return jnp.where((label != 0) & (label != before), longer, row), None

    first = place + 0 * path[0]  # So that it differs between workers if the path does.
    row, _ = jax.lax.scan(step, first, (jnp.pad(path, (1, 0))[:-1], path))
    return row[count]


class DeepSpeech(nnx.Module):
    """Two convolutions, LSTM layers, a lookahead convolution, and a dense layer, with BatchNorm.

    The first convolution halves the number of frames; both halve the number of bins. The default
    has 27,569,568 parameters: the spectrogram of 16 kHz, and 29 labels (the blank, A to Z, space
    and apostrophe).

    Args:
      bins: of frequency, in a frame.
      inputs: features of a bin.
      channels: of the convolutions.
      spans: bins under the kernels of the two convolutions, odd numbers.
      width: of the LSTM layers.
      lookahead: frames after its own that an output sees (section 3.7).
      labels: with the blank, which is label 0.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        bins: int = 161,
        inputs: int = 1,
        channels: int = 32,
        spans: tuple[int, int] = (41, 21),
        width: int = 800,
        layers: int = 5,
        lookahead: int = 20,
        labels: int = 29,
    ):
        # Kernels over frames and bins.
        (span1, side1), (span2, side2) = ((span, span // 2) for span in spans)
        self.bins = bins
        self.conv1 = nnx.Conv(inputs, channels, (11, span1), strides=2, padding=((5, 5), (side1, side1)), rngs=rngs)
        self.conv1_norm = batch_norm(channels, rngs)
        self.conv2 = nnx.Conv(
            channels, channels, (11, span2), strides=(1, 2), padding=((5, 5), (side2, side2)), rngs=rngs
        )
        self.conv2_norm = batch_norm(channels, rngs)
        flat = channels * -(-bins // 4)
        self.layers = nnx.List([LSTM(width if i else flat, width, rngs) for i in range(layers)])
        self.norms = nnx.List([batch_norm(width, rngs) for _ in range(layers - 1)])
        self.lookahead = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (lookahead + 1, width)))
        self.last_norm = batch_norm(width, rngs)
        self.last = nnx.Linear(width, labels, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the labels' logits.

        Args:
          x: features, float32 of shape ``(batch, frames, bins * inputs)``.
          lengths: frames of each utterance, int32 of shape ``(batch,)``; what follows is padding.

        Returns:
          Logits of shape ``(batch, (frames + 1) // 2, labels)``, and a mask of the first two axes
          that is False in the padding.
        """
        real = (jnp.arange((x.shape[1] + 1) // 2)[None] < (lengths[:, None] + 1) // 2)[..., None]
        pixels = real[..., None]
        x *= (jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None]
        y = x.reshape(*x.shape[:2], self.bins, -1)
        y = clipped(self.conv1_norm(self.conv1(y), mask=pixels)) * pixels
        y = clipped(self.conv2_norm(self.conv2(y), mask=pixels)) * pixels
        y = y.reshape(*y.shape[:2], -1)
        for i, layer in enumerate(self.layers):
            if i:
                y = self.norms[i - 1](y, mask=real)
            y = layer(y) * real
        y = clipped(look_ahead(y, self.lookahead[...]))
        return self.last(self.last_norm(y, mask=real)), real[..., 0]

    def accuracy(self, x: jax.Array, lengths: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
        """1 - the letter error rate of each frame's likeliest label: edits, over true labels.

        Arguments are as of :meth:`loss`. It is negative if there are more edits than labels.
        """
        logits, real = self(x, lengths)
        edits = jax.vmap(edit_distance)(jnp.argmax(logits, axis=-1) * real, labels, counts)
        return 1 - edits.sum() / counts.sum()

    def loss(self, x: jax.Array, lengths: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
        """The mean CTC loss of a label.

        Args:
          x, lengths: as above.
          labels: int32 of shape ``(batch, longest)``.
          counts: labels of each utterance, int32 of shape ``(batch,)``; what follows is padding.
        """
        logits, real = self(x, lengths)
        padding = jnp.arange(labels.shape[1])[None] >= counts[:, None]
        losses = optax.ctc_loss(logits, 1.0 - real, labels, padding.astype(jnp.float32))
        return losses.sum() / counts.sum()
