"""Tests the selectors: which elements they select, and how near to k their count is in a run."""

import functools
import json
import re
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
import oracles
from examples import train
from jsparse._vector import layout
from jsparse._vector.layout import Layout
from jsparse._vector.pending import Pending
from jsparse._vector.random import key_of, uniform
from jsparse.select import (
    BlockTopK,
    BucketedTopK,
    ChunkedTopK,
    DgcThreshold,
    FixedThreshold,
    GaussianThreshold,
    MSTopK,
    NonZero,
    PerLeaf,
    RandomK,
    ReusedThreshold,
    SampledThreshold,
    StochasticTopK,
    TopK,
    _candidates,
    gaussian,
)
from kernels_pallas import bitmap, reaches, sample_places, top_k_sample
from tiers import full, quick

N = 40_000
DENSITY = 0.01
K = 400
SELECTORS = [
    TopK(DENSITY),
    SampledThreshold(DENSITY),
    ReusedThreshold(DENSITY),
    GaussianThreshold(DENSITY),
    GaussianThreshold(DENSITY, "oktopk"),
    GaussianThreshold(DENSITY, "never"),
    ReusedThreshold(DENSITY, correct=False),
    FixedThreshold(2.0, DENSITY),
    FixedThreshold(0.0, DENSITY),
    NonZero(DENSITY),
    DgcThreshold(DENSITY),
]
# Selectors that do not select by a threshold alone.
OTHERS = [
    MSTopK(DENSITY),
    MSTopK(DENSITY, searches=4),
    RandomK(DENSITY),
    RandomK(DENSITY, shared=False),
    RandomK(0.7),
    BucketedTopK(DENSITY),
    BucketedTopK(0.0005),
    BlockTopK(40, 4000),
    BlockTopK(64),
    ChunkedTopK(DENSITY),
    ChunkedTopK(0.7),
    StochasticTopK(DENSITY),
    StochasticTopK(DENSITY, "capped"),
    StochasticTopK(DENSITY, bucket=512),
]


@functools.cache
def compiled(select):
    """The compiled selector. Equal selectors share one executable in all tests."""
    return jax.jit(select)


def run(select, gradients, delivered_share: float):
    """Selects with error feedback. Only a share of the selection is delivered, as in Ok-Topk."""
    step = compiled(select)
    state, residual = select.init(N, jnp.float32), np.zeros(N, np.float32)
    rng = np.random.default_rng(0)
    for t, gradient in enumerate(gradients):
        acc = residual + gradient
        x, state = step(jnp.asarray(acc), state, jnp.int32(t), jnp.int32(0))
        count = int(x.count)
        indices = np.asarray(x.indices)[:count]
        yield acc, np.asarray(x.values)[:count], indices, state
        residual = acc.copy()
        residual[indices[rng.random(count) < delivered_share]] = 0


