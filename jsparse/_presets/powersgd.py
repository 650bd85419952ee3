"""PowerSGD: low-rank sums of the gradient's matrices."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from .._comm.comm import Comm, CommLike, as_comm
from .._engine.memory import ErrorFeedback, largest_addend
from .._engine.reducer import Reduced, Reducer, counts_of_whole
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_count, check_fields
from .._vector.layout import Layout
from .._vector.parts import Factored, Parts, multiply_window, rescale
from .._vector.pending import Pending
from .._vector.random import key_of


class Matrix(NamedTuple):
    """A leaf seen as a matrix, and the rank of its factors.

    Attributes:
      rows, columns: its shape. Row-major order makes this a reshape that moves nothing.
      rank: columns of each factor.
    """

    rows: int
    columns: int
    rank: int


class LowRankState(NamedTuple):
    """The state of :class:`LowRank`.

    Attributes:
      q: for each compressed matrix, the right factor that the next step begins with, shape
        ``(columns, rank)``. It is the same on all workers.
    """

    q: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class LowRank(Reducer):
    """The reducer of :func:`powersgd`: it sums matrices by two factors, and all else densely.

    It must see the leaves' shapes, so it takes whole vectors: under :class:`Shards` all that is
    left of the leaves is one vector, which :meth:`check_layouts` refuses.

    Attributes:
      rank, min_rate, seed: as in :func:`powersgd`.
    """

    of_the_sum = True
    of_matrices = True

    rank: int = 4
    min_rate: float = 2.0
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        check_count("rank", self.rank, "a number of columns")
        if not self.min_rate >= 0:
            raise ValueError(
                f"min_rate is {self.min_rate}; it is how many times smaller the factors must be than the matrix, at "
                "least 0: 0 compresses every matrix"
            )

    def check_layouts(self, layouts: Sequence[Layout]) -> None:
        shapes = [shape for layout in layouts for shape in layout.shapes]
        if all(len(shape) < 2 for shape in shapes):
            raise ValueError(
                f"factors of low rank are of matrices, and the gradient has none: its leaves have shapes "
                f"{tuple(shapes)}. Pass the parameters in their own shapes, not raveled; over two levels, where a "
                "worker has a shard of a vector, name both axes as one: (inter, intra)"
            )

    def init(self, layout: Layout, size: int) -> LowRankState:
        factors = (
            jax.random.normal(key_of(self.seed, i), (matrix.columns, matrix.rank), layout.dtype)
            for i, matrix in enumerate(self.matrices(layout))
            if matrix
        )
        return LowRankState(tuple(factors))

    def matrices(self, layout: Layout) -> list[Matrix | None]:
        """How each leaf is compressed; None where it is summed densely."""
        return [self._matrix(shape) for shape in layout.shapes]

    def _matrix(self, shape: tuple[int, ...]) -> Matrix | None:
        if len(shape) < 2:
            return None
        splits = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
        rows, columns = min(splits, key=sum)
        if (rows + columns) * self.rank * self.min_rate >= rows * columns:
            return None
        return Matrix(rows, columns, min(self.rank, rows, columns))

    def applied(self, sums: Sequence[jax.Array], bases: Sequence[jax.Array], size: int) -> Sequence[jax.Array]:
        """The right factors of the total, made of the sums of those of the workers."""
        return sums

    def taken(self, own: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The right factors of what a worker delivers, made of its own."""
        return own

    def __call__(
        self, comm: Comm, pending: Pending, state: LowRankState, *, layout: Layout, step: jax.Array, keep: jax.Array
    ) -> Reduced:
        acc = pending.add_up()
        leaves = list(zip(self.matrices(layout), itertools.pairwise(layout.offsets), strict=True))
        limit = largest_addend(acc.dtype, 2 * max([1, *(matrix.rank for matrix, _ in leaves if matrix)]) * comm.size)

        def products(acc: jax.Array, others: Sequence[jax.Array], axis: int) -> list[jax.Array]:
            """Each matrix that travels as factors times one of these, fit to be sent."""
            compressed = [(matrix, begin) for matrix, (begin, _) in leaves if matrix]
            pairs = zip(compressed, others, strict=True)
            return [factor(multiply_window(acc, begin, matrix[:2], other, axis)) for (matrix, begin), other in pairs]

        def factor(x: jax.Array) -> jax.Array:
            """A factor to be sent: finite when summed, and zero in a step that does not count."""
            x = jnp.where(jnp.isnan(x), 0, jnp.clip(x, -limit, limit))
            return jnp.where(keep, x, 0)

        def vector(q: Sequence[jax.Array], rest: Sequence[jax.Array]) -> Parts:
            """The vector whose matrices have these right factors."""
            low, others = iter(zip(bases, q, strict=True)), iter(rest)
            return Parts([Factored(*next(low)) if matrix else next(others) for matrix, _ in leaves])

        p = products(acc, state.q, 1)
        rest = [jnp.where(keep, acc[begin:end], 0) for matrix, (begin, end) in leaves if not matrix]
        own, sums = _sum_together(comm, [*p, *rest])
        rest, p_sums, rest_sums = own[len(p) :], sums[: len(p)], sums[len(p) :]
        # The matrices are cut out of the vector again, once the first sum is there. Otherwise XLA
        # would keep copies of all of them while it waits for the sum.
        again, _ = lax.optimization_barrier((acc, p_sums))
        bases = _orthonormal_bases(p_sums)
        q = products(again, bases, 0)
        q, q_sums = _sum_together(comm, q)
        total, delivered = vector(self.applied(q_sums, bases, comm.size), rest_sums), vector(self.taken(q), rest)
        if q:
            # It depends on the sums, which are finite. Otherwise XLA would keep a copy of the
            # vector, to multiply one matrix after another was subtracted from it. A barrier does
            # not outlast the passes before copies are added.
            delivered = rescale(delivered, lambda x: jnp.where(q_sums[0][0, 0] < jnp.inf, x, 0))
        pairs = zip(state.q, q_sums, bases, strict=True)  # A column without a direction stays.
        after = tuple(directions(new, old, max(len(basis), len(new))) for old, new, basis in pairs)
        return Reduced(again, delivered, delivered, delivered, total, counts_of_whole(acc), LowRankState(after))


