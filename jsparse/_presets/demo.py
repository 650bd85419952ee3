"""DeMo: the largest frequencies of a decoupled momentum."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
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
from .._vector.sparse_vector import Leaf, SparseVector, to_dense
from .._vector.tiles import regions
from ..allreduce import TopkAllGather
from ..select import BlockTopK
from ..wire import Full, Wire
from .general import sparse_allreduce


@dataclasses.dataclass(frozen=True)
class Frequencies(Flat):
    """The leaves in tiles, and each tile as the coefficients of its discrete cosine transform.

    The transform is orthonormal, so a residual keeps in these coordinates what it would keep in
    those of the leaves.
    """

    # A coefficient belongs to a tile, and to no element.
    as_leaves: ClassVar[bool] = False

    def enter(
        self, comms: Sequence[Comm], bucket: Bucket, leaves: Sequence[Leaf], keep: jax.Array, limit: float
    ) -> Sequence[Leaf]:
        parts = super().enter(comms, bucket, list(map(to_dense, leaves)), keep, limit)
        if bucket.dense:
            return parts
        return [self._turned(_forward, to_dense(part).astype(bucket.layout.dtype)) for part in parts]

    def leave(self, comms: Sequence[Comm], bucket: Bucket, total: SparseVector | jax.Array) -> SparseVector | jax.Array:
        if bucket.dense:
            return super().leave(comms, bucket, total)
        leaves = bucket.layout.windows(to_dense(total))
        turned = [self._turned(_backward, leaf).reshape(-1) for leaf in leaves]
        return super().leave(comms, bucket, jnp.concatenate(turned))

    def _turned(self, turn: Callable[[jax.Array], jax.Array], leaf: jax.Array) -> jax.Array:
        """A leaf that is in tiles, each of which is turned."""
        vector = leaf.reshape(-1)
        parts = [
            turn(vector[begin:end].reshape(-1, height, width)).reshape(-1)
            for begin, end, height, width in regions(leaf.shape, self.tiles or 1)
        ]
        return jnp.concatenate(parts).reshape(leaf.shape)


def _forward(tiles: jax.Array) -> jax.Array:
    """The coefficients of tiles, shape ``(tiles, height, width)``."""
    left, right = (jnp.asarray(cosines(side), tiles.dtype) for side in tiles.shape[1:])
    # A coefficient is at most the root of the tile's size times the largest element.
    most = float(jnp.finfo(tiles.dtype).max) / (4 * math.sqrt(left.size * right.size) ** 0.5)
    tiles = jnp.where(jnp.isfinite(tiles), jnp.clip(tiles, -most, most), tiles)
    return _products(left, tiles, right.T)


def _backward(coefficients: jax.Array) -> jax.Array:
    """The tiles of coefficients: the inverse of :func:`_forward`."""
    left, right = (jnp.asarray(cosines(side), coefficients.dtype) for side in coefficients.shape[1:])
    return _products(left.T, coefficients, right)


def _products(left: jax.Array, tiles: jax.Array, right: jax.Array) -> jax.Array:
    tiles = jnp.einsum("ij,bjk->bik", left, tiles, precision=lax.Precision.HIGHEST)
    return jnp.einsum("bik,kl->bil", tiles, right, precision=lax.Precision.HIGHEST)


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
    decay: float = 0.999,
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
      decay: β, by which the momentum is multiplied in each step, above 0 and at most 1.
      mean: divide a coefficient by the number of workers that sent it (``"contributors"``, as all
        published codes do) or by the number of all workers (``"workers"``, as the paper's text
        says). With the former the update is larger than what is taken off the momenta.
      error_feedback: ``ErrorFeedback(decay)`` in full, to choose what else it has. In DisTrO's
        code, coefficients are sent as signs alone, and what that rounds away is lost:
        ``wire=wire.Compact(quantize.Sign(None, zeros=False))`` with
        ``error_feedback=ErrorFeedback(0.999, subtract="sent")``. With the default it is kept.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation. Its residuals are coefficients, in the order of the tiles.

    Raises:
      ValueError: an argument is out of range.

    **Cost**: ``2k n / chunk**2 (P-1)`` words and ``log P`` messages a worker.

    References:
      Peng et al., DeMo: Decoupled Momentum Optimization, ICLR 2026, Algorithm 1, and their code.
    """
    check_kind("chunk", chunk, int)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it is the side of a tile, at least 1, such as 64")
    general = sparse_allreduce(
        comm,
        select=BlockTopK(k, chunk**2),
        allreduce=TopkAllGather(),
        wire=wire,
        error_feedback=ErrorFeedback(decay) if error_feedback is None else error_feedback,
        scope=scope,
        dense_below=dense_below,
        tiles=chunk,
        mean=mean,
    ).synchroniser
    space = Frequencies(scope, dense_below, tiles=chunk)
    return SparseAllReduce.of(dataclasses.replace(general, space=space))
