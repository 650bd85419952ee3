"""The whole training step, against the same written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jsparse
import transports
from tiers import quick
from transports import AXIS

SIZE = 4
EXAMPLES = 24


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((EXAMPLES, 5)).astype(np.float32), rng.standard_normal(EXAMPLES).astype(np.float32)


def params():
    rng = np.random.default_rng(1)
    return {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32), "v": jnp.ones(7)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def chain(density=0.3, after=None, preset=jsparse.topk_allgather):
    return optax.chain(preset(AXIS, density=density), after or optax.sgd(0.1))


@pytest.mark.parametrize("checked", quick([True, False], True))
@pytest.mark.parametrize("micro_batches", quick([1, 3], 3))
@pytest.mark.parametrize("preset", quick([jsparse.topk_allgather, jsparse.oktopk], jsparse.topk_allgather))
def test_density_1_is_training_on_the_whole_batch(preset, micro_batches: int, checked: bool):
    tx, mesh = chain(1.0, preset=preset), transports.mesh(SIZE)
    step = jsparse.train_step(loss_fn, tx, mesh, AXIS, micro_batches=micro_batches, check_vma=checked)
    state = step.init(params())
    expected = params()
    for seed in range(3):
        loss, grads = jax.value_and_grad(loss_fn)(expected, data(seed))
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)
        state, got = step(state, data(seed))
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, expected)


def test_it_is_jitted_once_and_donates():
    tx = chain(preset=jsparse.oktopk)  # Its state has the most kinds of leaves.
    step = jsparse.train_step(loss_fn, tx, transports.mesh(SIZE), AXIS)
    first = params()
    state = step.init(first)
    for seed in range(4):
        before = state
        state, _ = step(state, data(seed))
        assert before.opt_state[0].buckets[0].residual.is_deleted()
        assert before.params["w"].is_deleted()
    assert step._run._cache_size() == 1
    assert not first["w"].is_deleted()
    assert step.lower(state, data()).compile().memory_analysis().alias_size_in_bytes > 0


@pytest.mark.parametrize("kept", ["replicated", "per_worker"])
def test_a_donated_state_is_refused(kept: str):
    step = jsparse.train_step(loss_fn, chain(), transports.mesh(SIZE), AXIS, params=kept)
    before = step.init(params())
    step(before, data())
    with pytest.raises(ValueError, match="the state was donated to a step"):
        step(before, data())
    if kept == "per_worker":
        with pytest.raises(ValueError, match="the state was donated to a step"):
            step.sync_params(before)


@pytest.mark.full
def test_micro_batches_synchronise_once():
    def messages(**kwargs):
        step = jsparse.train_step(loss_fn, chain(), transports.mesh(SIZE), AXIS, **kwargs)
        state = step.init(params())
        state, _ = step(state, data())
        return jsparse.stats(state.opt_state).words, jsparse.traffic(step, state, data()).bytes

    one, three = messages(), messages(micro_batches=3)
    np.testing.assert_array_equal(one[0], three[0])
    assert one[1] == three[1]


@pytest.mark.full
def test_metrics_are_averaged():
    def with_metrics(params, batch):
        return loss_fn(params, batch), {"first": batch[0][0, 0], "count": jnp.float32(batch[1].shape[0])}

    step = jsparse.train_step(with_metrics, chain(), transports.mesh(SIZE), AXIS, has_aux=True, micro_batches=2)
    _, (loss, metrics) = step(step.init(params()), data())
    x, _ = data()
    # Parts take turns with the examples of a worker's share.
    np.testing.assert_allclose(metrics["first"], x.reshape(SIZE, -1, 5)[:, :2, 0].mean(), rtol=1e-6)
    assert metrics["count"] == 3
    np.testing.assert_allclose(loss, loss_fn(params(), data()), rtol=1e-5)


class Normalised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(5, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.out = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.dense(x))))[:, 0]


@pytest.mark.parametrize("kept", quick(["mean", "per_worker"], "per_worker"))
@pytest.mark.parametrize("micro_batches", quick([1, 2], 2))
def test_batch_statistics(kept: str, micro_batches: int):
    """BatchNorm's statistics: averaged over workers, with their bytes counted, or per worker."""
    graph, start, statistics = nnx.split(Normalised(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    start, statistics = nnx.as_pure(start), nnx.as_pure(statistics)

    def loss_fn(params, batch, *, model_state):
        x, y = batch
        model = nnx.merge(graph, params, model_state)
        loss = jnp.mean((model(x) - y) ** 2)
        return loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))

    mesh = transports.mesh(SIZE)
    step = jsparse.train_step(loss_fn, chain(), mesh, AXIS, model_state=kept, micro_batches=micro_batches)
    state = step.init(start, statistics)
    means = np.tile(np.asarray(statistics["norm"]["mean"]), (SIZE, 1))
    for seed in range(2):
        x, _ = data(seed)
        for part in x.reshape(SIZE, -1, micro_batches, 5).transpose(2, 0, 1, 3):
            hidden = part @ np.asarray(state.params["dense"]["kernel"]) + np.asarray(state.params["dense"]["bias"])
            means = 0.99 * means + 0.01 * hidden.mean(1)
        if kept == "mean":
            means = np.tile(means.mean(0), (SIZE, 1))
        state, _ = step(state, data(seed))
        got = state.model_state["norm"]["mean"]
        assert got.shape == ((6,) if kept == "mean" else (SIZE, 6))
        np.testing.assert_allclose(np.broadcast_to(got, means.shape), means, rtol=1e-4, atol=1e-6)
        along = PartitionSpec(AXIS) if kept == "per_worker" else PartitionSpec()
        assert got.sharding == NamedSharding(mesh, along)

    messages = [part for part in jsparse.traffic(step, state, data()).parts if getattr(part, "name", "") == "psum"]
    # Mean and variance of six channels, and the loss.
    assert messages[0].payload == ("float32[13]" if kept == "mean" else "float32[1]")


