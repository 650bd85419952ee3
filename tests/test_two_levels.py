"""Two axes of a mesh: an all-reduce over one of them, or over both as two levels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jsparse
import oracles
import scenarios
import transports
from tiers import quick
from transports import LEVELS, N

ALONG, WHOLE = PartitionSpec(LEVELS), PartitionSpec()


def mesh(nodes: int = 2, gpus: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[: nodes * gpus]).reshape(nodes, gpus), LEVELS)


def unstack(tree):
    return jax.tree.map(lambda x: x[0], tree)


@pytest.mark.parametrize("name", quick(["oktopk", "parameter_server"], "parameter_server"))
def test_an_all_reduce_over_one_axis_of_two(name: str):
    """Types follow what varies along the other, and nothing is lost in either group."""
    tx = {
        "oktopk": jsparse.oktopk("nodes", density=0.1, select=jsparse.select.ReusedThreshold(0.1)),
        "parameter_server": jsparse.parameter_server("nodes"),
    }[name]

    def local_init(_):
        return jsparse.AxisComm(LEVELS).varying(tx.init(transports.zeros()))

    def local_update(grads, state):
        updates, state = tx.update(unstack(grads), state)
        return jax.tree.map(lambda x: x[None], updates), state

    state = jax.jit(jax.shard_map(local_init, mesh=mesh(), in_specs=ALONG, out_specs=ALONG))(np.arange(4))
    out_specs = (PartitionSpec("gpus"), ALONG)
    step = jax.jit(jax.shard_map(local_update, mesh=mesh(), in_specs=ALONG, out_specs=out_specs))
    acc = np.zeros((4, N))
    for gradient in scenarios.take("ordinary", 4, 3):
        updates, state = step(transports.tree(gradient), state)
        acc = acc + gradient
        residual = np.zeros((4, N)) if name == "parameter_server" else np.asarray(jsparse.residual(state))
        groups = (acc - residual).reshape(2, 2, N).sum(0)
        np.testing.assert_array_equal(2 * transports.flat(updates, 2), groups)
        assert (groups[0] != groups[1]).any()
        acc = residual


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def training():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32), "v": jnp.ones(7)}
    batches = [
        (rng.standard_normal((24, 5)).astype(np.float32), rng.standard_normal(24).astype(np.float32)) for _ in range(3)
    ]
    return params, batches


PRESETS = {
    "hitopk": lambda: jsparse.hitopk(*LEVELS, density=1.0),
    "hitopk-oktopk": lambda: jsparse.hitopk(*LEVELS, density=1.0, allreduce=jsparse.allreduce.OkTopk()),
    "torus": lambda: jsparse.torus(*LEVELS),
    "parameter_server": lambda: jsparse.parameter_server(LEVELS),
}


@pytest.mark.parametrize("checked", quick([True, False], True))
@pytest.mark.parametrize("name", quick(PRESETS, "torus"))
def test_density_1_is_training_on_the_whole_batch(name: str, checked: bool):
    tx = optax.chain(PRESETS[name](), optax.sgd(0.1))
    step = jsparse.train_step(loss_fn, tx, mesh(), LEVELS, check_vma=checked)
    expected, batches = training()
    state = step.init(expected)
    for batch in batches:
        loss, grads = jax.value_and_grad(loss_fn)(expected, batch)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)
        state, got = step(state, batch)
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, expected)


def test_the_residual_is_the_shards():
    state = jsparse.init(jsparse.hitopk(*LEVELS, density=0.1), transports.zeros(), mesh(2, 4), LEVELS)
    assert jsparse.residual(state).shape == (8, -(-N // 4))
    assert jsparse.stats(state).words.shape == (8,)
    assert set(jax.tree.leaves(jsparse.state_specs(state, LEVELS))) == {ALONG}


def test_one_axis_where_two_are_needed_is_refused():
    for axis in LEVELS:
        with pytest.raises(ValueError, match="over two axes, pass both"):
            jsparse.init(jsparse.hitopk(*LEVELS, density=0.1), transports.zeros(), mesh(), axis)


def test_sync_is_one_run():
    tx = jsparse.hitopk(*LEVELS, density=0.1)
    state = jsparse.init(tx, transports.zeros(), mesh(), LEVELS)

    def local(grads, state):
        update, after = jsparse.sync(tx, unstack(grads), state)
        return update, tx.update(unstack(grads), state)[0], after

    run = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(ALONG, ALONG), out_specs=(WHOLE, WHOLE, ALONG)))
    gradient = scenarios.take("ordinary", 4, 1)[0]
    update, dense, _ = run(transports.tree(gradient), state)
    assert update.indices.ndim == 1
    assert (np.diff(update.indices[: int(update.count)]) > 0).all()
    np.testing.assert_allclose(update.to_dense(), transports.flat(dense, 1)[0], rtol=3e-7)
    gradient[1, 3] = np.nan
    update, _, after = run(transports.tree(gradient), state)
    assert np.isnan(update.to_dense()).any()
    np.testing.assert_array_equal(jsparse.residual(after), jsparse.residual(state))


@pytest.mark.full
def test_finite_gradients_never_make_the_residual_infinite():
    tx = jsparse.hitopk(*LEVELS, density=0.05)
    over = jax.vmap(jax.vmap(lambda g, s: tx.update(g, s), axis_name="gpus"), axis_name="nodes")
    huge = {"w": jnp.full((2, 2, 100), 3e38) * jnp.array([1, -1, 1, 1]).reshape(2, 2, 1)}
    start = jax.vmap(jax.vmap(lambda _: tx.init({"w": jnp.zeros(100)}), axis_name="gpus"), axis_name="nodes")
    state, step = start(jnp.zeros((2, 2))), jax.jit(over)
    for _ in range(4):
        updates, state = step(huge, state)
        assert np.isfinite(updates["w"]).all()
    assert np.isfinite(state.buckets[0].residual).all()


@pytest.mark.parametrize(("density", "message"), [(0.2, "int32[400]"), (0.3, "float32[502]")])
def test_what_is_gathered_inside_a_node_is_sparse_or_dense(density: float, message: str):
    """Whichever is shorter: 2 words for each of 2 k elements, or 1 for each element of a shard."""
    tx = jsparse.hitopk(*LEVELS, density=density, select=jsparse.select.TopK(density))
    gradient = scenarios.take("ordinary", 4, 1)[0]

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    over = jax.jit(jax.vmap(jax.vmap(update, axis_name="gpus"), axis_name="nodes"))
    updates = over(jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), transports.tree(gradient)))
    shards = np.arange(N) // -(-N // 2) == np.arange(4)[:, None] % 2
    accs = np.where(shards, np.repeat(gradient.reshape(2, 2, N).sum(1), 2, axis=0), 0)
    expected = oracles.hitopk(accs, density=density, gpus=2, step=0).total
    np.testing.assert_array_equal(4 * transports.flat(updates, 4), np.tile(expected, (4, 1)))
    parts = jsparse.traffic(update, transports.zeros(), axis_sizes={"nodes": 2, "gpus": 2}).parts
    assert [part.payload for part in parts if (part.name, part.axes) == ("all_gather", ("gpus",))] == [message]


def test_words_between_and_inside_the_nodes():
    """The costs of the paper's steps 1, 3 and 4 (equations 7, 9, 10), an index with each value."""
    n, nodes, gpus = 102_400, 16, 8
    grads = jax.ShapeDtypeStruct((n,), jnp.float32)
    sizes = dict(zip(LEVELS, (nodes, gpus), strict=True))

    def sends(tx):
        parts = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), grads, axis_sizes=sizes).parts
        return {(part.name, part.axes): (part.cost.bytes / 4, part.cost.messages) for part in parts}

    sent = sends(jsparse.hitopk(*LEVELS, density=0.01))
    k = round(0.01 * n / gpus)
    assert sent["psum_scatter", ("gpus",)] == (n * (gpus - 1) / gpus, 3)
    assert sent["all_gather", ("nodes",)] == (2 * k * (nodes - 1), 4)
    assert sent["all_gather", ("gpus",)] == (2 * k * nodes * (gpus - 1), 3)
    # From 2km words on a shard is gathered densely, as that is shorter.
    for density, words in ((1 / 33, 2 * 388 * nodes * (gpus - 1)), (1 / 32, n * (gpus - 1) / gpus)):
        assert sends(jsparse.hitopk(*LEVELS, density=density))["all_gather", ("gpus",)] == (words, 3)
    assert sends(jsparse.torus(*LEVELS)) == {
        ("psum_scatter", ("gpus",)): (n * (gpus - 1) / gpus, 3),
        ("psum", ("nodes",)): (2 * n / gpus * (nodes - 1) / nodes, 8),
        ("all_gather", ("gpus",)): (n * (gpus - 1) / gpus, 3),
    }
