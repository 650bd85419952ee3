"""Dion: orthonormal updates of low rank, from momenta that stay with the workers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from .._comm.comm import CommLike, as_comm
from .._engine.memory import ErrorFeedback
from .._engine.space import Flat
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_fields
from .dense import dense
from .powersgd import LowRank, Matrix, directions


@dataclasses.dataclass(frozen=True)
class Orthonormal(LowRank):
    """The reducer of :func:`scale_by_dion`: factors as of PowerSGD, an update without their sizes.

    Its total is the update times the number of workers, and no sum of what they deliver.

    Attributes:
      rank_fraction, momentum: as in :func:`scale_by_dion`.
    """

    conserves = False

    rank_fraction: float = 0.25
    momentum: float = 0.95

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.rank_fraction <= 1:
            raise ValueError(
                f"rank_fraction is {self.rank_fraction}; it is the rank over the shorter side of a matrix, above 0 and "
                "at most 1, such as 0.25"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it is at least 0 and below 1, such as 0.95")

    def _matrix(self, shape: tuple[int, ...]) -> Matrix | None:
        if not orthonormalises(shape):
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return Matrix(rows, columns, math.ceil(self.rank_fraction * min(rows, columns) - 1e-9))

    def check_shard(self, name: str, shape: Sequence[int], shard: Sequence[int]) -> None:
        if orthonormalises(shape) and not orthonormalises(shard):
            raise ValueError(
                f"leaf {name} has shape {tuple(shape)}, and each device of a worker holds a shard of {tuple(shard)}: "
                "a single row or column has nothing to make orthonormal. Cut the leaf otherwise, by its spec or "
                "the sizes of the mesh's axes, so that a shard has two rows and two columns at least; or leave it to "
                "another optimizer: by matrices= of jsparse.dion, or by optax.partition around scale_by_dion"
            )

    def applied(self, sums: Sequence[jax.Array], bases: Sequence[jax.Array], size: int) -> Sequence[jax.Array]:
        pairs = zip(sums, bases, strict=True)
        return [size * math.sqrt(len(q) / len(p)) * directions(q, 0, max(len(p), len(q))) for q, p in pairs]

    def taken(self, own: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return [(1 - self.momentum) * q for q in own]


def orthonormalises(shape: Sequence[int]) -> bool:
    """Whether a leaf of this shape is a matrix to :func:`scale_by_dion`."""
    return len(shape) > 1 and min(math.prod(shape[:-1]), shape[-1]) > 1


def scale_by_dion(
    comm: CommLike, *, rank_fraction: float = 0.25, momentum: float = 0.95, seed: int = 0
) -> SparseAllReduce:
    """Dion's updates of matrices: orthonormal, of low rank, and of the workers' mean momentum.

    Let ``M_i`` be worker i's momentum of a matrix, to which it has added its gradient, and ``Q``
    the right factor of the step before. All workers compute ``P = orthonormalise(sum_i M_i Q)``
    and ``R = mean_i M_i^T P``, as in PowerSGD. The update is ``sqrt(b/a) P Q'^T`` for a matrix of
    a rows and b columns, where ``Q'`` has the columns of ``R``, scaled to length 1: only
    directions are left. Each worker takes ``(1 - m) P (M_i^T P)^T`` off its momentum. So momenta
    stay with the workers, and are never summed; yet the updates are those of one momentum of the
    mean gradient.

    A leaf of two or more axes is a matrix: the last axis has its columns, the outputs of a layer,
    and all others its rows. All other leaves, and matrices of a single row or column, are averaged
    densely, as they are. For these use another optimizer: :func:`dion` is the whole one.

    In a :doc:`sharded model <sharded>` each shard is such a matrix. A leaf that no axis cuts is
    orthonormalised whole on each device of a worker, on all of them alike.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      rank_fraction: the rank over the shorter side of a matrix, above 0 and at most 1. From about
        a half on, the factors are longer than the matrix.
      momentum: m, at least 0 and below 1; the paper's μ.
      seed: of the normal numbers with which ``Q`` begins, the same on all workers.

    Returns:
      A gradient transformation. The momentum of a worker is its residual.

    Raises:
      ValueError: an argument is out of range. From ``init``: no leaf has two or more axes; or a
        shard of a matrix is a single row or column.

    **Cost**: ``2 (P-1)/P (r s + d)`` words and ``4 log P`` messages a worker: of each matrix the
    rank times its rows and columns, and the elements of all other leaves. A step orthonormalises a
    column after the other.

    References:
      Ahn et al., Dion: Distributed Orthonormalized Updates, 2025, Algorithm 1 and their code. In
      the paper a worker takes ``(1 - m) P R^T`` off, so that all that differs between workers
      piles up in their momenta; here it takes its own share off, which has the same mean. The code
      scales by ``sqrt(fan_out / fan_in)``, as here.
    """
    reducer = Orthonormal(seed=seed, rank_fraction=rank_fraction, momentum=momentum)
    # A mean of gradients in place of an update would be far too large, so none goes densely.
    space = Flat(share_whole=False)
    return SparseAllReduce.of(Composition(as_comm(comm), reducer, ErrorFeedback(), space))


def dion(
    comm: CommLike,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank_fraction: float = 0.25,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    others: optax.GradientTransformation | None = None,
    matrices: Callable[[optax.Params], Any] | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Dion, a whole optimizer: orthonormal updates for matrices, another optimizer for the rest.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      learning_rate: of the matrices, a number or a schedule, such as 0.01.
      rank_fraction, momentum, seed: as in :func:`scale_by_dion`.
      weight_decay: of the matrices, times the learning rate.
      others: the optimizer of all other leaves, whose gradients are averaged densely; by default
        ``optax.adamw(learning_rate, b2=0.95, weight_decay=0.0)``.
      matrices: of parameters, a tree of their form: whether Dion updates a leaf. By default it
        updates all that have two rows and two columns at least. Leave out embeddings and the last
        layer, as the authors do.

    Returns:
      A gradient transformation, a whole optimizer.

    Raises:
      ValueError: an argument is out of range. From ``init``: a shard of a matrix is a single row
        or column.

    Example::

      tx = jsparse.dion("data", 0.01, others=optax.adamw(1e-3))
      step = jsparse.train_step(loss_fn, tx, mesh, "data")

    **Cost**: that of :func:`scale_by_dion`, and a dense all-reduce of all other leaves. The two
    are separate: if a gradient is not finite, the updates of its part are NaN, and those of the
    other are not. Momenta stay as they were. To skip such a step, pass
    ``others=optax.apply_if_finite(..., 5)`` for the state of the others, and put
    ``optax.apply_if_finite(optax.identity(), 5)`` after all.

    References:
      Ahn et al., Dion: Distributed Orthonormalized Updates, 2025.
    """
    if not (others is None or hasattr(others, "update")):
        raise ValueError(f"others is {others!r}; it must be an optimizer, such as optax.adamw(1e-3), or None")
    if not (matrices is None or callable(matrices)):
        raise ValueError(
            f"matrices is {matrices!r}; it must be a function of the parameters that returns a tree of truth values"
        )
    if others is None:
        others = optax.adamw(learning_rate, b2=0.95, weight_decay=0.0)
    of_matrices = optax.chain(
        scale_by_dion(comm, rank_fraction=rank_fraction, momentum=momentum, seed=seed),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )

    def labels(params: optax.Params) -> Any:
        wanted = jax.tree.map(lambda _: True, params) if matrices is None else matrices(params)
        return jax.tree.map(
            lambda leaf, chosen: "matrices" if chosen and orthonormalises(leaf.shape) else "others", params, wanted
        )

    return optax.partition({"matrices": of_matrices, "others": optax.chain(dense(comm), others)}, labels)