@pytest.mark.full
def test_keys_differ_between_workers_and_micro_batches():
    def noisy(params, batch, *, key):
        noise = jax.random.uniform(key)
        return loss_fn(params, batch), {"noise": noise, "square": noise**2}

    step = jsparse.train_step(noisy, chain(), transports.mesh(SIZE), AXIS, has_aux=True, with_key=True, micro_batches=3)
    _, (_, metrics) = step(step.init(params()), data(), jax.random.key(7))
    draws = [
        jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(7), rank), part))
        for rank in range(SIZE)
        for part in range(3)
    ]
    np.testing.assert_allclose(metrics["noise"], np.mean(draws), rtol=1e-6)
    np.testing.assert_allclose(metrics["square"], np.mean(np.square(draws)), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"with_key": True}, {"with_extra": True}, {"with_key": True, "with_extra": True}]
)
def test_a_compiled_step_is_called_like_the_step(options: dict[str, bool]):
    """Ahead of time, the step takes the same arguments, and computes the same."""

    def loss(params, batch, *, key=None, extra=1.0):
        return extra * loss_fn(params, batch) + (0.0 if key is None else jax.random.uniform(key))

    step = jsparse.train_step(loss, chain(), transports.mesh(SIZE), AXIS, **options)
    args = (data(), jax.random.key(7)) if "with_key" in options else (data(),)
    kwargs = {"extra": jnp.float32(2)} if "with_extra" in options else {}
    compiled = step.lower(step.init(params()), *args, **kwargs).compile()
    ahead, report_ahead = compiled(step.init(params()), *args, **kwargs)
    state, report = step(step.init(params()), *args, **kwargs)
    assert report_ahead == report
    jax.tree.map(np.testing.assert_array_equal, ahead.params, state.params)


@pytest.mark.full
def test_the_loss_reaches_transforms_that_want_it():
    """``optax.contrib.reduce_on_plateau`` and its like take the loss as ``value``."""
    tx = chain(after=optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)))
    step = jsparse.train_step(loss_fn, tx, transports.mesh(SIZE), AXIS)
    state = step.init(params())
    state, loss = step(state, data())
    np.testing.assert_allclose(state.opt_state[1][1].best_value, loss)


@pytest.mark.full
def test_a_non_finite_loss_is_skipped_by_apply_if_finite():
    tx = chain(after=optax.apply_if_finite(optax.adam(0.1), 5))
    step = jsparse.train_step(loss_fn, tx, transports.mesh(SIZE), AXIS)
    state = step.init(params())
    x, y = data()
    x[3, 2] = np.nan
    state, loss = step(state, (x, y))
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, state.params, params())