def powersgd(
    comm: CommLike,
    *,
    rank: int = 4,
    min_rate: float = 2.0,
    subtract: Literal["local", "mean"] = "local",
    seed: int = 0,
) -> SparseAllReduce:
    """PowerSGD: averages each matrix of the gradient as a product of two thin factors.

    Let ``A_i`` be worker i's gradient of a matrix plus its residual, and ``Q`` the right factor
    of the step before. All workers compute ``P = orthonormalise(sum_i A_i Q)`` and ``Q = mean_i
    A_i^T P``. The update is ``P Q^T``: the mean of the ``A_i``, projected onto the columns of
    ``P``. What was projected away stays in the residual. A step takes two all-reduces, for all
    matrices together, and the exchange of two words that opens each step with a residual.

    A leaf of two or more axes is a matrix. Its axes are cut in two where rows and columns add
    up to least: a kernel ``(in, out)`` stays as it is, a convolution's ``(3, 3, in, out)`` becomes
    ``(9 in, out)``, and PyTorch's ``(out, in, 3, 3)`` becomes ``(out, 9 in)``. Vectors and
    matrices that are too small travel densely with the first all-reduce.

    Factors are computed in float32 (float64, where a leaf is), with products in full precision. A
    column of ``Q`` that becomes zero, as where a gradient is zero or of lower rank, stays as it
    was. All workers must be devices of one kind, so that they orthonormalise equal numbers to
    equal bits.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      rank: columns of each factor, r. The more, the better the update, and the longer the
        messages.
      min_rate: a matrix of m rows and n columns is compressed if ``(m + n) r min_rate < m n``. 0
        compresses every matrix.
      subtract: what a worker takes off its residual: its own part of the update, ``P (A_i^T P)^T``
        (``"local"``, as in the authors' package powersgd), or the update itself (``"mean"``, as in
        PyTorch's hook). Both have the same sum over the workers, so both lose nothing. With
        ``"mean"`` a step takes one product less, but all that differs between the workers'
        gradients piles up in their residuals, and so it warns; with ``"local"`` only what the
        columns of ``P`` do not span.
      seed: of the normal numbers with which ``Q`` begins, the same on all workers.

    Returns:
      A gradient transformation. Its updates have the shapes and types of the gradients.

    Raises:
      ValueError: an argument is out of range. From ``init``: no leaf has two or more axes.

    **Cost**: ``2 (P-1)/P (r s + d)`` words and ``4 log P`` messages a worker, where s is the sum
    of all compressed matrices' rows and columns, and d the elements of all other leaves. A worker
    keeps the residual, as long as the gradient, and r floats for each column of a compressed
    matrix.

    References:
      Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization, NeurIPS 2019, Algorithms 1 and 2.

    Example (dense steps first, as PyTorch's ``start_powerSGD_iter``)::

      tx = optax.chain(
          jsparse.phases(((1000, jsparse.dense("data")), jsparse.powersgd("data"))),
          optax.sgd(0.1, momentum=0.9),
      )
    """
    reducer = LowRank(rank, min_rate, seed)
    return SparseAllReduce.of(Composition(as_comm(comm), reducer, ErrorFeedback(subtract=subtract)))


