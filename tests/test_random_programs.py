"""Random programs: any selector, all-reduce, wire, quantizer, memory and scope together.

The contract tests of ``test_invariants.py`` know each row of the table. Here Hypothesis puts the
parts of all rows together in ways that no row has, over any number of workers and any tree of
leaves. It feeds them gradients of many kinds, and shrinks what fails to a small program.
``JSPARSE_PROGRAMS`` in the environment sets how many programs the long form draws.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jsparse
import transports
from algorithms import ROWS, Row
from jsparse._engine.a2sgd import TwoMeans
from jsparse._engine.memory import ErrorFeedback, LeftAside, Memory, NoMemory
from jsparse._engine.momentum import MomentumCorrection, WithMomentum
from jsparse._engine.phases import Phased
from jsparse._engine.reducer import Reducer, Selecting, Whole
from jsparse._engine.synchroniser import Composition, Synchroniser
from jsparse._presets.ef21 import Differences
from jsparse._presets.onebit_adam import SharedMomentum
from jsparse._presets.powersgd import LowRank
from jsparse._vector.buckets import Bucket
from jsparse.quantize import Rotated
from transports import AXIS, LEVELS

# How many programs the long form draws. Without it, it draws the same ones in each run.
PROGRAMS = os.environ.get("JSPARSE_PROGRAMS")
SHAPES = [(), (0,), (3, 0), (1,), (2,), (7,), (33,), (64,), (5, 6), (2, 3, 4), (12, 10)]
# The smallest density keeps one element of a vector.
DENSITIES = [0.001, 0.05, 0.1, 0.3, 0.7, 1.0]


@dataclasses.dataclass(frozen=True)
class Program:
    """A synchronisation of gradients of certain shapes.

    Attributes:
      synchroniser: how they are synchronised.
      sizes: the workers; over two levels the nodes, and the workers of a node.
      leaves: shape and type of each leaf.
    """

    synchroniser: Synchroniser
    sizes: tuple[int, ...]
    leaves: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def workers(self) -> int:
        return math.prod(self.sizes)

    @property
    def zeros(self) -> list[np.ndarray]:
        return [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in self.leaves]

    @property
    def alike(self) -> bool:
        """Whether all workers get the same update."""
        return not isinstance(self.synchroniser, TwoMeans)

    @property
    def row(self) -> Row:
        """The program as the tests' transports take it."""
        gpus = {self.workers: self.sizes[1]} if len(self.sizes) > 1 else None
        return Row("program", lambda axis, density: jsparse.SparseAllReduce.of(self.synchroniser), gpus=gpus)


# Strategies.


