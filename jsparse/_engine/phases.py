"""A run in phases: different algorithms and densities, one after another, in one program."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._comm.comm import Comm
from .._comm.metered import Metered
from .._vector.buckets import Bucket
from .._vector.density import check_steps
from .._vector.sparse_vector import flatten
from .agreement import agree, check, varying_over
from .memory import NoMemory
from .outcome import conclude
from .state import BucketState, SparseAllReduceState
from .synchroniser import Composition, Means, Synchroniser
from .transform import SparseAllReduce


@dataclasses.dataclass(frozen=True)
class Phased(Synchroniser):
    """The synchroniser of :func:`phases`.

    A vector has one memory for all phases. The states of its reducers are a tuple, one for each
    phase.

    Attributes:
      stages: the synchronisers of the phases. They have the same space, and memories with the same
        state.
      starts: the first step of each phase.
      shared: the synchroniser that determines what is carried from step to step.
    """

    stages: tuple[Composition, ...]
    starts: tuple[int, ...]
    shared: Composition

    @property
    def levels(self) -> tuple[Comm, ...]:
        return self.shared.levels

    @property
    def model(self) -> tuple[Comm, ...]:  # type: ignore[override]
        return self.shared.model

    @property
    def by_senders(self) -> bool:
        return any(stage.by_senders for stage in self.stages)

    def over(self, *comms: Comm) -> "Phased":
        return Phased(tuple(stage.over(*comms) for stage in self.stages), self.starts, self.shared.over(*comms))

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "Phased":
        stages = tuple(stage.on_shards(model, whole) for stage in self.stages)
        return Phased(stages, self.starts, self.shared.on_shards(model, whole))

    def init(self, params: Any) -> SparseAllReduceState:
        """The state before the first step: one memory, and every phase's reducer."""
        shared = self.shared.init(params)
        each = zip(*(stage.init(params).buckets for stage in self.stages), strict=True)
        buckets = [
            BucketState(bucket.memory, tuple(own.reducer for own in stages))
            for bucket, stages in zip(shared.buckets, each, strict=True)
        ]
        return shared._replace(buckets=tuple(buckets))

    def buckets(self, params: Any) -> list[Bucket]:
        return self.shared.buckets(params)

    def compressed(self, params: Any) -> tuple[list[int], list[int]]:
        return max((stage.compressed(params) for stage in self.stages), key=lambda ids: len(ids[1]))

    def check_shard(self, name: str, shape: Sequence[int], shard: Sequence[int]) -> None:
        for stage in self.stages:
            stage.check_shard(name, shape, shard)

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        levels = list(map(Metered, self.levels))
        everyone = [*levels, *self.model]
        check(self, grads, state)
        leaves, treedef = flatten(grads)
        buckets = self.shared.space.buckets(leaves)
        given = self.shared.prepared(leaves)
        step, bad = agree(everyone, state.step[0], given)

        def run(number: int) -> tuple[list[jax.Array], Any]:
            stage, inside = self.stages[number], list(map(Metered, self.levels))
            before = [BucketState(bucket.memory, bucket.reducer[number]) for bucket in state.buckets]
            left_out = [bad] * len(buckets)
            outcomes = stage.synchronise(inside, buckets, given, before, left_out, step - self.starts[number])
            means = Means(buckets, [outcome.quotient for outcome in outcomes], bad).leaves(leaves)
            after = []
            for outcome, old in zip(outcomes, state.buckets, strict=True):
                reducers = (*old.reducer[:number], outcome.state.reducer, *old.reducer[number + 1 :])
                after.append(outcome._replace(quotient=None, state=BucketState(outcome.state.memory, reducers)))
            sent = [(level.words, level.messages) for level in inside]
            return means, varying_over(everyone, (after, sent))

        now = sum((step >= start for start in self.starts[1:]), jnp.int32(0))
        branches = [functools.partial(run, number) for number in range(len(self.stages))]
        means, (outcomes, sent) = self.levels[0].switch(now, branches, replicated=True)
        selects = map(self.shared.selects, buckets)
        after = conclude(levels, self.model, state, outcomes, selects, bad, step, undo=False, sent=sent)
        return jax.tree.unflatten(treedef, means), after


