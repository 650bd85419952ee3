"""What A2SGD has beside the contracts of the table; and training with replicas that differ."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jsparse
import oracles
import transports
from algorithms import ROWS, Row, case
from jsparse import cost
from tiers import quick
from transports import AXIS

ALONG, WHOLE = PartitionSpec(AXIS), PartitionSpec()


def simulate(grads: list, **kwargs) -> np.ndarray:
    """What each of some workers makes of its vector."""
    tx = jsparse.a2sgd(AXIS, **kwargs)
    stacked = jnp.stack([jnp.asarray(g) for g in grads])
    run = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)
    return np.asarray(jax.jit(run)(stacked))


def test_the_papers_example():
    """Section III.A, to the digit."""
    got = simulate([[1.0, 2.0, -1.0], [-1.0, -2.0, 3.0]])
    np.testing.assert_array_equal(got, [[1, 2.75, -1.25], [-1, -1.75, 2.25]])
    # The oracle of the other tests is held to it, too.
    oracle = oracles.a2sgd([np.array([[1.0, 2, -1], [-1, -2, 3]])])
    np.testing.assert_array_equal(oracle[0], got)


@pytest.mark.parametrize("row, size", [case(row, row.usual_size) for row in ROWS if row.preset == "a2sgd"])
def test_gradients_of_any_scale(row: Row, size: int):
    """Twenty random steps: what is mostly positive, mostly negative, mostly zero, large and
    small.
    """
    rng = np.random.default_rng(size)
    state, update = transports.workers(row, size)
    for _ in range(20):
        flat = (rng.standard_normal((size, transports.N)) + rng.normal()).astype(np.float32)
        flat *= (rng.random(flat.shape) < rng.random()) * 10.0 ** rng.integers(-5, 5)
        got, state = update(transports.tree(flat), state)
        rounding = 2e-6 * np.abs(flat).max()
        np.testing.assert_allclose(transports.flat(got, size), row.oracle(flat), rtol=2e-6, atol=rounding)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("per_leaf", [False, True])
def test_traffic_is_64_bits_in_one_message(size: int, per_leaf: bool):
    tx = jsparse.a2sgd(AXIS, per_leaf=per_leaf)
    traffic = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), transports.zeros(), axis_sizes={AXIS: size})
    (message,) = traffic.parts
    assert (message.name, message.payload) == ("psum", "float32[8]" if per_leaf else "float32[2]")
    with pytest.raises(ValueError, match="size is"):
        cost.exact(tx, transports.zeros(), (2, size))


def test_equal_gradients_are_the_dense_mean():
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    for size in (2, 3, 7):
        np.testing.assert_allclose(simulate([gradient] * size), [gradient] * size, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(simulate([gradient]), [gradient])


def test_what_moves_has_the_shared_mean():
    """On each worker the elements that reach their mean move together; the others, and zeros,
    stay.
    """
    rng = np.random.default_rng(1)
    grads = rng.integers(-20, 21, (4, 300)).astype(np.float32)
    got = simulate(list(grads))
    for before, after in zip(grads, got, strict=True):
        plus, minus = before[before >= 0].mean(), -before[before < 0].mean()
        reach = np.where(before >= 0, before >= plus, -before >= minus)
        np.testing.assert_array_equal(after[~reach], before[~reach])
        assert (after[reach] != before[reach]).all()
        assert np.ptp((after - before)[reach & (before > 0)]) < 1e-5
    assert (got[grads == 0] == 0).all()


@pytest.mark.parametrize(
    ("grads", "expected"),
    [
        # One parameter: the missing mean is zero.
        ([[3.0], [-1.0]], [[1.5], [-0.5]]),
        ([[3.0], [5.0]], [[4.0], [4.0]]),
        # Nothing positive on one worker: it adds zero to that mean, and its own zeros stay.
        ([[-1.0, 0.0, -3.0], [2.0, 2.0, 2.0]], [[-1.0, 0.0, -2.0], [1.0, 1.0, 1.0]]),
        ([[0.0, 0.0], [4.0, -2.0]], [[0.0, 0.0], [2.0, -1.0]]),
        ([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]),
        # Minus zero counts as at least zero, as in IEEE 754.
        ([[-0.0, 2.0], [-0.0, 4.0]], [[0.0, 2.5], [0.0, 3.5]]),
    ],
)
def test_missing_signs(grads, expected):
    for per_leaf in (False, True):
        np.testing.assert_array_equal(simulate(grads, per_leaf=per_leaf), expected)


def test_equal_elements_reach_their_mean():
    """However the mean is rounded: of a tenth, thrice, float32 makes more than a tenth."""
    for count in (3, 7, 1000, 5001):
        got = simulate([np.full(count, 0.1, np.float32), np.full(count, 0.3, np.float32)])
        np.testing.assert_allclose(got, np.full((2, count), 0.2), rtol=1e-6)


def test_a_sum_that_is_not_finite_is_told():
    got = simulate([np.full(4, 3e38, np.float32), np.ones(4, np.float32)])
    assert np.isnan(got).all()


def test_types():
    """Means of narrow leaves are float32, of double ones float64. Updates keep their types."""
    rng = np.random.default_rng(2)
    flat = rng.standard_normal((3, 4000))
    for dtype, rtol in [(jnp.bfloat16, 1e-2), (jnp.float16, 2e-3)]:
        grads = np.asarray(jnp.asarray(flat, dtype).astype(jnp.float32))
        got = simulate(list(jnp.asarray(flat, dtype)))
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), oracles.a2sgd([grads])[0], rtol=rtol, atol=1e-3)
    with jax.enable_x64(True):
        got = simulate(list(flat))
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, oracles.a2sgd([flat])[0], rtol=1e-13)
        tx = jsparse.a2sgd(AXIS)
        mixed = {"a": jax.ShapeDtypeStruct((3,), jnp.float64), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
        traffic = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), mixed, axis_sizes={AXIS: 4})
        assert cost.exact(tx, mixed, 4) == (traffic.least, traffic.cost)
        assert traffic.parts[0].payload == "float64[2]"


@pytest.mark.parametrize("n", [255, 1000, 262_144, 300_007])
def test_gradients_of_any_length(n: int):
    """All elements count in the means, those that are left when the rest is folded too."""
    rng = np.random.default_rng(n)
    gradient = np.abs(rng.standard_normal(n)).astype(np.float32) + np.float32(1)
    gradient[-n // 3 :] *= 3
    gradient[rng.random(n) < 0.3] *= -1
    tx = jsparse.a2sgd(AXIS)

    def each(rank):
        x = jnp.where(rank == 0, 1, 2) * jnp.asarray(gradient)
        return tx.update(x, tx.init(x))[0]

    got = np.asarray(jax.jit(jax.vmap(each, axis_name=AXIS))(jnp.arange(2)))[0]
    for sign in (1, -1):
        own = sign * gradient[sign * gradient > 0].astype(np.float64)
        moved = (sign * (got - gradient))[sign * gradient > own.mean() * 1.001]
        np.testing.assert_allclose(moved.mean(dtype=np.float64), own.mean() / 2, rtol=1e-5)


@pytest.mark.parametrize("n", [300_007, 4_000_000])
def test_long_gradients_are_folded_into_even_parts(n: int):
    """XLA:CPU sums parts of an odd length one element at a time."""
    tx = jsparse.a2sgd(AXIS)
    step = jax.make_jaxpr(lambda x: tx.update(x, tx.init(x)), axis_env=[(AXIS, 2)])
    text = str(step(jax.ShapeDtypeStruct((n,), jnp.float32)))
    parts = {int(length) for length in re.findall(r"f32\[16,(\d+)\]", text)}
    assert parts
    assert all(length % 64 == 0 and 0.9 * n < 256 * length <= n for length in parts)


@pytest.mark.full
def test_long_gradients():
    """VGG-16's: means in float32 to seven digits, no array as long beside the gradient, counts
    beyond int32.
    """
    n = 14_728_266
    gradient = np.random.default_rng(3).standard_normal(n, np.float32) + np.float32(0.5)
    tx = jsparse.a2sgd(AXIS)

    def each(rank):
        x = jnp.where(rank == 0, 1, 2) * jnp.asarray(gradient)
        return tx.update(x, tx.init(x))[0]

    got = np.asarray(jax.jit(jax.vmap(each, axis_name=AXIS))(jnp.arange(2)))[0]
    plus = gradient[gradient >= 0].mean(dtype=np.float64)
    moved = (got - gradient)[gradient > plus * 1.001]
    np.testing.assert_allclose(moved.mean(dtype=np.float64), plus / 2, rtol=1e-6)

    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS), donate_argnums=0)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(1)), axis_name=AXIS)(jnp.arange(1))
    memory = step.lower(jax.ShapeDtypeStruct((1, n), jnp.float32), state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * 4 * n

    big = {name: jax.ShapeDtypeStruct((2**30,), jnp.float32) for name in "abc"}
    traffic = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), big, axis_sizes={AXIS: 4})
    assert traffic.bytes == 12


def test_no_parameters():
    tx = jsparse.a2sgd(AXIS)
    for tree in ({}, {"a": jnp.zeros((0, 3))}):
        update = jax.jit(jax.vmap(lambda _, tree=tree: tx.update(tree, tx.init(tree)), axis_name=AXIS))
        got, state = update(jnp.arange(3))
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(lambda x: (3, *x.shape), tree)
        assert (state.report.messages == 0).all()
        assert cost.exact(tx, tree, 3)[1].messages == 0


def test_wrong_use_is_refused():
    tx = jsparse.a2sgd(AXIS)
    with pytest.raises(ValueError, match="not bound"):
        tx.init(jnp.zeros(3))
    with pytest.raises(ValueError, match="int32"):
        simulate([np.arange(3, dtype=np.int32)])
    with pytest.raises(ValueError, match="comm is 3"):
        jsparse.a2sgd(3)
    with pytest.raises(ValueError, match="use tx"):
        jsparse.sync(tx, jnp.zeros(3), None)
    summed = jax.shard_map(lambda g: tx.update(g, tx.init(g)), mesh=transports.mesh(2), in_specs=WHOLE, out_specs=ALONG)
    with pytest.raises(ValueError, match="already summed"):
        jax.eval_shape(summed, jnp.zeros(3))


# Training with replicas that differ.
SIZE = 4


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 5)).astype(np.float32)
    return x, np.tanh(x @ np.array([1, -2, 3, 0, 1], np.float32)).astype(np.float32)


def params():
    rng = np.random.default_rng(1)
    return {"w": jnp.asarray(rng.standard_normal((5, 7)), jnp.float32), "v": jnp.ones(7)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def make(*members, mesh=None, **kwargs):
    mesh = mesh or transports.mesh(SIZE)
    return jsparse.train_step(loss_fn, optax.chain(*members), mesh, AXIS, params="per_worker", **kwargs)


@pytest.mark.parametrize("checked", quick([True, False], True))
@pytest.mark.parametrize("micro_batches", quick([1, 2], 2))
def test_local_momentum_sgd_by_hand(checked: bool, micro_batches: int):
    """No all-reduce at all: each worker trains on its share; every third step they agree, and go
    on.
    """
    step = make(optax.sgd(0.1, momentum=0.9), check_vma=checked, micro_batches=micro_batches)
    state = step.init(params())
    own = [params() for _ in range(SIZE)]
    momentum = [jax.tree.map(jnp.zeros_like, params()) for _ in range(SIZE)]
    for number in range(7):
        x, y = data(number)
        state, loss = step(state, (x, y))
        losses = []
        for rank in range(SIZE):
            value, grads = jax.value_and_grad(loss_fn)(own[rank], (x[6 * rank :][:6], y[6 * rank :][:6]))
            losses.append(value)
            momentum[rank] = jax.tree.map(lambda m, g: 0.9 * m + g, momentum[rank], grads)
            own[rank] = jax.tree.map(lambda p, m: p - 0.1 * m, own[rank], momentum[rank])
        np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *own)
        mean = jax.tree.map(lambda leaf: leaf.mean(0), expected)
        ended = jsparse.sync_params(state, AXIS, mesh=transports.mesh(SIZE))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ended, mean)
        if number % 3 == 2:
            own = [jax.tree.map(jnp.asarray, mean)] * SIZE
            expected = jax.tree.map(lambda leaf: np.stack([leaf] * SIZE), mean)
            before, state = state, step.sync_params(state)
            assert before.params["w"].is_deleted()
            assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(state.params))
        else:
            assert (state.params["w"][0] != state.params["w"][1]).any()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), state.params, expected)
    assert step._run._cache_size() == 1
    # What it ends in are ordinary arrays: an ordinary step goes on from them.
    assert ended["w"].sharding.is_fully_replicated
    dense = jsparse.train_step(loss_fn, optax.chain(jsparse.dense(AXIS), optax.sgd(0.1)), transports.mesh(SIZE), AXIS)
    _, loss = dense(dense.init(ended), data())
    np.testing.assert_allclose(loss, loss_fn(ended, data()), rtol=1e-5)


def test_a2sgd_in_a_step():
    """The whole step against the oracle: updates, momentum after them, each worker's own
    parameters; what is sent.
    """
    mesh = transports.mesh(SIZE)
    step = make(jsparse.a2sgd(AXIS), optax.sgd(0.1, momentum=0.9))
    state = step.init(params())
    own = [params() for _ in range(SIZE)]
    momentum = np.zeros((SIZE, 42), np.float32)
    for number in range(4):
        x, y = data(number)
        state, _ = step(state, (x, y))
        grads = [jax.grad(loss_fn)(own[rank], (x[6 * rank :][:6], y[6 * rank :][:6])) for rank in range(SIZE)]
        flat = np.stack([np.concatenate([g["v"], g["w"].ravel()]) for g in grads])
        momentum = 0.9 * momentum + oracles.a2sgd([flat])[0]
        for rank in range(SIZE):
            v, w = momentum[rank, :7], momentum[rank, 7:].reshape(5, 7)
            own[rank] = {"w": own[rank]["w"] - 0.1 * w, "v": own[rank]["v"] - 0.1 * v}
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *own)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), state.params, expected)
    stats = jsparse.stats(state.opt_state)
    np.testing.assert_array_equal(stats.words, [3] * SIZE)
    np.testing.assert_array_equal(stats.step, [4] * SIZE)
    assert jsparse.residual(state.opt_state).shape == (SIZE, 0)
    payloads = [part.payload for part in jsparse.traffic(step, state, data()).parts]
    assert sorted(payloads) == ["float32[1]", "float32[2]"]  # The loss, and the means.
    assert [part.payload for part in jsparse.traffic(step.sync_params, state).parts] == ["float32[42]"]
    specs = jsparse.state_specs(state.opt_state, AXIS)
    assert set(jax.tree.leaves(specs)) == {ALONG}
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        assert leaf.sharding == NamedSharding(mesh, ALONG)
        assert leaf.shape[0] % SIZE == 0


def test_the_whole_algorithm():
    """Algorithm 1 to its end: the average (line 10), and one dense step from it (11 and 12)."""
    rate, mesh = 0.1, transports.mesh(SIZE)
    step = make(jsparse.a2sgd(AXIS), optax.sgd(rate))
    last = jsparse.train_step(loss_fn, optax.chain(jsparse.dense(AXIS), optax.sgd(rate)), mesh, AXIS)
    state = step.init(params())
    for number in range(3):
        state, _ = step(state, data(number))
    final, _ = last(last.init(jsparse.sync_params(state, AXIS, mesh=mesh)), data(3))

    def gradient(flat, rank, number):
        x, y = (part[6 * rank :][:6] for part in data(number))
        g = jax.grad(loss_fn)({"v": flat[:7], "w": flat[7:].reshape(5, 7)}, (x, y))
        return np.concatenate([g["v"], g["w"].ravel()])

    own = np.tile(np.concatenate([params()["v"], params()["w"].ravel()]), (SIZE, 1))
    for number in range(3):
        gradients = np.stack([gradient(own[rank], rank, number) for rank in range(SIZE)])
        own = own - rate * oracles.a2sgd([gradients])[0]
    average = own.mean(0)
    average -= rate * np.mean([gradient(average, rank, 3) for rank in range(SIZE)], axis=0)
    got = np.concatenate([final.params["v"], final.params["w"].ravel()])
    np.testing.assert_allclose(got, average, rtol=1e-4, atol=1e-5)
    assert jsparse.traffic(last, last.init(params()), data()).bytes == (42 + 1) * 4 * 2 * (SIZE - 1) / SIZE


def test_workers_along_two_axes():
    """As along one, in row-major order."""
    axes = ("hosts", "devices")
    mesh = Mesh(np.array(jax.devices()[:SIZE]).reshape(2, 2), axes)
    tx = optax.chain(jsparse.a2sgd(axes), optax.sgd(0.1, momentum=0.9))
    step = jsparse.train_step(loss_fn, tx, mesh, axes, params="per_worker")
    one = make(jsparse.a2sgd(AXIS), optax.sgd(0.1, momentum=0.9))
    state, expected = step.init(params()), one.init(params())
    for number in range(2):
        state, _ = step(state, data(number))
        expected, _ = one(expected, data(number))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, state.params, expected.params)
    ended = jsparse.sync_params(state, axes, mesh=mesh)
    jax.tree.map(lambda got, own: close(got, np.asarray(own)[3]), ended, step.sync_params(state).params)


@pytest.mark.full
def test_replicas_that_agree_are_as_good():
    """With an all-reduce that agrees, parameters per worker train as replicated ones do."""
    members = jsparse.topk_allgather(AXIS, density=0.3), optax.adam(0.01)
    step = make(*members)
    plain = jsparse.train_step(loss_fn, optax.chain(*members), transports.mesh(SIZE), AXIS)
    state, expected = step.init(params()), plain.init(params())
    for number in range(3):
        state, _ = step(state, data(number))
        expected, _ = plain(expected, data(number))
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(got, np.stack([want] * SIZE), rtol=1e-6)
        assert (got == got[:1]).all()
    assert jsparse.residual(state.opt_state).shape == (SIZE, 42)


def test_batch_statistics_per_worker_too():
    def counting(params, batch, *, model_state, key):
        noise = jax.random.normal(key, ())
        return loss_fn(params, batch), {"seen": model_state["seen"] + batch[0].sum(), "noise": noise}

    tx, mesh = optax.chain(jsparse.a2sgd(AXIS), optax.sgd(0.1)), transports.mesh(SIZE)
    step = jsparse.train_step(
        counting, tx, mesh, AXIS, params="per_worker", model_state="per_worker", with_key=True, micro_batches=2
    )
    state = step.init(params(), {"seen": jnp.zeros(()), "noise": jnp.zeros(())})
    state, _ = step(state, data(), jax.random.key(0))
    mean = jsparse.sync_params(state.model_state, AXIS, mesh=mesh)
    np.testing.assert_allclose(mean["seen"], data()[0].sum() / SIZE, rtol=1e-5)
    assert len(set(np.asarray(state.model_state["noise"]).tolist())) == SIZE


def test_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((SIZE,), (AXIS,))
    step = make(jsparse.a2sgd(AXIS), optax.adam(0.01), mesh=mesh)
    state, _ = step(step.init(params()), data())
    state = step.sync_params(state)
    ended = jsparse.sync_params(state, AXIS, mesh=mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b)[0], rtol=1e-6), ended, state.params)


def test_a_checkpoint_keeps_every_replica(tmp_path):
    step = make(jsparse.a2sgd(AXIS), optax.adam(0.01))
    state = step.init(params())
    for number in range(2):
        state, _ = step(state, data(number))
    state = state._replace(model_state=())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step2", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpointer.restore(tmp_path / "step2", target)
    assert (restored.params["w"][0] != restored.params["w"][1]).any()
    expected, _ = step(state._replace(model_state=None), data(2))
    got, _ = step(restored._replace(model_state=None), data(2))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_your_own_loop():
    """Parameters and the whole state per worker, under both settings of check_vma; synchronised
    inside.
    """
    mesh = transports.mesh(SIZE)
    tx = jsparse.per_worker(optax.chain(jsparse.a2sgd(AXIS), optax.adam(0.01)))
    results = []
    for checked in (True, False):
        opt_state = jsparse.init(tx, params(), mesh, AXIS, per_worker=True)
        specs = jsparse.state_specs(opt_state, AXIS)

        def local_step(own, opt_state, batch):
            own = jax.tree.map(lambda x: x[0], own)
            _, grads = jsparse.local_value_and_grad(loss_fn, AXIS)(own, batch)
            updates, opt_state = tx.update(grads, opt_state, own)
            own = optax.apply_updates(own, updates)
            return jax.tree.map(lambda x: x[None], own), opt_state, jsparse.sync_params(own, AXIS)

        step = jax.jit(
            jax.shard_map(
                local_step,
                mesh=mesh,
                in_specs=(ALONG, specs, ALONG),
                out_specs=(ALONG, specs, WHOLE),
                check_vma=checked,
            )
        )
        own = jax.tree.map(lambda x: jnp.stack([x] * SIZE), params())
        for number in range(2):
            own, opt_state, mean = step(own, opt_state, data(number))
        results.append((own, mean))
        jax.tree.map(lambda m, o: np.testing.assert_allclose(m, o.mean(0), rtol=1e-5, atol=1e-6), mean, own)
    jax.tree.map(np.testing.assert_array_equal, *results)
    whole = make(jsparse.a2sgd(AXIS), optax.adam(0.01))
    state = whole.init(params())
    for number in range(2):
        state, _ = whole(state, data(number))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state.params, results[0][0])


def test_sync_params():
    """All floats in one message; of the rest the largest; equal ones stay, to rounding."""
    for size in (1, 3, 8):
        rng = np.random.default_rng(size)
        tree = {
            "f": rng.standard_normal((size, 3, 2)).astype(np.float32),
            "h": jnp.asarray(rng.standard_normal((size, 5)), jnp.bfloat16),
            "c": (rng.standard_normal((size, 2)) + 1j * rng.standard_normal((size, 2))).astype(np.complex64),
            "i": np.arange(size, dtype=np.int32),
            "b": np.arange(size) == 1,
            "none": np.zeros((size, 0), np.float32),
        }
        mesh = transports.mesh(size)
        outside = jsparse.sync_params(tree, AXIS, mesh=mesh)
        vmapped = jax.jit(jax.vmap(lambda tree: jsparse.sync_params(tree, AXIS), axis_name=AXIS))(tree)
        pmapped = jax.pmap(lambda tree: jsparse.sync_params(tree, AXIS), axis_name=AXIS)(tree)
        for got in (outside, jax.tree.map(lambda x: x[0], vmapped), jax.tree.map(lambda x: x[0], pmapped)):
            np.testing.assert_allclose(got["f"], tree["f"].mean(0), rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(
                got["h"].astype(np.float32), tree["h"].astype(np.float32).mean(0), rtol=1e-2, atol=1e-2
            )
            np.testing.assert_allclose(got["c"], tree["c"].mean(0), rtol=1e-5, atol=1e-6)
            assert got["i"] == size - 1
            assert got["b"] == (size > 1)
            assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, tree)
        traffic = jsparse.traffic(lambda tree: jsparse.sync_params(tree, AXIS, mesh=mesh), tree)  # noqa: B023
        assert [part.payload for part in traffic.parts].count("float32[15]") == 1

        equal = {name: np.repeat(leaf[:1], size, axis=0) for name, leaf in tree.items()}
        got = jsparse.sync_params(equal, AXIS, mesh=mesh)
        for name in "fc":
            np.testing.assert_allclose(got.pop(name), equal.pop(name)[0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), got, equal)
    assert jsparse.sync_params({}, AXIS, mesh=transports.mesh(2)) == {}
    only = jsparse.sync_params({"i": np.arange(2)}, AXIS, mesh=transports.mesh(2))
    assert only["i"] == 1


@pytest.mark.parametrize(
    "members",
    [
        lambda: [jsparse.a2sgd(AXIS), optax.sgd(0.1)],
        lambda: [jsparse.a2sgd(AXIS, per_leaf=True), optax.adam(0.1)],
        lambda: [optax.sgd(0.1)],
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_replicated_parameters_are_refused(members, checked: bool):
    step = jsparse.train_step(loss_fn, optax.chain(*members()), transports.mesh(SIZE), AXIS, check_vma=checked)
    with pytest.raises(ValueError, match=r"no all-reduce has made alike.*params=\"per_worker\""):
        step.init(params())


def test_other_wrong_uses_are_refused():
    mesh, tx = transports.mesh(SIZE), optax.chain(jsparse.a2sgd(AXIS), optax.adam(0.1))
    with pytest.raises(ValueError, match="params is 'own'"):
        jsparse.train_step(loss_fn, tx, mesh, AXIS, params="own")
    plain = jsparse.train_step(loss_fn, optax.chain(jsparse.dense(AXIS), optax.sgd(0.1)), mesh, AXIS)
    with pytest.raises(ValueError, match="alike on all workers"):
        plain.sync_params(plain.init(params()))
    rows = plain.init({"w": np.zeros((SIZE, 7), np.float32)})
    with pytest.raises(ValueError, match="alike on all workers"):
        jsparse.sync_params(rows, AXIS, mesh=mesh)
    with pytest.raises(ValueError, match=r"Wrap the whole chain in jsparse\.per_worker"):
        jsparse.init(tx, params(), mesh, AXIS, per_worker=True)
    with pytest.raises(ValueError, match=r"\['v'\] has shape \(7,\); parameters of 4 workers"):
        jsparse.sync_params(params(), AXIS, mesh=mesh)
    with pytest.raises(ValueError, match="the mesh has axes"):
        jsparse.sync_params(params(), "rows", mesh=mesh)
    with pytest.raises(ValueError, match="name its axis"):
        jsparse.sync_params(params(), jsparse.AxisComm(AXIS), mesh=mesh)
    with pytest.raises(ValueError, match="not bound"):
        jsparse.sync_params(params(), AXIS)
    # Within per-worker state, nothing stands too early; alone it does.
    early = optax.trace(0.9), jsparse.a2sgd(AXIS), optax.scale(-0.1)
    assert make(*early).init(params()).opt_state.inner[0].trace["w"].shape == (SIZE * 5, 7)
    with pytest.raises(ValueError, match="member 0 of the chain"):
        jsparse.init(optax.chain(*early), params(), mesh, AXIS, per_worker=True)
    # What the wrapper can't cure is still refused inside it.
    with pytest.raises(ValueError, match="MultiSteps"):
        make(optax.MultiSteps(tx, 2)).init(params())
    # And JAX itself refuses to take updates that differ for replicated ones, where it is let look.
    opt_state = jax.eval_shape(lambda: jsparse.init(jsparse.per_worker(tx), params(), mesh, AXIS, per_worker=True))
    specs = jsparse.state_specs(opt_state, AXIS)
    loop = jax.shard_map(
        lambda own, s, g: jsparse.per_worker(tx).update(jax.tree.map(lambda x: x[0], g), s, own),
        mesh=mesh,
        in_specs=(WHOLE, specs, ALONG),
        out_specs=(WHOLE, specs),
    )
    with pytest.raises(ValueError, match="replicat"):
        jax.eval_shape(loop, params(), opt_state, jax.tree.map(lambda x: jnp.stack([x] * SIZE), params()))


@pytest.mark.full
def test_it_trains_as_well_as_dense_and_as_local_sgd():
    """Digits, 4 workers, momentum, three seeds, agreeing after each of eight epochs or at the end
    only: final mean parameters on unseen images. Local SGD has no algorithm between averages.
    """
    digits = load_digits()
    x, y = np.float32(digits.data / 16), np.int32(digits.target)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    train, test = order[:1440], order[1440:]
    start = {
        "w": jnp.asarray(rng.standard_normal((64, 32)) / 8, jnp.float32),
        "v": jnp.asarray(rng.standard_normal((32, 10)) / 6, jnp.float32),
    }

    def logits(params, x):
        return jax.nn.relu(x @ params["w"]) @ params["v"]

    def loss_fn(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]).mean()

    mesh, sgd, drift = transports.mesh(SIZE), optax.sgd(0.1, momentum=0.9), []

    def accuracy(tx, every: int = 0) -> float:
        """The mean of the seeds; parameters are averaged after so many epochs, 0 for never."""
        step = jsparse.train_step(loss_fn, tx, mesh, AXIS, params="per_worker" if every else "replicated")
        reached = []
        for seed in range(3):
            state = step.init(start)
            for epoch in range(1, 9):
                for batch in np.random.default_rng((seed, epoch)).permutation(train).reshape(-1, 96):
                    state, _ = step(state, (x[batch], y[batch]))
                if every and epoch % every == 0:
                    drift.append(float(jnp.std(state.params["w"], axis=0).max()))
                    state = step.sync_params(state)
            ended = jsparse.sync_params(state, AXIS, mesh=mesh) if every else state.params
            reached.append(jnp.mean(jnp.argmax(logits(ended, x[test]), 1) == y[test]))
        return float(np.mean(reached))

    dense = accuracy(optax.chain(jsparse.dense(AXIS), sgd))
    assert dense > 0.96
    for every in (1, 8):
        means, local = accuracy(optax.chain(jsparse.a2sgd(AXIS), sgd), every), accuracy(sgd, every)
        assert means > dense - 0.01
        assert abs(means - local) < 0.01
    assert min(drift) > 1e-3