# The chains of docs/chain.md with a memory before the all-reduce.
REMEMBERING = {
    "trace": lambda: (jsparse.per_worker(optax.trace(0.9)), jsparse.topk_allgather(AXIS, density=0.3)),
    "trace, oktopk": lambda: (jsparse.per_worker(optax.trace(0.9)), jsparse.oktopk(AXIS, density=0.3)),
    "ema": lambda: (jsparse.per_worker(optax.ema(0.9, debias=False)), jsparse.vote(AXIS)),
    "lion": lambda: (jsparse.per_worker(optax.scale_by_lion()), jsparse.vote(AXIS)),
}


@pytest.mark.parametrize("kept", ["mean", "per_worker"])
@pytest.mark.parametrize("name", quick(list(REMEMBERING), "trace"))
def test_a_non_finite_step_leaves_all_states_as_they_were(name: str, kept: str):
    """Those of what stands before the all-reduce, and the model state; later steps go on."""

    def centred(params, batch, *, model_state):
        x, y = batch
        middle = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
        return loss_fn(params, (x - middle[None], y)), {"mean": middle, "most": model_state["most"]}

    tx = optax.chain(*REMEMBERING[name](), optax.apply_if_finite(optax.sgd(0.01), 5))
    step = jsparse.train_step(centred, tx, transports.mesh(SIZE), AXIS, model_state=kept)
    state = step.init(params(), {"mean": np.zeros(5, np.float32), "most": np.full(1, np.inf, np.float32)})
    x, y = data()
    bad = x.copy()
    bad[3, 2] = np.nan
    for number, given in enumerate([x, bad, x, x]):
        before = jax.device_get((state.params, state.model_state, state.opt_state[0]))
        state, _ = step(state, (given, y))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state[0])))
        assert np.isfinite(state.model_state["mean"]).all()
        changed = [not np.array_equal(before[0][leaf], state.params[leaf]) for leaf in before[0]]
        # A vote tells only the part of the update in which the NaN is; the rest is made zero, too.
        assert changed == 2 * [number != 1]
        if number == 1:
            own = slice(5) if kept == "mean" else 0  # The others' own statistics are of good batches.
            np.testing.assert_array_equal(before[1]["mean"][own], np.asarray(state.model_state["mean"])[own])
    assert int(jsparse.stats(state).skipped.max()) == name.startswith("trace")  # A vote counts none.


