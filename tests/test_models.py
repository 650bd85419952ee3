"""The examples' models: the published numbers of parameters, and gradients in every leaf."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.models import (
    FNN,
    LSTM,
    VGG,
    Bert,
    ConvNet,
    DeepSpeech,
    Intent,
    LanguageModel,
    ResNet,
    Transformer,
    shapes,
)
from examples.models.speech import edit_distance, look_ahead
from examples.models.transformer import positions
from jsparse.bench.nets import VGG16
from tiers import quick

RNG = np.random.default_rng(0)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


PUBLISHED = {
    "fnn-3": (lambda: FNN((28, 28, 1), 200, rngs()), 199_210),
    "fnn-4096": (lambda: FNN((28, 28, 1), 4096, rngs()), 20_037_642),
    "convnet": (lambda: ConvNet(28, 28, 1, rngs=rngs()), 421_642),
    "vgg-16": (lambda: VGG(rngs()), 14_728_266),
    "resnet-20": (lambda: ResNet(3, rngs()), 269_722),
    "resnet-110": (lambda: ResNet(18, rngs()), 1_727_962),
    "lstm-ptb": (lambda: LanguageModel(10_000, 1500, 2, rngs()), 66_034_000),
    "lstm-an4": (lambda: DeepSpeech(rngs()), 27_569_568),
    "bert-base": (lambda: Bert(rngs()), 133_547_324),
}


@pytest.mark.parametrize("name", quick(PUBLISHED, *(name for name in PUBLISHED if name != "resnet-110")))
def test_published_numbers_of_parameters(name: str):
    make, published = PUBLISHED[name]
    params = nnx.state(nnx.eval_shape(make), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == published


@pytest.mark.parametrize(
    ("found", "published"),
    [
        (shapes.resnet50(), 25_557_032),
        (shapes.vgg19(), 143_667_240),
        (shapes.alexnet(), 60_965_224),
        # torch.nn.Transformer() has 44,140,544, with a LayerNorm after each of both stacks.
        (shapes.transformer_base()[1:], 44_140_544 - 2 * 2 * 512),
    ],
    ids=["resnet-50", "vgg-19", "alexnet", "transformer"],
)
def test_shapes_of_large_models(found: list[tuple[int, ...]], published: int):
    assert sum(map(math.prod, found)) == published


def test_the_base_transformer_is_near_the_papers_count():
    assert sum(map(math.prod, shapes.transformer_base())) == pytest.approx(65e6, rel=0.04)


def numbers(below: int, *shape: int) -> np.ndarray:
    return RNG.integers(below, size=shape, dtype=np.int32)


def images(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.random(shape, np.float32), numbers(10, shape[0])


NARROW = tuple(channels // 32 for channels in VGG16)
# The small forms, each with a batch.
SMALL = {
    "fnn": (lambda: FNN((8, 8, 1), 20, rngs()), images(4, 8, 8, 1)),
    "vgg": (lambda: VGG(rngs(), NARROW), images(8, 32, 32, 3)),
    "resnet": (lambda: ResNet(1, rngs(), width=4), images(4, 16, 16, 3)),
    "lstm": (lambda: LanguageModel(50, 32, 2, rngs()), (numbers(50, 3, 6), numbers(50, 3, 6))),
    "transformer": (lambda: Transformer(50, 16, 2, 32, 2, rngs()), (numbers(50, 3, 6), numbers(50, 3, 6))),
    "bert": (
        lambda: Bert(rngs(), 50, 16, 2, 32, 2, longest=6),
        (numbers(50, 3, 6), np.array([[0, 0, 0, 1, 1, 1]] * 3), numbers(50, 3, 6), np.array([0, 1, 1])),
    ),
    "intent": (
        lambda: Intent(50, 7, 5, 16, rngs()),
        (numbers(50, 3, 6), np.array([6, 2, 4]), numbers(7, 3, 6), numbers(5, 3)),
    ),
    "speech": (
        lambda: DeepSpeech(rngs(), bins=13, channels=4, width=16, layers=2, lookahead=3),
        (
            RNG.standard_normal((3, 30, 13), np.float32),
            np.array([30, 21, 12]),
            1 + numbers(28, 3, 5),
            np.array([5, 3, 2]),
        ),
    ),
}


@pytest.mark.full
def test_bert_predicts_only_masked_words():
    """Its loss and accuracy are those that the logits of all places give."""
    model, x, segments = Bert(rngs(), 50, 16, 2, 32, 2, longest=9), numbers(50, 3, 9), np.zeros((3, 9), np.int32)
    masked, follows = np.full((3, 9), -1, np.int32), np.array([0, 1, 1])
    masked[0, [1, 4, 8]], masked[1, [0]], masked[2, [6, 7]] = [3, 40, 7], [12], [0, 5]
    words, next_ = model(x, segments, np.broadcast_to(np.arange(9), (3, 9)))
    losses = optax.softmax_cross_entropy_with_integer_labels(words, np.maximum(masked, 0))[masked >= 0]
    expected = losses.mean() + optax.softmax_cross_entropy_with_integer_labels(next_, follows).mean()
    np.testing.assert_allclose(model.loss(x, segments, masked, follows), expected, rtol=1e-5)
    found = np.where(masked >= 0, words.argmax(-1), masked)  # As if it predicted all.
    assert model.accuracy(x, segments, found, follows) == 1
    found[2, 7] = (found[2, 7] + 1) % 50
    np.testing.assert_allclose(model.accuracy(x, segments, found, follows), 5 / 6)


def test_looking_ahead_is_a_convolution_in_groups():
    y, weights = RNG.standard_normal((2, 9, 5), np.float32), RNG.standard_normal((4, 5), np.float32)
    expected = jax.lax.conv_general_dilated(
        y, weights[:, None], (1,), ((0, 3),), dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=5
    )
    np.testing.assert_allclose(look_ahead(y, weights), expected, rtol=1e-5, atol=1e-5)


def without_gradient(path: str) -> bool:
    """Whether a leaf can't change the outputs.

    BatchNorm takes off what a bias before it adds; to softmax all keys' biases are alike.
    """
    return re.fullmatch(r"convs\.\d+\.bias|conv\d\.bias|.*\.key\.bias", path) is not None


@pytest.mark.parametrize("name", quick(SMALL, "fnn"))
def test_models_learn_a_batch(name: str):
    """Every leaf has a gradient, in some steps the loss halves, and most is predicted."""
    make, batch = SMALL[name]
    graph, params, rest = nnx.split(make(), nnx.Param, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(graph, params, rest).loss(*batch))(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, grads

    state = tx.init(params)
    losses = []
    for _ in range(60):
        params, state, loss, grads = step(params, state)
        losses.append(float(loss))
        if len(losses) == 1:
            check_gradient(nnx.to_flat_state(grads))
    assert losses[0] < 20
    assert losses[-1] < losses[0] / 2
    assert nnx.merge(graph, params, rest).accuracy(*batch) > 0.7


def check_gradient(grads) -> None:
    norms = {".".join(map(str, path)): float(jnp.linalg.norm(leaf)) for path, leaf in grads}
    largest = max(norms.values())
    for path, norm in norms.items():
        assert np.isfinite(norm), path
        if without_gradient(path):
            assert norm < 1e-5 * largest, path
        else:
            assert norm > 1e-5 * largest, path


def test_lstm_layer():
    """Against Flax's cell, whose one bias vector is the sum of the layer's two."""
    layer, cell = LSTM(3, 4, rngs()), nnx.LSTMCell(3, 4, rngs=rngs())
    gates = [(cell.ii, cell.hi), (cell.if_, cell.hf), (cell.ig, cell.hg), (cell.io, cell.ho)]
    for i, (of_input, of_state) in enumerate(gates):
        part = slice(4 * i, 4 * i + 4)
        of_input.kernel[...] = layer.input.kernel[:, part]
        of_state.kernel[...] = layer.state.kernel[:, part]
        of_state.bias[...] = (layer.input.bias + layer.state.bias)[part]
    x = RNG.standard_normal((2, 5, 3), np.float32)
    np.testing.assert_allclose(layer(x), nnx.RNN(cell)(x), atol=1e-6)


def test_positions():
    found = positions(3, 4)[0]
    np.testing.assert_allclose(found[2], [np.sin(2), np.cos(2), np.sin(0.02), np.cos(0.02)], rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LanguageModel(50, 8, 1, rngs()),
        pytest.param(lambda: Transformer(50, 8, 2, 8, 1, rngs()), marks=pytest.mark.full),
    ],
    ids=["lstm", "transformer"],
)
def test_no_word_sees_the_words_after_it(make):
    x = numbers(50, 1, 6)
    other = x.copy()
    other[0, 4] += 1
    model = make()
    before, after = model(x), model(other % 50)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4] != after[:, 4]).any()


@pytest.mark.full
@pytest.mark.parametrize("name", ["intent", "speech"])
def test_padding_changes_nothing(name: str):
    make, batch = SMALL[name]
    model = make()
    extra = [(0, 0), (0, 4)] + [(0, 0)] * (batch[0].ndim - 2)
    longer = [np.pad(batch[0], extra, constant_values=3), batch[1], np.pad(batch[2], extra[:2]), batch[3]]
    assert model.loss(*longer) == pytest.approx(float(model.loss(*batch)), rel=1e-5)


@pytest.mark.parametrize(
    ("path", "truth", "edits"),
    [
        ("", "", 0),
        ("--aa-a-", "aa", 0),
        ("aaab", "ab", 0),
        ("--", "abc", 3),
        ("abc", "", 3),
        ("kitten", "siten", 1),
        ("kit-ten", "siten", 2),
        ("s-u-n-d-a-y", "saturday", 3),
        ("a-b", "ba", 2),
    ],
)
def test_edit_distance(path: str, truth: str, edits: int):
    said = [0 if letter == "-" else ord(letter) for letter in path.ljust(12, "-")]
    true = [ord(letter) for letter in truth.ljust(9, "x")]
    assert edit_distance(jnp.array(said), jnp.array(true), jnp.array(len(truth))) == edits


@pytest.mark.full
def test_ctc_takes_the_labels_of_the_frames_that_are_there():
    """Of one frame without padding, the loss is of the label's probability there."""
    model = DeepSpeech(rngs(), bins=13, channels=4, width=16, layers=2, lookahead=3)
    x = RNG.standard_normal((2, 2, 13), np.float32)
    batch = x, np.array([2, 2]), np.array([[5, 0], [7, 9]]), np.array([1, 1])
    logits, real = model(*batch[:2])
    assert real.shape == (2, 1)
    of_label = jax.nn.log_softmax(logits)[jnp.arange(2), 0, jnp.array([5, 7])]
    assert model.loss(*batch) == pytest.approx(-float(of_label.mean()), rel=1e-5)
