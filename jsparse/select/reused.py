"""The reused threshold of Ok-Topk, corrected in each step."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import Marked, varying_as

from .._vector.density import check_steps
from .._vector.sparse_vector import SparseVector
from ._candidates import Candidates, FromLargest

# A threshold is kept while the count is within BAND of k, relative to k. Otherwise it is
# corrected, at most CORRECTIONS times in a step. It is given up if the count is still more than
# LOST away from k.
BAND = 0.05
CORRECTIONS = 3
LOST = 0.5


class ReusedThresholdState(NamedTuple):
    """The state of :class:`ReusedThreshold`. Each leaf has shape ``(1,)``.

    Attributes:
      threshold: the threshold of the last step.
      selected: int32, the number of elements that reached it.
      slope: how steeply the count falls: ``-d log(count) / d log(threshold)``.
    """

    threshold: jax.Array
    selected: jax.Array
    slope: jax.Array


@dataclasses.dataclass(frozen=True)
class ReusedThreshold(FromLargest):
    """Selects about k elements by a threshold that is evaluated exactly from time to time.

    Between exact evaluations it is corrected. This is Ok-Topk, Algorithm 1, lines 2 to 4, with
    the correction that the authors' code adds: without it, error feedback makes the count drift
    to many times k within one period of reuse. Each step counts the elements that reach the last
    threshold. If the count is outside k ± 5 %, the step moves the threshold along the measured
    slope, up to three times. If the count is then still off by more than half of k, the threshold
    is evaluated exactly.

    With ``correct=False`` these lines are followed to the letter: the threshold stays as it is
    between exact evaluations. (One that is 0 selects everything, so it is evaluated anew.) If more
    than k elements reach it, the buffer holds a different part of them in each step.

    Attributes:
      density: k / n, above 0 and at most 1.
      tau_threshold: τ', the number of steps between exact evaluations, at least 1.
      correct: whether the threshold is corrected between them.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022,
      section 3.1.3.
    """

    density: float
    tau_threshold: int = 32
    correct: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_steps("tau_threshold", self.tau_threshold)

    def init(self, n: int, dtype: DTypeLike) -> ReusedThresholdState:
        return ReusedThresholdState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32), jnp.full(1, 2.0, dtype))

    def select(
        self, acc: jax.Array, marked: Marked | None, state: ReusedThresholdState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, ReusedThresholdState]:
        candidates = Candidates(acc, self.density, marked)
        threshold, slope = state.threshold[0], state.slope[0]
        due = step % self.tau_threshold == 0
        if self.correct:
            threshold, count, slope = _correct(candidates, threshold, slope, due)
            due |= jnp.abs(count - candidates.k) > LOST * candidates.k
        else:
            due |= threshold == 0
        threshold = lax.cond(due, candidates.kth_magnitude, lambda: threshold)
        x, report = candidates.take_above(threshold, step)
        return x, ReusedThresholdState(report.threshold, report.selected, slope[None])


def _correct(
    candidates: Candidates, threshold: jax.Array, slope: jax.Array, skip: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Moves the threshold until its count is within the band: ``(threshold, count, slope)``."""
    acc, k = candidates.acc, candidates.k

    def outside(carry):
        i, _, count, _ = carry
        return (i < CORRECTIONS) & (jnp.abs(count - k) > BAND * k)

    def move(carry):
        i, threshold, count, slope = carry
        ratio = jnp.maximum(count, 1).astype(acc.dtype) / k
        moved = threshold * jnp.clip(ratio ** (1 / slope), 0.5, 2.0)
        recount = candidates.count_above(moved)
        fall = jnp.log(ratio * k / jnp.maximum(recount, 1))
        seen = fall / jnp.log(moved / threshold)
        slope = jnp.where(jnp.isfinite(seen), jnp.clip(seen, 0.5, 50.0), slope)
        return i + 1, moved, recount, slope

    count = lax.cond(skip, lambda: varying_as(jnp.int32(k), acc), lambda: candidates.count_above(threshold))
    start = varying_as(jnp.int32(0), acc)
    return lax.while_loop(outside, move, (start, threshold, count, slope))[1:]
