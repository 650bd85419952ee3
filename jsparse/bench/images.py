"""Image data sets: scikit-learn's digits, and MNIST and CIFAR-10 in their standard files."""

import codecs
import gzip
import math
import pathlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MNIST_PAGE = "https://storage.googleapis.com/cvdf-datasets/mnist"
CIFAR10_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CLASSES = 10


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
        ``data_batch_5.bin`` and ``test_batch.bin``) or Python version (the same without ``.bin``).
        The digits need no directory.

    Raises:
      ValueError: the directory or a file in it is missing, or a file has the wrong format. The
        message names the page from which the files come.
    """
    if name == "digits":
        return _digits()
    if directory is None:
        raise ValueError(f"{name} is read from files: name their directory with --data-dir")
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: point --data-dir at {name}'s files")
    return {"mnist": _mnist, "cifar10": _cifar10}[name](directory)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("the digits are scikit-learn's: pip install scikit-learn") from error

    digits: Any = load_digits()
    x = (digits.images / 16).astype(np.float32)[..., None]
    y = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1440], order[1440:]
    return Images(x[train], y[train], x[test], y[test])


def _mnist(directory: pathlib.Path) -> Images:
    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        x, y = _idx(directory, f"{name}-images-idx3-ubyte"), _idx(directory, f"{name}-labels-idx1-ubyte")
        if len(x) != len(y):
            raise ValueError(
                f"{directory} has {len(x)} images and {len(y)} labels of {name}: fetch both from {MNIST_PAGE}"
            )
        _check_labels(f"{name}-labels-idx1-ubyte", y, MNIST_PAGE)
        return x[..., None].astype(np.float32) / 255, y.astype(np.int32)

    return Images(*part("train"), *part("t10k"))


def _check_labels(name: str, y: np.ndarray, page: str) -> None:
    if (y >= CLASSES).any():
        record = int((y >= CLASSES).argmax())
        raise ValueError(f"{name}, record {record}: the label is {y[record]}, not 0 to 9; fetch the file from {page}")


def _idx(directory: pathlib.Path, name: str) -> np.ndarray:
    """Reads an idx file of unsigned bytes.

    The file holds a magic number, the lengths of the axes (big-endian), and the bytes.
    """
    plain, zipped = directory / name, directory / f"{name}.gz"
    fetch = f"fetch the file from {MNIST_PAGE}"
    if plain.exists():
        raw = plain.read_bytes()
    elif zipped.exists():
        try:
            raw = gzip.decompress(zipped.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{zipped} is not a whole gzip file ({error}): {fetch}") from error
    else:
        raise ValueError(
            f"{directory} has neither {name} nor {name}.gz: put MNIST's four idx files there, from {MNIST_PAGE}"
        )
    axes = 3 if "idx3" in name else 1
    if raw[:4] != bytes([0, 0, 8, axes]) or len(raw) < 4 + 4 * axes:
        raise ValueError(f"{name} is not an idx file of unsigned bytes with {axes} axes: {fetch}")
    shape = np.frombuffer(raw, ">i4", axes, 4)
    if (shape < 0).any() or len(raw) != 4 + 4 * axes + math.prod(shape.tolist()):
        raise ValueError(f"{name} has {len(raw)} bytes, which does not fit its shape {tuple(shape.tolist())}: {fetch}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar10(directory: pathlib.Path) -> Images:
    """Reads the binary version, or the Python one if its first file is there."""
    python = (directory / "data_batch_1").exists()
    read, end = (_pickled, "") if python else (_records, ".bin")

    def batches(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for name in names:
            if not (directory / name).exists():
                raise ValueError(f"{directory} lacks {name}: put CIFAR-10's files there, from {CIFAR10_PAGE}")
            x, y = read(directory / name)
            _check_labels(name, y, CIFAR10_PAGE)
            found.append((x, y))
        x, y = (np.concatenate(some) for some in zip(*found, strict=True))
        return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32) / 255, y.astype(np.int32)

    return Images(*batches([f"data_batch_{i}{end}" for i in range(1, 6)]), *batches([f"test_batch{end}"]))


def _records(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of the binary version: pixels ``(count, 3072)`` and labels, both uint8.

    A record is one label byte and 3,072 pixel bytes: a plane of red, one of green and one of blue.
    """
    raw = np.fromfile(path, np.uint8)
    if not raw.size or raw.size % 3073:
        raise ValueError(
            f"{path.name} has {raw.size} bytes, not a multiple of 3,073: fetch the file from {CIFAR10_PAGE}"
        )
    every = raw.reshape(-1, 3073)
    return every[:, 1:], every[:, 0]


class _Arrays(pickle.Unpickler):
    """Unpickles NumPy's arrays and plain values, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        # Files name the modules of NumPy 1.
        allowed: dict[str, Callable[..., Any]] = {
            "_reconstruct": np._core.multiarray._reconstruct,  # pyright: ignore[reportAttributeAccessIssue]
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "encode": codecs.encode,
        }
        if module.partition(".")[0] not in ("numpy", "_codecs") or name not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return allowed[name]


def _pickled(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of the Python version, a pickled dict, as :func:`_records` does."""
    try:
        with path.open("rb") as file:
            batch = _Arrays(file, encoding="bytes").load()
        x, y = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        if x.dtype != np.uint8 or x.shape != (len(y), 3072) or y.dtype.kind != "i" or (y < 0).any():
            raise ValueError(f"data of {x.shape} {x.dtype}, labels of {y.shape} {y.dtype}")
    # A damaged pickle raises errors of many kinds.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path.name} is not a batch of CIFAR-10's Python version ({what}): fetch the file from {CIFAR10_PAGE}"
        ) from error
    return x, y