def phases(stages: Sequence[tuple[int, SparseAllReduce] | SparseAllReduce], *, flush: bool = True) -> SparseAllReduce:
    """Makes a run in phases, each with its own algorithm or density.

    Use it for warm-ups, and to change to dense sums. All phases are in one compiled program, and
    the step that the workers agree on chooses the phase. Steps are counted as synchronisations,
    without those that met a non-finite gradient. Each phase begins as its transformation by itself
    would, but with the residual (and the velocity of :func:`dgc`) of the phase before. Each phase
    keeps its own thresholds and regions.

    A phase that selects nothing takes part in the error feedback of sparse ones. The first step of
    a dense phase delivers all that they left in the residuals, and these are zero from then on.
    Quantized and low-rank phases keep there what they do not deliver. Nothing is lost at any
    boundary.

    Args:
      stages: ``((steps, tx), ..., tx)``: how many steps each transformation runs; the last one has
        no end. They are presets, or :func:`sparse_allreduce`, over the same axis. The sparse ones
        must have the same ``scope``, ``dense_below``, ``tiles``, ``error_feedback`` and momentum.
        So :func:`demo` fits no other sparse one. The others, which select nothing, take these over
        from them, whatever their own are.
      flush: whether a dense phase delivers the residual. Otherwise it leaves the residual aside
        until the next sparse phase.

    Returns:
      A gradient transformation. Place it, read it and chain it like any other. ``stats`` tells of
      the phase that ran.

    Raises:
      ValueError: the stages are not of that form, or do not fit together. So :func:`vote` and
        :func:`scale_by_dion`, whose updates are no sums, are refused beside phases with error
        feedback, Dion also beside sparse ones and before dense ones. :func:`qsgd`, which rounds at
        random, is refused beside error feedback unless ``flush`` is False. Sparse phases without
        error feedback are refused beside a phase that keeps a residual, and :func:`powersgd`
        beside sparse ones with ``tiles``, or :func:`demo`.

    Example (the warm-up of gTop-k, with epochs of 100 steps)::

      densities = (0.25, 0.0725, 0.015, 0.004)
      warm_up = [(100, jsparse.gtopk("data", density=density)) for density in densities]
      last = jsparse.gtopk("data", density=0.001)
      tx = optax.chain(jsparse.phases((*warm_up, last)), optax.sgd(0.1))

    **Cost**: what the phase that runs sends, and the one exchange that opens each step. A phase
    runs within a branch, so its messages can't overlap with anything outside the branch.

    References:
      Shi et al., gTop-k, ICDCS 2019, section IV-B (density warm-up); Shi et al., MLSys 2021,
      section 5.6 (sparse, then dense); the code of Li and Hoefler, PPoPP 2022 (dense at first).
    """
    return SparseAllReduce.of(_fit(*_parse(stages), flush))


def _parse(stages: Any) -> tuple[list[Composition], list[int]]:
    """The synchronisers, and the number of steps of each but the last."""
    form = "pass ((steps, tx), ..., tx): each with its number of steps, but the last, which has no end"
    if isinstance(stages, SparseAllReduce) or not stages:
        raise ValueError(f"there are no phases: {form}")
    synchronisers, lengths = [], []
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        ends = isinstance(stage, tuple | list) and len(stage) == 2 and isinstance(stage[0], int)
        steps, tx = stage if ends else (None, stage)
        if not isinstance(tx, SparseAllReduce):
            raise ValueError(
                f"phase {number} is {type(tx).__name__}, and no preset; {form}. Put the other members of a chain "
                "around the phases: optax.chain(jsparse.phases(...), optax.sgd(0.1))"
            )
        if (steps is None) != last:
            raise ValueError(f"phase {number} has {'an' if last else 'no'} end; {form}")
        if steps is not None:
            check_steps(f"steps of phase {number}", steps)
            lengths.append(steps)
        if not isinstance(tx.synchroniser, Composition):
            raise ValueError(
                f"phase {number} has phases itself, or workers whose updates differ: pass all phases in one sequence, "
                "and only presets whose updates are alike on all workers"
            )
        synchronisers.append(tx.synchroniser)
    if sum(lengths) >= 2**31:
        raise ValueError(f"the phases have {sum(lengths)} steps; the step is an int32: choose fewer than 2**31")
    return synchronisers, lengths


