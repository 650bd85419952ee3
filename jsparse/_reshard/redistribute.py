"""Arrays of several workers, divided among another number of workers; on the host, in NumPy."""

import numpy as np

# How many elements are computed at a time, so that they stay in the cache.
CHUNK = 2**16


def redistribute(rows: np.ndarray, size: int, before: int, after: int) -> np.ndarray:
    """Makes ``size`` vectors whose sum is ``after / before`` times that of the given vectors.

    Think of the given rows as lying side by side, all equally wide, and of the new rows as lying
    over the same stretch. A new row is the mean of the old rows that it covers, times a factor
    common to all. So no worker has more to deliver than others, magnitudes stay comparable to
    those of thresholds, and values that were not negative stay so.

    If each old row covers a whole number of new ones, and the factor is 1, it is copied. Otherwise
    new rows are differences of running sums. These are rounded to whole multiples of the smallest
    bit that is set in the old rows or in the new sum. So the differences add up to that sum
    exactly if they are representable, as differences of integers are, and otherwise to rounding.

    A value that is not finite reaches only those new rows that cover its row.

    Args:
      rows: shape ``(old size, n)``, floats.
      size: how many new rows to make.
      before: by what the old sum is divided to get the mean.
      after: by what the new sum is divided to get the same mean.

    Returns:
      Shape ``(size, n)``, of the type of ``rows``.
    """
    old = len(rows)
    if size % old == 0 and size * before == old * after:
        return rows[np.arange(size) * old // size]
    result = np.empty((size, rows.shape[1]), rows.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # Given values may be infinite or NaN.
        for begin in range(0, rows.shape[1], CHUNK):
            part = slice(begin, begin + CHUNK)
            _deal(rows[:, part], result[:, part], before, after)
            spoilt = begin + np.flatnonzero(~np.isfinite(rows[:, part]).all(0))
            if spoilt.size:
                result[:, spoilt] = _means(rows[:, spoilt], size, before, after)
    return result


def _deal(rows: np.ndarray, result: np.ndarray, before: int, after: int) -> None:
    size = len(result)
    wide = rows.astype(np.float64)
    total = (wide.sum(0) * after / before).astype(rows.dtype)
    unit = np.minimum(np.min(_last_bit(wide), axis=0), _last_bit(total.astype(np.float64)))
    begun, passed, given = 0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for number, row in enumerate(result, 1):
        end, rest = divmod(number * len(rows), size)
        passed = passed + wide[begun:end].sum(0)
        begun = end
        reached = passed * size + wide[end] * rest if rest else passed * size
        reached = reached * after / (before * size)
        units = reached / unit  # From 2**53 on it is whole, or too large for a float.
        reached = np.where(np.abs(units) < 2.0**53, np.rint(units) * unit, reached)
        # What rounding loses here is not added to the next row, which may be far smaller.
        row[:] = reached - given
        given = reached


def _means(rows: np.ndarray, size: int, before: int, after: int) -> np.ndarray:
    """The same without running sums: of each new row from those alone that it covers."""
    new, old = np.arange(size)[:, None] * len(rows), np.arange(len(rows)) * size
    overlap = np.minimum(new + len(rows), old + size) - np.maximum(new, old)
    wide = rows.astype(np.float64)
    sums = [(wide[parts > 0] * parts[parts > 0, None]).sum(0) for parts in overlap]
    return (np.stack(sums) * after / (before * size)).astype(rows.dtype)


def _last_bit(x: np.ndarray) -> np.ndarray:
    """The power of two of which each float64 is an odd multiple.

    It is a large one for 0 and for values that are not finite.
    """
    some = (x != 0) & np.isfinite(x)
    mantissa, exponent = np.frexp(np.where(some, x, 1))
    whole = (mantissa * 2.0**53).astype(np.int64)
    return np.where(some, np.ldexp((whole & -whole).astype(np.float64), exponent - 53), 2.0**1000)


def joined(parts: np.ndarray, nodes: int, gpus: int, shards: int, n: int) -> np.ndarray:
    """The vectors that the workers of each node hold in parts, shape ``(nodes, shards, n)``.

    Args:
      parts: those of all devices end to end: node by node, in a node worker by worker, and in a
        worker shard by shard of the model.
      nodes: the number of nodes.
      gpus: the number of workers in a node.
      shards: the number of devices of a worker.
      n: the length of a vector. Its last parts may be filled up.
    """
    return parts.reshape(nodes, gpus, shards, -1).swapaxes(1, 2).reshape(nodes, shards, -1)[:, :, :n]


def parted(vectors: np.ndarray, gpus: int) -> np.ndarray:
    """The inverse of :func:`joined`: all parts end to end, the last ones filled up with zeros."""
    nodes, shards, n = vectors.shape
    width = -(-n // gpus)
    filled = np.pad(vectors, ((0, 0), (0, 0), (0, gpus * width - n)))
    return filled.reshape(nodes, shards, gpus, width).swapaxes(1, 2).reshape(-1)


def nearest(rows: np.ndarray, size: int) -> np.ndarray:
    """For each new row, the given row over which it begins: for arrays that have no mean."""
    return rows[np.arange(size) * len(rows) // size]


def interpolate(starts: np.ndarray, n: int, size: int) -> np.ndarray:
    """Where ``size`` regions of ``n`` indices begin that hold equal parts of the contents.

    Args:
      starts: where the old regions begin. Each holds an equal part, evenly over its indices.
      n: the number of indices.
      size: the number of new regions.
    """
    edges = np.append(starts, n)
    at = np.arange(size) * len(starts) / size
    return np.interp(at, np.arange(len(edges)), edges).astype(starts.dtype)
