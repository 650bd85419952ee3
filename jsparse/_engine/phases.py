"""A run in phases: different algorithms and densities, one after another, in one compiled program."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._comm.comm import Comm
from .._comm.metered import Metered
from .._vector.density import check_steps
from .memory import NoMemory
from .state import BucketState, SparseAllReduceState
from .synchroniser import Composition, Means, Outcome, agree, begin, conclude, thresholds_of, varying_over
from .transform import SparseAllReduce

Stage: TypeAlias = tuple[int, SparseAllReduce] | SparseAllReduce


@dataclasses.dataclass(frozen=True)
class Phased:
    """The synchroniser of :func:`phases`.

    A vector has one memory for all phases. Its reducers' states are a tuple, one for each phase.

    Attributes:
      stages: the phases' synchronisers, of one space and with memories of one state.
      starts: the first step of each.
      shared: the one that says what is carried.
    """

    stages: tuple[Composition, ...]
    starts: tuple[int, ...]
    shared: Composition

    @property
    def levels(self) -> tuple[Comm, ...]:
        return self.shared.levels

    @property
    def agree_over(self) -> tuple[Comm, ...]:
        return self.shared.agree_over

    @property
    def space(self) -> Any:
        return self.shared.space

    @property
    def memory(self) -> Any:
        return self.shared.memory

    @property
    def alike(self) -> bool:
        return True

    def over(self, *comms: Comm) -> "Phased":
        return Phased(tuple(stage.over(*comms) for stage in self.stages), self.starts, self.shared.over(*comms))

    def init(self, params: Any) -> SparseAllReduceState:
        each = [stage.init(params).buckets for stage in self.stages]
        own = self.shared.init(params).buckets
        carried = [
            BucketState(bucket.memory, tuple(states[i].reducer for states in each)) for i, bucket in enumerate(own)
        ]
        return begin(self, tuple(carried), thresholds_of(self.space.buckets(jax.tree.leaves(params))))

    def reduce(self, grads: Any, state: SparseAllReduceState) -> tuple[Means, SparseAllReduceState]:
        raise ValueError(
            "the phases of a run have sums of different lengths; sync needs one sparse vector: use tx.update"
        )

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        levels = [Metered(comm) for comm in self.levels]
        further = [Metered(comm) for comm in self.agree_over]
        leaves, treedef = jax.tree.flatten(grads)
        buckets = self.shared.check(levels, grads, state)
        given = self.shared.prepare(levels, grads)
        step, bad = agree([*levels, *further], state.step[0], given)

        def run(number: int) -> tuple[list[jax.Array], Any]:
            stage, inside = self.stages[number], [Metered(comm) for comm in self.levels]
            before = [BucketState(bucket.memory, bucket.reducer[number]) for bucket in state.buckets]
            outcome = stage.synchronise(
                inside, buckets, given, before, [bad] * len(buckets), step - self.starts[number]
            )
            means = Means(buckets, outcome.quotients, bad).leaves(leaves)
            after = [
                BucketState(new.memory, (*old.reducer[:number], new.reducer, *old.reducer[number + 1 :]))
                for new, old in zip(outcome.states, state.buckets, strict=True)
            ]
            sent = [(level.words, level.messages) for level in inside]
            return means, varying_over(levels, (outcome._replace(quotients=[], states=after), sent))

        now = sum((step >= start for start in self.starts[1:]), jnp.int32(0))
        branches = [functools.partial(run, number) for number in range(len(self.stages))]
        outcome: Outcome
        means, (outcome, sent) = self.levels[0].switch(now, branches, replicated=True)
        after = conclude(self, [*levels, *further], state, outcome, bad, step, undo=False, sent=sent)
        return jax.tree.unflatten(treedef, means), after


def phases(stages: Sequence[Stage], *, flush: bool = True) -> SparseAllReduce:
    """A run in phases, each with its own algorithm or density: for warm-ups, and for a change to dense sums.

    All phases are in one compiled program; the step that the workers agree on chooses. Steps are counted as
    synchronisations, those with a non-finite gradient apart. Each phase begins as its transformation by itself would,
    with the residual (and velocity, of :func:`dgc`) of the one before; each keeps its own thresholds and regions.

    A dense phase takes part in error feedback: what sparse ones left over is delivered whole in its first step, and
    its residuals are zero from then on. Nothing is lost at any boundary.

    Args:
      stages: ``((steps, tx), ..., tx)``: how many steps each transformation runs, and last the one that stays. They are
        presets, or :func:`sparse_allreduce`, over the same axis; the sparse ones with the same ``scope``,
        ``dense_below``, ``error_feedback`` and momentum, which dense ones take over from them.
      flush: whether a dense phase delivers the residual. Otherwise it leaves it aside until the next sparse one.

    Returns:
      A gradient transformation; place, read and chain it like any other. ``stats`` tells of the phase that ran.

    Raises:
      ValueError: the stages are not of that form, or do not fit together.

    Example (the warm-up of gTop-k, with epochs of 100 steps)::

      warm_up = [(100, jsparse.gtopk("data", density=density)) for density in (0.25, 0.0725, 0.015, 0.004)]
      tx = optax.chain(jsparse.phases((*warm_up, jsparse.gtopk("data", density=0.001))), optax.sgd(0.1))

    **Cost**: what the phase sends that runs, and the one exchange that opens each step. It runs within a branch, where
    messages overlap with nothing outside it.

    References:
      Shi et al., gTop-k, ICDCS 2019, section IV-B (density warm-up); Shi et al., MLSys 2021, section 5.6 (sparse, then
      dense); the code of Li and Hoefler, PPoPP 2022 (dense at first).
    """
    return SparseAllReduce.of(_fit(*_parse(stages), flush))


def _parse(stages: Any) -> tuple[list[Composition], list[int]]:
    """The synchronisers, and how many steps each but the last is for."""
    form = "pass ((steps, tx), ..., tx): how long each runs, and last the one that stays"
    if isinstance(stages, SparseAllReduce) or not stages:
        raise ValueError(f"there are no phases: {form}")
    synchronisers, lengths = [], []
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        steps, tx = None, stage
        if isinstance(stage, tuple | list) and len(stage) == 2 and isinstance(stage[0], int):
            steps, tx = stage
        if not isinstance(tx, SparseAllReduce):
            raise ValueError(
                f"phase {number} is {type(tx).__name__}, and no preset; {form}. What else a chain holds stands around "
                "the phases: optax.chain(jsparse.phases(...), optax.sgd(0.1))"
            )
        if (steps is None) != last:
            raise ValueError(f"phase {number} has {'an' if last else 'no'} end; {form}")
        if steps is not None:
            check_steps(f"steps of phase {number}", steps)
            lengths.append(steps)
        if not isinstance(tx.synchroniser, Composition):
            raise ValueError(
                f"phase {number} has phases itself, or workers whose updates differ: write all phases in one row, of "
                "presets that keep workers alike"
            )
        synchronisers.append(tx.synchroniser)
    if sum(lengths) >= 2**31:
        raise ValueError(f"the phases have {sum(lengths)} steps; a run's number of steps is an int32: take fewer")
    return synchronisers, lengths


def _fit(stages: list[Composition], lengths: list[int], flush: bool) -> Phased:
    """The phases. Those that keep nothing themselves take part in the others' memory; others must fit."""

    def keeps(stage: Composition) -> bool:
        return stage.reducer.sparse or stage.memory != NoMemory()

    shared = next((stage for stage in stages if keeps(stage)), stages[0])
    fitted = []
    for number, stage in enumerate(stages):
        where = f"phase {number} does not fit to the others"
        if stage.levels != shared.levels:
            raise ValueError(
                f"{where}: it is over {stage.levels}, they over {shared.levels}; name the same axes in all. Beside "
                "hitopk the dense one is jsparse.torus(inter, intra)"
            )
        if getattr(stage.space, "bucket_bytes", None) is not None:
            raise ValueError(f"{where}: bucket_bytes cuts the vector of which they have one residual; leave it out")
        if stage.reducer.staleness:
            raise ValueError(f"{where}: what arrives some steps late would be lost at its end; take staleness=0")
        if keeps(stage):
            for name, ours, theirs in (*_differing(stage, shared, "space"), *_differing(stage, shared, "memory")):
                raise ValueError(f"{where}: its {name} is {ours}, theirs {theirs}; there is one state for all")
            fitted.append(stage)
        else:
            memory = shared.memory.in_dense_phase(flush)
            fitted.append(dataclasses.replace(stage, space=shared.space, memory=memory))
    if not flush and shared.memory.feeds_back and not keeps(stages[-1]):
        raise ValueError("the last phase is dense, and with flush=False the residual would never go; leave flush out")
    return Phased(tuple(fitted), tuple(itertools.accumulate(lengths, initial=0)), shared)


def _differing(a: Composition, b: Composition, part: str) -> Iterator[tuple[str, Any, Any]]:
    """The name of each option in which a part of two synchronisers differs, and both values."""
    ours, theirs = getattr(a, part), getattr(b, part)
    if type(ours) is not type(theirs):
        yield part, ours, theirs
    elif ours != theirs:
        for field in dataclasses.fields(ours):
            values = getattr(ours, field.name), getattr(theirs, field.name)
            if values[0] != values[1]:
                yield field.name, *values
