"""Word-level texts: the Penn Treebank and WikiText-2, as numbers of words."""

import collections
import pathlib
from typing import NamedTuple

import numpy as np

from .files import damaged, read_lines

PTB = "https://www.fit.vut.cz/person/imikolov/rnnlm (simple-examples.tgz)"
WIKITEXT2 = "https://huggingface.co/datasets/Salesforce/wikitext (wikitext-2-v1)"
END = "<eos>"


class Text(NamedTuple):
    """A text in three parts.

    Attributes:
      train, valid, test: numbers of words, int32 of shape ``(count,)``. Each line ends with the
        word ``<eos>``.
      words: the words of the training part, the most frequent first; a number is a place in it.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    words: list[str]


def read_ptb(directory: pathlib.Path) -> Text:
    """Reads Mikolov's version of the Penn Treebank.

    Args:
      directory: of ``ptb.train.txt``, ``ptb.valid.txt`` and ``ptb.test.txt``.

    Raises:
      ValueError: a file is missing, empty or not text, or has a word that is not in training.
    """
    return _read([directory / f"ptb.{part}.txt" for part in ("train", "valid", "test")], PTB)


def read_wikitext2(directory: pathlib.Path) -> Text:
    """Reads WikiText-2 by words (Merity et al. 2017); blank lines are ``<eos>`` alone.

    Args:
      directory: of ``wiki.train.tokens`` or ``train.txt``, and of the same with valid and test.

    Raises:
      ValueError: as of :func:`read_ptb`.
    """
    paths = [directory / f"wiki.{part}.tokens" for part in ("train", "valid", "test")]
    if (directory / "train.txt").exists():
        paths = [directory / f"{part}.txt" for part in ("train", "valid", "test")]
    return _read(paths, WIKITEXT2)


def _read(paths: list[pathlib.Path], page: str) -> Text:
    parts = [[[*line.split(), END] for line in read_lines(path, page)] for path in paths]
    words = [word for word, _ in collections.Counter(word for line in parts[0] for word in line).most_common()]
    number = {word: i for i, word in enumerate(words)}
    numbers: list[np.ndarray] = []
    for path, lines in zip(paths, parts, strict=True):
        found: list[int] = []
        for line, text in enumerate(lines, 1):
            try:
                found += [number[word] for word in text]
            except KeyError as error:
                raise damaged(path, f"the word {error} is not in {paths[0].name}", page, line) from error
        numbers.append(np.array(found, np.int32))
    train, valid, test = numbers
    return Text(train, valid, test, words)


def _check_length(text: np.ndarray, least: int) -> None:
    if len(text) < least:
        raise ValueError(f"a part of the text has {len(text)} words, and a row needs {least}: take a longer text")


def windows(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into rows of words, and the words that follow each of them.

    Args:
      text: int32 of shape ``(count,)``.
      length: of a row.

    Returns:
      Two int32 arrays of shape ``((count - 1) // length, length)``.

    Raises:
      ValueError: the text has no whole row.
    """
    _check_length(text, length + 1)
    rows = (len(text) - 1) // length
    return text[: rows * length].reshape(rows, length), text[1 : rows * length + 1].reshape(rows, length)


def masked_pairs(text: np.ndarray, words: int, length: int, seed: int) -> tuple[np.ndarray, ...]:
    """Makes the batch of BERT's pre-training (Devlin et al. 2019, section 3.1 and appendix A.1).

    A row is [CLS], a segment, [SEP], another segment, [SEP]. In half of the rows, the second
    segment is the one that follows the first in the text. 15 % of the words are to be predicted:
    80 % of them are replaced by [MASK], 10 % by another word.

    Args:
      text: int32 of shape ``(count,)``.
      words: in the vocabulary; [CLS], [SEP] and [MASK] have the next three numbers.
      length: words of a segment.
      seed: of the random choices.

    Returns:
      The arguments of :meth:`examples.models.Bert.loss`, int32: words, segments and masked words,
      of shape ``(rows, 2 length + 3)``, and whether the second segment follows, ``(rows,)``.

    Raises:
      ValueError: the text has no whole row.
    """
    _check_length(text, 2 * length)
    rng = np.random.default_rng(seed)
    segments = text[: len(text) // length * length].reshape(-1, length)
    first, second = segments[:-1:2], segments[1::2]
    rows = len(second)
    follows = rng.integers(2, size=rows, dtype=np.int32)
    other = second[(np.arange(rows) + rng.integers(1, max(rows, 2), rows)) % rows]
    second = np.where(follows[:, None] == 1, second, other)
    clear, end = np.full((rows, 1), words), np.full((rows, 1), words + 1)
    x = np.concatenate([clear, first, end, second, end], axis=1).astype(np.int32)
    masked = np.where((rng.random(x.shape) < 0.15) & (x < words), x, -1).astype(np.int32)
    how = rng.random(x.shape)
    drawn = rng.integers(words, size=x.shape, dtype=np.int32)
    shown = np.where(how < 0.8, words + 2, np.where(how < 0.9, drawn, x))
    x = np.where(masked >= 0, shown, x).astype(np.int32)
    of_segment = np.repeat(np.array([0, 1], np.int32), [length + 2, length + 1])
    return x, np.tile(of_segment, (rows, 1)), masked, follows
