"""1-bit Adam: Adam whose momentum is sent as signs, once its second moments are frozen."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._comm.comm import CommLike, as_comm
from .._engine.mean import Quotient
from .._engine.momentum import Velocity, WithMomentum
from .._engine.phases import phases
from .._engine.reducer import Reduced, Whole
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_kind
from .._vector.density import check_steps
from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, to_dense
from ..allreduce import Quantized
from ..quantize import Quantizer, Sign
from ..quantize._base import check_quantizer
from .dense import dense

ONE_BIT = Sign(zeros=False, norm="rms")


@dataclasses.dataclass(frozen=True)
class SharedMomentum(WithMomentum):
    """The memory of :func:`onebit_momentum`: a gradient is added to what all have agreed on.

    The velocity is the last update, alike on all workers.
    """

    def accumulate(
        self, state: Velocity, layout: Layout, parts: Sequence[Leaf], keep: jax.Array, size: int
    ) -> tuple[Pending, Velocity]:
        own = self.momentum * state.velocity + (1 - self.momentum) * layout.ravel(parts)
        return self.push(state, state.velocity, own, layout, keep, size)

    def retain(
        self, state: Velocity, done: Reduced, mean: Quotient, keep: jax.Array, size: int
    ) -> tuple[Velocity, Quotient]:
        (velocity, kept), mean = super().retain(state, done, mean, keep, size)
        return Velocity(jnp.where(keep, to_dense(mean.value()), velocity), kept), mean


def onebit_momentum(
    comm: CommLike,
    *,
    freeze_step: int,
    momentum: float = 0.9,
    quantize: Quantizer = ONE_BIT,
) -> SparseAllReduce:
    """The momentum of 1-bit Adam: dense at first, then sent as signs.

    All workers have the same momentum m. A worker sends ``b m + (1 - b) g``, with its own gradient
    g, and the mean of these is the next m and the update. In the first ``freeze_step`` steps they
    are summed densely. From then on they are quantized twice, by each worker and by the owner of
    each part of the sum, and what that rounds away is fed back. :func:`onebit_adam` is the whole
    optimizer.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      freeze_step: the number of dense steps, at least 1.
      momentum: b, at least 0 and below 1.
      quantize: of the later steps. By default the signs of 512 values have one scale, the root of
        the mean of their squares; in DeepSpeed's code all values of a tensor have one. No scale is
        for values of two leaves: if the gradients of one were far smaller, it would get momenta
        that are far too large. The last values of a leaf are repeated until they are 512.

    Returns:
      A gradient transformation. Its state holds the momentum beside the residual, both of shape
      ``(n,)`` on a worker.

    Raises:
      ValueError: an argument is out of range; the quantizer rounds at random, or has one scale for
        all values.

    **Cost**: in the first steps that of :func:`dense`; then ``2 (P-1)/P n (1/32 + 1/512)`` words
    and ``P - 1 + log P`` messages a worker. In n each leaf counts as a multiple of 512, and all
    together as one of ``512 P``.

    References:
      Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed, ICML 2021, Algorithm 1.
    """
    check_kind("freeze_step", freeze_step, int)
    check_steps("freeze_step", freeze_step)
    check_quantizer("quantize", quantize)
    if quantize.unit is None:
        raise ValueError(
            f"quantize is {quantize}, which has one scale for the values of all leaves: take one that has a scale for "
            "each bucket, such as quantize.Sign(512, zeros=False, norm='rms')"
        )
    reducer = Whole(Quantized(quantize, split=True), quantize.unit)
    later = SparseAllReduce.of(Composition(as_comm(comm), reducer, SharedMomentum(momentum)))
    return phases(((freeze_step, dense(comm)), later))


class FrozenMoments(NamedTuple):
    """The state of the scaling in :func:`onebit_adam`.

    Attributes:
      count: int32 scalar: steps so far.
      momentum: the momentum of the step before.
      second: the second moments, in float32 at least.
    """

    count: jax.Array
    momentum: optax.Updates
    second: optax.Updates


def _by_frozen_moments(freeze_step: int, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Divides a momentum by the roots of second moments, which grow in the first steps only."""

    def init(params: optax.Params) -> FrozenMoments:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), params)
        return FrozenMoments(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), zeros)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        finite = jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]).all()
        grows = state.count < freeze_step

        def moment(second, new, old):
            gradient = (new.astype(second.dtype) - b1 * old.astype(second.dtype)) / (1 - b1)
            return jnp.where(finite & grows, b2 * second + (1 - b2) * gradient**2, second)

        second = jax.tree.map(moment, state.second, updates, state.momentum)
        momentum = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updates, state.momentum)
        scaled = jax.tree.map(lambda m, v: (m.astype(v.dtype) / (jnp.sqrt(v) + eps)).astype(m.dtype), updates, second)
        return scaled, FrozenMoments(state.count + finite, momentum, second)

    return optax.GradientTransformation(init, update)


def onebit_adam(
    comm: CommLike,
    learning_rate: optax.ScalarOrSchedule,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    quantize: Quantizer = ONE_BIT,
) -> optax.GradientTransformationExtraArgs:
    """1-bit Adam, a whole optimizer: dense Adam at first, then signs of the momentum.

    Adam's second moments change little after a while. From ``freeze_step`` on they stay as they
    are, and only the momentum is sent, in one bit an element (:func:`onebit_momentum`). There is
    no bias correction, as in DeepSpeed's code, so warm the learning rate up.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      learning_rate: a number or a schedule.
      freeze_step: the number of dense steps, at least 1; the authors take 15 to 20 % of a run. If
        second moments are frozen while they are still small, training diverges. Where a gradient
        is zero all the time before, its update is divided by ``eps`` ever after: give such leaves
        another optimizer.
      b1: the momentum.
      b2: of the second moments.
      eps: added to the roots of the second moments.
      weight_decay: times the learning rate, as in AdamW.
      quantize: as in :func:`onebit_momentum`.

    Returns:
      A gradient transformation, a whole optimizer.

    Raises:
      ValueError: an argument is out of range.

    Example::

      tx = jsparse.onebit_adam("data", schedule, freeze_step=2000)
      step = jsparse.train_step(loss_fn, tx, mesh, "data")

    A step that is not finite changes no moments; the count of a schedule goes on. To skip it, put
    ``optax.apply_if_finite(optax.identity(), 5)`` after this.

    **Cost**: that of :func:`onebit_momentum`. The second moments are made of mean gradients, which
    are recovered from the momenta of two steps, to rounding.

    References:
      Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed, ICML 2021, Algorithm 1; DeepSpeed, ``onebit/adam.py``.
    """
    for name, value, below in (("b2", b2, 1), ("eps", eps, math.inf), ("weight_decay", weight_decay, math.inf)):
        if isinstance(value, int | float) and not 0 <= value < below:  # Injected hyperparameters are arrays.
            raise ValueError(f"{name} is {value}; it must be at least 0" + (", and below 1" if below == 1 else ""))
    return optax.chain(
        onebit_momentum(comm, freeze_step=freeze_step, momentum=b1, quantize=quantize),
        _by_frozen_moments(freeze_step, b1, b2, eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
