"""ATIS: sentences on flights, with a slot for each word and an intent."""

import pathlib
from typing import NamedTuple

import numpy as np

from .files import damaged, read_lines

PAGE = "https://github.com/yvchen/JointSLU (data)"


class Sentences(NamedTuple):
    """Sentences, padded with 0 to the longest one; all arrays are int32.

    Attributes:
      words: numbers of words, of shape ``(count, longest)``.
      lengths: words of each sentence, of shape ``(count,)``.
      slots: numbers of slots, of shape ``(count, longest)``.
      intents: numbers of intents, of shape ``(count,)``.
    """

    words: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    intents: np.ndarray


class Atis(NamedTuple):
    """Training and test sentences, and what their numbers stand for.

    Attributes:
      words: of the training sentences; the first is ``<unk>``, for all others.
      slots, intents: of all sentences.
    """

    train: Sentences
    test: Sentences
    words: list[str]
    slots: list[str]
    intents: list[str]


def read_atis(directory: pathlib.Path) -> Atis:
    """Reads the files with intents.

    A line has the words from BOS to EOS, a tab, the slots of all words but EOS, and the intent.

    Args:
      directory: of ``atis.train.w-intent.iob`` and ``atis.test.w-intent.iob``.

    Raises:
      ValueError: a file is missing, empty or not text, or a line has another form.
    """
    train, test = (_read(directory / f"atis.{part}.w-intent.iob") for part in ("train", "test"))
    words = ["<unk>", *sorted({word for sentence, _, _ in train for word in sentence})]
    slots = sorted({slot for _, found, _ in train + test for slot in found})
    intents = sorted({intent for _, _, intent in train + test})
    return Atis(_numbered(train, words, slots, intents), _numbered(test, words, slots, intents), words, slots, intents)


def _read(path: pathlib.Path) -> list[tuple[list[str], list[str], str]]:
    found = []
    for number, line in enumerate(read_lines(path, PAGE), 1):
        text, tab, tags = line.partition("\t")
        words, slots = text.split(), tags.split()
        if not tab:
            raise damaged(path, "there is no tab between words and slots", PAGE, number)
        if len(words) < 3 or words[0] != "BOS" or words[-1] != "EOS":
            raise damaged(path, f"the words are not BOS, a sentence, EOS, but {text!r}", PAGE, number)
        if len(slots) != len(words):
            what = f"{len(words)} words need {len(words) - 1} slots and an intent; there are {len(slots)} in all"
            raise damaged(path, what, PAGE, number)
        found.append((words[1:-1], slots[1:-1], slots[-1]))
    return found


def _numbered(
    sentences: list[tuple[list[str], list[str], str]], words: list[str], slots: list[str], intents: list[str]
) -> Sentences:
    of_word, of_slot = ({name: i for i, name in enumerate(names)} for names in (words, slots))
    lengths = np.array([len(sentence) for sentence, _, _ in sentences], np.int32)
    padded = np.zeros((2, len(sentences), lengths.max()), np.int32)
    for i, (sentence, tags, _) in enumerate(sentences):
        padded[0, i, : lengths[i]] = [of_word.get(word, 0) for word in sentence]
        padded[1, i, : lengths[i]] = [of_slot[tag] for tag in tags]
    return Sentences(padded[0], lengths, padded[1], np.array([intents.index(i) for _, _, i in sentences], np.int32))