def gradients(steps: int, seed: int = 0):
    """Draws gradients whose layers differ in scale. It changes with the step, as in training."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(rng.normal(0, 1.5, 40)), N // 40)
    for step in range(steps):
        yield (rng.standard_normal(N) * scale * np.exp(0.3 * np.sin(step / 9))).astype(np.float32)


@pytest.mark.parametrize("select", SELECTORS, ids=repr)
def test_what_is_selected_reaches_the_threshold(select):
    for acc, values, indices, state in run(select, gradients(5), 0.2):
        assert (np.diff(indices) > 0).all()
        np.testing.assert_array_equal(values, acc[indices])
        assert (np.abs(values) >= state.threshold[0]).all()
        assert len(indices) == min(int(state.selected[0]), K)
        assert state.selected[0] == np.count_nonzero(np.abs(acc) >= state.threshold[0])


@pytest.mark.parametrize("select", quick(OTHERS, *OTHERS[::3]), ids=repr)
def test_what_is_selected_is_of_the_vector(select):
    k = round(select.density * N)
    for acc, values, indices, state in run(select, gradients(5), 0.2):
        assert (np.diff(indices) > 0).all()
        np.testing.assert_array_equal(values, acc[indices])
        assert np.abs(values).min() == state.threshold[0] > 0
        if isinstance(select, StochasticTopK):
            assert len(indices) <= state.selected[0]
        else:
            assert len(indices) == state.selected[0] == k


@pytest.mark.parametrize("share", quick([1.0, 0.15], 0.15))
@pytest.mark.parametrize(
    ("select", "limit"),
    [
        full(TopK(DENSITY), 0.0),
        full(MSTopK(DENSITY), 0.0),
        full(BucketedTopK(DENSITY), 0.0),
        full(BlockTopK(40, 4000), 0.0),
        (SampledThreshold(DENSITY), 0.05),
        (ReusedThreshold(DENSITY), 0.11),
        full(DgcThreshold(DENSITY, sample=0.05), 0.2),
    ],
)
def test_the_count_stays_near_k_for_200_steps(select, limit: float, share: float):
    selected = [int(state.selected[0]) for *_, state in run(select, gradients(200), share)]
    assert np.mean(np.abs(np.array(selected) / K - 1)) <= limit
    assert max(selected) <= 2 * K


@pytest.mark.parametrize("select", [*SELECTORS, *OTHERS], ids=repr)
def test_the_first_state_has_the_form_of_all_others(select):
    """So the second step compiles nothing, and a state can go through a loop."""
    first = select.init(N, jnp.float32)
    after = jax.eval_shape(select, jnp.zeros(N), first, jnp.int32(0), jnp.int32(0))[1]
    assert jax.tree.structure(after) == jax.tree.structure(first)
    forms = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (first, after)]
    assert forms[0] == forms[1]


def at_steps(select, acc: np.ndarray, steps: int, rank: int = 0) -> np.ndarray:
    """Which elements of a vector are selected in successive steps: bools, shape ``(steps, n)``."""

    def one(step):
        x, _ = select(jnp.asarray(acc), select.init(len(acc), jnp.float32), step, jnp.int32(rank))
        return x.indices

    indices = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(steps, dtype=jnp.int32)))
    chosen = np.zeros((steps, len(acc) + 1), bool)
    chosen[np.arange(steps)[:, None], indices] = True
    return chosen[:, :-1]


def assert_frequent(chosen: np.ndarray, probability: np.ndarray) -> None:
    """Tests by chi-square how often elements were selected: 1 of 10,000 seeds is a false alarm."""
    steps = len(chosen)
    tested = (steps * probability > 5) & (steps * (1 - probability) > 5)
    assert (chosen[:, probability <= 0].sum(0) == 0).all()
    assert chosen[:, probability > 1 - 1e-6].all()
    p, freedom = probability[tested], tested.sum()
    assert freedom > 100
    statistic = ((chosen[:, tested].sum(0) - steps * p) ** 2 / (steps * p * (1 - p))).sum()
    assert abs(statistic - freedom) < 3.9 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("density", quick([0.1, 0.8], 0.1))
@pytest.mark.parametrize("shared", quick([True, False], True))
def test_random_k_is_uniform(density: float, shared: bool):
    n, steps = 500, 2000
    k = round(density * n)
    select = RandomK(density, shared=shared, seed=1)
    chosen = at_steps(select, np.ones(n, np.float32), steps)
    assert (chosen.sum(1) == k).all()
    # The counts add up to k in each step. That removes one of the n degrees of freedom.
    assert_frequent(chosen, np.full(n, density))
    for distance in (1, 2, 32):
        pairs = (chosen & np.roll(chosen, distance, axis=1)).sum()
        expected = steps * n * k * (k - 1) / (n * (n - 1))
        assert abs(pairs - expected) < 5 * np.sqrt(expected)
    others = at_steps(select, np.ones(n, np.float32), steps, rank=1)
    if shared:
        np.testing.assert_array_equal(chosen, others)
    else:
        common, expected = (chosen & others).sum(), steps * k * k / n
        assert abs(common - expected) < 5 * np.sqrt(expected)


def test_random_elements_are_the_same_on_all_workers_by_default():
    ones = np.ones(N, np.float32)
    np.testing.assert_array_equal(at_steps(RandomK(DENSITY), ones, 3), at_steps(RandomK(DENSITY), ones, 3, rank=1))


@pytest.mark.parametrize("per_leaf", [False, True])
@pytest.mark.parametrize("keep", quick([True, False], True))
@pytest.mark.parametrize(
    "shapes",
    [
        [(9000,)],
        [(5, 4096)],  # Pieces and squares end where the leaf does.
        [(3,), (4, 33, 50), (7000,), (1,), (90, 90), (0,), (2, 3000)],
        [(100,), (9001,), (100,)],
    ],
)
def test_a_vector_is_marked_while_it_is_added_up(shapes, keep: bool, per_leaf: bool, monkeypatch):
    monkeypatch.setattr(layout, "PIECE", 2048)
    rng, types = np.random.default_rng(0), (jnp.float32, jnp.bfloat16)
    leaves = [jnp.asarray(rng.standard_normal(shape), types[i % 2]) for i, shape in enumerate(shapes)]
    places = Layout.of(leaves)
    vector = jnp.asarray(rng.standard_normal(places.n), jnp.float32)
    pending = Pending(vector, leaves, jnp.bool_(keep), places, limit=3.0)
    assert pending.worth_marking()
    want = pending.add_up()
    thresholds = jnp.linspace(1.7, 0.4, len(leaves)) if per_leaf else jnp.float32(1.7)
    acc, words = jax.jit(Pending.add_up_and_mark)(pending, thresholds)
    np.testing.assert_array_equal(acc, want)
    each = jnp.repeat(thresholds, np.array(places.lengths)) if per_leaf else thresholds
    np.testing.assert_array_equal(words, bitmap.pack(reaches(want, each)))
    sampled = sample_places(np.arange(257, dtype=np.uint32), places.n, 257)
    np.testing.assert_array_equal(pending.sample(257), want[sampled])
    sizes = [min(n, 64) for n in places.lengths]
    at = [sample_places(np.arange(m, dtype=np.uint32), n, m) for n, m in zip(places.lengths, sizes, strict=True) if m]
    begins = [begin for begin, m in zip(places.offsets, sizes, strict=False) if m]
    sampled = np.concatenate([begin + here for begin, here in zip(begins, at, strict=True)])
    np.testing.assert_array_equal(pending.samples(sizes), want[sampled])


LEAVES = {"a": (300, 40), "b": (7,), "c": (1,), "d": (500, 24), "e": (0,), "f": (64, 64)}


@pytest.mark.parametrize(
    "select",
    quick(
        [*SELECTORS, *OTHERS, TopK(1.0)],
        TopK(DENSITY),
        ReusedThreshold(DENSITY),  # Its state differs from leaf to leaf.
        BlockTopK(40, 4000),
    ),
    ids=repr,
)
def test_per_leaf_selects_what_scope_leaf_selects(select):
    """In two steps, to the bit; and with one message, where that has one for each leaf."""
    rng, workers = np.random.default_rng(4), 2
    mesh = jax.make_mesh((workers,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    steps = [
        {name: rng.standard_normal((workers, *shape)).astype(np.float32) for name, shape in LEAVES.items()}
        for _ in range(2)
    ]

    def run(tx):
        def both(*steps):
            state, updates = tx.init(jax.tree.map(lambda x: x[0], steps[0])), []
            for grads in steps:
                update, state = tx.update(jax.tree.map(lambda x: x[0], grads), state)
                updates.append(update)
            residual = jnp.concatenate([bucket.memory.residual for bucket in state.buckets])
            return jax.tree.map(lambda x: x[None], (updates, residual))

        along = jax.sharding.PartitionSpec("workers")
        return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=along, out_specs=along))(*steps)

    jax.tree.map(
        np.testing.assert_array_equal,
        run(jsparse.topk_allgather("workers", select=PerLeaf(select))),
        run(jsparse.topk_allgather("workers", select=select, scope="leaf")),
    )


def test_per_leaf_sends_one_message_and_reports_of_all_leaves():
    params, sizes = {name: jnp.ones(shape) for name, shape in LEAVES.items()}, {"workers": 2}

    def messages(tx):
        return jsparse.traffic(lambda grads: tx.update(grads, tx.init(grads))[0], params, axis_sizes=sizes).messages

    # Beside the gathers, maxima of two messages each: workers agree on the step and whether the
    # gradient is finite, with several vectors by two of them.
    assert messages(jsparse.topk_allgather("workers", select=PerLeaf(TopK(DENSITY)))) == 1 + 2
    assert messages(jsparse.topk_allgather("workers", density=DENSITY, scope="leaf")) == 5 + 4
    state = PerLeaf(TopK(0.5)).init_for(Layout.of([jnp.zeros(4), jnp.zeros(2), jnp.zeros(2)]))
    leaves = [jnp.array([4.0, -3.0, 2.0, 1.0]), jnp.array([0.0, 0.0]), jnp.array([9.0, -8.0])]
    pending = Pending(None, leaves, jnp.bool_(True), Layout.of(leaves))
    _, x, state = PerLeaf(TopK(0.5)).accumulate_and_select(pending, state, jnp.int32(0), jnp.int32(0))
    np.testing.assert_array_equal(x.indices, [0, 1, 6, 8])
    assert (state.threshold[0], state.selected[0]) == (3.0, 3)
    np.testing.assert_array_equal(state.leaves.threshold, [3, 0, 9])
    np.testing.assert_array_equal(state.leaves.selected, [2, 0, 1])


def test_per_leaf_takes_all_that_one_vector_may_have():
    """Here segments that begin at multiples of 1024 would not fit."""
    leaves = {"a": jax.ShapeDtypeStruct((2**30 - 1,), jnp.float32), "b": jax.ShapeDtypeStruct((2**30,), jnp.float32)}
    tx = jsparse.topk_allgather("workers", select=PerLeaf(TopK(0.001)))
    update = jax.vmap(lambda grads: tx.update(grads, tx.init(grads))[0], axis_name="workers", axis_size=1, in_axes=None)
    assert jax.eval_shape(update, leaves)["b"].shape == (1, 2**30)


def test_a_bitmap_is_turned_from_arrays_in_memory(monkeypatch):
    """XLA would look, for each bit, whether a write that it had not made yet covers it."""
    monkeypatch.setattr(layout, "PIECE", 2048)
    leaves = [jnp.zeros(9000), jnp.zeros(7001)]
    places = Layout.of(leaves)
    pending = Pending(jnp.zeros(places.n), leaves, jnp.bool_(True), places, limit=3.0)
    text = jax.jit(Pending.add_up_and_mark).lower(pending, jnp.float32(1.7)).compile().as_text()
    written = set(re.findall(r"%([\w.-]+) = \S+ dynamic-update-slice\(", text))
    assert written
    assert not written & set(re.findall(r" broadcast\(%([\w.-]+)\)", text))


def sums(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "ties":
            return np.round(x)
        case "few":  # Fewer than k elements.
            return np.where(np.arange(n) % 1000 == 0, x, 0)
        case "zeros":
            return np.zeros_like(x)
        case "heavy":  # The first threshold of Gaussian-k is below the bound of its candidates.
            return rng.standard_t(3, n).astype(np.float32)
        case "unseen":  # The sample sees none of the large elements, so the bound does not hold.
            seen = np.zeros(n, bool)
            size = top_k_sample(n, round(DENSITY * n)).size
            seen[sample_places(np.arange(size, dtype=np.uint32), n, size)] = True
            return np.where(seen, 1e-3 * x, x)
    return x


@pytest.mark.parametrize("kind", quick(["normal", "heavy", "ties", "few", "unseen", "zeros"], "heavy"))
@pytest.mark.parametrize(
    "select",
    quick(
        [
            TopK(DENSITY),
            ReusedThreshold(DENSITY),
            ReusedThreshold(DENSITY, correct=False),
            DgcThreshold(DENSITY),
            *(GaussianThreshold(DENSITY, adjust) for adjust in ("enough", "oktopk", "never")),
        ],
        TopK(DENSITY),
    ),
    ids=repr,
)
def test_what_is_found_among_candidates_is_what_the_whole_vector_has(select, kind: str, monkeypatch):
    """Both where candidates are marked while the vector is added up, and where they are not."""
    n = 600_001
    want = jnp.asarray(sums(kind, n))
    places = Layout.of([jnp.zeros(n - 1000), jnp.zeros((10, 100))])
    # Halves of floats are exact, as is their sum.
    leaves = [part / 2 for part in places.windows(want)]
    pending = Pending(want / 2, leaves, jnp.bool_(True), places)
    assert pending.worth_marking()
    # Each program would add up the mean in an order of its own.
    monkeypatch.setattr(gaussian, "_describe", lambda acc: (jnp.float32(0), jnp.float32(1)))
    state, rank = select.init(n, jnp.float32), jnp.int32(0)
    state = state._replace(threshold=jnp.full(1, 2.2, jnp.float32))  # A tenth from the k-th of a normal distribution.
    for step in (jnp.int32(0), jnp.int32(5)):
        acc, *marked = jax.jit(select.accumulate_and_select)(pending, state, step, rank)
        np.testing.assert_array_equal(acc, want)
        found = jax.jit(select)(want, state, step, rank)
        with monkeypatch.context() as whole:
            whole.setattr(_candidates, "top_k_sample", lambda n, k: None)
            expected = jax.jit(lambda *args: select(*args))(want, state, step, rank)
        for got in (marked, found):
            jax.tree.map(np.testing.assert_array_equal, tuple(got), expected)


@pytest.mark.parametrize("density", quick([1e-4, 1e-3, 0.01, 0.05], 1e-3))
@pytest.mark.parametrize("n", quick([300_000, 1_200_000, 5_000_000], 300_000))
def test_the_candidates_of_a_normal_vector_are_complete(n: int, density: float):
    """If they were not, the results would be the same, and all of the vector would be read."""
    acc = jax.random.normal(jax.random.key(n), n)
    found = _candidates.Candidates(acc, density, None)
    assert found.complete
    assert found.k < found.count < n / 4


@pytest.mark.parametrize(
    "select",
    quick(
        [TopK(DENSITY), ReusedThreshold(DENSITY), DgcThreshold(DENSITY), GaussianThreshold(DENSITY), MSTopK(DENSITY)],
        TopK(DENSITY),
    ),
    ids=repr,
)
def test_selecting_makes_no_copy_of_the_vector(select):
    n = 2_000_000
    state, number = jax.eval_shape(lambda: select.init(n, jnp.float32)), jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(select).lower(jax.ShapeDtypeStruct((n,), jnp.float32), state, number, number).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * n / 4


def test_random_k_drops_zeros():
    acc = (np.arange(N) % 4 > 0).astype(np.float32)
    chosen = at_steps(RandomK(DENSITY), acc, 50)
    assert not chosen[:, acc == 0].any()
    assert abs(chosen.sum() - 0.75 * K * 50) < 5 * np.sqrt(0.1875 * K * 50)


@pytest.mark.parametrize("rule", ["exact", "capped"])
@pytest.mark.parametrize("tails", quick(["short", "heavy"], "heavy"))
def test_stochastic_selects_by_probability(rule: str, tails: str):
    """Theorem 2.1: k elements are selected in expectation.

    The vector "heavy" has elements whose share of the norm is above 1 / k.
    """
    n, steps, density = 1000, 4000, 0.05
    rng = np.random.default_rng(0)
    acc = (rng.uniform(-1, 1, n) if tails == "short" else rng.standard_t(1, n)).astype(np.float32)
    probability = oracles.stochastic_probabilities(acc, 50, rule)
    chosen = at_steps(StochasticTopK(density, rule), acc, steps)
    assert_frequent(chosen, probability)
    expected = probability.sum()
    assert expected == pytest.approx(50) or (rule, tails) == ("capped", "heavy")
    assert expected <= 50 + 1e-9
    # Within four standard errors: 1 of 10,000 seeds is a false alarm. The buffer overflows in 1
    # of 30,000 steps, which changes the mean by less.
    assert abs(chosen.sum(1).mean() - expected) < 4 * np.sqrt((probability * (1 - probability)).sum() / steps)
    others = at_steps(StochasticTopK(density, rule), acc, 3, rank=1)
    assert (others != chosen[:3]).any(axis=1).all()


@pytest.mark.parametrize("rule", quick(["exact", "capped"], "exact"))
@pytest.mark.parametrize(
    ("n", "density", "bucket"),
    [
        (N, 5 / 512, 512),  # Top5 of the thesis, and a shorter last bucket.
        pytest.param(1003, 0.3, 64, marks=pytest.mark.full),
        pytest.param(1003, 0.001, 64, marks=pytest.mark.full),
        pytest.param(1003, 0.9, 32, marks=pytest.mark.full),
        pytest.param(1003, 0.05, 1024, marks=pytest.mark.full),
    ],
)
def test_stochastic_in_buckets_follows_the_thesis(n: int, density: float, bucket: int, rule: str):
    """Which elements, given the random numbers: norms by bucket, and the first of those drawn."""
    acc = next(gradients(1))[:n] * (np.arange(n) % 7 > 0)
    acc[: 2 * bucket] = 0
    acc[-1] = 1e30
    k, select = round(density * n), StochasticTopK(density, rule, bucket=bucket)
    call = jax.jit(lambda step, rank: select(jnp.asarray(acc), select.init(n, jnp.float32), step, rank))
    short = 0
    for step, rank in ((0, 0), (1, 0), (1, 1), (2, 5), (100, 0)):
        x, state = call(jnp.int32(step), jnp.int32(rank))
        numbers = np.asarray(uniform(key_of(0, step, rank), n))
        expected = oracles.stochastic_in_buckets(acc, k, numbers, bucket=bucket, step=step, rule=rule)
        np.testing.assert_array_equal(x.indices[: int(x.count)], expected)
        np.testing.assert_array_equal(x.values[: int(x.count)], acc[expected])
        assert x.capacity == k
        assert x.count <= state.selected[0]
        short += state.selected[0] > x.count
    assert short or bucket != 512  # Some buckets drew more than their share.


def test_stochastic_overflows():
    """With k = 1 the buffer has room for five elements, and 1 of 1,700 steps selects more."""
    select, acc = StochasticTopK(0.01), jnp.ones(100)

    def one(step):
        x, state = select(acc, select.init(100, jnp.float32), step, jnp.int32(0))
        return x.count, state.selected[0]

    counts, selected = jax.jit(jax.vmap(one))(jnp.arange(20_000, dtype=jnp.int32))
    assert counts.max() == 5 < selected.max()
    np.testing.assert_array_equal(counts, np.minimum(selected, 5))


@pytest.mark.parametrize(
    ("n", "density", "bucket"),
    [
        pytest.param(N, DENSITY, 512, marks=pytest.mark.full),
        (1003, 0.05, 64),
        pytest.param(N, 0.0005, 512, marks=pytest.mark.full),
    ],
)
def test_bucketed_selects_the_top_of_each_bucket(n: int, density: float, bucket: int):
    acc = next(gradients(1))[:n]
    steps = 60
    chosen = at_steps(BucketedTopK(density, bucket), acc, steps)
    k = round(density * n)
    assert (chosen.sum(1) == k).all()
    for begin in range(0, n, bucket):
        part = acc[begin : begin + bucket]
        counts = chosen[:, begin : begin + bucket].sum(1)
        share = k * len(part) / n
        assert set(counts) <= {int(share), int(np.ceil(share))}
        assert counts.mean() == pytest.approx(share, abs=0.05)
        for count, step in {count: step for step, count in enumerate(counts)}.items():
            expected = oracles.top_k(part, count)
            np.testing.assert_array_equal(np.flatnonzero(chosen[step, begin : begin + bucket]), expected)


@pytest.mark.parametrize(
    ("n", "k", "block", "count"),
    [
        (N, 64, 4096, 9 * 64 + 49),
        (1003, 3, 64, 15 * 3 + 2),
        (1003, 1, 100, 10 + 1),  # 0.03 of the last block, and so one.
        (128, 63, 64, 126),
        (100, 64, 4096, 2),
        (1, 64, 4096, 1),
        (1003, 64, 64, 1003),
        (1003, 7000, 4096, 1003),
        (1003, 1, 1, 1003),
    ],
)
def test_block_selects_the_same_number_of_each_block(n: int, k: int, block: int, count: int):
    acc = next(gradients(1))[:n]
    acc[::2] = np.copysign(np.ceil(np.abs(acc[::2])), acc[::2])  # Ties.
    select = BlockTopK(k, block)
    x, state = compiled(select)(jnp.asarray(acc), select.init(n, jnp.float32), jnp.int32(5), jnp.int32(1))
    expected = oracles.block_top_k(acc, k, block)
    assert x.capacity == len(expected) == state.selected[0] == count
    np.testing.assert_array_equal(x.indices, expected)
    np.testing.assert_array_equal(x.values, acc[expected])
    assert select.density == min(1, k / block)


@pytest.mark.full
def test_block_leaves_places_empty_where_a_block_has_zeros():
    """The places of a block of zeros go to no other block."""
    acc = next(gradients(1))
    acc[4000:8000] = 0
    acc[8000:12_000] = np.nan
    acc[12_000] = np.inf
    (chosen,) = at_steps(BlockTopK(40, 4000), acc, 1)
    assert [*chosen.reshape(10, -1).sum(1)] == [40, 0, 0, *(7 * [40])]
    assert chosen[12_000]


@pytest.mark.parametrize("density", [DENSITY, 0.0123, 0.3, 0.9, 1.0])
def test_chunked_selects_the_largest_of_each_chunk(density: float):
    acc = next(gradients(1))
    k = round(density * N)
    chunks = np.array_split(np.arange(N), k)
    expected = [chunk[np.argmax(np.abs(acc[chunk]))] for chunk in chunks]
    np.testing.assert_array_equal(np.flatnonzero(at_steps(ChunkedTopK(density), acc, 1)[0]), expected)


@pytest.mark.parametrize("name", ["gaussian", "heavy", "periodic", "sparse"])
def test_dgc_follows_the_authors_code(name: str):
    """Each threshold is the one for some first element, and the steps have several of them."""
    rng = np.random.default_rng(0)
    acc = {
        "gaussian": rng.standard_normal(N),
        "heavy": rng.standard_t(1, N),
        # The sample has all of the large elements, or none.
        "periodic": np.where(np.arange(N) % 99 == 0, 100, 1) * rng.standard_normal(N),
        "sparse": rng.standard_normal(N) * (np.arange(N) % 120 == 0),
    }[name].astype(np.float32)
    select = DgcThreshold(DENSITY)
    allowed, seen = np.array(oracles.dgc_thresholds(acc, DENSITY, 99)), set()
    call = jax.jit(lambda step: select(jnp.asarray(acc), select.init(N, jnp.float32), step, jnp.int32(0)))
    for step in range(12):
        x, state = call(jnp.int32(step))
        seen.add(float(state.threshold[0]))
        assert np.min(np.abs(allowed - state.threshold[0]) / np.maximum(allowed, 1e-30)) < 1e-5
        assert x.count <= K
    assert len(seen) > {"gaussian": 3, "heavy": 3, "periodic": 1, "sparse": 0}[name]


@pytest.mark.parametrize("adjust", ["enough", "oktopk", "never"])
@pytest.mark.parametrize("name", ["gaussian", "short tails", "heavy tails", "huge", "two layers"])
def test_gaussian_adjusts_its_threshold(name: str, adjust: str):
    rng = np.random.default_rng(0)
    acc = {
        "gaussian": rng.standard_normal(N),
        "short tails": rng.uniform(-1, 1, N),
        "heavy tails": rng.standard_t(1, N),
        "huge": rng.standard_normal(N) * 1e30,
        # The quantile lies among the larger ones: too many reach it.
        "two layers": rng.standard_normal(N) * np.where(np.arange(N) < 0.1 * N, 10, 1),
    }[name].astype(np.float32)
    select = GaussianThreshold(DENSITY, adjust)
    x, state = compiled(select)(jnp.asarray(acc), select.init(N, jnp.float32), jnp.int32(0), jnp.int32(0))
    exact, selected = acc.astype(np.float64), int(state.selected[0])
    largest = np.abs(exact).max()
    quantile = abs(exact.mean()) + NormalDist().inv_cdf(1 - DENSITY / 2) * exact.std()
    first = largest if name == "huge" else min(quantile, largest)  # Squares of 1e30 overflow.
    np.testing.assert_allclose(state.threshold[0], oracles.adjusted(np.abs(exact), K, first, adjust), rtol=1e-4)
    assert selected >= {"enough": 0.75 * K, "oktopk": 1, "never": 1}[adjust]
    if name == "gaussian":
        assert abs(selected / K - 1) < 0.2
    if adjust == "oktopk" and name != "huge":
        # That code adds the mean with its sign.
        code = oracles.gaussian_in_oktopks_code(np.sign(exact.mean()) * exact, DENSITY)
        if name == "short tails":
            assert quantile / 1.02**20 > largest  # What the authors' code selects there.
            assert len(code) == 0
        else:
            assert selected == len(code)
            assert np.isin(x.indices[: int(x.count)], code).all()


@pytest.mark.parametrize("density", [1e-16, 5e-324])
def test_gaussian_selects_the_largest_at_tiny_densities(density: float):
    select = GaussianThreshold(density)
    x, _ = select(jnp.arange(10.0), select.init(10, jnp.float32), jnp.int32(0), jnp.int32(0))
    assert x.indices.tolist() == [9]


def test_reuse_counts_instead_of_searching():
    """Between exact evaluations the threshold moves with the gradients, and is not exact."""
    exact = 0
    for acc, _, _, state in run(ReusedThreshold(DENSITY, tau_threshold=32), gradients(64), 0.15):
        exact += float(state.threshold[0]) == np.sort(np.abs(acc))[-K]
    assert 2 <= exact < 20


def test_without_correction_the_threshold_stays():
    """Lines 2 to 4 of the paper. Where little is delivered, the count then drifts away from k."""
    select, before = ReusedThreshold(DENSITY, tau_threshold=8, correct=False), 0.0
    counts = []
    for step, (acc, _, indices, state) in enumerate(run(select, gradients(24), 0.15)):
        np.testing.assert_array_equal(indices, oracles.reused_threshold(acc, K, before, step, 8))
        assert (state.threshold[0] == before) == (step % 8 > 0)
        before = state.threshold[0]
        counts.append(int(state.selected[0]))
    assert counts[::8] == [K] * 3
    assert max(counts) > 2 * K


def test_a_threshold_of_zero_is_not_reused():
    """It would select everything: here after a first step without a gradient."""
    select = ReusedThreshold(DENSITY, correct=False)
    state = select.init(N, jnp.float32)
    for step, acc in enumerate([np.zeros(N, np.float32), *gradients(2)]):
        _, state = compiled(select)(jnp.asarray(acc), state, jnp.int32(step), jnp.int32(0))
    assert 0.5 * K < state.selected[0] < 2 * K


@pytest.mark.parametrize(
    ("searches", "least"),
    [
        pytest.param(6, 0.9, marks=pytest.mark.full),
        pytest.param(12, 0.99, marks=pytest.mark.full),
        (30, 0.999),
    ],
)
@pytest.mark.parametrize("name", ["gaussian", "heavy tails", "layers"])
def test_mstopk_is_near_the_printed_algorithm(name: str, searches: int, least: float):
    """The distance to Algorithm 1 as printed: the share of the elements that both select."""
    rng = np.random.default_rng(0)
    acc = {
        "gaussian": rng.standard_normal(N).astype(np.float32),
        "heavy tails": rng.standard_t(2, N).astype(np.float32),
        "layers": next(gradients(1)),
    }[name]
    select = MSTopK(DENSITY, searches)
    x, _ = compiled(select)(jnp.asarray(acc), select.init(N, jnp.float32), jnp.int32(0), jnp.int32(0))
    printed = oracles.ms_top_k_as_printed(acc, K, searches, rng)
    assert len(printed) == x.count == K
    assert np.intersect1d(x.indices, printed).size >= least * K


@pytest.mark.parametrize("name", ["one huge", "all alike", "few elements"])
def test_mstopk_mends_the_printed_algorithm(name: str):
    """Where that selects almost none of the k largest elements, or every element."""
    rng = np.random.default_rng(0)
    acc = {
        "one huge": np.where(np.arange(N) == 7, 3e38, rng.standard_normal(N)),
        "all alike": np.full(N, 3.0),
        "few elements": np.where(np.arange(N) % 200 == 7, rng.standard_normal(N), 0),
    }[name].astype(np.float32)
    select, top = MSTopK(DENSITY), oracles.top_k(acc, K)
    x, _ = compiled(select)(jnp.asarray(acc), select.init(N, jnp.float32), jnp.int32(0), jnp.int32(0))
    printed = oracles.ms_top_k_as_printed(acc, K, 30, rng)
    assert np.isin(x.indices[: int(x.count)], top).all()
    assert x.count == len(top)
    assert {
        "one huge": np.intersect1d(printed, top).size < 0.05 * K,
        "all alike": len(printed) == N,
        "few elements": np.count_nonzero(acc[printed] == 0) == K - len(top),
    }[name]


def test_a_lost_threshold_is_found_again():
    def jump():
        for step, gradient in enumerate(gradients(12)):
            yield gradient * (1000.0 if step == 6 else 1.0)

    counts = [int(state.selected[0]) for *_, state in run(ReusedThreshold(DENSITY), jump(), 0.15)]
    assert max(np.abs(np.array(counts) - K)) <= 0.5 * K


@pytest.mark.parametrize("select", [s for s in SELECTORS + OTHERS if s.density == DENSITY], ids=repr)
@pytest.mark.parametrize("name", ["zeros", "constant", "few", "one huge", "NaN"])
def test_degenerate_vectors(select, name: str):
    acc = {
        "zeros": np.zeros(N),
        "constant": np.full(N, 3.0),
        "few": np.eye(1, N, 7)[0] * 5,
        "one huge": np.where(np.arange(N) == 7, 3e38, 3.0),
        "NaN": np.where(np.arange(N) % 3, 0.5, np.nan),
    }[name].astype(np.float32)
    state, call = select.init(N, jnp.float32), compiled(select)
    for step in range(3):
        x, state = call(jnp.asarray(acc), state, jnp.int32(step), jnp.int32(0))
        least = most = {"zeros": 0, "few": 1}.get(name, K)
        if isinstance(select, {"few": RandomK, "NaN": RandomK | FixedThreshold | StochasticTopK}.get(name, ())):
            least = 0
        elif isinstance(select, StochasticTopK) and name in ("constant", "one huge"):
            # The margin of 100 is five standard deviations. With the rule "capped" the
            # probability of the huge element is cut to 1, and those of the others are almost 0.
            least, most = (1, 1) if (select.rule, name) == ("capped", "one huge") else (K - 100, K + 100)
        elif isinstance(select, GaussianThreshold) and name == "one huge":
            least = 1
        assert least <= x.count <= most
        assert np.isfinite(x.values).all()
        if name == "one huge" and isinstance(
            select, TopK | MSTopK | BucketedTopK | BlockTopK | ChunkedTopK | StochasticTopK
        ):
            assert 7 in x.indices
        assert np.isfinite(state.threshold[0])


@pytest.mark.parametrize(
    ("select", "limit"),
    [
        pytest.param(None, 0.05, id="default"),
        pytest.param(SampledThreshold, 0.11, id="sampled", marks=pytest.mark.slow),
        pytest.param(ReusedThreshold, 0.11, id="reused", marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_counts_on_real_gradients(select, limit: float, monkeypatch, tmp_path):
    """Trains the model of the example for 200 steps, and checks how far the counts are from k.

    The mean relative deviation of the local count is limited, and that of the global count too.
    """
    monkeypatch.setitem(
        train.ALGORITHMS,
        "tested",
        lambda density: jsparse.oktopk("workers", density=density, select=select and select(density)),
    )
    figures = tmp_path / "runs.json"
    # As many steps as by default, with half the workers.
    options = ["--epochs", "18", "--workers", "4", "--batch", "32", "--plot", str(tmp_path / "x.png")]
    train.main(["--algorithm", "tested", *options, "--json", str(figures)])
    (result,) = json.loads(figures.read_text())
    assert len(result["loss"]) >= 198
    k = result["k"]
    selected, updated = np.array(result["selected"]), np.array(result["updated"])
    assert np.mean(np.abs(selected / k - 1)) < limit
    assert np.mean(np.abs(updated / k - 1)) < limit
