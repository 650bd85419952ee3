"""What should hold in each process of several, asserted there."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import processes
from jsparse._comm import gloo
from jsparse._train import stats as _stats

AXIS = "data"


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def params(seed: int = 0):
    return {"b": jnp.zeros(()), "v": jnp.ones(7), "w": jax.random.normal(jax.random.key(seed), (5, 7))}


def data(length: int = 8):
    rng = np.random.default_rng(0)
    return rng.standard_normal((length, 5)).astype(np.float32), rng.standard_normal(length).astype(np.float32)


def test_batches(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    """This process's share, in numpy or on its device, and a global array are the same batch."""
    own = jax.tree.map(lambda x: x[4 * rank : 4 * rank + 4], data())
    along = NamedSharding(mesh, PartitionSpec(AXIS))
    whole = jax.tree.map(lambda x: jax.make_array_from_process_local_data(along, x), own)
    ended = [step(step.init(params()), batch) for batch in (own, jax.tree.map(jnp.asarray, own), whole)]
    for state, loss in ended:
        np.testing.assert_array_equal(loss, ended[0][1])
        jax.tree.map(np.testing.assert_array_equal, state.params, ended[0][0].params)
    np.testing.assert_allclose(ended[0][1], loss_fn(params(), data()), rtol=1e-5)
    assert step._run._cache_size() == 1
    with pytest.raises(ValueError, match=r"this process's workers .* multiple of 2"):
        step(ended[0][0], data(3))
    # The shapes of global arrays, and a mesh of this process alone.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole)
    assert jsparse.traffic(step, ended[0][0], shapes) == jsparse.traffic(step, ended[0][0], own)
    alone = jsparse.train_step(loss_fn, dense(), Mesh(np.array(jax.local_devices()), (AXIS,)), AXIS)
    _, loss = alone(alone.init(params()), own)
    np.testing.assert_allclose(loss, loss_fn(params(), own), rtol=1e-5)


def test_beginnings(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    """All begin with the same values, or are told what differs.

    Global arrays and NaNs are taken as they are.
    """
    with pytest.raises(ValueError, match=r"different values of \['w'\]; all begin"):
        step.init(params(seed=rank))
    with pytest.raises(ValueError, match=r"different values of \['w'\]; all begin"):
        jsparse.init(dense(), params(seed=rank), mesh, AXIS)
    with pytest.raises(ValueError, match="different names, shapes or types"):
        step.init(params() | {f"only on {rank}": jnp.zeros(())})
    first = step.init(params())
    again = step.init(first.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, params())
    step(again, data(4))
    assert not first.params["w"].is_deleted()
    assert np.isnan(step.init(jax.tree.map(lambda x: x * jnp.nan, params())).params["w"]).all()


def test_model_state_and_keys(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    """Dropout keys: of the step, and kept by each worker."""

    def noisy(params, batch, *, model_state, key):
        own, now = jax.random.split(model_state["key"])
        draws = {"step": jax.random.uniform(key), "own": jax.random.uniform(now)}
        return loss_fn(params, batch), ({"key": own, "seen": model_state["seen"] + 1}, draws)

    for kept in ("per_worker", "mean"):
        step = jsparse.train_step(noisy, dense(), mesh, AXIS, has_aux=True, model_state=kept, with_key=True)
        state = step.init(params(), {"key": jax.random.key(3), "seen": jnp.zeros(3)})
        state, (_, draws) = step(state, data(4), jax.random.key(7))
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(7), worker), 0) for worker in range(4)]
        np.testing.assert_allclose(draws["step"], np.mean([jax.random.uniform(key) for key in keys]), rtol=1e-6)
        rows = {
            tuple(np.asarray(shard.data).ravel().tolist())
            for shard in jax.random.key_data(state.model_state["key"]).addressable_shards
        }
        assert len(rows) == (2 if kept == "per_worker" else 1)
        assert state.model_state["seen"].shape == ((4, 3) if kept == "per_worker" else (3,))


