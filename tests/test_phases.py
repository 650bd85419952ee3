"""A run in phases: each phase is as by itself, nothing is lost, and there is one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jsparse
import scenarios
import transports
from algorithms import ROWS, Row
from tiers import quick
from transports import AXIS, LEVELS, N

SIZE = 3
DENSITY = 0.05
STEPS = 2  # Of each phase.
oktopk = functools.partial(jsparse.oktopk, AXIS, density=DENSITY)
gtopk = functools.partial(jsparse.gtopk, AXIS, density=DENSITY)
dense = functools.partial(jsparse.dense, AXIS)
topk = functools.partial(jsparse.topk_allgather, AXIS)
dgc = functools.partial(jsparse.dgc, AXIS, density=DENSITY, momentum=0.5, clip_norm=1e9)
RUNS = {
    "dense, sparse, sparse": (dense(), oktopk(), gtopk()),
    "sparse, dense, sparse": (topk(density=0.25), jsparse.parameter_server(AXIS), topk(density=0.004)),
    "momentum": (dense(), dgc(density=0.5), dgc()),
}
# What integers are multiplied by, so that momentum of a half leaves integers.
SCALE = 256


# All that share an executable, with the row of the table that has the first of them.
pytestmark = pytest.mark.xdist_group(f"phases-{SIZE}")


@functools.cache
def row(name: str) -> Row:
    found = Row(name, lambda comm, density: in_phases(*RUNS[name]))
    config = found.make(AXIS, DENSITY).synchroniser
    same = [row for row in ROWS if row.gpus is None and row.make(AXIS, DENSITY).synchroniser == config]
    return same[0] if same else found


def in_phases(*stages: jsparse.SparseAllReduce, **kwargs) -> jsparse.SparseAllReduce:
    *first, last = stages
    return jsparse.phases((*((STEPS, stage) for stage in first), last), **kwargs)


def alone(tx: jsparse.SparseAllReduce, like: jsparse.SparseAllReduceState):
    """A phase's transformation by itself, with the residual and the velocity of the run."""
    fresh = jax.jit(jax.vmap(lambda _: tx.init(transports.zeros()), axis_name=AXIS))(jnp.arange(SIZE))
    own = like.buckets[0]
    bucket = fresh.buckets[0]._replace(memory=own.memory)
    return fresh._replace(buckets=(bucket,)), jax.jit(jax.vmap(tx.update, axis_name=AXIS))


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_each_phase_is_as_by_itself(name: str):
    """Each phase gives the same bits as its transformation alone on the same state.

    Nothing is lost, not even at boundaries.
    """
    stages = RUNS[name]
    state, update = transports.workers(row(name), SIZE)
    by_itself, expected, compiled = None, None, None
    for number, gradient in enumerate(scenarios.take("ordinary", SIZE, STEPS * len(stages))):
        gradient = SCALE * gradient
        before, phase = state, number // STEPS
        stage = stages[phase]
        is_dense = not stage.synchroniser.reducer.sparse
        grads = transports.tree(gradient)
        updates, state = update(grads, before)
        # Other tests may have compiled it for gradients with sparse leaves.
        compiled = compiled or update._cache_size()
        own, own_before = state.buckets[0], before.buckets[0]
        pushed = gradient
        if hasattr(own.memory, "velocity"):
            pushed = 0.5 * np.asarray(own_before.memory.velocity) + pushed
        acc = (np.asarray(own_before.residual, np.float64) + pushed).sum(0)
        total = np.round(SIZE * transports.flat(updates, SIZE)[0].astype(np.float64))
        np.testing.assert_array_equal(acc, np.asarray(own.residual, np.float64).sum(0) + total)
        assert is_dense == (not np.any(own.residual))

        if is_dense:
            assert np.count_nonzero(total) > 0.7 * N
            continue
        if number % STEPS == 0:
            by_itself, run = alone(stage, before)
        expected, by_itself = run(grads, by_itself)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        np.testing.assert_array_equal(own.residual, by_itself.buckets[0].residual)
        jax.tree.map(np.testing.assert_array_equal, own.reducer[phase], by_itself.buckets[0].reducer)
        # What is told of the phase that ran; the opening exchange counted once.
        jax.tree.map(np.testing.assert_array_equal, state.report, by_itself.report)
    assert update._cache_size() == compiled


