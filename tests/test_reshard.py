"""A training state that goes on with another number of workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import transports
from jsparse._reshard.redistribute import interpolate, redistribute
from tiers import quick
from transports import AXIS, LEVELS

PARAMS = {"v": np.zeros(395, np.float32), "w": np.zeros((20, 30), np.float32)}
WIDTH = sum(leaf.size for leaf in PARAMS.values())


def mesh(size: int) -> Mesh:
    return transports.mesh(size)


def nodes(m: int, g: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: m * g]).reshape(m, g), LEVELS)


def pending(state) -> np.ndarray:
    """On one level: what the residuals hold back of the mean."""
    residual = np.asarray(jsparse.residual(state), np.float64)
    return residual.sum(0) / len(residual)


def steps(tx, on: Mesh, axis, state, gradients, check_vma: bool = True):
    """Updates with gradients of all workers, shape ``(steps, P, n)``.

    Returns the sum of the updates, and the state after them.
    """
    specs = jsparse.state_specs(state, axis)

    def local(grads, state):
        grads = {"v": grads[0, :395], "w": grads[0, 395:].reshape(20, 30)}
        updates, state = tx.update(grads, state, PARAMS)
        return jnp.concatenate([updates["v"], updates["w"].reshape(-1)]), state

    along = PartitionSpec(axis)
    outs = (PartitionSpec(), specs)
    step = jax.jit(jax.shard_map(local, mesh=on, in_specs=(along, specs), out_specs=outs, check_vma=check_vma))
    total = np.zeros(WIDTH)
    for given in gradients:
        update, state = step(given, state)
        total += np.asarray(update, np.float64)
    return total, state


def filled(tx, on: Mesh, axis):
    """A state of whole numbers; how many workers and devices it is of, it says truly."""
    rng = np.random.default_rng(0)

    def fill(path, x):
        true = jax.tree_util.keystr(path).endswith((".sizes", ".shards"))
        return np.asarray(x) if true else rng.integers(1, 99, x.shape).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(fill, jsparse.init(tx, PARAMS, on, axis))


def whole(rng, size: int, count: int) -> np.ndarray:
    """Whole numbers, of which eighths and sixths of sums stay representable for a while."""
    return (rng.integers(-50, 51, (count, size, WIDTH)) * 48).astype(np.float32)


@pytest.mark.parametrize("old", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 6, 7, 16])
def test_sums_are_kept(old: int, new: int):
    rng = np.random.default_rng(0)
    numbers = (rng.integers(-50, 51, (old, 200)) * (rng.random((old, 200)) < 0.7)).astype(np.float32)
    dealt = redistribute(numbers, new, old, new)
    wanted = numbers.sum(0, dtype=np.float64) * new / old
    sums = dealt.sum(0, dtype=np.float64)
    representable = np.float32(wanted) == wanted
    assert representable.sum() > 20
    np.testing.assert_array_equal(sums[representable], wanted[representable])
    np.testing.assert_allclose(sums, wanted, atol=1e-7 * np.abs(numbers).max() * new)
    # Balanced: no worker has more than the largest of those it replaces, but for rounding to whole
    # numbers.
    assert (np.abs(dealt) <= np.abs(numbers).max(0) + 1).all()

    floats = rng.standard_normal((old, 200)).astype(np.float32)
    sums = redistribute(floats, new, old, new).sum(0, dtype=np.float64)
    np.testing.assert_allclose(sums, floats.sum(0, dtype=np.float64) * new / old, atol=1e-6 * new / old * old)
    same = np.full((old, 3), np.float32(0.1))
    np.testing.assert_array_equal(redistribute(same, new, old, new), np.full((new, 3), np.float32(0.1)))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize(("old", "new"), [(2, 1), (4, 2), (4, 3), (8, 4), (8, 6), (3, 8), (6, 1)])
def test_second_moments_stay_between_those_that_they_cover(old: int, new: int, dtype):
    """Squares of gradients that some workers have none of. A negative one is NaN to Adam."""
    rng = np.random.default_rng(0)
    moments = (rng.standard_normal((old, 5000)) ** 2 * (rng.random((old, 5000)) < 0.5)).astype(dtype)
    for worker, row in enumerate(redistribute(moments, new, old, new)):
        covered = moments[worker * old // new : -(-(worker + 1) * old // new)].astype(np.float64)
        near = float(jnp.finfo(dtype).eps)
        assert row.dtype == dtype
        assert (row.astype(np.float64) >= covered.min(0) * (1 - near)).all()
        assert (row.astype(np.float64) <= covered.max(0) * (1 + near)).all()


def test_parameters_whose_paths_are_alike_are_refused():
    tx, mesh = optax.chain(jsparse.dense(AXIS), jsparse.sharded(optax.adam(0.1), AXIS)), transports.mesh(2)
    params = {"a/b": np.ones(4, np.float32), "a": {"b": np.ones(4, np.float32)}}
    with pytest.raises(ValueError, match=r"both called '.*a/b': rename"):
        jsparse.reshard(tx, jsparse.init(tx, params, mesh, AXIS), params, mesh, AXIS)


def test_what_is_not_finite_stays_where_it_is():
    """The new rows that cover it are not finite. The others are the means of what they cover."""
    rows = np.array([[np.nan, np.inf, 1.0, np.inf], [1.0, 2.0, 1.0, np.inf]], np.float32)
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(redistribute(rows, 3, 2, 3), [[nan, inf, 1, inf], [nan, inf, 1, inf], [1, 2, 1, inf]])
    four = np.array([[nan], [1], [2], [3]], np.float32)
    np.testing.assert_array_equal(redistribute(four, 2, 4, 2), [[nan], [2.5]])


def test_values_of_unlike_size_stay_finite():
    rows = np.array([[1.0, 1e-3], [1e-300, 0.0], [1e300, 1e-320]])
    dealt = redistribute(rows, 2, 3, 2)
    assert np.isfinite(dealt).all()
    np.testing.assert_allclose(dealt.sum(0), rows.sum(0) * 2 / 3)


@pytest.mark.full
def test_a_run_on_8_then_4_then_6_workers_then_1():
    """Nothing is lost: the gradients' means are in the updates and in the residuals."""
    rng = np.random.default_rng(0)
    tx = jsparse.topk_allgather(AXIS, density=0.05)
    state, given, applied, taken = jsparse.init(tx, PARAMS, mesh(8), AXIS), np.zeros(WIDTH), np.zeros(WIDTH), 0
    for size in (8, 4, 6, 1):
        before = pending(state)
        state = jsparse.reshard(tx, state, PARAMS, mesh(size), AXIS)
        after = pending(state)
        representable = np.float32(before * size) == before * size
        np.testing.assert_array_equal(after[representable], before[representable])
        np.testing.assert_allclose(after, before, rtol=2e-7)
        assert representable.all() == (size > 1)
        assert (np.asarray(state.step) == taken).all()
        assert state.step.sharding == NamedSharding(mesh(size), PartitionSpec(AXIS))
        gradients = whole(rng, size, 3)
        total, state = steps(tx, mesh(size), AXIS, state, gradients)
        taken += 3
        given, applied = given + gradients.mean(1, dtype=np.float64).sum(0), applied + total
        np.testing.assert_allclose(applied + pending(state), given, rtol=1e-6, atol=1e-3)


