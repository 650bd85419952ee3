"""A run in phases: different algorithms and densities, one after another, in one compiled program."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._comm.metered import Metered
from .._vector.density import check_steps
from .config import Config, Phases
from .synchronise import (
    BucketState,
    Reduced,
    SparseAllReduceState,
    Sums,
    agree,
    check,
    conclude,
    gradients,
    reduce_buckets,
    varying_over,
)
from .transform import SparseAllReduce, averages, begin, initial

Stage: TypeAlias = tuple[int, SparseAllReduce] | SparseAllReduce


class PhasedState(NamedTuple):
    """States of the phases' selectors, or of their all-reduces.

    Attributes:
      threshold: shape ``(1,)``: that of the phase that ran last; 0 where it has none.
      selected: int32, shape ``(1,)``: what its selector selected.
      states: one for each phase.
    """

    threshold: jax.Array
    selected: jax.Array
    states: tuple[Any, ...]


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
    config = _fit(*_parse(stages), flush)
    init: Any = functools.partial(_init, config)
    update: Any = functools.partial(_update, config)
    return SparseAllReduce(init, update)


def _parse(stages: Any) -> tuple[list[Config], list[int]]:
    """The configurations, and how many steps each but the last is for."""
    form = "pass ((steps, tx), ..., tx): how long each runs, and last the one that stays"
    if isinstance(stages, SparseAllReduce) or not stages:
        raise ValueError(f"there are no phases: {form}")
    configs, lengths = [], []
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
        config = tx.config
        if isinstance(config, Phases):
            raise ValueError(f"phase {number} has phases itself: write them all in one row")
        configs.append(config)
    if sum(lengths) >= 2**31:
        raise ValueError(f"the phases have {sum(lengths)} steps; a run's number of steps is an int32: take fewer")
    return configs, lengths


def _fit(configs: list[Config], lengths: list[int], flush: bool) -> Phases:
    """The phases, of which dense ones have what sparse ones say of it; refused where they do not fit together."""
    shared = next((config for config in configs if config.allreduce.sparse), configs[0])
    stages = []
    for number, config in enumerate(configs):
        where = f"phase {number} does not fit to the others"
        if config.levels != shared.levels:
            raise ValueError(
                f"{where}: it is over {config.levels}, they over {shared.levels}; name the same axes in all. Beside "
                "hitopk the dense one is jsparse.torus(inter, intra)"
            )
        if config.bucket_bytes is not None:
            raise ValueError(f"{where}: bucket_bytes cuts the vector of which they have one residual; leave it out")
        if getattr(config.allreduce, "staleness", 0):
            raise ValueError(f"{where}: what arrives some steps late would be lost at its end; take staleness=0")
        if config.allreduce.sparse:
            for field in ("scope", "dense_below", "feedback", "momentum", "clip_norm"):
                ours, theirs = getattr(config, field), getattr(shared, field)
                if ours != theirs:
                    name = "error_feedback" if field == "feedback" else field
                    raise ValueError(f"{where}: its {name} is {ours}, theirs {theirs}; there is one state for all")
            stages.append(config)
        else:
            stages.append(
                dataclasses.replace(
                    config,
                    # It leaves nothing over, so that there is nothing to decay or to average.
                    error_feedback=flush and shared.allreduce.sparse and shared.feedback is not None,
                    scope=shared.scope,
                    dense_below=shared.dense_below,
                    momentum=shared.momentum,
                    clip_norm=shared.clip_norm,
                )
            )
    if not flush and shared.allreduce.sparse and not configs[-1].allreduce.sparse:
        raise ValueError("the last phase is dense, and with flush=False the residual would never go; leave flush out")
    return Phases(tuple(stages), tuple(itertools.accumulate(lengths, initial=0)))


def _init(phases: Phases, params: optax.Params) -> SparseAllReduceState:
    states = [begin(stage, params).buckets for stage in phases.stages]
    own = begin(phases.shared, params).buckets
    carried = []
    for i, bucket in enumerate(phases.plan(params)):
        select, reduce = (tuple(getattr(state[i], part) for state in states) for part in ("select", "reduce"))
        dtype = bucket.layout.dtype
        carried.append(
            own[i]._replace(select=_phased(select, (), dtype) if any(select) else (), reduce=_phased(reduce, (), dtype))
        )
    return initial(phases.levels, carried)


def _update(
    phases: Phases,
    updates: optax.Updates,
    state: SparseAllReduceState,
    params: optax.Params | None = None,
    **extra_args,
) -> tuple[optax.Updates, SparseAllReduceState]:
    del params, extra_args
    levels = [Metered(comm) for comm in phases.levels]
    size = math.prod(level.size for level in levels)
    leaves, treedef = jax.tree.flatten(updates)
    buckets = phases.plan(updates)
    check(phases.shared, levels, buckets, updates, state)
    given = gradients(phases.shared, updates, size)
    step, bad = agree(levels, state.step[0], given)
    opening = [(level.words, level.messages) for level in levels]

    def run(number: int) -> tuple[list[jax.Array], Any]:
        stage, start = phases.stages[number], phases.starts[number]
        metered = [Metered(comm) for comm in phases.levels]
        before = [_enter(number, stage, bucket) for bucket in state.buckets]
        reduced = reduce_buckets(stage, metered, buckets, given, before, [bad] * len(buckets), step - start)
        carried = [_leave(number, stage, *pair) for pair in zip(reduced.carried, state.buckets, strict=True)]
        means = averages(Sums(buckets, reduced.totals, bad, size), leaves)
        sent = [(level.words, level.messages) for level in metered]
        return means, varying_over(levels, (reduced._replace(totals=[], carried=carried), sent))

    now = sum((step >= start for start in phases.starts[1:]), jnp.int32(0))
    branches = [functools.partial(run, number) for number in range(len(phases.stages))]
    reduced: Reduced
    means, (reduced, sent) = phases.levels[0].switch(now, branches, replicated=True)
    after = conclude(levels, state, reduced, [*opening, *sent], bad, step, undo=False)
    return jax.tree.unflatten(treedef, means), after


def _enter(number: int, stage: Config, bucket: BucketState) -> BucketState:
    """The state as the phase knows it."""
    return bucket._replace(
        residual=bucket.residual if stage.error_feedback else None,
        select=bucket.select.states[number] if bucket.select else (),
        reduce=bucket.reduce.states[number],
    )


def _leave(number: int, stage: Config, after: BucketState, before: BucketState) -> BucketState:
    """The state of all phases, after one of them."""

    def replaced(old: PhasedState, new: Any) -> PhasedState:
        states = tuple(new if i == number else state for i, state in enumerate(old.states))
        return _phased(states, new, old.threshold.dtype)

    return after._replace(
        residual=after.residual if stage.error_feedback else before.residual,
        select=replaced(before.select, after.select) if before.select else (),
        reduce=replaced(before.reduce, after.reduce),
    )


def _phased(states: tuple[Any, ...], latest: Any, dtype: DTypeLike) -> PhasedState:
    threshold = getattr(latest, "threshold", jnp.zeros(1, dtype))
    return PhasedState(threshold, getattr(latest, "selected", jnp.zeros(1, jnp.int32)), states)
