"""Image data sets: scikit-learn's digits, and MNIST and CIFAR-10 in their standard files."""

import gzip
import pathlib
from typing import Any, NamedTuple

import numpy as np


class Images(NamedTuple):
    """Training and test images with their labels.

    Images are float32 in [0, 1], of shape ``(count, height, width, channels)``; labels are int32,
    of shape ``(count,)``.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load_images(name: str, directory: pathlib.Path | None = None) -> Images:
    """Loads a data set.

    Args:
      name: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
      directory: where the files are: MNIST's four idx files (``train-images-idx3-ubyte`` and so
        on, gzipped or not), or CIFAR-10's binary version (``data_batch_1.bin`` to
        ``data_batch_5.bin`` and ``test_batch.bin``). The digits need no directory.

    Raises:
      ValueError: the directory or a file in it is missing, or a file has the wrong format.
    """
    if name == "digits":
        return _digits()
    if directory is None:
        raise ValueError(f"{name} is read from files: name their directory with --data-dir")
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: point --data-dir at {name}'s files")
    return {"mnist": _mnist, "cifar10": _cifar10}[name](directory)


def _digits() -> Images:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    x = (digits.images / 16).astype(np.float32)[..., None]
    y = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1440], order[1440:]
    return Images(x[train], y[train], x[test], y[test])


def _mnist(directory: pathlib.Path) -> Images:
    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        x, y = _idx(directory, f"{name}-images-idx3-ubyte"), _idx(directory, f"{name}-labels-idx1-ubyte")
        return x[..., None].astype(np.float32) / 255, y.astype(np.int32)

    return Images(*part("train"), *part("t10k"))


def _idx(directory: pathlib.Path, name: str) -> np.ndarray:
    """Reads an idx file of unsigned bytes.

    The file holds a magic number, the lengths of the axes (big-endian), and the bytes.
    """
    plain, zipped = directory / name, directory / f"{name}.gz"
    if plain.exists():
        raw = plain.read_bytes()
    elif zipped.exists():
        raw = gzip.decompress(zipped.read_bytes())
    else:
        raise ValueError(f"{directory} has neither {name} nor {name}.gz: put MNIST's four idx files there")
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{name} is not an idx file of unsigned bytes: fetch it anew")
    axes = raw[3]
    shape = np.frombuffer(raw, ">i4", axes, 4)
    if len(raw) != 4 + 4 * axes + int(np.prod(shape)):
        raise ValueError(f"{name} has {len(raw)} bytes, which does not fit its shape {tuple(shape)}: fetch it anew")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar10(directory: pathlib.Path) -> Images:
    """Reads the binary version.

    A record is one label byte and 3,072 pixel bytes: a plane of red, one of green and one of blue.
    """

    def batches(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        records = []
        for name in names:
            if not (directory / name).exists():
                raise ValueError(f"{directory} lacks {name}: put CIFAR-10's binary version there")
            raw = np.fromfile(directory / name, np.uint8)
            if raw.size % 3073:
                raise ValueError(f"{name} has {raw.size} bytes, not a multiple of 3,073: fetch it anew")
            records.append(raw.reshape(-1, 3073))
        every = np.concatenate(records)
        x = every[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32) / 255
        return x, every[:, 0].astype(np.int32)

    return Images(*batches([f"data_batch_{i}.bin" for i in range(1, 6)]), *batches(["test_batch.bin"]))