def test_a_residual_may_be_left_aside():
    """``flush=False``: a dense phase neither delivers nor changes it."""
    tx = in_phases(topk(density=DENSITY), dense(), topk(density=DENSITY), flush=False)
    state, update = transports.workers(Row("aside", lambda comm, density: tx), SIZE)
    aside, acc = None, None
    for number, gradient in enumerate(scenarios.take("ordinary", SIZE, 2 * STEPS + 1)):
        left = np.asarray(state.buckets[0].residual)
        updates, state = update(transports.tree(gradient), state)
        total = SIZE * transports.flat(updates, SIZE)[0]
        if STEPS <= number < 2 * STEPS:
            aside = left if aside is None else aside
            np.testing.assert_allclose(total, gradient.sum(0), rtol=1e-6)
            np.testing.assert_array_equal(state.buckets[0].residual, aside)
        acc = (left + gradient).sum(0, dtype=np.float64)
    np.testing.assert_array_equal(acc, np.asarray(state.buckets[0].residual, np.float64).sum(0) + np.round(total))
    assert np.any(aside)


@pytest.mark.parametrize("boundary", quick([STEPS, 2 * STEPS], STEPS))
def test_a_bad_step_at_a_boundary(boundary: int):
    """It counts for no phase, delivers nothing of the residual, and spoils no state."""
    state, update = transports.workers(row("sparse, dense, sparse"), SIZE)
    gradients = scenarios.take("ordinary", SIZE, boundary + 1)
    for gradient in gradients[:boundary]:
        _, state = update(transports.tree(gradient), state)
    bad = gradients[boundary].copy()
    bad[1, 3] = -np.inf
    updates, after = update(transports.tree(bad), state)
    assert np.isnan(transports.flat(updates, SIZE)).all()
    jax.tree.map(np.testing.assert_array_equal, state.buckets, after.buckets)
    np.testing.assert_array_equal(state.step, after.step)
    assert (after.report.delivered == 0).all()
    want, _ = update(transports.tree(gradients[boundary]), state)
    updates, _ = update(transports.tree(gradients[boundary]), after)
    jax.tree.map(np.testing.assert_array_equal, updates, want)


