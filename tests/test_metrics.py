"""What is read of a state, wherever it comes from: ``metrics``, ``stats`` and ``residual``."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jsparse
import scenarios
import transports
from algorithms import ROWS, Row, case
from jsparse._comm.metered import Metered
from jsparse._engine.outcome import Outcome, begin, conclude
from jsparse._engine.reducer import Counts
from jsparse._engine.space import Flat
from jsparse._engine.state import BucketState
from jsparse._train import metrics as _metrics
from tiers import quick
from transports import AXIS, N

OF_THE_STATE = {
    *("step", "skipped", "bytes", "messages", "share_of_dense", "density"),
    *("selected", "overflowed", "delivered", "residual_norm"),
}
OF_UPDATES = {"update_norm", "residual_over_update", "age"}
SPARSE = optax.chain(jsparse.topk_allgather(AXIS, density=0.1), optax.sgd(0.1))
READERS = [jsparse.stats, jsparse.residual, jsparse.metrics]


def named(names: set[str]) -> set[str]:
    return {f"jsparse/{name}" for name in names}


def plain(figures: dict[str, jax.Array]) -> dict[str, float]:
    return {name.removeprefix("jsparse/"): float(figure) for name, figure in figures.items()}


def quotient(a: float, b: float) -> float:
    return a / b if a else 0.0


SHORT = ("dense", "topk_allgather")


@pytest.mark.parametrize("row, size", [case(row, row.usual_size, full=row.name not in SHORT) for row in ROWS])
def test_metrics_of_every_algorithm(row: Row, size: int):
    """They are finite, and what ``stats``, the residual and the update say; one program reads all
    steps, without a transfer, and inside a user's program too.
    """
    state, update = transports.workers(row, size)
    before = plain(jsparse.metrics(state))
    assert (before["step"], before["bytes"], before["share_of_dense"]) == (0, 0, 0)
    programs = []
    for gradient in scenarios.take("ordinary", size, 3):
        updates, state = update(transports.tree(row.scale * gradient), state)
        mean = jax.tree.map(lambda leaf: leaf[0], updates)
        with jax.transfer_guard("disallow"):
            figures = jsparse.metrics(state, mean)
        programs.append(_metrics._summarised._cache_size())
    assert programs[0] == programs[-1]

    assert set(figures) == named(OF_THE_STATE | OF_UPDATES)
    assert set(jsparse.metrics(state)) == named(OF_THE_STATE)
    for name, figure in figures.items():
        assert figure.shape == ()
        assert figure.dtype == (jnp.int32 if name in named({"step", "skipped"}) else jnp.float32)
        assert np.isfinite(figure), name
    inside = jax.jit(lambda *args: jsparse.metrics(*args))(state, mean)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), inside, figures)

    told, got = jax.tree.map(lambda x: np.asarray(x, np.float64), jsparse.stats(state)), plain(figures)
    assert all(leaf.shape[0] == size for leaf in told)
    for name in ("selected", "overflowed", "delivered", "messages"):
        assert got[name] == pytest.approx(getattr(told, name).mean())
    assert (got["step"], got["skipped"]) == (3, 0)
    assert got["bytes"] == pytest.approx(4 * told.words.mean())
    assert got["share_of_dense"] == pytest.approx(4 * told.words.mean() / (4 * math.ceil(2 * N * (size - 1) / size)))
    assert got["density"] == pytest.approx(told.updated.mean() / N)

    left = np.asarray(jsparse.residual(state), np.float64)
    gpus = row.gpus[size] if row.gpus else 1
    nodes = left.reshape(size // gpus, -1)  # Each node's shards, one after another.
    np.testing.assert_allclose(told.residual_norm, np.linalg.norm(left, axis=1), rtol=1e-5)
    norm = np.sqrt(np.mean((np.linalg.norm(nodes, axis=1) / gpus) ** 2))
    moved = np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in mean.values()])
    assert got["residual_norm"] == pytest.approx(norm, rel=1e-5)
    assert got["update_norm"] == pytest.approx(np.linalg.norm(moved), rel=1e-5)
    assert got["residual_over_update"] == pytest.approx(quotient(norm, np.linalg.norm(moved)), rel=1e-5)
    waits = np.mean(np.abs(nodes).sum(1) / gpus)
    assert got["age"] == pytest.approx(quotient(waits, np.abs(moved).sum()), rel=1e-5)
    assert (got["age"] > 0) == (left.any())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_share_is_of_what_pmean_would_send(dtype):
    """``dense`` sends that, and twice that for narrow floats, which it sums in float32."""
    params, tx = {"v": jnp.zeros(700, dtype), "w": jnp.zeros((30, 10), dtype)}, jsparse.dense(AXIS)
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(5))
    grads = jax.tree.map(lambda leaf: jnp.ones((5, *leaf.shape), dtype), params)
    updates, state = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(grads, state)
    mean = jsparse.traffic(lambda x: jax.lax.pmean(x, AXIS), jnp.zeros(1000, dtype), axis_sizes={AXIS: 5})
    assert 4 * jsparse.stats(state).dense_words[0] == mean.bytes
    got = plain(jsparse.metrics(state, jax.tree.map(lambda leaf: leaf[0], updates)))
    assert (got["bytes"], got["share_of_dense"], got["density"]) == (6400, 6400 / mean.bytes, 1)
    assert (got["residual_norm"], got["age"]) == (0, 0)
    assert got["update_norm"] == pytest.approx(1000**0.5)


@pytest.mark.full
def test_a_sparse_mean_is_as_good_as_an_update():
    tx = jsparse.topk_allgather(AXIS, density=0.05)
    grads = jnp.asarray(scenarios.take("ordinary", 3, 1)[0])
    state = jax.vmap(lambda _: tx.init(jnp.zeros(N)), axis_name=AXIS)(jnp.arange(3))
    mean, after = jax.vmap(lambda *args: jsparse.sync(tx, *args), axis_name=AXIS)(grads, state)
    updates, _ = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(grads, state)
    sparse = jax.tree.map(lambda leaf: leaf[0], mean)
    assert isinstance(sparse, jsparse.SparseVector)
    got, want = jsparse.metrics(after, sparse), jsparse.metrics(after, updates[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_words_beyond_a_uint32():
    """Sums over workers and transformations stay what they are, or at the largest."""
    tx = jsparse.dense(AXIS)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(10)), axis_name=AXIS)(jnp.arange(2))
    many = state._replace(report=state.report._replace(words=jnp.full((2, 1), 2**32 - 10, jnp.uint32)))
    assert float(jsparse.metrics(many)["jsparse/bytes"]) == np.float32(4 * (2**32 - 10))
    assert jsparse.stats((many, many)).words.tolist() == [2**32 - 1] * 2


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["v"] ** 2)


def trained(tx, steps: int = 2, mesh=None, axis=AXIS):
    """The state of a training step before the last step, which it was donated to, and after it."""
    step = jsparse.train_step(loss_fn, tx, transports.mesh(4) if mesh is None else mesh, axis)
    state = step.init({"v": jnp.ones(50), "w": jnp.ones(20)})
    for number in range(steps):
        before = state
        state, _ = step(state, np.random.default_rng(number).random((8, 20), np.float32))
    return before, state


@pytest.mark.full
def test_the_state_of_a_training_step():
    """All readers take it whole; the update that optax kept serves ``metrics``."""
    tx = optax.chain(jsparse.oktopk(AXIS, density=0.1), optax.snapshot("mean", lambda updates: updates), optax.sgd(0.1))
    _, state = trained(tx)
    for read in READERS:
        jax.tree.map(np.testing.assert_array_equal, read(state), read(state.opt_state))
    mean = optax.tree.get(state.opt_state, "mean")
    got = plain(jsparse.metrics(state, mean))
    assert got["update_norm"] == pytest.approx(optax.tree.norm(mean), rel=1e-6)
    assert got["age"] > 0
    with pytest.raises(ValueError, match=r"pass its opt_state.*_replace\(opt_state="):
        jsparse.reshard(tx, state, state.params, transports.mesh(2), AXIS)


@pytest.mark.full
def test_on_a_mesh_with_explicit_axes():
    _, state = trained(
        optax.chain(jsparse.topk_allgather("data", density=0.1), optax.sgd(0.1)),
        2,
        jax.make_mesh((4,), ("data",)),
        "data",
    )
    _, usual = trained(SPARSE)
    for read in READERS:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), read(state), read(usual))


def donated_to_a_training_step():
    before, _ = trained(SPARSE)
    return before.opt_state


def donated_whole_to_a_training_step():
    return trained(SPARSE)[0]


def donated_to_pmap():
    tx = jsparse.topk_allgather(AXIS, density=0.1)
    state = jax.pmap(lambda _: tx.init(jnp.zeros(50)), axis_name=AXIS)(np.arange(4))
    jax.pmap(tx.update, axis_name=AXIS, donate_argnums=1)(np.ones((4, 50), np.float32), state)
    return state


def donated_in_part():
    _, state = trained(SPARSE)
    state.opt_state[0].buckets[0].residual.delete()
    return state.opt_state


DONATED = [donated_to_a_training_step, donated_whole_to_a_training_step, donated_to_pmap, donated_in_part]


@pytest.mark.parametrize("make", quick(DONATED, donated_to_a_training_step, donated_in_part))
def test_a_donated_state_is_refused(make):
    state = make()
    for read in READERS:
        with pytest.raises(ValueError, match="was donated to a step"):
            read(state)
    tx = jsparse.oktopk(AXIS, density=0.1)
    opt_state = getattr(state, "opt_state", state)
    with pytest.raises(ValueError, match="was donated to a step"):
        jsparse.reshard(tx, opt_state, jnp.zeros(50), transports.mesh(2), AXIS)


def test_donated_updates_are_refused():
    _, state = trained(optax.chain(jsparse.dense(AXIS), optax.sgd(0.1)))
    gone = jnp.ones(70)
    gone.delete()
    with pytest.raises(ValueError, match="was donated to a step"):
        jsparse.metrics(state, {"w": gone})


@pytest.mark.parametrize("scope", quick(["global", "leaf"], "global"))
def test_a_state_of_pmap_is_read_as_that_of_vmap(scope: str):
    tx = jsparse.topk_allgather(AXIS, density=0.05, scope=scope)
    states = []
    for transform in (jax.pmap, lambda *args, **kwargs: jax.jit(jax.vmap(*args, **kwargs))):
        state = transform(lambda _: tx.init(transports.zeros()), axis_name=AXIS)(np.arange(4))
        update = transform(tx.update, axis_name=AXIS)
        for gradient in scenarios.take("ordinary", 4, 2):
            _, state = update(transports.tree(gradient), state)
        states.append(state)
    assert states[0].step.shape == (4, 1)
    for read in READERS:
        got, want = map(read, states)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert jsparse.residual(states[0]).shape == (4, N)
    assert {leaf.shape for leaf in jsparse.stats(states[0])} == {(4,), (4, 1 if scope == "global" else 4)}


def test_updates_of_all_workers_side_by_side_are_those_of_one():
    tx = optax.chain(jsparse.topk_allgather(AXIS, density=0.05), optax.snapshot("mean", lambda updates: updates))
    state = jax.vmap(lambda _: tx.init(transports.zeros()), axis_name=AXIS)(np.arange(4))
    (gradient,) = scenarios.take("ordinary", 4, 1)
    updates, state = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(transports.tree(gradient), state)
    kept = jsparse.metrics(state, optax.tree.get(state, "mean"))
    one = jsparse.metrics(state, jax.tree.map(lambda leaf: leaf[0], updates))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), kept, one)


def test_a_workers_own_figures_inside_shard_map():
    mesh = transports.mesh(4)
    _, state = trained(SPARSE)

    def own(state):
        return {name: figure[None] for name, figure in jsparse.metrics(state).items()}

    along = PartitionSpec(AXIS)
    figures = jax.shard_map(own, mesh=mesh, in_specs=along, out_specs=along)(state.opt_state[0])
    told = jsparse.stats(state)
    np.testing.assert_allclose(figures["jsparse/residual_norm"], told.residual_norm, rtol=1e-6)
    np.testing.assert_array_equal(figures["jsparse/selected"], told.selected)


def two_transformations():
    return optax.partition(
        {
            "sparse": optax.chain(jsparse.oktopk(AXIS, density=0.3), optax.adam(0.1)),
            "dense": optax.chain(jsparse.topk_allgather(AXIS, density=0.2), optax.sgd(0.1)),
        },
        {"w": "sparse", "v": "dense"},
    )


@pytest.mark.full
def test_figures_of_several_transformations():
    """Counts are added, thresholds and residuals lie side by side."""
    _, state = trained(two_transformations())
    inner = state.opt_state.inner_states
    first, second = (jsparse.stats(inner[name]) for name in ("dense", "sparse"))
    together = jsparse.stats(state)
    for name in ("selected", "overflowed", "delivered", "updated", "elements", "words", "dense_words", "messages"):
        np.testing.assert_array_equal(getattr(together, name), getattr(first, name) + getattr(second, name))
    for name in ("thresholds", "global_thresholds"):
        wanted = np.concatenate([getattr(first, name), getattr(second, name)], axis=1)
        np.testing.assert_array_equal(getattr(together, name), wanted)
    np.testing.assert_allclose(together.residual_norm, np.hypot(first.residual_norm, second.residual_norm), rtol=1e-6)
    parts = [jsparse.residual(inner[name]) for name in ("dense", "sparse")]
    np.testing.assert_array_equal(jsparse.residual(state), np.concatenate(parts, axis=1))
    assert jsparse.residual(state).shape == (4, 70)
    got = plain(jsparse.metrics(state))
    assert got["density"] == pytest.approx(float(together.updated[0]) / 70)
    assert got["residual_norm"] == pytest.approx(np.sqrt(np.mean(np.square(together.residual_norm))), rel=1e-6)


@pytest.mark.full
def test_a_step_that_one_of_several_transformations_skips():
    tx = two_transformations()
    step = jsparse.train_step(loss_fn, tx, transports.mesh(4), AXIS)
    state = step.init({"v": jnp.ones(50), "w": jnp.ones(20)})
    batch = np.ones((8, 20), np.float32)
    batch[0, 0] = np.nan
    state, _ = step(state, batch)  # The gradient of v is finite.
    assert jsparse.stats(state.opt_state.inner_states["dense"]).skipped.tolist() == [0] * 4
    assert (jsparse.stats(state).skipped.tolist(), jsparse.stats(state).step.tolist()) == ([1] * 4, [1] * 4)


def test_states_of_different_workers():
    tx = jsparse.dense(AXIS)
    states = [jax.vmap(lambda _: tx.init(jnp.zeros(3)), axis_name=AXIS)(jnp.arange(size)) for size in (2, 3)]
    for read in READERS:
        with pytest.raises(ValueError, match=r"states of \[2, 3\] workers"):
            read(states)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(jsparse.oktopk(AXIS, density=0.1), marks=pytest.mark.full),
        jsparse.a2sgd(AXIS),
        pytest.param(
            jsparse.phases(((1, jsparse.dense(AXIS)), jsparse.oktopk(AXIS, density=0.1))), marks=pytest.mark.full
        ),
    ],
    ids=["oktopk", "a2sgd", "phases"],
)
def test_skipped_steps_are_counted_and_carried_to_other_workers(tx):
    grads = np.ones((4, 50), np.float32)
    spoilt = grads.copy()
    spoilt[1, 7] = np.inf
    state = jax.vmap(lambda _: tx.init(jnp.zeros(50)), axis_name=AXIS)(jnp.arange(4))
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for gradient in (grads, spoilt, grads, spoilt):
        _, state = update(gradient, state)
    assert plain(jsparse.metrics(state)) | {"step": 2, "skipped": 2} == plain(jsparse.metrics(state))
    saved = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), state)
    moved = jsparse.reshard(tx, saved, jnp.zeros(50), Mesh(np.array(jax.devices()[:3]), (AXIS,)), AXIS)
    told = jsparse.stats(moved)
    assert (told.step.tolist(), told.skipped.tolist()) == ([2] * 3, [2] * 3)
    # What a dense all-reduce would send among three: 2 * 50 * 2 / 3 words.
    assert (told.elements.tolist(), told.dense_words.tolist()) == ([50] * 3, [67] * 3)


def test_counts_of_very_many_elements_do_not_wrap():
    def report(_):
        comm, many, none = jsparse.AxisComm(AXIS), jnp.int32(2**30 + 5), jnp.int32(0)
        outcome = Outcome(None, BucketState((), ()), Counts(none, none, many, none, none), many)
        state = begin([comm], Flat(), [], [BucketState((), ())] * 2, ())
        told = conclude([Metered(comm)], [], state, [outcome] * 2, [False] * 2, jnp.array(False), none, undo=False)
        return told.report

    told = jax.vmap(report, axis_name=AXIS)(jnp.arange(2))
    assert (told.delivered == 2**31 - 1).all()
    assert (told.updated == 2**31 - 1).all()
