"""AN4: spoken letters, numbers and names, as spectrograms of wav files or as mel cepstra."""

import pathlib
import re
import wave
from typing import Literal, NamedTuple

import numpy as np

from .files import damaged, read_bytes, read_lines

PAGE = "http://www.speech.cs.cmu.edu/databases/an4"
RATE = 16000
# 20 ms and 10 ms.
WINDOW, HOP = 320, 160
CEPSTRA = 13
# A label is a place in it; the first is CTC's blank.
LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "


class Utterances(NamedTuple):
    """Utterances, padded with 0 to the longest one.

    Attributes:
      frames: features, float32 of shape ``(count, longest, bins)``.
      lengths: frames of each utterance, int32 of shape ``(count,)``.
      labels: of the letters, int32 of shape ``(count, most)``.
      counts: letters of each utterance, int32 of shape ``(count,)``.
    """

    frames: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


def read_an4(directory: pathlib.Path, features: Literal["mfcc", "spectrogram"]) -> tuple[Utterances, Utterances]:
    """Reads the training and the test utterances.

    Args:
      directory: of ``etc/an4_{train,test}.{fileids,transcription}`` and of the features' files.
      features: ``"mfcc"`` reads ``feat/**/*.mfc``, 13 coefficients a frame, each of mean 0 and
        variance 1 in an utterance. ``"spectrogram"`` reads ``wav/**/*.wav``: see
        :func:`spectrogram`.

    Raises:
      ValueError: a file is missing or has another form, or a transcription has other letters.
    """
    train, test = (_read(directory, part, features) for part in ("train", "test"))
    return train, test


def _read(directory: pathlib.Path, part: str, features: str) -> Utterances:
    ids = [line.strip() for line in read_lines(directory / f"etc/an4_{part}.fileids", PAGE)]
    labels = _labels(directory / f"etc/an4_{part}.transcription", ids)
    if features == "mfcc":
        frames = [cepstra(directory / f"feat/{name}.mfc") for name in ids]
    else:
        frames = [spectrogram(directory / f"wav/{name}.wav") for name in ids]
    return Utterances(*_padded(frames), *_padded(labels))


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    found = np.zeros((len(rows), lengths.max(), *rows[0].shape[1:]), rows[0].dtype)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found, lengths


def _labels(path: pathlib.Path, ids: list[str]) -> list[np.ndarray]:
    """The letters of lines such as ``<s> GO </s> (an253-fash-b)``; the marks may be absent."""
    lines = read_lines(path, PAGE)
    if len(lines) != len(ids):
        raise damaged(path, f"has {len(lines)} lines for {len(ids)} fileids", PAGE)
    found = []
    for number, (line, name) in enumerate(zip(lines, ids, strict=True), 1):
        match = re.fullmatch(r"(?:<s>)?\s*(.*?)\s*(?:</s>)?\s*\((.*)\)\s*", line)
        if not match or match[2] != name.rpartition("/")[2]:
            raise damaged(path, f"{line!r} is not a transcription of {name}", PAGE, number)
        other = set(match[1]) - set(LABELS[1:])
        if other or not match[1]:
            raise damaged(path, f"{line!r} has other characters than A to Z, ' and space, or none", PAGE, number)
        found.append(np.array([LABELS.index(letter) for letter in match[1]], np.int32))
    return found


def cepstra(path: pathlib.Path) -> np.ndarray:
    """Reads mel cepstra: a big-endian int32, the number of the big-endian float32 that follow.

    Returns:
      Float32 of shape ``(frames, 13)``; each coefficient has mean 0 and variance 1.
    """
    raw = read_bytes(path, PAGE)
    count = int.from_bytes(raw[:4], "big", signed=True)
    if count <= 0 or count % CEPSTRA or len(raw) != 4 + 4 * count:
        what = f"{len(raw)} bytes begin with the number {count}: not the count of the floats after it, 13 a frame"
        raise damaged(path, what, PAGE)
    found = np.frombuffer(raw, ">f4", offset=4).reshape(-1, CEPSTRA).astype(np.float32)
    bad = ~np.isfinite(found).all(1)
    if bad.any():
        raise damaged(path, f"frame {bad.argmax()} is not finite", PAGE)
    return (found - found.mean(0)) / np.maximum(found.std(0), 1e-6)


def spectrogram(path: pathlib.Path) -> np.ndarray:
    """Computes the spectrogram of a wav file of 16 kHz, 16 bits and one channel.

    Windows (Hamming) have 320 samples, 20 ms, and begin every 10 ms.

    Returns:
      ``log(1 + magnitude)`` of 161 bins: float32 of shape ``(frames, 161)``. The mean of all is 0,
      and the variance 1.
    """
    try:
        with wave.open(str(path)) as file:
            form = file.getframerate(), 8 * file.getsampwidth(), file.getnchannels()
            count, raw = file.getnframes(), file.readframes(file.getnframes())
    except OSError as error:
        raise damaged(path, f"can't be read ({error.strerror})", PAGE) from error
    except (wave.Error, EOFError) as error:
        raise damaged(path, f"is not a wav file ({str(error) or 'it ends too early'})", PAGE) from error
    if form != (RATE, 16, 1):
        raise damaged(path, f"has {form[0]} Hz, {form[1]} bits, {form[2]} channels, not 16000, 16 and 1", PAGE)
    if len(raw) != 2 * count or count < WINDOW:
        raise damaged(path, f"has {len(raw) // 2} samples of {count}, and at least {WINDOW} are needed", PAGE)
    samples = np.frombuffer(raw, "<i2") / 2**15
    parts = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    found = np.log1p(np.abs(np.fft.rfft(parts * np.hamming(WINDOW))))
    return ((found - found.mean()) / np.maximum(found.std(), 1e-6)).astype(np.float32)