@pytest.mark.full
def test_a_mesh_of_explicit_axes():
    """What ``jax.make_mesh`` makes, with batches that are not sharded."""
    mesh = jax.make_mesh((SIZE,), (AXIS,))
    step = jsparse.train_step(loss_fn, chain(1.0), mesh, AXIS)
    state, _ = step(step.init(params()), data())
    _, grads = jax.value_and_grad(loss_fn)(params(), data())
    np.testing.assert_allclose(state.params["w"], params()["w"] - 0.1 * grads["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_weakly_typed_parameters_compile_once():
    step = jsparse.train_step(loss_fn, chain(), transports.mesh(SIZE), AXIS)
    state = step.init({"w": jnp.full((5, 7), 0.1), "v": jnp.full(7, 1.0)})
    for seed in range(2):
        state, _ = step(state, data(seed))
    assert step._run._cache_size() == 1


@pytest.mark.full
def test_keys_kept_per_worker_differ():
    def noisy(params, batch, *, model_state):
        key, now = jax.random.split(model_state["key"])
        return loss_fn(params, batch), ({"key": key}, {"noise": jax.random.uniform(now)})

    step = jsparse.train_step(noisy, chain(), transports.mesh(SIZE), AXIS, has_aux=True, model_state="per_worker")
    state = step.init(params(), {"key": jax.random.key(0)})
    state, _ = step(state, data())
    assert len({tuple(row) for row in np.asarray(jax.random.key_data(state.model_state["key"])).tolist()}) == SIZE


@pytest.mark.full
def test_narrow_gradients_are_not_lost_in_micro_batches():
    tx = optax.chain(jsparse.oktopk(AXIS, density=1.0), optax.scale(-1.0))
    step = jsparse.train_step(
        lambda p, batch: jnp.sum(p * jnp.float16(6e-8)) + 0 * jnp.sum(batch),
        tx,
        transports.mesh(2),
        AXIS,
        micro_batches=4,
    )
    state, _ = step(step.init(jnp.zeros(3, jnp.float16)), np.ones((8, 1), np.float16))
    np.testing.assert_array_equal(state.params, -jnp.full(3, 6e-8, jnp.float16))


@pytest.mark.full
def test_two_all_reduces_for_different_parameters():
    tx = optax.partition(
        {
            "sparse": optax.chain(jsparse.oktopk(AXIS, density=0.3), optax.adam(0.1)),
            "dense": optax.chain(jsparse.dense(AXIS), optax.sgd(0.1)),
        },
        {"w": "sparse", "v": "dense"},
    )
    step = jsparse.train_step(loss_fn, tx, transports.mesh(SIZE), AXIS)
    state, _ = step(step.init(params()), data())
    assert jsparse.stats(state).elements.tolist() == [sum(leaf.size for leaf in state.params.values())] * SIZE
    assert jsparse.stats(state.opt_state.inner_states["sparse"]).selected.shape == (SIZE,)


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        ({"axis": "rows"}, None, "the mesh has axes"),
        ({"axis": ()}, None, "name an axis"),
        ({"axis": (AXIS, AXIS)}, None, "each once"),
        ({"tx": jsparse.dense("other")}, lambda step: step.init(params()), "'other' is not bound here, where the axes"),
        ({"mesh": None}, lambda step: step.init(params()), "is not bound here"),
        ({"micro_batches": 0}, None, "micro_batches is 0"),
        ({"model_state": "sum"}, None, "model_state is 'sum'"),
        ({"micro_batches": 5}, lambda step: step(step.init(params()), data()), "multiple of 20"),
        ({}, lambda step: step(step.init(params()), data(), jax.random.key(0)), "with_key=True"),
        ({}, lambda step: step.init(params(), {"mean": jnp.zeros(3)}), "init was given a model state"),
        ({"model_state": "mean"}, lambda step: step.init(params()), "init was given no model state"),
        ({}, lambda step: step(step.init(params()), (np.zeros((0, 5)), np.zeros(0))), "positive multiple"),
        ({}, lambda step: step(step.init(params()), (data()[0], 3.0)), r"\[1\] has shape \(\);"),
        ({"with_key": True}, lambda step: step(step.init(params()), data()), "with_key=True"),
        ({"tx": optax.sgd(0.1)}, lambda step: step.init(params()), "no all-reduce has made alike"),
        (
            {"tx": optax.chain(jsparse.dense(AXIS), jsparse.dense(AXIS))},
            lambda step: step.init(params()),
            "already summed",
        ),
    ],
)
def test_bad_input_is_refused(make, call, message: str):
    arguments = {"tx": chain(), "mesh": transports.mesh(SIZE), "axis": AXIS} | make
    with pytest.raises(ValueError, match=message):
        call(jsparse.train_step(loss_fn, **arguments)) if call else jsparse.train_step(loss_fn, **arguments)


@pytest.mark.parametrize(
    ("make", "returned", "message"),
    [
        ({"has_aux": True}, lambda loss, _: loss, r"returned a \w+ where \(loss, aux\)"),
        ({"has_aux": True}, lambda loss, _: (loss, {"name": "x"}), "'name'.* of aux is 'x'"),
        ({"has_aux": True}, lambda loss, _: (loss, jax.random.key(0)), "which has no mean"),
        ({"model_state": "mean"}, lambda loss, _: loss, r"where \(loss, model_state\)"),
        ({"model_state": "mean"}, lambda loss, kept: (loss, kept, 1), "tuple of 3"),
        ({"model_state": "mean"}, lambda loss, kept: (loss, None), "return the same structure"),
        ({"model_state": "mean"}, lambda loss, kept: (loss, kept | {"new": 1.0}), "return the same structure"),
        ({"model_state": "mean"}, lambda loss, _: (loss, {"m": jnp.zeros((4, 3))}), r"returned it with shape \(4, 3\)"),
        ({"model_state": "mean"}, lambda loss, _: (loss, {"m": 0.0}), r"with shape \(\)"),
        ({"model_state": "mean", "has_aux": True}, lambda loss, kept: (loss, kept), "dict where"),
    ],
)
@pytest.mark.parametrize("micro_batches", quick([1, 2], 2))
def test_what_a_loss_returns_is_checked(make, returned, message: str, micro_batches: int):
    def loss(params, batch, model_state=None):
        return returned(loss_fn(params, batch), model_state)

    step = jsparse.train_step(loss, chain(), transports.mesh(SIZE), AXIS, micro_batches=micro_batches, **make)
    state = step.init(params(), {"m": jnp.zeros(3)} if "model_state" in make else None)
    with pytest.raises(ValueError, match=message):
        step(state, data())