def parts_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The parts that the rows are made of, by kind, each once."""
    found: dict[str, list[Any]] = {"select": [], "sparse": [], "dense": [], "quantize": []}

    def add(kind: str, part: Any) -> None:
        if part is not None and part not in found[kind]:
            found[kind].append(part)

    for row in rows:
        synchroniser = row.make(transports.axis(row), 0.05).synchroniser
        for stage in getattr(synchroniser, "stages", [synchroniser]):
            reducer = getattr(stage, "reducer", None)
            if isinstance(reducer, Selecting):
                add("select", reducer.select)
                add("quantize", getattr(reducer.wire, "values", None))
            if isinstance(reducer, Selecting | Whole):
                add("sparse" if reducer.sparse else "dense", reducer.allreduce)
                add("quantize", getattr(reducer.allreduce, "quantize", None))
    return found


PARTS = parts_of(ROWS)
WIRES = [jsparse.wire.Full(), *map(jsparse.wire.Compact, PARTS["quantize"])]

densities = st.sampled_from(DENSITIES)


def of_density(part: Any, density: float) -> Any:
    """A selector like this one, of another density."""
    if isinstance(part, jsparse.select.BlockTopK):
        return dataclasses.replace(part, k=max(1, round(density * part.block)))
    return dataclasses.replace(part, density=density)


selectors = st.builds(of_density, st.sampled_from(PARTS["select"]), densities)
feedbacks = st.sampled_from([True, True, True, False, ErrorFeedback(decay=0.5)])
momenta = st.one_of(
    *[st.none()] * 3,
    st.fixed_dictionaries(
        {"momentum": st.sampled_from([0.5, 0.9]), "nesterov": st.booleans(), "factor_masking": st.booleans()}
    ),
)


def shared(momenta: st.SearchStrategy[Any] = momenta) -> st.SearchStrategy[dict[str, Any]]:
    """Options that all phases of a run have in common."""
    return st.fixed_dictionaries(
        {
            "error_feedback": feedbacks,
            "momentum": momenta,
            "scope": st.sampled_from(["global", "global", "leaf"]),
            "dense_below": st.sampled_from([0, 0, 8]),
        }
    )


@st.composite
def sparse(draw: Any, options: dict[str, Any], comms: tuple[str, ...] = (AXIS,)) -> jsparse.SparseAllReduce:
    """A selector, an all-reduce and a wire, on one level or two."""
    momentum, options = options["momentum"], {name: options[name] for name in options if name != "momentum"}
    # Without error feedback, quantizers may be unbiased.
    allowed = [wire for wire in WIRES if not (wire.unbiased and options["error_feedback"])]
    options |= {
        "select": draw(selectors),
        "allreduce": draw(st.sampled_from(PARTS["sparse"])),
        "wire": draw(st.sampled_from(allowed)),
    }
    if isinstance(options["allreduce"], jsparse.allreduce.CyclicTopK):
        options["wire"] = jsparse.wire.Full()  # It takes no other.
    if len(comms) > 1:
        return jsparse.hitopk(*comms, **options)
    if momentum:
        return jsparse.dgc(*comms, **options, **momentum)
    return jsparse.sparse_allreduce(*comms, **options)


@st.composite
def dense(draw: Any) -> jsparse.SparseAllReduce:
    kind = draw(st.sampled_from(["dense", "server", "parts"]))
    if kind == "dense":
        return jsparse.dense(AXIS, bucket_bytes=draw(st.sampled_from([None, 1, 100])))
    if kind == "server":
        return jsparse.parameter_server(AXIS, staleness=draw(st.integers(0, 2)))
    allreduce = draw(st.sampled_from(PARTS["dense"]))
    feedback = False if allreduce.unbiased or allreduce.staleness else draw(feedbacks)
    return jsparse.sparse_allreduce(
        AXIS, select=None, allreduce=allreduce, error_feedback=feedback, scope=draw(st.sampled_from(["global", "leaf"]))
    )


@st.composite
def in_phases(draw: Any) -> jsparse.SparseAllReduce:
    options = draw(shared())
    stage = st.one_of(sparse(options), st.sampled_from([jsparse.dense(AXIS), jsparse.parameter_server(AXIS)]))
    stages = draw(st.lists(st.tuples(st.integers(1, 3), stage), min_size=1, max_size=2))
    return jsparse.phases((*stages, draw(sparse(options))), flush=draw(st.booleans()))


@st.composite
def programs(draw: Any) -> Program:
    kind = draw(st.sampled_from(["sparse", "sparse", "sparse", "row", "phases", "dense", "levels"]))
    if kind == "row":
        # Those whose updates are no means, and those of frequencies, have rules of their own.
        row = draw(st.sampled_from([row for row in ROWS if not row.rule and not row.frequencies]))
        tx, levels = row.make(transports.axis(row), draw(densities)), 1 if row.gpus is None else 2
    elif kind == "levels":
        with_shards = shared(st.none()).flatmap(lambda options: sparse(options, LEVELS))
        tx, levels = draw(st.one_of(with_shards, with_shards, st.just(jsparse.torus(*LEVELS)))), 2
    else:
        one = {"sparse": shared().flatmap(sparse), "phases": in_phases(), "dense": dense()}
        tx, levels = draw(one[kind]), 1
    workers = draw(st.integers(1, 9))
    sizes = (workers,)
    if levels == 2:
        gpus = draw(st.sampled_from([g for g in range(1, workers + 1) if workers % g == 0]))
        sizes = (workers // gpus, gpus)
    synchroniser = tx.synchroniser
    for stage in stages_of(synchroniser):
        hypothesis.assume(sizes[0] % getattr(getattr(stage.reducer, "allreduce", None), "group", 1) == 0)
    dtypes = ["float32", "float32", "bfloat16", "float16"] + ["float64"] * draw(st.booleans())
    leaves = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(dtypes)), min_size=1, max_size=5))
    if any(isinstance(stage.reducer, LowRank) for stage in stages_of(synchroniser)):
        leaves.append(((12, 10), "float32"))
    return Program(synchroniser, sizes, tuple(leaves))


def stages_of(synchroniser: Synchroniser) -> Sequence[Composition]:
    """The compositions that a synchroniser runs; A2SGD is none."""
    if isinstance(synchroniser, Phased):
        return synchroniser.stages
    return [synchroniser] if isinstance(synchroniser, Composition) else []


def quantizers_of(reducer: Reducer) -> list[Any]:
    """The layouts of values in a reducer's messages; none of :class:`LowRank`."""
    parts = [getattr(reducer, "wire", None), getattr(getattr(reducer, "allreduce", None), "quantize", None)]
    return [getattr(part, "values", part) for part in parts if part is not None]


