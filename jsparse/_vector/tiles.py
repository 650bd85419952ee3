"""Matrices in the order of square tiles: JAX's arrays, or NumPy's."""

import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

A = TypeVar("A", jax.Array, np.ndarray)


def has_tiles(shape: Sequence[int], side: int | None) -> bool:
    """Whether a leaf of this shape is in tiles: two or more of its axes are longer than 1."""
    return side is not None and sum(length > 1 for length in shape) > 1


def into_tiles(x: A, side: int | None) -> A:
    """A leaf's elements tile by tile, in the leaf's shape; a leaf without tiles as it is.

    The leaf is seen as a matrix: its last axis longer than 1 are the columns, and all axes before
    it the rows. First come the whole tiles of ``side`` by ``side`` elements, row by row, then the
    narrower ones at the right edge, the lower ones at the bottom, and the corner.

    >>> into_tiles(np.arange(15).reshape(3, 5), 2).reshape(-1)
    array([ 0,  1,  5,  6,  2,  3,  7,  8,  4,  9, 10, 11, 12, 13, 14])
    """
    if side is None or not has_tiles(x.shape, side):
        return x
    rows, columns = matrix_of(x.shape, side)
    matrix = x.reshape(rows, columns)
    parts = []
    for top, bottom, height in spans(rows, side):
        for left, right, width in spans(columns, side):
            cut = matrix[top:bottom, left:right]
            cut = cut.reshape((bottom - top) // height, height, (right - left) // width, width)
            parts.append(cut.swapaxes(1, 2).reshape(-1))
    return x.__array_namespace__().concatenate(parts).reshape(x.shape)


def out_of_tiles(x: A, side: int | None) -> A:
    """The leaf of which :func:`into_tiles` made ``x``."""
    if side is None or not has_tiles(x.shape, side):
        return x
    rows, columns = matrix_of(x.shape, side)
    numbers, vector, begin, bands = x.__array_namespace__(), x.reshape(-1), 0, []
    for top, bottom, height in spans(rows, side):
        band = []
        for left, right, width in spans(columns, side):
            end = begin + (bottom - top) * (right - left)
            tiles = vector[begin:end].reshape((bottom - top) // height, (right - left) // width, height, width)
            band.append(tiles.swapaxes(1, 2).reshape(bottom - top, right - left))
            begin = end
        bands.append(numbers.concatenate(band, axis=1))
    return numbers.concatenate(bands).reshape(x.shape)


def matrix_of(shape: Sequence[int], side: int | None) -> tuple[int, int]:
    """The rows and columns of a leaf: one row, where it has no tiles."""
    if not has_tiles(shape, side):
        return 1, math.prod(shape)
    *leading, columns = [length for length in shape if length > 1]
    return math.prod(leading), columns


def spans(length: int, side: int) -> list[tuple[int, int, int]]:
    """The stretches of an axis that are cut alike: begin, end, and the length of a tile."""
    whole = length // side * side
    both = ((0, whole, side), (whole, length, length - whole))
    return [(begin, end, tile) for begin, end, tile in both if end > begin]
