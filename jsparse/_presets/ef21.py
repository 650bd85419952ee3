"""EF21-SGDM: workers send changes of their momentum, and keep the mean of what they sent."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from .._comm.comm import CommLike
from .._engine.memory import ErrorFeedback, largest_addend
from .._engine.momentum import Velocity, WithMomentum
from .._engine.transform import SparseAllReduce
from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ..allreduce import AllReduce, TopkAllGather
from .general import Options, of_density


@dataclasses.dataclass(frozen=True)
class Differences(WithMomentum):
    """The memory of :func:`ef21_changes`: what is fed back is how a velocity changes.

    The velocity is an average of this worker's gradients, ``m velocity + (1 - m) gradient``, and
    the residual is the velocity less what was delivered of it so far.
    """

    def accumulate(
        self, state: Velocity, layout: Layout, parts: Sequence[Leaf], keep: jax.Array, size: int
    ) -> tuple[Pending, Velocity]:
        # So that differences are finite, in the types of their leaves too.
        most = largest_addend(layout.dtype, 2 * size)
        gradient = jnp.clip(layout.ravel([_halved(part) for part in parts]), -most, most)
        change = jnp.where(keep, (1 - self.momentum) * (gradient - state.velocity), 0)
        return self.push(state, state.velocity + change, change, layout, keep, size)


def _halved(part: Leaf) -> Leaf:
    """A leaf of which no element is more than half of its type's largest."""
    values = part.values if isinstance(part, SparseVector) else part
    most = float(jnp.finfo(values.dtype).max) / 2
    clipped = jnp.clip(values, -most, most)
    return dataclasses.replace(part, values=clipped) if isinstance(part, SparseVector) else clipped


def ef21_changes(
    comm: CommLike,
    *,
    density: float | None = None,
    momentum: float = 0.9,
    allreduce: AllReduce | None = None,
    **options: Unpack[Options],
) -> SparseAllReduce:
    """The messages of EF21-SGDM: how the mean momentum changes.

    Each worker keeps the momentum ``v = m v + (1 - m) g``. It selects from what of ``v`` it has
    not yet delivered. The update is the mean of what is delivered: a change of the mean momentum,
    not a gradient. Their sum over all steps is what :func:`ef21` returns. This function is for
    :func:`sync`, and for :func:`phases`: put ``optax.apply_if_finite(optax.chain(sum, sgd), 5)``
    after them, where ``sum`` is ``optax.trace(1.0, accumulator_dtype=jnp.float32)``. Alone it
    would keep a NaN for ever.

    Args:
      comm, density, momentum, allreduce: as in :func:`ef21`.
      **options: as in :func:`ef21`.

    Returns:
      A gradient transformation. Its state holds a momentum beside the residual, both of shape
      ``(n,)`` on a worker.

    Raises:
      TypeError: an option is not known.
      ValueError: an argument is out of range, or ``error_feedback`` is not the default's; and as
        from :func:`sparse_allreduce`.

    **Cost**: that of the all-reduce; with the default ``2k (P-1)`` words and ``log P`` messages a
    worker.

    References:
      Fatkhullin et al., Momentum Provably Improves Error Feedback!, NeurIPS 2023, Algorithm 1.
    """
    feedback = options.get("error_feedback", True)
    if feedback not in (True, ErrorFeedback()):
        raise ValueError(
            f"error_feedback is {feedback!r}; EF21 is a form of error feedback, in which the residual is what is not "
            "known of a momentum, and must not decay: leave it out"
        )
    reduce = TopkAllGather() if allreduce is None else allreduce
    plain = of_density(comm, density, reduce, options).synchroniser
    return SparseAllReduce.of(dataclasses.replace(plain, memory=Differences(momentum, plain.memory)))


def ef21(
    comm: CommLike,
    *,
    density: float | None = None,
    momentum: float = 0.9,
    allreduce: AllReduce | None = None,
    **options: Unpack[Options],
) -> optax.GradientTransformationExtraArgs:
    """EF21-SGDM: the update is a dense estimate of the mean momentum, and messages correct it.

    Each worker keeps the momentum ``v = m v + (1 - m) g``, and all workers keep ``h``, the mean of
    what is known of their momenta. A worker sends the largest elements of what is not known of its
    own, and ``h`` grows by the mean of what is sent. The update is all of ``h``. So an element
    that waits is not missing from the update: its last estimate is used, and when it arrives it
    does not come as a sum of many gradients. Put plain SGD after it,
    ``optax.sgd(learning_rate)``: the updates contain the momentum already.

    This is error feedback whose gradients are the changes of ``v``. So it runs with any sparse
    all-reduce, and at density 1 it is SGD with momentum. The estimate is a sum over all steps, and
    the rounding errors of their additions stay in it. It is held in float32 at least; changes are
    rounded to the type of their leaf before. Gradients are clipped at half of their type's largest
    number, in float16 at 32,752, and where error feedback clips, at a power of two that falls with
    P, so that no sum overflows.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      momentum: m, at least 0 and below 1; the paper's η is ``1 - m``. With 0 it is EF21. ``v``
        begins with zeros; in the paper it begins with the first gradient.
      allreduce: the all-reduce of the selected elements; by default
        ``allreduce.TopkAllGather()``, as in the paper, where all that is selected is delivered.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback`` (True
        only), ``scope`` and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation: a chain of :func:`ef21_changes`, and of their sum, which is the
      estimate, alike on all workers. A step that is not finite changes neither.

    Raises:
      TypeError: an option is not known.
      ValueError: an argument is out of range, or ``error_feedback`` is not the default's; and as
        from :func:`sparse_allreduce`.

    **Cost**: that of the all-reduce; with the default ``2k (P-1)`` words and ``log P`` messages a
    worker.

    References:
      Fatkhullin et al., Momentum Provably Improves Error Feedback!, NeurIPS 2023, Algorithm 1;
      Richtárik et al., EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback, NeurIPS 2021, Algorithm 2.

    Example::

      tx = optax.chain(jsparse.ef21("data", density=0.01), optax.sgd(0.1))
    """
    changes = ef21_changes(comm, density=density, momentum=momentum, allreduce=allreduce, **options)
    return optax.chain(changes, _summed())


def _summed() -> optax.GradientTransformation:
    """The sum of all finite updates so far, in float32 at least."""

    def init(params: optax.Params) -> optax.TraceState:
        return optax.TraceState(
            jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), params)
        )

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        sums = jax.tree.map(lambda old, new: old + new.astype(old.dtype), state.trace, updates)
        finite = jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]).all()
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), sums, state.trace)
        return jax.tree.map(lambda new, like: new.astype(like.dtype), sums, updates), optax.TraceState(kept)

    return optax.GradientTransformation(init, update)