def _fit(stages: list[Composition], lengths: list[int], flush: bool) -> Phased:
    """The phases as one synchroniser.

    A phase that keeps no state itself uses the memory of the others. Phases that keep a state must
    fit together.
    """
    # The others take space and memory over from these: dense phases from sparse ones.
    sparse = [stage for stage in stages if stage.reducer.sparse]
    keeping = sparse or [stage for stage in stages if stage.memory != NoMemory()]
    shared = (keeping or stages)[0]
    fitted = []
    for number, stage in enumerate(stages):
        where = f"phase {number} does not fit the others"
        if stage.levels != shared.levels:
            raise ValueError(
                f"{where}: it runs over {stage.levels}, they over {shared.levels}; name the same axes in all. The "
                "dense phase that fits hitopk is jsparse.torus(inter, intra)"
            )
        if getattr(stage.space, "bucket_bytes", None) is not None:
            raise ValueError(f"{where}: bucket_bytes cuts the vector, but they have one residual for it; leave it out")
        if stage.reducer.staleness:
            raise ValueError(f"{where}: sums that arrive late would be lost at its end; take staleness=0")
        if any(_loses(stage, other, after=i > number) for i, other in enumerate(stages)):
            raise ValueError(
                f"{where}: {stage.reducer} makes no sum of what it takes. The residual of another phase would be lost "
                "in it, or its momentum would be delivered by a phase that follows. Train with it in a run of its "
                "own, from jsparse.init on; dense phases may come before it"
            )
        if stage in keeping:
            for part in ("space", "memory"):
                for name, ours, theirs in _differing(part, getattr(stage, part), getattr(shared, part)):
                    raise ValueError(
                        f"{where}: its {name} is {ours}, theirs {theirs}; choose the same, as they share a state"
                    )
            fitted.append(stage)
        elif stage.memory != NoMemory() and shared.memory == NoMemory():
            raise ValueError(
                f"{where}: its residual would be dropped, as sparse phases with error_feedback=False keep none; leave "
                "that out"
            )
        elif stage.reducer.of_matrices and (not shared.space.as_leaves or getattr(shared.space, "tiles", None)):
            raise ValueError(
                f"{where}: {stage.reducer} is of matrices, and they take elements in another order, that of tiles or "
                "of transforms: choose phases without tiles, and not demo"
            )
        else:
            memory = shared.memory.in_dense_phase(flush)
            fitted.append(dataclasses.replace(stage, space=shared.space, memory=memory))
    if not flush and shared.memory.feeds_back and stages[-1] not in keeping:
        raise ValueError(
            "the last phase is dense, and flush is False, so the residual would never be delivered; leave flush out"
        )
    return Phased(tuple(fitted), tuple(itertools.accumulate(lengths, initial=0)), shared)


def _loses(stage: Composition, other: Composition, *, after: bool) -> bool:
    """Whether a phase can't share its memory with another, which may follow it.

    Phases of a reducer that conserves nothing, such as Dion's, share a momentum. It is not what
    others call a residual.
    """
    if stage.reducer.conserves or type(stage.reducer) is type(other.reducer):
        return False
    return other.memory.feeds_back or (stage.memory.feeds_back and (after or other.reducer.sparse))


def _differing(part: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """The options in which a part of two synchronisers differs: the name, and both values."""
    if type(ours) is not type(theirs):
        return [(part, ours, theirs)]
    names = [field.name for field in dataclasses.fields(ours)]
    values = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return [(name, own, other) for name, own, other in values if own != other]
