"""LIBSVM's sparse rows, read whole or by many processes in parallel."""

import io
import pathlib
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_svmlight_file

from .files import damaged

PAGE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"


class Rows(NamedTuple):
    """Sparse rows in CSR form.

    Attributes:
      indptr: int64 of shape ``(rows + 1,)``; row i has the elements ``indptr[i]:indptr[i + 1]``.
      indices: columns from 0 on, ascending in a row; int32 of shape ``(elements,)``.
      values: float32 of shape ``(elements,)``.
      labels: float32 of shape ``(rows,)``.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    labels: np.ndarray


def read_libsvm(path: pathlib.Path, part: int = 0, parts: int = 1) -> Rows:
    """Reads a part of a file of lines ``label index:value index:value``, and only its bytes.

    The file's bytes are divided evenly. A line belongs to the part in which it begins. So every
    row is in one part, and the parts, one after the other, are the file.

    Args:
      path: of the file. Its columns count from 1. Comments (``#``), ``qid`` and blank lines are
        ignored.
      part: from 0 to ``parts - 1``, such as the process's index.
      parts: such as the number of processes.

    Raises:
      ValueError: the file is missing, a line of the part has another form or a number that is not
        finite, or there is no such part.
    """
    if not 0 <= part < parts:
        raise ValueError(f"part is {part} of {parts}: choose from 0 to parts - 1")
    # scikit-learn's own byte ranges repeat a row if a range ends in a comment, or is in one line.
    begin, text = _own_lines(path, part, parts)
    try:
        return _parsed(text)
    except (ValueError, OverflowError):
        for number, line in enumerate(text.split(b"\n"), 1):
            try:
                _parsed(line)
            except (ValueError, OverflowError) as error:
                with path.open("rb") as file:
                    number += file.read(begin).count(b"\n")
                raise damaged(path, f"{line[:60]!r} is no row ({error})", PAGE, number) from error
        raise


def _own_lines(path: pathlib.Path, part: int, parts: int) -> tuple[int, bytes]:
    """The lines that begin in a part's bytes, and where the first of them begins."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            first, end = size * part // parts, size * (part + 1) // parts
            file.seek(max(first - 1, 0))
            if first:
                file.readline()  # The line of the byte before begins in an earlier part.
            begin = file.tell()
            if begin >= end:
                return begin, b""
            text = file.read(end - begin)
            return begin, text if text.endswith(b"\n") else text + file.readline()
    except OSError as error:
        raise damaged(path, f"can't be read ({error.strerror})", PAGE) from error


def _parsed(text: bytes) -> Rows:
    load: Any = load_svmlight_file  # Its inferred types are too narrow.
    rows, labels = load(io.BytesIO(text), zero_based=False)
    with np.errstate(over="ignore"):
        values, labels = rows.data.astype(np.float32), labels.astype(np.float32)
    if not np.isfinite(values).all() or not np.isfinite(labels).all():
        raise ValueError("a number is not finite in float32")
    return Rows(rows.indptr.astype(np.int64), rows.indices.astype(np.int32), values, labels)