def test_a_move_to_as_many_workers_changes_no_bit():
    rng = np.random.default_rng(0)
    tx = optax.chain(jsparse.per_worker(optax.trace(0.5)), jsparse.topk_allgather(AXIS, density=0.05), optax.adam(0.1))
    _, state = steps(tx, mesh(3), AXIS, jsparse.init(tx, PARAMS, mesh(3), AXIS), whole(rng, 3, 2))
    other = Mesh(np.array(jax.devices()[3:6]), (AXIS,))
    moved = jsparse.reshard(tx, state, PARAMS, other, AXIS)
    jax.tree.map(np.testing.assert_array_equal, state, moved)
    assert moved[1].buckets[0].residual.sharding == NamedSharding(other, PartitionSpec(AXIS))
    assert moved[2][0].mu["w"].sharding == NamedSharding(other, PartitionSpec())


@pytest.mark.parametrize(
    "shapes", quick([((2, 4), (4, 2)), ((4, 2), (3, 2)), ((2, 3), (1, 4)), ((1, 1), (2, 4))], ((4, 2), (3, 2)))
)
def test_nodes_and_workers_in_them_may_both_change(shapes: tuple[tuple[int, int], tuple[int, int]]):
    old, new = shapes
    rng, (m, g), size = np.random.default_rng(0), old, new[0] * new[1]
    tx = jsparse.hitopk(*LEVELS, density=0.05, allreduce=jsparse.allreduce.OkTopk())
    state = jax.tree.map(np.asarray, jsparse.init(tx, PARAMS, nodes(m, g), LEVELS))
    whole = np.zeros((m, g * -(-WIDTH // g)), np.float32)
    whole[:, :WIDTH] = rng.integers(-50, 51, (m, WIDTH)) * m * g
    bucket = state.buckets[0]._replace(memory=state.buckets[0].memory._replace(residual=whole.reshape(-1)))
    moved = jsparse.reshard(tx, state._replace(buckets=(bucket,)), PARAMS, nodes(*new), LEVELS)
    residual = np.asarray(jsparse.residual(moved), np.float64).reshape(new[0], -1)
    np.testing.assert_array_equal(residual.sum(0)[:WIDTH] / size, whole.sum(0)[:WIDTH] / (m * g))
    assert not residual[:, WIDTH:].any()
    # Where the shards are others, regions begin anew; else they were even before, to one index.
    shard, starts = -(-WIDTH // new[1]), np.asarray(moved.buckets[0].reducer.reduce.starts).reshape(size, -1)
    np.testing.assert_allclose(starts, np.tile(np.arange(new[0]) * shard // new[0], (size, 1)), atol=new[1] == g)


def test_regions_hold_equal_parts():
    np.testing.assert_array_equal(interpolate(np.array([0, 100, 600, 700], np.int32), 1000, 2), [0, 600])
    np.testing.assert_array_equal(interpolate(np.array([0, 600], np.int32), 1000, 4), [0, 300, 600, 800])
    tx = jsparse.oktopk(AXIS, density=0.05)
    state, starts = jsparse.init(tx, PARAMS, mesh(8), AXIS), np.arange(8, dtype=np.int32) ** 2
    bucket = state.buckets[0]
    reduce = bucket.reducer.reduce._replace(starts=np.tile(starts, 8))
    bucket = bucket._replace(reducer=bucket.reducer._replace(reduce=reduce))
    moved = jsparse.reshard(tx, state._replace(buckets=(bucket,)), PARAMS, mesh(4), AXIS)
    regions = np.asarray(moved.buckets[0].reducer.reduce.starts)
    assert regions.dtype == np.int32
    np.testing.assert_array_equal(regions, np.tile(starts[::2], 4))


def test_an_average_inside_nodes_and_a_sparse_sum_between_them():
    """Workers of a node hold the same residual, before and after."""
    between = jsparse.AxisComm("nodes", alike=("gpus",))
    tx = optax.chain(jsparse.dense("gpus"), jsparse.topk_allgather(between, density=0.05))
    state = jsparse.init(tx, PARAMS, nodes(2, 4), LEVELS)
    _, state = steps(tx, nodes(2, 4), LEVELS, state, whole(np.random.default_rng(0), 8, 1), check_vma=False)
    for shape in ((3, 2), (4, 2), (1, 4)):
        moved = jsparse.reshard(tx, state, PARAMS, nodes(*shape), LEVELS)
        residual = np.asarray(jsparse.residual(moved[1])).reshape(*shape, -1)
        np.testing.assert_array_equal(residual, np.broadcast_to(residual[:, :1], residual.shape))
        np.testing.assert_allclose(pending(moved[1]), pending(state[1]), rtol=2e-7)


def test_momentum_and_second_moments_of_each_worker():
    rng = np.random.default_rng(0)
    tx = optax.chain(jsparse.per_worker(optax.scale_by_adam()), jsparse.topk_allgather(AXIS, density=0.05))
    _, state = steps(tx, mesh(8), AXIS, jsparse.init(tx, PARAMS, mesh(8), AXIS), whole(rng, 8, 2))
    moved = jsparse.reshard(tx, state, PARAMS, mesh(3), AXIS)
    had, have = state[0].inner, moved[0].inner
    np.testing.assert_array_equal(have.count, [2, 2, 2])
    for moment in ("mu", "nu"):
        before, after = (np.asarray(getattr(x, moment)["w"], np.float64) for x in (had, have))
        assert after.shape == (3 * 20, 30)
        np.testing.assert_allclose(after.reshape(3, -1).mean(0), before.reshape(8, -1).mean(0), rtol=1e-5, atol=1e-4)
    assert (np.asarray(have.nu["w"]) >= 0).all()


def test_a_sharded_optimizer_is_cut_anew_exactly():
    def chain(adam):
        return optax.chain(jsparse.dense(AXIS), adam)

    tx, plain = chain(jsparse.sharded(optax.adam(0.1), AXIS)), chain(optax.adam(0.1))
    state = filled(tx, mesh(8), AXIS)
    state[1].inner[0].count[:] = 7
    moved = jsparse.reshard(tx, state, PARAMS, mesh(3), AXIS)
    cut = moved[1].inner[0]
    np.testing.assert_array_equal(cut.count, [7, 7, 7])

    def joined(adam, name):
        return np.asarray(adam[name]).reshape(-1)[: PARAMS[name].size].reshape(PARAMS[name].shape)

    moments = [{name: joined(given, name) for name in PARAMS} for given in (cut.mu, cut.nu)]
    for ours, given in zip(moments, (state[1].inner[0].mu, state[1].inner[0].nu), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, {name: joined(given, name) for name in PARAMS})
    # And the next update is that of the whole optimizer.
    first = jsparse.init(plain, PARAMS, mesh(3), AXIS)
    adam = first[1][0]._replace(count=jnp.int32(7), mu=moments[0], nu=moments[1])
    gradients = whole(np.random.default_rng(0), 3, 1)
    expected, _ = steps(plain, mesh(3), AXIS, (first[0], (adam, *first[1][1:])), gradients)
    total, _ = steps(tx, mesh(3), AXIS, moved, gradients)
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_replicas_that_differ():
    """``train_step(params="per_worker")`` goes on from the mean of its replicas."""

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    tx = optax.chain(jsparse.a2sgd(AXIS), optax.sgd(0.1, momentum=0.9))
    params = {"w": np.ones(6, np.float32)}
    batches = np.random.default_rng(0).standard_normal((2, 24, 6)).astype(np.float32)
    step = jsparse.train_step(loss, tx, mesh(4), AXIS, params="per_worker")
    state, _ = step(step.init(params), batches[0])
    step = jsparse.train_step(loss, tx, mesh(6), AXIS, params="per_worker")
    mean = jax.tree.map(lambda x: np.asarray(x).mean(0), state.params)
    moved = jsparse.reshard(tx, state.opt_state, params, mesh(6), AXIS)
    trace = np.asarray(moved.inner[1][0].trace["w"]).reshape(6, 6)
    before = np.asarray(state.opt_state.inner[1][0].trace["w"]).reshape(4, 6)
    np.testing.assert_allclose(trace.mean(0), before.mean(0), rtol=1e-5, atol=1e-7)
    state, value = step(step.init(mean)._replace(opt_state=moved), batches[1])
    assert np.isfinite(value)
    assert state.params["w"].shape == (6, 6)
    assert jsparse.stats(state.opt_state).step.tolist() == [2] * 6


@pytest.mark.parametrize("target", quick([True, False], True))
def test_a_checkpoint_of_other_workers(tmp_path, target: bool):
    """Saved by 8 workers, restored by 3: with its types, or as the dicts of orbax."""
    tx = optax.chain(
        jsparse.per_worker(optax.trace(0.5)),
        jsparse.phases(((1, jsparse.dense(AXIS)), jsparse.dgc(AXIS, density=0.05))),
        jsparse.sharded(optax.adam(0.1), AXIS),
    )
    specs = jsparse.state_specs(filled(tx, mesh(8), AXIS), AXIS)
    state = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh(8), spec)), filled(tx, mesh(8), AXIS), specs
    )
    expected = jsparse.reshard(tx, state, PARAMS, mesh(3), AXIS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "8", state)
        checkpointer.wait_until_finished()
        everywhere = NamedSharding(mesh(3), PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
        restored = checkpointer.restore(tmp_path / "8", shapes if target else None)
    if not target:
        assert jax.tree.structure(restored) != jax.tree.structure(state)
        restored = jax.tree.map(np.asarray, restored)
    moved = jsparse.reshard(tx, restored, PARAMS, mesh(3), AXIS)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)
    assert jax.tree.structure(moved) == jax.tree.structure(expected)
    np.testing.assert_array_equal(pending(moved[1]), pending(state[1]))


def test_a_chain_without_anything_of_one_worker():
    tx = optax.chain(optax.adam(0.1))
    state = tx.init(PARAMS)
    moved = jsparse.reshard(tx, state, PARAMS, mesh(3), AXIS)
    jax.tree.map(np.testing.assert_array_equal, moved, state)
    assert moved[0][0].mu["w"].sharding == NamedSharding(mesh(3), PartitionSpec())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tx, state: (optax.chain(tx, optax.trace(0.5)), state, PARAMS), "lacks.*pass the chain"),
        (lambda tx, state: (jsparse.dense(AXIS), state, PARAMS), "has.*which that of the chain has not"),
        (lambda tx, state: (tx, state, {**PARAMS, "v": np.zeros(7, np.float32)}), "shape .*pass the chain"),
        (lambda tx, state: (tx, state, {name: np.stack([x] * 4) for name, x in PARAMS.items()}), "one worker's"),
        (lambda tx, state: (tx, state._replace(step=state.step[:3]), PARAMS), "shape .*pass the chain"),
        (
            lambda tx, state: (jsparse.hitopk(*LEVELS, density=0.05, select=jsparse.select.TopK(0.05)), state, PARAMS),
            "not bound",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message: str):
    tx = jsparse.topk_allgather(AXIS, density=0.05)
    tx, state, params = change(tx, jsparse.init(tx, PARAMS, mesh(4), AXIS))
    with pytest.raises(ValueError, match=message):
        jsparse.reshard(tx, state, params, mesh(2), AXIS)


def test_axes_and_nodes_that_do_not_fit_are_refused():
    tx = jsparse.topk_allgather(AXIS, density=0.05)
    state = jsparse.init(tx, PARAMS, mesh(4), AXIS)
    with pytest.raises(ValueError, match="the mesh has axes"):
        jsparse.reshard(tx, state, PARAMS, mesh(2), "data")
    tx = jsparse.hitopk(*LEVELS, density=0.05)
    state = jsparse.init(tx, PARAMS, nodes(2, 2), LEVELS)
    with pytest.raises(ValueError, match="the axes between nodes first"):
        jsparse.reshard(tx, state, PARAMS, nodes(2, 4), LEVELS[::-1])
    jsparse.reshard(tx, state, PARAMS, nodes(2, 4), LEVELS)
    # So short that of 12 workers a shard is as long in nodes of three as of four: the state says
    # which they were.
    params = np.zeros(5, np.float32)
    for gpus in (3, 4):
        one = jsparse.init(tx, params, nodes(1, gpus), LEVELS)
        state = jax.tree.map(lambda x, gpus=gpus: np.tile(np.asarray(x), 12 // gpus), one)
        state = state._replace(sizes=np.tile(np.array([12 // gpus, gpus], np.int32), 12))
        moved = jsparse.reshard(tx, state, params, nodes(2, 2), LEVELS)
        assert moved.buckets[0].residual.shape == (12,)
        assert np.asarray(moved.sizes).reshape(4, 2).tolist() == [[2, 2]] * 4