def test_figures_are_gathered_in_one_message(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    state, _ = step(step.init(params()), data(4))
    stats = jsparse.stats(state.opt_state)
    assert stats.words.tolist() == [stats.words[0]] * 4
    assert jsparse.traffic(step, state, data(4)).bytes >= 4 * int(stats.words[0]) > 0
    ours = _stats.find(state.opt_state)
    sent = jsparse.traffic(_stats.reader(_stats.read, ours), ours)
    assert [part.name for part in sent.parts] == ["all_gather"]
    assert sent.bytes == 3 * sum(leaf.nbytes // 4 for leaf in stats)
    figures = jsparse.metrics(state, state.params)
    assert all(figure.is_fully_replicated for figure in figures.values())
    assert float(figures["jsparse/bytes"]) == 4 * int(stats.words[0])
    norm = np.sqrt(np.mean(np.square(stats.residual_norm)))
    np.testing.assert_allclose(figures["jsparse/residual_norm"], norm, rtol=1e-5)
    inside = jax.jit(jsparse.metrics)(state.opt_state, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), inside, figures)


def test_long_messages(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    """Over gloo pairs exchange them by sums, and sums go round in a ring."""
    comm, along = jsparse.AxisComm(AXIS), PartitionSpec(AXIS)
    every = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 4, 37), dtype=np.int32)
    partners = [1, 0, 3, 2]
    calls = {
        "all_to_all": (comm.all_to_all, every.swapaxes(0, 1)),
        "psum_scatter": (comm.psum_scatter, every.sum(axis=0, dtype=np.int32)),
        "ppermute": (lambda x: comm.ppermute(x, list(enumerate(partners))), every[partners]),
    }
    x = jax.make_array_from_callback(every.shape, NamedSharding(mesh, along), every.__getitem__)
    with mock.patch.multiple(gloo, LONG=16, LONG_GATHERED=16):
        for name, (call, expected) in calls.items():
            local = jax.shard_map(lambda x, call=call: call(x[0])[None], mesh=mesh, in_specs=along, out_specs=along)
            assert "psum" in {part.name for part in jsparse.traffic(local, x).collectives} or name == "psum_scatter"
            for shard in jax.jit(local)(x).addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=name)
        two, along = Mesh(mesh.devices.reshape(2, 2), ("others", "pair")), PartitionSpec(("others", "pair"))
        pair = jsparse.AxisComm("pair")
        rows = jax.make_array_from_callback(every.shape, NamedSharding(two, along), every.__getitem__)
        local = jax.shard_map(
            lambda x: pair.all_gather(x[0]), mesh=two, in_specs=along, out_specs=PartitionSpec("others")
        )
        assert "psum" in {part.name for part in jsparse.traffic(local, rows).collectives}
        for shard in jax.jit(local)(rows).addressable_shards:
            np.testing.assert_array_equal(shard.data, every[shard.index])


def test_figures_of_a_long_gradient(rank: int, mesh: Mesh, step: jsparse.TrainStep):
    """So long that XLA sums its residual by another kernel."""
    long = jsparse.train_step(lambda params, x: jnp.sum(x @ params), step._body.tx, mesh, AXIS)
    state, _ = long(long.init(jnp.zeros(20_000)), np.tile(np.arange(20_000, dtype=np.float32), (2, 1)))
    figures = jsparse.metrics(state, state.params)
    norms = np.concatenate([np.linalg.norm(own.data, axis=1) for own in jsparse.residual(state).addressable_shards])
    assert norms.min() == norms.max() > 0
    np.testing.assert_allclose(figures["jsparse/residual_norm"], norms[0], rtol=1e-5)


def dense():
    return optax.chain(jsparse.dense(AXIS), optax.sgd(0.1))


def main() -> None:
    rank = processes.join()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    tx = optax.chain(jsparse.oktopk(AXIS, density=0.3), optax.sgd(0.1))
    step = jsparse.train_step(loss_fn, tx, mesh, AXIS)
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test(rank, mesh, step)
            print(f"{name} held", flush=True)
    print("all held")


if __name__ == "__main__":
    main()