@pytest.mark.full
def test_one_phase_runs_not_all():
    """Under vmap, too, the agreed step chooses one branch.

    The branch holds all exchanges but the opening one.
    """
    tx = RUNS["dense, sparse, sparse"]
    state, _ = transports.workers(row("dense, sparse, sparse"), SIZE)
    local = jax.tree.map(lambda x: x[0], state)
    traffic = jsparse.traffic(in_phases(*tx).update, transports.zeros(), local, axis_sizes={AXIS: SIZE})
    opening, choice = traffic.parts
    assert (opening.name, opening.payload) == ("pmax", "int32[2]")
    for branch, stage in zip(choice.branches, tx, strict=True):
        own = jsparse.traffic(lambda g, s=stage: s.update(g, s.init(g)), transports.zeros(), axis_sizes={AXIS: SIZE})
        exchanges = opening.cost if stage.synchroniser.reducer.sparse else type(opening.cost)()
        assert (branch.cost + exchanges, branch.least + exchanges) == (own.cost, own.least)
    grads = transports.tree(np.zeros((SIZE, N), np.float32))
    jaxpr = jax.make_jaxpr(jax.vmap(in_phases(*tx).update, axis_name=AXIS))(grads, state)
    # A branch that lowering chooses by platform is no choice of the program.
    choices = [eqn.params for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert [len(x["branches"]) for x in choices if not x.get("branches_platforms")] == [len(tx)]


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


@pytest.mark.parametrize("levels", quick([False, True], False))
@pytest.mark.parametrize("checked", quick([False, True], True))
def test_in_a_training_step(checked: bool, levels: bool):
    """Compiled once, read and placed like any other, and skipped by ``apply_if_finite``."""
    if levels:
        mesh, axis = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), LEVELS), LEVELS
        tx = in_phases(jsparse.hitopk(*LEVELS, density=0.2, scope="leaf", dense_below=10), jsparse.torus(*LEVELS))
    else:
        mesh, axis = transports.mesh(4), AXIS
        tx = in_phases(topk(density=0.2, scope="leaf", dense_below=10), dense())
    tx = optax.chain(tx, optax.apply_if_finite(optax.sgd(0.05), 5))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32), "v": jnp.ones(7)}
    x, y = rng.standard_normal((8, 5)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    step = jsparse.train_step(loss_fn, tx, mesh, axis, check_vma=checked)
    state = step.init(params)
    n = 35 // (2 if levels else 1) + levels
    losses = []
    for number in range(2 * STEPS):
        state, loss = step(state, (x, y))
        losses.append(loss)
        stats = jsparse.stats(state.opt_state)
        assert (stats.step == number + 1).all()
        assert stats.thresholds.shape == (4, 1)
        assert (stats.selected > 0).all() == (number < STEPS)
        assert jsparse.residual(state.opt_state).shape == (4, n)
        assert np.any(jsparse.residual(state.opt_state)) == (number < STEPS)
    assert losses[-1] < losses[0]
    before = state.params
    before = jax.tree.map(np.asarray, before)
    state, _ = step(state, (x * np.nan, y))
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert step._run._cache_size() == 1


def quantized(**kwargs) -> jsparse.SparseAllReduce:
    return jsparse.quantized(AXIS, quantize=jsparse.quantize.Sign(64), **kwargs)


@pytest.mark.full
@pytest.mark.parametrize(
    "sparse",
    [
        pytest.param(topk(density=0.1, scope="leaf"), id="leaf", marks=pytest.mark.full),
        pytest.param(topk(density=0.1, dense_below=10), id="dense_below", marks=pytest.mark.full),
        pytest.param(jsparse.dgc(AXIS, density=0.1), id="dgc"),
    ],
)
def test_a_dense_phase_takes_over_what_the_sparse_ones_keep(sparse: jsparse.SparseAllReduce):
    """Also one that would keep a residual of its own; nothing is lost at the boundary."""
    tx = in_phases(sparse, quantized())
    dense = tx.synchroniser.stages[1]
    assert dense.space == sparse.synchroniser.space
    state = jax.vmap(lambda _: tx.init(transports.zeros()), axis_name=AXIS)(jnp.arange(SIZE))
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for gradient in scenarios.take("ordinary", SIZE, 2 * STEPS):
        before, (updates, state) = state, step(transports.tree(gradient), state)
        assert np.isfinite(transports.flat(updates, SIZE)).all()
        # The sparse phase leaves most of it behind; the dense one leaves what signs round away.
        changed = np.asarray(state.buckets[0].residual) != np.asarray(before.buckets[0].residual)
        assert changed.any()


@pytest.mark.full
def test_a_quantized_phase_leaves_the_residual_aside():
    tx = jsparse.phases(((2, topk(density=0.1)), (2, quantized()), topk(density=0.1)), flush=False)
    state = jax.vmap(lambda _: tx.init(transports.zeros()), axis_name=AXIS)(jnp.arange(SIZE))
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    kept = []
    for gradient in scenarios.take("ordinary", SIZE, 5):
        _, state = step(transports.tree(gradient), state)
        kept.append(np.asarray(state.buckets[0].residual))
    np.testing.assert_array_equal(kept[1], kept[2])
    np.testing.assert_array_equal(kept[1], kept[3])
    assert not np.array_equal(kept[3], kept[4])
    with pytest.raises(ValueError, match="never be delivered"):
        jsparse.phases(((2, topk(density=0.1)), quantized()), flush=False)


@pytest.mark.full
def test_phases_in_64_bit_mode():
    """Phases with a global threshold, and without one, report it in the type of their vector."""
    with jax.enable_x64(True):
        tx = in_phases(oktopk(), topk(density=0.1))
        grads = {"a": jnp.zeros((SIZE, 30), jnp.float32), "b": jnp.zeros((SIZE, 3), jnp.float16)}
        state = jax.vmap(tx.init, axis_name=AXIS)(grads)
        _, after = jax.eval_shape(jax.vmap(tx.update, axis_name=AXIS), grads, state)
        assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


def test_phases_of_leaves_without_elements():
    tx = in_phases(topk(density=0.1), dense())
    grads = {"a": jnp.zeros((SIZE, 3, 0))}
    state = jax.vmap(tx.init, axis_name=AXIS)(grads)
    updates, state = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(grads, state)
    assert updates["a"].shape == (SIZE, 3, 0)
    assert (state.step == 1).all()


@pytest.mark.full
@pytest.mark.parametrize(
    "stages",
    [
        ((2, dense()), jsparse.scale_by_dion(AXIS, rank_fraction=0.5)),
        ((2, dense()), (1, jsparse.vote(AXIS)), dense()),
    ],
    ids=["dense, dion", "dense, vote, dense"],
)
def test_phases_whose_updates_are_no_sums(stages):
    """Where nothing is pending, each phase is as by itself."""
    params = {"matrix": jnp.zeros((4, 4)), "vector": jnp.zeros(3)}
    rng = np.random.default_rng(0)
    given = [jax.tree.map(lambda p: rng.standard_normal((2, *p.shape)).astype(np.float32), params) for _ in range(4)]

    def run(tx, gradients):
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(2))
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        for gradient in gradients:
            updates, state = update(gradient, state)
            yield updates

    found = list(run(jsparse.phases(stages), given))
    begin = 0
    for stage in stages:
        length, tx = stage if isinstance(stage[0], int) else (4 - begin, stage)
        alone = list(run(tx, given[begin : begin + length]))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[begin : begin + length], alone
        )
        begin += length
    # Dion's momentum goes on where its rank changes.
    jsparse.phases(((2, jsparse.scale_by_dion(AXIS)), jsparse.scale_by_dion(AXIS, rank_fraction=0.5)))
