"""DeMo: the largest frequencies of a decoupled momentum."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._comm.comm import Comm, CommLike
from .._engine.memory import ErrorFeedback
from .._engine.space import Flat
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_kind
from .._vector.buckets import Bucket, Scope
from .._vector.sparse_vector import Leaf, Vector, to_dense
from .._vector.tiles import matrix_of, spans
from ..allreduce import TopkAllGather
from ..select import BlockTopK
from ..wire import Full, Wire
from .general import sparse_allreduce


@dataclasses.dataclass(frozen=True)
class Frequencies(Flat):
    """The leaves in tiles, and each tile as the coefficients of its discrete cosine transform.

    The transform is orthonormal, so a residual keeps in these coordinates what it would keep in
    those of the leaves. A tile's coefficients stand column by column.
    """

    # A coefficient belongs to a tile, and to no element.
    as_leaves: ClassVar[bool] = False

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        arrays = list(map(to_dense, leaves))
        if bucket.dense:
            return super().enter(comms, bucket, arrays, keep, limit)
        return [_forward(leaf.astype(bucket.layout.dtype), self.tiles or 1) for leaf in arrays]

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: Vector) -> Vector:
        if bucket.dense:
            return super().leave(comms, bucket, total)
        leaves = bucket.layout.windows(to_dense(total))
        return jnp.concatenate([_backward(leaf, self.tiles or 1).reshape(-1) for leaf in leaves])


def _forward(leaf: jax.Array, side: int) -> jax.Array:
    """The coefficients of a leaf's tiles, in the leaf's shape.

    Both products are of a matrix with few columns, which is the fastest on CPUs: the tiles are
    turned on their sides in between.
    """
    rows, columns = matrix_of(leaf.shape, side)
    matrix, parts = leaf.reshape(rows, columns), []
    # A coefficient is at most the root of a tile's size times the largest element.
    most = float(jnp.finfo(leaf.dtype).max) / (4 * min(rows, side) ** 0.5 * min(columns, side) ** 0.5)
    matrix = jnp.where(jnp.isfinite(matrix), jnp.clip(matrix, -most, most), matrix)
    for top, bottom, height in spans(rows, side):
        for left, right, width in spans(columns, side):
            cut = _product(matrix[top:bottom, left:right], cosines(width).T)
            tiles = cut.reshape((bottom - top) // height, height, (right - left) // width, width)
            parts.append(_product(tiles.transpose(0, 2, 3, 1), cosines(height).T).reshape(-1))
    return jnp.concatenate(parts).reshape(leaf.shape)


def _backward(coefficients: jax.Array, side: int) -> jax.Array:
    """The leaf of coefficients: the inverse of :func:`_forward`."""
    rows, columns = matrix_of(coefficients.shape, side)
    vector, begin, bands = coefficients.reshape(-1), 0, []
    for top, bottom, height in spans(rows, side):
        band = []
        for left, right, width in spans(columns, side):
            end = begin + (bottom - top) * (right - left)
            tiles = vector[begin:end].reshape((bottom - top) // height, (right - left) // width, width, height)
            tiles = _product(tiles, cosines(height)).transpose(0, 3, 1, 2)
            band.append(_product(tiles, cosines(width)).reshape(bottom - top, right - left))
            begin = end
        bands.append(jnp.concatenate(band, axis=1))
    return jnp.concatenate(bands).reshape(coefficients.shape)


def _product(x: jax.Array, turn: np.ndarray) -> jax.Array:
    """Multiplies each stretch of ``len(turn)`` elements of the last axis by ``turn``."""
    side = len(turn)
    if side == 1:
        return x
    rows = x.reshape(-1, side)
    return jnp.dot(rows, jnp.asarray(turn, x.dtype), precision=lax.Precision.HIGHEST).reshape(x.shape)


@functools.cache
def cosines(side: int) -> np.ndarray:
    """The matrix of the orthonormal discrete cosine transform (DCT-II) of this length."""
    number, place = np.mgrid[:side, :side]
    matrix = np.sqrt(2 / side) * np.cos(np.pi * (2 * place + 1) * number / (2 * side))
    matrix[0] /= np.sqrt(2)
    return matrix


def demo(
    comm: CommLike,
    *,
    k: int = 32,
    chunk: int = 64,
    decay: float | None = None,
    mean: Literal["contributors", "workers"] = "contributors",
    error_feedback: ErrorFeedback | None = None,
    wire: Wire = Full(),
    scope: Scope = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """DeMo, decoupled momentum: workers send the largest frequencies of their momenta.

    A worker adds its gradient to its momentum, and takes the discrete cosine transform of square
    tiles of each matrix. It sends the k largest coefficients of each tile, and keeps the rest as
    its momentum, which decays. The update is the transform back of the mean of what is sent. DeMo
    takes its sign::

      tx = optax.chain(
          jsparse.demo("data", k=32),
          optax.scale_by_sign(),
          optax.add_decayed_weights(0.1),
          optax.scale_by_learning_rate(4e-4),
      )

    The momentum of the paper is the residual here: ``decay`` is its β. In the paper the learning
    rate multiplies each gradient before the momentum; here it follows, which is the same as long
    as it is constant.

    A matrix is cut in tiles of ``chunk`` by ``chunk``, and narrower ones at its edges; a vector
    in stretches of ``chunk`` elements. The authors' code cuts an axis into equal parts of at most
    64 instead. Blocks of ``chunk**2`` coefficients are selected from, one leaf after another:
    they are tiles where all leaves before have a multiple of that many elements, and with
    ``scope="leaf"``.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      k: the coefficients of a block that are sent, of ``chunk**2``.
      chunk: the side of a tile.
      decay: β, by which the momentum is multiplied in each step, above 0 and at most 1; by default
        0.999.
      mean: divide a coefficient by the number of workers that sent it (``"contributors"``, as all
        published codes do) or by the number of all workers (``"workers"``, as the paper's text
        says). With the former the update is larger than what is taken off the momenta.
      error_feedback: ``ErrorFeedback(decay)`` in full, in place of ``decay``, to choose what else
        it has. In DisTrO's code, coefficients are sent as signs alone, a vote of each worker, and
        what that rounds away is lost:
        ``wire=wire.Compact(quantize.Sign(None, zeros=False, norm="one"))`` with
        ``error_feedback=ErrorFeedback(0.999, subtract="sent")``.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation. Its residuals are coefficients, in the order of the tiles, and
      those of a tile column by column.

    Raises:
      ValueError: an argument is out of range; and as from :func:`sparse_allreduce`.

    **Cost**: ``2k n / chunk**2 (P-1)`` words and ``log P`` messages a worker.

    References:
      Peng et al., DeMo: Decoupled Momentum Optimization, ICLR 2026, Algorithm 1, and their code.
    """
    check_kind("chunk", chunk, int)
    if isinstance(error_feedback, bool):
        raise ValueError(
            f"error_feedback is {error_feedback}; the residual is demo's momentum, so pass an ErrorFeedback, or decay"
        )
    if decay is not None and error_feedback is not None:
        raise ValueError(f"decay is {decay}, and error_feedback {error_feedback} has one: pass one of them")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it is the side of a tile, at least 1, such as 64")
    general = sparse_allreduce(
        comm,
        select=BlockTopK(k, chunk**2),
        allreduce=TopkAllGather(),
        wire=wire,
        error_feedback=ErrorFeedback(0.999 if decay is None else decay) if error_feedback is None else error_feedback,
        scope=scope,
        dense_below=dense_below,
        tiles=chunk,
        mean=mean,
    ).synchroniser
    space = Frequencies(scope, dense_below, tiles=chunk)
    return SparseAllReduce.of(dataclasses.replace(general, space=space))