def _sum_together(comm: Comm, arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays as they are sent, and their sums over the workers, by one all-reduce."""
    if not arrays:
        return [], []
    whole, unravel = ravel_pytree(arrays)
    # Otherwise XLA would compute again what was sent, wherever it is read.
    whole = lax.optimization_barrier(whole)
    return unravel(whole), unravel(comm.psum(whole))


def _orthonormal_bases(matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """An orthonormal basis of each matrix's columns, computed together for those of one shape."""
    bases: dict[int, jax.Array] = {}
    for shape in dict.fromkeys(x.shape for x in matrices):
        ids = [i for i, x in enumerate(matrices) if x.shape == shape]
        bases |= zip(ids, _orthonormal(jnp.stack([matrices[i] for i in ids])), strict=True)
    return [bases[i] for i in range(len(matrices))]


def _orthonormal(x: jax.Array) -> jax.Array:
    """Orthonormal columns that span those of ``x``, shape ``(matrices, rows, rank)``:
    Gram-Schmidt.

    Each column is projected twice. If the second projection takes half of it or more, it was
    nothing but rounding errors, and becomes zero.
    """
    x, rank = _scaled(x), x.shape[2]
    numbers = lax.broadcasted_iota(jnp.int32, (1, rank, 1), 1)

    def project(v: jax.Array, x: jax.Array, k: jax.Array) -> jax.Array:
        products = jnp.einsum("bmr,bmo->bro", x, v, precision=lax.Precision.HIGHEST)
        products = jnp.where(numbers < k, products, 0)
        return v - jnp.einsum("bmr,bro->bmo", x, products, precision=lax.Precision.HIGHEST)

    def column(k: jax.Array, x: jax.Array) -> jax.Array:
        once = project(lax.dynamic_slice_in_dim(x, k, 1, 2), x, k)
        twice = project(once, x, k)
        before, after = (jnp.linalg.norm(v, axis=1, keepdims=True) for v in (once, twice))
        return lax.dynamic_update_slice_in_dim(x, jnp.where(after > before / 2, twice / after, 0), k, 2)

    return lax.fori_loop(0, rank, column, x)


def _scaled(x: jax.Array) -> jax.Array:
    """Columns divided by their largest magnitude, so that squares neither overflow nor vanish."""
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    return x / jnp.where(largest > 0, largest, 1)


def directions(factor: jax.Array, otherwise: jax.Array | float, longer: int) -> jax.Array:
    """The columns of a sum of right factors, at length 1.

    A column that is zero, but for rounding, has no direction. The bound is the rounding of a
    product of so many terms, if they round to either side alike.

    Args:
      factor: shape ``(columns, rank)``.
      otherwise: what stands in place of a column without a direction.
      longer: the matrix's rows or columns, whichever are more.
    """
    size = jnp.max(jnp.abs(factor), axis=0, keepdims=True)
    scaled = _scaled(factor)
    unit = scaled / jnp.maximum(jnp.linalg.norm(scaled, axis=0, keepdims=True), 1)
    return jnp.where(size > longer**0.5 * jnp.finfo(factor.dtype).eps * jnp.max(size), unit, otherwise)
