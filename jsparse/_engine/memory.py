"""Memories: what a worker keeps from step to step of what it has not yet delivered.

Error feedback is one rule for every algorithm: ``residual' = acc - delivered``, where
``acc = residual + gradient``. An element may stay behind for many reasons: it was not selected, a
buffer was full, a value was rounded. Whatever the reason, it is still in ``acc``.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas import varying_as, zero_of

from .._vector.arguments import check_fields
from .._vector.layout import Layout
from .._vector.parts import Parts
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector, Vector, to_dense
from .mean import Quotient
from .reducer import Reduced

# Tells the largest magnitude of a gradient, and its norm divided by that.
Norm: TypeAlias = Callable[[Sequence[jax.Array]], tuple[jax.Array, jax.Array]]


class Residual(NamedTuple):
    """The state of error feedback, and of a memory that keeps nothing.

    Attributes:
      residual: shape ``(n,)``: what was accumulated and not yet delivered; None if it is not kept.
    """

    residual: jax.Array | None


class Memory:
    """What a worker keeps for one vector: a frozen dataclass. Inherit from this class.

    Its state is a NamedTuple of arrays. Those of the vector's length have shape ``(n,)``; it has a
    ``residual``: what was accumulated and not delivered, or None. In a step with ``keep`` false
    nothing is delivered, but the total and its mean may be anything. A memory leaves all its state
    as it was then. By default it keeps nothing.

    Attributes:
      feeds_back: whether what was not delivered is kept.
      subtracts_mean: whether each worker subtracts the mean of what all of them delivered, in
        place of what it delivered itself.
      subtracts_sent: whether each worker subtracts all that it has of what it delivered in part.
    """

    feeds_back = False
    subtracts_mean = False
    subtracts_sent = False

    def init(self, n: int, dtype: DTypeLike) -> Any:
        """The state before the first step, for a vector of length ``n``."""
        return Residual(None)

    def limit(self, dtype: DTypeLike, size: int) -> float:
        """The magnitude to which vectors are clipped, so that ``size`` vectors add up finitely."""
        return math.inf

    def prepare(self, leaves: Sequence[Leaf], size: int, norm: Norm) -> Sequence[Leaf]:
        """What is made of a worker's gradients before they become vectors, such as clipping.

        Args:
          leaves: all gradients.
          size: the number of workers.
          norm: the Euclidean norm of arrays of one type, one for each leaf, as :meth:`Space.norm`
            gives it.
        """
        return leaves

    def accumulate(
        self, state: Any, layout: Layout, parts: Sequence[Leaf], keep: jax.Array, size: int
    ) -> tuple[Pending, Any]:
        """The vector to send, and the state.

        Arrays of the state that the vector replaces may be None in it.

        Args:
          state: from ``init`` or from the step before.
          layout: where the parts stand in the vector.
          parts: this step's gradient.
          keep: bool scalar: whether the step counts.
          size: how many workers sum the vector.
        """
        return Pending(None, parts, keep, layout), state

    def retain(self, state: Any, done: Reduced, mean: Quotient, keep: jax.Array, size: int) -> tuple[Any, Quotient]:
        """The state after a step, and what its update is made of.

        Args:
          state: from :meth:`accumulate`.
          done: what the reducer made of the vector.
          mean: the mean that is made of the sum.
          keep, size: as in :meth:`accumulate`.
        """
        return state, mean

    def for_dense(self) -> "Memory":
        """The memory of a vector that always goes densely and as it is."""
        return NoMemory()

    def in_dense_phase(self, flush: bool) -> "Memory":
        """A memory with the same state for a phase that delivers everything.

        Args:
          flush: whether the phase delivers what was kept; otherwise it leaves that aside.
        """
        return self


@dataclasses.dataclass(frozen=True)
class NoMemory(Memory):
    """Keeps nothing: what is not delivered is lost."""


@dataclasses.dataclass(frozen=True)
class LeftAside(Memory):
    """Leaves a residual as it is, neither adding to it nor delivering it."""

    def init(self, n: int, dtype: DTypeLike) -> Residual:
        return Residual(jnp.zeros(n, dtype))


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Memory):
    """How a worker keeps what was not delivered.

    The rule is ``residual' = decay * (β (acc - subtracted) + (1 - β) residual)``. The default,
    ``residual' = acc - delivered``, loses nothing and is what most papers do.
    ``error_feedback=True`` stands for it.

    Attributes:
      decay: the factor by which a step multiplies the residual, above 0 and at most 1. Below 1,
        gradient mass is lost on purpose: the older it is, the more. It takes one more pass over n
        elements in a step.
      subtract: ``"local"``: what this worker itself delivered. It changes k elements, in place.
        ``"mean"``: the update, ``total / P``, as one PowerSGD code does. Both have the same sum
        over workers, so both lose nothing, the mean to rounding. But with the mean all that
        differs between the workers' gradients stays in their residuals, which grow in every step.
        So it warns. It is for reducers whose result depends on the sum of the residuals alone, as
        that of :func:`jsparse.powersgd` does, and is refused with all others, where elements might
        never arrive.
        ``"sent"``: all that this worker has of an element that it sent and of which anything was
        delivered, as if no value had been rounded. The rounding errors are lost, also those of
        sums that a worker rounds, as in DisTrO's code. So it warns. It is refused where nothing is
        selected: there it would keep nothing. It is also refused with all-reduces in which a
        worker keeps sums of what others sent: gTop-k but for ``put_back="exact"`` without the
        tree, Ok-Topk but for ``put_back="senders"``.
      low_pass: β, above 0 and at most 1: the share of a step's error in the residual. Below 1 the
        residual is an average over steps, and gradient mass is lost on purpose: each step adds
        only the part β of what it did not deliver. ScaleCom takes 0.1 with large batches, LoCo
        0.2. A step needs memory for one more vector.

    >>> tx = jsparse.sparse_allreduce(
    ...     "data", select=jsparse.select.TopK(0.01), allreduce=jsparse.allreduce.TopkAllGather(),
    ...     error_feedback=ErrorFeedback(decay=0.9),
    ... )
    """

    feeds_back = True

    decay: float = 1.0
    subtract: Literal["local", "mean", "sent"] = "local"
    low_pass: float = 1.0

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"decay is {self.decay}; it is the factor by which a step multiplies the residual, above 0 and at "
                "most 1: to keep nothing pass error_feedback=False"
            )
        if not 0 < self.low_pass <= 1:
            raise ValueError(
                f"low_pass is {self.low_pass}; it is the share of a step's error in the residual, above 0 and at most "
                "1, such as 0.1"
            )
        if self.subtract not in ("local", "mean", "sent"):
            raise ValueError(f'subtract is {self.subtract!r}; choose "local", "mean" or "sent"')
        if self.subtract == "sent":
            warnings.warn(
                "subtract is 'sent': what rounding takes from the values that are sent is lost: take 'local', the "
                "default",
                stacklevel=3,
            )
        if self.subtracts_mean:
            warnings.warn(
                "subtract is 'mean': all that differs between the workers' gradients piles up in their residuals, and "
                "the rounding errors of the updates grow with it: take 'local', the default",
                stacklevel=3,
            )

    @property
    def subtracts_mean(self) -> bool:
        return self.subtract == "mean"

    @property
    def subtracts_sent(self) -> bool:
        return self.subtract == "sent"

    def init(self, n: int, dtype: DTypeLike) -> Residual:
        return Residual(jnp.zeros(n, dtype))

    def limit(self, dtype: DTypeLike, size: int) -> float:
        """As :func:`largest_addend` says.

        A sum of finite gradients that became infinite would stay in the residual for ever.
        """
        return largest_addend(dtype, size)

    def accumulate(
        self, state: Residual, layout: Layout, parts: Sequence[Leaf], keep: jax.Array, size: int
    ) -> tuple[Pending, Any]:
        before = state if self.low_pass < 1 else None
        return Pending(state.residual, parts, keep, layout, self.limit(layout.dtype, size)), before

    def retain(
        self, state: Any, done: Reduced, mean: Quotient, keep: jax.Array, size: int
    ) -> tuple[Residual, Quotient]:
        if self.subtract == "sent" and isinstance(done.own, SparseVector):
            residual = to_dense(done.acc).at[done.own.indices.reshape(-1)].set(0, mode="drop")
        else:
            subtracted = Quotient(done.total, size).value() if self.subtract == "mean" else done.delivered
            residual = _subtract(to_dense(done.acc), subtracted, keep)
        if self.low_pass < 1:
            blend = self.low_pass * residual + (1 - self.low_pass) * state.residual
            residual = jnp.where(keep, blend, state.residual)
        if self.decay < 1:
            residual = residual * jnp.where(keep, self.decay, 1).astype(residual.dtype)
        return Residual(residual), mean

    def in_dense_phase(self, flush: bool) -> Memory:
        # A dense phase leaves nothing over that could decay or be averaged.
        return ErrorFeedback() if flush else LeftAside()


def largest_addend(dtype: DTypeLike, size: int) -> float:
    """A magnitude of which ``size`` workers have a finite sum, however it is rounded.

    It is the power of two whose sum is at most half of the first float that is too large. The
    largest float over ``size`` would not do: rounded sums of ten of these are infinite in float32,
    and bfloat16 rounds it up. Neither can happen to a power of two.
    """
    return 2.0 ** (int(jnp.finfo(dtype).maxexp) - 1 - (size - 1).bit_length())


def _subtract(acc: jax.Array, delivered: Vector, keep: jax.Array) -> jax.Array:
    """``acc - delivered``: for a sparse vector in place, without a pass over ``acc``."""
    if isinstance(delivered, SparseVector):
        indices, values = (varying_as(x.reshape(-1), acc) for x in (delivered.indices, delivered.values))
        return acc.at[indices].add(-values, mode="drop")
    if isinstance(delivered, Parts):
        return delivered.subtract_from(acc, zero_of(keep))
    return acc - delivered
