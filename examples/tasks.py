"""The models that examples.train knows by name, each with the data sets that it can learn.

``-small`` are models of the same classes with other sizes, which train on one machine.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx

from examples import data, models
from jsparse.bench.images import load_images
from jsparse.bench.nets import VGG16

# Words of a row of text, and of each segment of a pair.
ROW, SEGMENT = 20, 16


class Task(NamedTuple):
    """A model and the examples that it learns.

    Attributes:
      model: with ``loss(*batch)`` and ``accuracy(*batch)``.
      train, test: arrays of all examples along the leading axis; a part of them is a batch.
    """

    model: Any
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]


class Trainable(NamedTuple):
    """A model's row in the table.

    Attributes:
      make: a function of the data set's name, its directory and random number generators.
      data: names of the data sets; the first is the default.
    """

    make: Callable[[str, pathlib.Path | None, nnx.Rngs], Task]
    data: tuple[str, ...]


def of_images(make: Callable[[Sequence[int], nnx.Rngs], nnx.Module], *names: str) -> Trainable:
    def task(name: str, directory: pathlib.Path | None, rngs: nnx.Rngs) -> Task:
        images = load_images(name, directory)
        return Task(make(images.train_x.shape[1:], rngs), images[:2], images[2:])

    return Trainable(task, names or ("digits", "mnist", "cifar10"))


def named(name: str, directory: pathlib.Path | None) -> pathlib.Path:
    if directory is None:
        raise ValueError(f"{name} is read from files: name their directory with --data-dir")
    return directory


def text(name: str, directory: pathlib.Path | None) -> data.Text:
    read = {"ptb": data.read_ptb, "wikitext2": data.read_wikitext2}[name]
    return read(named(name, directory))


TEXTS = ("ptb", "wikitext2")


def of_text(make: Callable[[int, nnx.Rngs], nnx.Module]) -> Trainable:
    """A model of the next word."""

    def task(name: str, directory: pathlib.Path | None, rngs: nnx.Rngs) -> Task:
        found = text(name, directory)
        return Task(make(len(found.words), rngs), data.windows(found.train, ROW), data.windows(found.test, ROW))

    return Trainable(task, TEXTS)


def of_pairs(**sizes: int) -> Trainable:
    """BERT, for the words of the text and three special ones."""

    def task(name: str, directory: pathlib.Path | None, rngs: nnx.Rngs) -> Task:
        found = text(name, directory)
        words = len(found.words)
        train, test = (data.masked_pairs(part, words, SEGMENT, seed=0) for part in (found.train, found.test))
        return Task(models.Bert(rngs, words=words + 3, **sizes), train, test)

    return Trainable(task, TEXTS)


def intent(name: str, directory: pathlib.Path | None, rngs: nnx.Rngs) -> Task:
    atis = data.read_atis(named(name, directory))
    model = models.Intent(len(atis.words), len(atis.slots), len(atis.intents), 128, rngs)
    return Task(model, atis.train, atis.test)


def of_speech(features: Literal["mfcc", "spectrogram"], **sizes: Any) -> Trainable:
    def task(name: str, directory: pathlib.Path | None, rngs: nnx.Rngs) -> Task:
        return Task(models.DeepSpeech(rngs, **sizes), *data.read_an4(named(name, directory), features))

    return Trainable(task, ("an4",))


MODELS = {
    "convnet": of_images(lambda shape, rngs: models.ConvNet(*shape, rngs=rngs)),
    "fnn3": of_images(lambda shape, rngs: models.FNN(shape, 200, rngs)),
    "fnn4096": of_images(lambda shape, rngs: models.FNN(shape, 4096, rngs)),
    "vgg16": of_images(lambda shape, rngs: models.VGG(rngs), "cifar10"),
    "vgg-small": of_images(lambda shape, rngs: models.VGG(rngs, [c // 8 for c in VGG16]), "cifar10"),
    "resnet20": of_images(lambda shape, rngs: models.ResNet(3, rngs, inputs=shape[-1])),
    "resnet110": of_images(lambda shape, rngs: models.ResNet(18, rngs, inputs=shape[-1])),
    "lstm-ptb": of_text(lambda words, rngs: models.LanguageModel(words, 1500, 2, rngs)),
    "lstm-small": of_text(lambda words, rngs: models.LanguageModel(words, 200, 1, rngs)),
    "transformer-small": of_text(lambda words, rngs: models.Transformer(words, 16, 2, 64, 2, rngs)),
    "bert-base": of_pairs(),
    "bert-small": of_pairs(width=64, heads=4, inner=256, layers=2, longest=2 * SEGMENT + 3),
    "lstm-atis": Trainable(intent, ("atis",)),
    "lstm-an4": of_speech("spectrogram"),
    "lstm-an4-small": of_speech("mfcc", bins=1, inputs=13, channels=32, spans=(1, 1), width=64, layers=2),
}
DATA = tuple(dict.fromkeys(name for model in MODELS.values() for name in model.data))


def make_task(model: str, name: str, directory: pathlib.Path | None, seed: int) -> Task:
    """Reads the data and makes the model.

    Args:
      model: its name.
      name: of the data set.
      directory: of the data set's files.
      seed: of the parameters.

    Raises:
      ValueError: the model can't learn that data set, or a file is missing or damaged.
    """
    row = MODELS[model]
    if name not in row.data:
        raise ValueError(f"{model} learns {' or '.join(row.data)}, not {name}: change --data or --model")
    return row.make(name, directory, nnx.Rngs(seed))
