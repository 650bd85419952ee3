"""States that hold something for each worker: placed, read, saved and restored."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import scenarios
import transports
from transports import AXIS, N

SIZE = 4
ALONG, WHOLE = PartitionSpec(AXIS), PartitionSpec()


def chain(*after):
    return optax.chain(
        optax.clip_by_global_norm(1e9),
        jsparse.per_worker(optax.trace(0.9)),
        jsparse.oktopk(AXIS, density=0.05),
        *(after or [optax.adam(1e-3)]),
    )


def make_step(tx, mesh, specs):
    def local(grads, state):
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, state, grads)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(ALONG, specs), out_specs=(WHOLE, specs)))


def test_init_places_every_leaf_as_its_spec_says():
    mesh = transports.mesh(SIZE)
    state = jsparse.init(chain(), transports.zeros(), mesh, AXIS)
    specs = jsparse.state_specs(state, AXIS)

    def check(leaf, spec):
        if leaf.size:
            assert leaf.sharding == NamedSharding(mesh, spec)

    jax.tree.map(check, state, specs)
    _, momentum, ours, adam = state
    assert ours.buckets[0].residual.shape == (SIZE * N,)
    assert ours.step.shape == (SIZE,)
    assert momentum.inner.trace["w"].shape == (SIZE * 20, 30)
    assert momentum.inner.trace["scalar"].shape == (SIZE,)
    assert adam[0].mu["w"].shape == (20, 30)
    assert set(jax.tree.leaves(specs)) == {ALONG, WHOLE}
    assert jax.tree.leaves(specs[3]) == [WHOLE] * len(jax.tree.leaves(adam))


def test_a_checkpoint_keeps_every_workers_state(tmp_path):
    """Saved and restored by orbax, the run goes on to the bit."""
    mesh = transports.mesh(SIZE)
    tx = chain()

    def full(tree):  # Orbax saves no empty arrays.
        return {name: leaf for name, leaf in tree.items() if name != "empty"}

    state = jsparse.init(tx, full(transports.zeros()), mesh, AXIS)
    step = make_step(tx, mesh, jsparse.state_specs(state, AXIS))
    gradients = [full(transports.tree(g)) for g in scenarios.take("ordinary", SIZE, 4)]
    for grads in gradients[:2]:
        _, state = step(grads, state)
    momentum = np.asarray(state[1].inner.trace["v"]).reshape(SIZE, -1)
    assert (momentum[0] != momentum[1]).any()

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step2", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpointer.restore(tmp_path / "step2", target)

    jax.tree.map(np.testing.assert_array_equal, state, restored)
    for grads in gradients[2:]:
        expected, state = step(grads, state)
        updates, restored = step(grads, restored)
        jax.tree.map(np.testing.assert_array_equal, expected, updates)
    jax.tree.map(np.testing.assert_array_equal, state, restored)


@pytest.mark.full
def test_residual_and_stats():
    mesh = transports.mesh(SIZE)
    tx = optax.chain(jsparse.oktopk(AXIS, density=0.05), optax.sgd(0.1))
    state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
    step = make_step(tx, mesh, jsparse.state_specs(state, AXIS))
    gradient = scenarios.take("ordinary", SIZE, 1)[0]
    updates, state = step(transports.tree(gradient), state)
    residual = np.asarray(jsparse.residual(state))
    assert residual.shape == (SIZE, N)
    stats = jsparse.stats(state)
    k = round(0.05 * N)
    assert all(leaf.shape[0] == SIZE for leaf in stats)
    assert (stats.step == 1).all()
    assert (stats.selected == k).all()
    np.testing.assert_array_equal(stats.delivered, (residual != gradient).sum(1))
    np.testing.assert_array_equal(stats.updated, sum(np.count_nonzero(leaf) for leaf in jax.tree.leaves(updates)))
    np.testing.assert_allclose(stats.residual_norm, np.linalg.norm(residual, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(stats.thresholds[:, 0], np.sort(np.abs(gradient), axis=1)[:, -k])
    assert stats.global_thresholds.shape == (SIZE, 1)
    assert (stats.words > 0).all()
    np.testing.assert_array_equal(stats.messages, stats.messages[0])


def test_dense_has_stats_and_no_residual():
    mesh = transports.mesh(SIZE)
    tx = jsparse.dense(AXIS)
    state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
    _, state = make_step(tx, mesh, ALONG)(transports.tree(np.ones((SIZE, N), np.float32)), state)
    assert jsparse.residual(state).shape == (SIZE, 0)
    assert jsparse.stats(state).words.tolist() == [2 * N * (SIZE - 1) // SIZE + 1] * SIZE
    assert jsparse.stats(state).updated.tolist() == [N] * SIZE


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (lambda: optax.chain(optax.trace(0.9), jsparse.oktopk(AXIS, density=0.1)), r"jsparse\.per_worker"),
        (lambda: optax.chain(optax.adam(0.1), jsparse.oktopk(AXIS, density=0.1)), r"jsparse\.per_worker"),
        (
            lambda: optax.chain(optax.chain(optax.identity(), optax.ema(0.9)), jsparse.dense(AXIS), optax.adam(0.1)),
            r"member 0 .* jsparse\.per_worker",
        ),
        (
            lambda: optax.MultiSteps(optax.chain(jsparse.oktopk(AXIS, density=0.1), optax.sgd(0.1)), 4),
            "micro_batches",
        ),
        (lambda: optax.apply_if_finite(jsparse.oktopk(AXIS, density=0.1), 3), "around what follows"),
        (
            lambda: optax.conditionally_transform(jsparse.oktopk(AXIS, density=0.1), lambda step: step % 2 == 0),
            r"jsparse\.local_steps",
        ),
        (
            lambda: optax.conditionally_mask(jsparse.oktopk(AXIS, density=0.1), lambda step: step % 2 == 0),
            r"jsparse\.local_steps",
        ),
        (
            lambda: optax.named_chain(("momentum", optax.trace(0.9)), ("sync", jsparse.oktopk(AXIS, density=0.1))),
            r"member 'momentum' .* jsparse\.per_worker",
        ),
        (lambda: optax.chain(optax.zero_nans(), jsparse.oktopk(AXIS, density=0.1)), r"jsparse\.per_worker"),
        (
            lambda: optax.chain(optax.apply_if_finite(optax.clip(1.0), 3), jsparse.oktopk(AXIS, density=0.1)),
            r"jsparse\.per_worker",
        ),
    ],
)
def test_a_chain_that_would_go_wrong_is_refused(tx, message: str):
    mesh = transports.mesh(2)
    with pytest.raises(ValueError, match=message):
        jsparse.init(tx(), transports.zeros(), mesh, AXIS)
    state = jax.eval_shape(jax.vmap(lambda _: tx().init(transports.zeros()), axis_name=AXIS), jnp.arange(2))
    with pytest.raises(ValueError, match=message):
        jsparse.state_specs(state, AXIS)


def of_ones_own() -> optax.GradientTransformation:
    """A momentum before the all-reduce, in a state of which nothing tells the order."""
    momentum, sync = optax.trace(0.9), jsparse.oktopk(AXIS, density=0.1)

    def update(grads, state, params=None):
        grads, moved = momentum.update(grads, state["momentum"])
        grads, sent = sync.update(grads, state["sync"])
        return grads, {"momentum": moved, "sync": sent}

    return optax.GradientTransformation(lambda p: {"momentum": momentum.init(p), "sync": sync.init(p)}, update)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (of_ones_own, r"the state \['momentum'\].*jsparse\.per_worker"),
        (
            lambda: optax.chain(optax.masked(jsparse.dense(AXIS), {name: name == "w" for name in transports.SHAPES})),
            r"the update \['b'\].*cover every parameter",
        ),
        (lambda: optax.adam(0.1), "no all-reduce has made alike"),
    ],
)
def test_what_would_let_replicas_drift_apart_is_refused(tx, message: str):
    with pytest.raises(ValueError, match=message):
        jsparse.init(tx(), transports.zeros(), transports.mesh(2), AXIS)


def test_an_all_reduce_over_one_axis_of_two_is_refused():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("hosts", "devices"))
    for tx in (
        jsparse.dense("hosts"),
        jsparse.topk_allgather("hosts", density=0.1),
        jsparse.oktopk("hosts", density=0.1),
    ):
        with pytest.raises(ValueError, match="no all-reduce has made alike"):
            jsparse.init(tx, transports.zeros(), mesh, ("hosts", "devices"))


@pytest.mark.full
def test_a_transform_survives_copying():
    tx = jsparse.oktopk(AXIS, density=0.1)
    for copied in (copy.copy(tx), copy.deepcopy(tx), jax.tree.map(lambda x: x, tx), tx._replace(update=tx.update)):
        assert isinstance(copied, jsparse.SparseAllReduce)
        assert copied.synchroniser == tx.synchroniser
        jsparse.init(copied, transports.zeros(), transports.mesh(2), AXIS)


# Its state is a number of Python's.
COUNTING = optax.GradientTransformation(lambda _: {"count": 0}, lambda u, s, _=None: (u, {"count": s["count"] + 1}))


@pytest.mark.full
def test_chains_that_are_fine_are_not_refused():
    mesh = transports.mesh(2)
    for tx in (
        optax.chain(optax.clip(1.0), jsparse.oktopk(AXIS, density=0.1), optax.adam(0.1)),
        optax.chain(optax.scale_by_schedule(lambda step: 0.1), jsparse.dense(AXIS)),
        optax.chain(optax.add_decayed_weights(1e-4), jsparse.topk_allgather(AXIS, density=0.1), optax.sgd(0.1)),
        optax.chain(optax.inject_hyperparams(optax.scale)(step_size=0.1), jsparse.oktopk(AXIS, density=0.1)),
        optax.chain(jsparse.oktopk(AXIS, density=0.1), optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)),
        optax.named_chain(("clip", optax.clip(1.0)), ("sync", jsparse.oktopk(AXIS, density=0.1))),
        optax.chain(optax.masked(optax.set_to_zero(), {n: n == "b" for n in transports.SHAPES}), jsparse.dense(AXIS)),
        optax.chain(COUNTING, jsparse.oktopk(AXIS, density=0.1), COUNTING),
        jsparse.oktopk(AXIS, density=0.1),
    ):
        state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
        assert jsparse.stats(state).step.shape == (2,)
        state = jsparse.reshard(tx, state, transports.zeros(), transports.mesh(3), AXIS)
        assert jsparse.stats(state).step.shape == (3,)
