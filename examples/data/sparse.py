"""Batches of sparse rows, in arrays of static length; and made-up rows of any size."""

from typing import NamedTuple

import numpy as np

from .libsvm import Rows


class Batches(NamedTuple):
    """A worker's batches, one after the other along the leading axis.

    The distinct columns of a batch are known before training. So a step reads and writes only
    those of the weights, and nobody has to search for the gradient's non-zero elements.

    Attributes:
      columns: int32 of shape ``(batches, capacity)``: a batch's distinct columns, ascending, and
        in unused places the number of all columns.
      places: int32 of shape ``(batches, elements)``: where an element's column is in ``columns``.
      rows: int32 of the same shape: an element's row within the batch, ascending.
      values: float32 of the same shape; 0 in unused places.
      labels: float32 of shape ``(batches, size)``.
      present: float32 of the same shape: 1 for a row, 0 for an unused place of the last batch.
    """

    columns: np.ndarray
    places: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    present: np.ndarray


def cut(rows: Rows, size: int, seed: int) -> list[Rows]:
    """Divides rows, in a random order, into batches of ``size`` rows; the last may have fewer."""
    order = np.random.default_rng(seed).permutation(rows.labels.size)
    batches = []
    for start in range(0, order.size, size):
        chosen = order[start : start + size]
        lengths = rows.indptr[chosen + 1] - rows.indptr[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        elements = np.arange(indptr[-1]) + np.repeat(rows.indptr[chosen] - indptr[:-1], lengths)
        batches.append(Rows(indptr, rows.indices[elements], rows.values[elements], rows.labels[chosen]))
    return batches


def columns(rows: Rows) -> int:
    """The least number of columns that the rows can have."""
    return int(rows.indices.max(initial=-1)) + 1


def sizes(batches: list[Rows]) -> tuple[int, int, int]:
    """The number of batches, and the most distinct columns and the most elements of any."""
    columns = max((np.unique(batch.indices).size for batch in batches), default=0)
    return len(batches), columns, max((batch.indices.size for batch in batches), default=0)


def pad(batches: list[Rows], size: int, count: int, capacity: int, elements: int, columns: int) -> Batches:
    """The batches as arrays of these lengths; the batches that are missing are empty.

    Args:
      batches: at most ``count``, each of at most ``size`` rows.
      size: rows of a batch.
      count, capacity, elements: at least what :func:`sizes` says, and alike on all workers.
      columns: the number of all columns.
    """
    result = Batches(
        np.full((count, capacity), columns, np.int32),
        np.zeros((count, elements), np.int32),
        np.full((count, elements), size - 1, np.int32),
        np.zeros((count, elements), np.float32),
        np.zeros((count, size), np.float32),
        np.zeros((count, size), np.float32),
    )
    for i, batch in enumerate(batches):
        found, places = np.unique(batch.indices, return_inverse=True)
        result.columns[i, : found.size] = found
        result.places[i, : places.size] = places
        result.rows[i, : places.size] = np.repeat(np.arange(batch.labels.size), np.diff(batch.indptr))
        result.values[i, : places.size] = batch.values
        result.labels[i, : batch.labels.size] = batch.labels
        result.present[i, : batch.labels.size] = 1
    return result


class Kind(NamedTuple):
    """A kind of made-up data: the r-th most frequent column occurs as often as ``r^-exponent``.

    Attributes:
      columns: how many there are, below ``2**31``.
      used: how many of them occur at all.
      draws: columns drawn for a row; those drawn twice count once.
      exponent: of the power law, above 1.
      spread: whether used columns stand anywhere. Otherwise they stand first, the frequent ones
        before the others.
    """

    columns: int
    used: int
    draws: int
    exponent: float
    spread: bool


# The dimensions of the thesis's data sets, with about as many columns a row: 115 and 3,700. Of
# Webspam's columns, all but 680,715 are empty.
KINDS = {
    "url": Kind(3_231_961, 3_231_961, 580, 1.5, True),
    "webspam": Kind(16_609_143, 680_715, 16_000, 1.2, False),
}
# Rows are drawn in groups of so many, to save memory.
GROUP = 100


def made_up(rows: int, kind: Kind, seed: int) -> Rows:
    """Makes up rows, with labels that weights of their own decide, alike on all workers.

    Args:
      rows: how many.
      kind: which columns they have.
      seed: of this worker's rows.
    """
    rng = np.random.default_rng(seed)
    # To multiply by a number that has no divisor in common with ``columns`` permutes them.
    factor = next(f for f in range(kind.columns // 3 * 2 + 1, 2 * kind.columns) if np.gcd(f, kind.columns) == 1)
    power = 1 - kind.exponent
    parts = []
    for start in range(0, rows, GROUP):
        uniform = rng.random((min(GROUP, rows - start), kind.draws))
        ranks = np.int64((1 + uniform * ((kind.used + 1.0) ** power - 1)) ** (1 / power)) - 1
        found = np.sort(ranks * factor % kind.columns if kind.spread else ranks, axis=1)
        new = np.diff(found, axis=1, prepend=-1) > 0
        parts.append((new.sum(axis=1), found[new].astype(np.int32)))
    lengths, indices = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    values = np.repeat(1 / np.sqrt(lengths), lengths).astype(np.float32)
    # A column's weight is a hash of its number.
    weights = (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) / 2.0**23 - 1
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    margins = np.add.reduceat(weights * values, indptr[:-1]) + 0.1 * rng.normal(size=rows)
    return Rows(indptr, indices, values, np.where(margins > 0, 1, -1).astype(np.float32))
