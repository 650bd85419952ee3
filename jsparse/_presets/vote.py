"""Majority vote: the sign of the sum of the workers' signs."""

import dataclasses

import jax
import jax.numpy as jnp

from .._comm.comm import Comm, CommLike, as_comm
from .._engine.mean import undivided
from .._engine.reducer import Reduced, Reducer, counts_of_whole
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_fields
from .._vector.layout import Layout
from .._vector.pending import Pending
from ..allreduce import Quantized
from ..quantize import Sign


@dataclasses.dataclass(frozen=True)
class MajorityVote(Reducer):
    """The reducer of :func:`vote`. Its total is the update, and no sum.

    Attributes:
      zeros: as in :func:`vote`.
    """

    of_any_vector = True
    conserves = False

    zeros: bool = True

    def __post_init__(self):
        check_fields(self)

    def init(self, layout: Layout, size: int) -> tuple[()]:
        return ()

    def __call__(
        self, comm: Comm, pending: Pending, state: tuple[()], *, layout: Layout, step: jax.Array, keep: jax.Array
    ) -> Reduced:
        acc = pending.add_up()
        votes = Quantized(Sign(None, self.zeros, "one"), split=True)
        winners, _ = votes.by_owners(comm, self._signs(acc), step, self._signs)
        return Reduced(acc, acc, acc, acc, winners, counts_of_whole(acc), state)

    def _signs(self, x: jax.Array) -> jax.Array:
        """The votes of a vector, or the winners of a sum of votes; NaN where it is not finite."""
        signs = jnp.sign(x) if self.zeros else jnp.where(x < 0, -1, 1).astype(x.dtype)
        return jnp.where(jnp.isfinite(x), signs, jnp.nan)


def vote(comm: CommLike, *, zeros: bool = True) -> SparseAllReduce:
    """Majority vote: each element of the update is the sign that most workers have.

    Every worker sends the signs of its vector, a worker counts those of its part, and all get the
    winners: -1, 0 or 1. The vector may be anything that a worker computes by itself. With momentum
    (Signum) or Lion's update (distributed Lion) in front, it is an optimizer::

      signum = optax.chain(
          jsparse.per_worker(optax.ema(0.9, debias=False)),
          jsparse.vote("data"),
          optax.scale(-1e-4),
      )
      lion = optax.chain(
          jsparse.per_worker(optax.scale_by_lion()),
          jsparse.vote("data"),
          optax.add_decayed_weights(0.1),
          optax.scale(-1e-4),
      )

    Nothing is fed back: magnitudes are lost on purpose. The workers' momentum differs, so it is
    kept by :func:`per_worker`. If an element is not finite on a worker, a whole part of the update
    is NaN.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      zeros: whether zero is a third sign. If true, it takes 1.6 bits an element, a zero has no
        vote, and a tie gives 0. If false, it takes one bit, and zeros and ties count as positive:
        parameters whose gradient is always zero then move all the time.

    Returns:
      A gradient transformation. Its updates have the shapes and types of the gradients.

    **Cost**: ``2 (P-1)/P n/20`` words and ``P - 1 + log P`` messages a worker; ``2 (P-1)/P n/32``
    words with ``zeros=False``.

    References:
      Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant,
      ICLR 2019, Algorithm 1 (Signum); Liu et al., Communication Efficient Distributed Training
      with Distributed Lion, NeurIPS 2024 (MaVo). Neither says what a tie gives.
    """
    return SparseAllReduce.of(Composition(as_comm(comm), MajorityVote(zeros), mean=undivided))