# Gradients: a vector of n elements for each worker. A leaf takes its part in its own type.


def gaussian(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((size, n))


def heavy_tails(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_t(1.5, (size, n))


def constant(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return np.ones((size, n))


def ties(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-1, 2, (size, n))


def integers(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-99, 100, (size, n))


def one_hot(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 9, (size, 1)) * (np.arange(n) == rng.integers(0, n, (size, 1)))


def zeros(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice([0.0, -0.0], (size, n))


def denormal(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """Below the smallest normal number of float32, or of float16."""
    return rng.choice([-1, 1], (size, n)) * 10 ** np.where(
        rng.random((size, n)) < 0.5, rng.uniform(-45, -37, (size, n)), rng.uniform(-8, -4, (size, n))
    )


def huge(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """Up to the largest float32, and beyond that of float16, which is taken instead."""
    return rng.choice([-1, 1], (size, n)) * 10 ** rng.uniform(30, 38.5, (size, n))


def largest(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """The largest number of every type."""
    return rng.choice([-np.inf, np.inf], (size, n))


def moving(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """The support moves on in each step, round a circle."""
    return rng.integers(1, 99, (size, n)) * ((np.arange(n) - 5 * step) % n < n // 8 + 1)


def in_pairs(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """Two workers at a time cancel exactly; an odd one has zeros."""
    half = rng.integers(-50, 51, (size // 2, n))
    return np.concatenate([np.stack([half, -half], 1).reshape(-1, n), np.zeros((size % 2, n))])


def cancelling(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """The sum of all workers is exactly zero, and that of fewer is not."""
    rest = rng.integers(-50, 51, (size - 1, n))
    return np.concatenate([rest, -rest.sum(0, keepdims=True)])


def nearly_cancelling(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return 1000 * cancelling(size, n, step, rng) + rng.integers(-1, 2, (size, n))


def alike(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return np.repeat(rng.integers(-99, 100, (1, n)), size, axis=0)


def disjoint(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 99, (size, n)) * (np.arange(n) % size == np.arange(size)[:, None])


def unlike(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """A worker's gradients are up to a million times as large as another's."""
    return rng.standard_normal((size, n)) * 10.0 ** rng.integers(-3, 4, (size, 1))


def layered(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((size, n)) * np.logspace(-4, 4, n)


def few(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """Fewer elements than are selected, and on some workers none."""
    return rng.integers(-9, 10, (size, n)) * (rng.random((size, n)) < 0.02 * rng.integers(0, 3, (size, 1)))


def to_and_fro(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    """A step takes back what the step before added."""
    return np.random.default_rng(n).integers(-9, 10, (size, n)) * (-1) ** step


def growing(size: int, n: int, step: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((size, n)) * 10.0**step


WHOLE = [
    constant,
    ties,
    integers,
    one_hot,
    zeros,
    moving,
    in_pairs,
    cancelling,
    alike,
    disjoint,
    few,
    to_and_fro,
]
KINDS = {
    kind.__name__: kind
    for kind in [
        *WHOLE,
        gaussian,
        heavy_tails,
        denormal,
        huge,
        largest,
        nearly_cancelling,
        unlike,
        layered,
        growing,
    ]
}


class Fault(NamedTuple):
    """A value that is not finite, in one step of one worker; the last two are taken modulo."""

    step: int
    value: float
    worker: int
    place: int


faults = st.builds(
    Fault, st.integers(0, 3), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 8), st.integers(0, 999)
)
# The kinds of a run's steps, and a fault. Often whole numbers alone, so that nothing is rounded.
runs = st.tuples(
    st.one_of(
        *(
            st.lists(st.sampled_from(names), min_size=1, max_size=12)
            for names in ([kind.__name__ for kind in WHOLE], list(KINDS))
        )
    ),
    st.none() | faults,
)


def gradients(program: Program, flat: np.ndarray) -> list[np.ndarray]:
    """A vector for each worker as leaves, whose first axis is that of the workers."""
    leaves, begin = [], 0
    for like in program.zeros:
        most = float(jnp.finfo(like.dtype).max)
        part = np.clip(flat[:, begin : begin + like.size], -most, most)
        leaves.append(part.astype(like.dtype).reshape(program.workers, *like.shape))
        begin += like.size
    return leaves


# Runs.


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      first: the state before the first step.
      advance: ``(gradients, state, steps) -> (last updates, sums of updates, state)``. Leaves have
        a leading axis for the workers. The gradients are the same in each step.
      ways: the words and messages of every way through its branches.
    """

    first: jsparse.SparseAllReduceState
    advance: Callable[..., Any]
    ways: set[tuple[int, int]]


@functools.lru_cache(maxsize=20)
def compiled(program: Program) -> Compiled:
    if compiled.cache_info().misses % 100 == 0:
        jax.clear_caches()  # Executables stay mapped into memory.
    row, size = program.row, program.workers
    tx = row.make(transports.axis(row), 1.0)
    first = jax.jit(transports.vmapped(lambda _: tx.init(program.zeros), row, size))(np.arange(size))
    update = transports.vmapped(tx.update, row, size)

    def advance(grads, state, steps):
        def once(_, carry):
            _, sums, state = carry
            updates, state = update(grads, state)
            sums = [total + part.astype(total.dtype) for total, part in zip(sums, updates, strict=True)]
            return updates, sums, state

        sums = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in grads]
        return lax.fori_loop(0, steps, once, (grads, sums, state))

    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), first)
    traffic = jsparse.traffic(tx.update, program.zeros, local, axis_sizes=transports.axis_sizes(row, size))
    return Compiled(first, jax.jit(advance), transports.ways_through(traffic))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays, or trees of them, are the same to the bit; a NaN too."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def check_run(program: Program, kinds: Sequence[str], fault: Fault | None, seed: int) -> None:
    """One step of each kind; every invariant after each."""
    run, sums = compiled(program), []
    n = sum(leaf.size for leaf in program.zeros)
    state = run.first
    for step, kind in enumerate(kinds):
        rng = np.random.default_rng([seed, step])
        flat = np.zeros((program.workers, n))
        if n:
            flat += KINDS[kind](program.workers, n, step, rng)
        grads = gradients(program, flat)
        spoilt = n > 0 and fault is not None and fault.step == step
        if spoilt:
            place = spoil(program, grads, fault)
        updates, _, after = run.advance(grads, state, np.int32(1))
        updates = [np.asarray(leaf) for leaf in updates]
        if program.alike:
            assert all(same_bits(leaf, np.broadcast_to(leaf[:1], leaf.shape)) for leaf in updates), "replicas differ"
        check_report(program, run, after)
        if spoilt:
            check_fault(program, updates, place, state, after)
        else:
            assert (np.asarray(after.step) == np.asarray(state.step) + 1).all()
            check_mass(program, grads, updates, state, after, sums)
        state = after
    assert run.advance._cache_size() == 1, "compiled again"
    stats = jsparse.stats(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state))
    assert same_bits((stats.words, stats.messages), [x[:, 0] for x in (state.report.words, state.report.messages)])


def spoil(program: Program, grads: list[np.ndarray], fault: Fault) -> tuple[int, int]:
    """Puts a value that is not finite into a leaf of one worker: which leaf, and where in it."""
    place = fault.place % sum(leaf.size for leaf in program.zeros)
    for number, leaf in enumerate(program.zeros):
        if place < leaf.size:
            grads[number].reshape(program.workers, -1)[fault.worker % program.workers, place] = fault.value
            return number, place
        place -= leaf.size
    raise AssertionError


def check_fault(
    program: Program,
    updates: list[np.ndarray],
    place: tuple[int, int],
    before: jsparse.SparseAllReduceState,
    after: jsparse.SparseAllReduceState,
) -> None:
    """All workers see it, and nothing is changed; without a state, it may stay where it is."""
    if jax.tree.leaves(before.buckets) or not program.alike:
        assert all(np.isnan(leaf).all() for leaf in updates)
        assert same_bits(before.buckets, after.buckets)
        assert same_bits(before.step, after.step)
        assert not np.any(after.report.delivered)
        assert not np.any(after.report.updated)
        assert same_bits(before.report.thresholds, after.report.thresholds)
    else:
        leaf, within = place
        assert not np.isfinite(updates[leaf].reshape(program.workers, -1)[:, within]).any()


def check_report(program: Program, run: Compiled, after: jsparse.SparseAllReduceState) -> None:
    """What a worker says that it sent is one way through the program; what it keeps is finite."""
    report = after.report
    words, messages = (np.asarray(x)[:, 0].tolist() for x in (report.words, report.messages))
    sent = set(zip(words, messages, strict=True))
    assert sent <= run.ways, f"words and messages are {sent}, and the program has {sorted(run.ways)}"
    # Over two levels, those that have different shards may go different ways.
    assert len(sent) == 1 or len(program.sizes) > 1
    assert all(np.isfinite(leaf).all() for bucket in after.buckets for leaf in jax.tree.leaves(bucket.memory))


class Sum(NamedTuple):
    """What a bucket's update should be, before it is divided by the number of workers.

    Attributes:
      want: shape ``(n,)``: what was accumulated, less what is left; infinite or NaN where that
        can't be told.
      slack: shape ``(n,)``: by how much rounding may change it.
    """

    want: np.ndarray
    slack: np.ndarray


def running(program: Program, before: jsparse.SparseAllReduceState) -> Composition:
    """What runs in a step."""
    synchroniser = program.synchroniser
    if isinstance(synchroniser, Phased):
        step = int(np.asarray(before.step)[0, 0])
        return synchroniser.stages[sum(step >= start for start in synchroniser.starts[1:])]
    assert isinstance(synchroniser, Composition)
    return synchroniser


def check_mass(
    program: Program,
    grads: list[np.ndarray],
    updates: list[np.ndarray],
    before: jsparse.SparseAllReduceState,
    after: jsparse.SparseAllReduceState,
    earlier: list[list[Sum]],
) -> None:
    """The update is what was accumulated less what is left, over the number of workers.

    Exactly, where whole numbers are sent without rounding; else to rounding. ``earlier`` are the
    sums of the steps before, for a server that is late.
    """
    if not program.alike:
        return
    stage = running(program, before)
    sums = []
    for bucket, old, new in zip(stage.space.buckets(program.zeros), before.buckets, after.buckets, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            sums.append(summed(program, stage, bucket, bucket.take(grads), old.memory, new.memory))
    earlier.append(sums)
    if len(earlier) <= stage.reducer.staleness:
        assert not any(np.any(leaf) for leaf in updates)
        return
    seen = set()
    for bucket, (want, slack) in zip(
        stage.space.buckets(program.zeros), earlier[-1 - stage.reducer.staleness], strict=True
    ):
        wide, begin = jnp.finfo(bucket.layout.dtype), 0
        for i in bucket.ids:
            got = updates[i][0].reshape(-1).astype(np.float64)
            seen.add(i)
            part = slice(begin, begin + got.size)
            begin += got.size
            compare(got, want[part] / program.workers, slack[part] / program.workers, updates[i].dtype, wide)
    assert all(i in seen or not leaf.size for i, leaf in enumerate(updates))


def compare(got: np.ndarray, mean: np.ndarray, slack: np.ndarray, dtype: Any, wide: Any) -> None:
    """The mean, rounded to the leaf's type; infinite where that type ends."""
    narrow = jnp.finfo(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (np.abs(mean) + slack) * (float(narrow.eps) + 4 * float(wide.eps))
        allowed = slack + rounded + float(narrow.smallest_subnormal)
        allowed += float(jnp.finfo(jnp.float32).tiny)  # Less becomes zero.
        ends = np.abs(mean) + allowed >= float(narrow.max)
        told = np.isfinite(mean) & np.isfinite(allowed)
        right = np.abs(got - mean) <= allowed
    right |= ends & (np.abs(got) >= float(narrow.max) * (1 - 2 * float(narrow.eps)))
    wrong = np.flatnonzero(told & ~right)
    assert not wrong.size, f"lost at {wrong[:5]}: {got[wrong[:5]]}, not {mean[wrong[:5]]} ± {allowed[wrong[:5]]}"


def summed(program: Program, stage: Composition, bucket: Bucket, leaves: list[np.ndarray], old: Any, new: Any) -> Sum:
    """What became of a bucket's gradients, read off the memories before and after the step."""
    reducer, memory = stage.parts(bucket)
    dtype, n = bucket.layout.dtype, bucket.layout.n
    nodes, gpus = (*program.sizes, 1)[:2]
    width = -(-n // gpus) * gpus

    def clip(x: np.ndarray, size: int = nodes, memory: Memory = ErrorFeedback()) -> np.ndarray:
        limit = memory.limit(dtype, size)
        return np.clip(x, -limit, limit)

    def over_nodes(vectors: Any) -> np.ndarray:
        """The vectors of the nodes, of which their workers have a shard each."""
        return np.asarray(vectors, np.float64).reshape(nodes, width)

    flat = np.concatenate([leaf.reshape(program.workers, -1).astype(np.float64) for leaf in leaves], axis=1)
    flat = clip(flat, program.workers, memory) if len(program.sizes) > 1 else flat
    flat = np.pad(flat, ((0, 0), (0, width - n))).reshape(nodes, gpus, width)
    before, after = (jax.tree.map(over_nodes, kept) for kept in (old, new))
    acc = accumulated(memory, before, flat.sum(1), clip)
    magnitude = np.abs(flat).sum((0, 1)) + sum(np.abs(x).sum(0) for x in (acc, *jax.tree.leaves((before, after))))

    feedback = memory.feedback if isinstance(memory, WithMomentum) else memory
    mixes = isinstance(reducer, LowRank) or any(isinstance(part, Rotated) for part in quantizers_of(reducer))
    lossless = not mixes and all(part.lossless for part in quantizers_of(reducer))
    # Without error feedback nothing is clipped, and a sum may overflow on its way, that of a node
    # too.
    magnitudes = np.maximum(np.abs(acc).sum(0), np.abs(flat).sum((0, 1)))
    magnitudes = np.where(magnitudes < float(jnp.finfo(dtype).max), magnitudes, np.nan)
    want = acc.sum(0)
    if isinstance(feedback, ErrorFeedback):
        want = want - after.residual.sum(0) / feedback.decay
    elif not lossless:
        return Sum(np.full(n, np.nan), np.zeros(n))
    elif reducer.sparse:
        return Sum(np.zeros(n), magnitudes[:n] * 1.001)
    else:
        want = np.where(np.isnan(magnitudes), np.nan, want)
        assert isinstance(feedback, NoMemory) or same_bits(old.residual, new.residual)
    assert not np.any(want[n:])

    whole = not mixes and all(part.elementwise for part in quantizers_of(reducer))
    whole &= feedback in (ErrorFeedback(), LeftAside(), NoMemory())
    whole &= bool((256 * acc % 1 == 0).all() and 256 * np.abs(acc).sum(0).max(initial=0) < 2**24)
    if whole:
        return Sum(want[:n], np.zeros(n))
    magnitude = np.full_like(magnitude, magnitude.max()) if mixes else magnitude
    wide = jnp.finfo(dtype)
    return Sum(want[:n], ((8 * (nodes + 8)) * (float(wide.eps) * magnitude + float(wide.tiny)))[:n])


def accumulated(memory: Memory, kept: Any, pushed: np.ndarray, clip: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What a memory makes of a gradient."""
    if isinstance(memory, Differences):
        change = (1 - memory.momentum) * (clip(2 * pushed) / 2 - kept.velocity)
        return accumulated(memory.feedback, kept.kept, change, clip)
    if isinstance(memory, SharedMomentum):
        own = memory.momentum * kept.velocity + (1 - memory.momentum) * pushed
        return accumulated(memory.feedback, kept.kept, own, clip)
    if isinstance(memory, MomentumCorrection):
        velocity = clip(memory.momentum * kept.velocity + pushed)
        pushed = clip(memory.momentum * velocity + pushed) if memory.nesterov else velocity
        return accumulated(memory.feedback, kept.kept, pushed, clip)
    return clip(kept.residual + pushed) if isinstance(memory, ErrorFeedback) else pushed


# Liveness.

# An element waits for at most so many times P n/k steps; among random choices, so many times more.
PATIENCE, AT_RANDOM = 2, 3
# Programs that would need more steps to tell are left out.
MOST_STEPS = 2000


def steps_to_wait(program: Program) -> float:
    """The steps that an element of a constant gradient may have to wait; infinite without a limit.

    It is ``PATIENCE P n/k``. There is no limit with memories that do not conserve mass, with
    quantizers that move a value far from itself, and with all-reduces that leave what they cut at
    its senders.
    """
    if not program.alike:
        return math.inf
    *_, stage = stages_of(program.synchroniser)
    most = 1.0 + stage.reducer.staleness
    for bucket in stage.space.buckets(program.zeros):
        reducer, memory = stage.parts(bucket)
        if isinstance(reducer, LowRank):
            return math.inf
        values = quantizers_of(reducer)
        if isinstance(reducer, Whole) and memory == NoMemory() and all(part.lossless for part in values):
            continue
        if not all(part.elementwise or isinstance(part, jsparse.quantize.Block8) for part in values):
            return math.inf
        if memory != ErrorFeedback() or keeps_places(reducer.allreduce):
            return math.inf
        if reducer.sparse:
            n = -(-bucket.layout.n // math.prod(program.sizes[1:]))
            chance = isinstance(reducer.select, jsparse.select.RandomK | jsparse.select.StochasticTopK)
            k = max(1, round(reducer.select.density * n))
            most = max(most, PATIENCE * (AT_RANDOM if chance else 1) * program.sizes[0] * n / k)
    return most


def keeps_places(allreduce: Any) -> bool:
    """Whether what is sent and then cut stays in the residuals of those who sent it.

    If their parts nearly cancel, such elements can keep the places of others for ever.
    """
    if isinstance(allreduce, jsparse.allreduce.GTopk):
        return allreduce.topology != "tree" and allreduce.put_back == "exact"
    return isinstance(allreduce, jsparse.allreduce.OkTopk) and getattr(allreduce, "put_back", "senders") == "senders"


def standing(kind: str, size: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """A gradient that stays the same: workers agree, cancel in pairs, or disagree."""
    signs = rng.choice([-1, 1], (1, n))
    if kind == "disjoint":
        return signs * (np.arange(n) % size == np.arange(size)[:, None])
    if kind == "alike":
        return np.repeat(signs, size, axis=0)
    if kind == "in pairs":
        large = 4 * signs * ((-1) ** np.arange(size) * (np.arange(size) < size // 2 * 2))[:, None]
        return np.where(rng.random(n) < 0.5, large, signs)
    apart = rng.integers(-3, 4, (size, n))
    apart[-1] -= apart.sum(0)
    return signs * (rng.random(n) < 0.7) + apart


def check_liveness(program: Program, kind: str, seed: int) -> None:
    """Under constant gradients the time-averaged update reaches the mean gradient.

    Every element waits for w steps at most. So after T steps the average is off by no more than
    w / T times the largest mean magnitude. T is such that an element that never came is further
    off.
    """
    n, waiting = sum(leaf.size for leaf in program.zeros), steps_to_wait(program)
    if not n or waiting == math.inf:
        return
    given = standing(kind, program.workers, n, np.random.default_rng(seed))
    mean, largest = given.mean(0), np.abs(given).mean(0).max()
    least = np.abs(mean[mean != 0]).min(initial=largest)
    steps = math.ceil(2 * waiting * largest / max(least, 1e-9))
    if not 0 < steps <= MOST_STEPS:
        return
    run = compiled(program)
    _, sums, _ = run.advance(gradients(program, given), run.first, np.int32(steps))
    average = np.concatenate([np.asarray(leaf[0], np.float64).reshape(-1) for leaf in sums]) / steps
    rounding = np.concatenate([np.full(leaf.size, float(jnp.finfo(leaf.dtype).eps)) for leaf in program.zeros])
    allowed = largest * (waiting / steps + rounding + steps * float(jnp.finfo(jnp.float32).eps))
    late = np.flatnonzero(np.abs(average - mean) > allowed)
    assert not late.size, f"after {steps} steps {late[:5]} are {average[late[:5]]}, not {mean[late[:5]]}"


# The test.


def check(program: Program, runs: Sequence[tuple[Sequence[str], Fault | None]], constant: str, seed: int) -> None:
    with jax.enable_x64(any(dtype == "float64" for _, dtype in program.leaves)):
        for kinds, fault in runs:
            check_run(program, kinds, fault, seed)
        check_liveness(program, constant, seed)


cases = hypothesis.given(
    programs(),
    st.lists(runs, min_size=1, max_size=4),
    st.sampled_from(["alike", "disjoint", "in pairs", "apart"]),
    st.integers(0, 99),
)


@pytest.mark.parametrize(
    "examples", [1, pytest.param(int(PROGRAMS or 40), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_random_programs(examples: int):
    """Every invariant holds for any program: see ``check_run`` and ``check_liveness``.

    The same programs in each run, unless their number is given.
    """
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 10 or not PROGRAMS,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(cases(check))()
