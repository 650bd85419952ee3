"""The transformation in a chain: types, buckets, order, neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jsparse
import scenarios
import transports
from algorithms import ROWS, Row
from jsparse._engine.memory import largest_addend
from tiers import quick
from transports import AXIS, N

SIZE = 4
MIXED = {
    "a": jax.ShapeDtypeStruct((40,), jnp.float32),
    "b": jax.ShapeDtypeStruct((0,), jnp.bfloat16),
    "c": jax.ShapeDtypeStruct((10, 30), jnp.bfloat16),
    "d": jax.ShapeDtypeStruct((), jnp.float16),
    "e": jax.ShapeDtypeStruct((77,), jnp.float16),
}


def vmapped(tx):
    """``(state, update)`` of a transformation over ``SIZE`` workers."""
    params = transports.zeros()
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(SIZE))
    return state, jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params), axis_name=AXIS))


def random_gradients(shapes, rng):
    return {name: jnp.asarray(rng.integers(-64, 65, (SIZE, *leaf.shape)), leaf.dtype) for name, leaf in shapes.items()}


PRESETS = {
    "dense": lambda: jsparse.dense(AXIS),
    "bucketed": lambda: jsparse.dense(AXIS, bucket_bytes=300),
    "topk": lambda: jsparse.topk_allgather(AXIS, density=0.1),
    "oktopk": lambda: jsparse.oktopk(AXIS, density=0.1),
    "leaf": lambda: jsparse.topk_allgather(AXIS, density=0.1, scope="leaf"),
    "dense_below": lambda: jsparse.topk_allgather(AXIS, density=0.1, dense_below=50),
}


@pytest.mark.parametrize("x64", quick([False, True], True))
@pytest.mark.parametrize("name", quick(PRESETS, "topk"))
def test_mixed_types(name: str, x64: bool):
    """Every leaf keeps its type; sums are formed and kept in the widest, at least float32."""
    with jax.enable_x64(x64):
        shapes = MIXED | ({"f": jax.ShapeDtypeStruct((60,), jnp.float64)} if x64 else {})
        tx = PRESETS[name]()
        wide = jnp.float64 if x64 else jnp.float32
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(SIZE))
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        rng = np.random.default_rng(0)
        delivered = dict.fromkeys(shapes, 0.0)
        sent = dict.fromkeys(shapes, 0.0)
        for _ in range(3):
            grads = random_gradients(shapes, rng)
            updates, state = update(grads, state)
            for leaf, shape in shapes.items():
                assert updates[leaf].shape == (SIZE, *shape.shape)
                assert updates[leaf].dtype == shape.dtype
                assert (updates[leaf] == updates[leaf][:1]).all()
                sent[leaf] += np.asarray(grads[leaf], np.float64).sum(0)
                delivered[leaf] += SIZE * np.asarray(updates[leaf][0], np.float64)
        plan = tx.synchroniser.space.buckets(jax.tree.leaves(params))
        # What has not been delivered is in the residual: exactly, in these small integers; but for
        # the rounding of updates to the leaf's own type.
        for bucket, carried in zip(plan, state.buckets, strict=True):
            if carried.residual is None:
                parts = [0.0] * len(bucket.ids)
            else:
                assert carried.residual.dtype == (jnp.float32 if name == "leaf" and bucket.ids != (5,) else wide)
                parts = bucket.layout.unravel(np.asarray(carried.residual, np.float64).sum(0))
            for i, part in zip(bucket.ids, parts, strict=True):
                leaf = list(shapes)[i]
                exact = float(jnp.finfo(shapes[leaf].dtype).eps)
                left = np.asarray(part, np.float64)
                np.testing.assert_allclose(delivered[leaf] + left, sent[leaf], atol=3 * 64 * SIZE * exact, rtol=1e-6)


def test_buckets_hold_what_they_should():
    tree = [np.zeros(size, np.float32) for size in (100, 5, 0, 200, 300)]

    def ids(tx):
        return [(bucket.ids, bucket.dense) for bucket in tx.synchroniser.space.buckets(jax.tree.leaves(tree))]

    assert ids(jsparse.oktopk(AXIS, density=0.1)) == [((0, 1, 3, 4), False)]
    assert ids(jsparse.oktopk(AXIS, density=0.1, scope="leaf")) == [((i,), False) for i in (0, 1, 3, 4)]
    assert ids(jsparse.oktopk(AXIS, density=0.1, dense_below=150)) == [((3, 4), False), ((0, 1), True)]
    assert ids(jsparse.dense(AXIS)) == [((0, 1, 3, 4), False)]
    assert ids(jsparse.dense(AXIS, bucket_bytes=2000)) == [((4, 3), False), ((1, 0), False)]
    assert ids(jsparse.dense(AXIS, bucket_bytes=1)) == [((i,), False) for i in (4, 3, 1, 0)]


def test_without_error_feedback_what_is_not_sent_is_lost():
    tx = jsparse.sparse_allreduce(
        AXIS, select=jsparse.select.TopK(0.1), allreduce=jsparse.allreduce.TopkAllGather(), error_feedback=False
    )
    state, update = vmapped(tx)
    assert jsparse.residual(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)).size == 0
    gradient = scenarios.take("ordinary", SIZE, 1)[0]
    first, state = update(transports.tree(gradient), state)
    second, _ = update(transports.tree(gradient), state)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.full
def test_the_order_of_the_chain():
    """A learning rate before the all-reduce, and after it.

    Ok-Topk's Algorithm 2 has it before: ``acc = residual + lr * grad``.
    """
    before, update_before = vmapped(optax.chain(optax.scale(0.5), jsparse.topk_allgather(AXIS, density=0.1)))
    after, update_after = vmapped(optax.chain(jsparse.topk_allgather(AXIS, density=0.1), optax.scale(0.5)))
    for gradient in scenarios.take("ordinary", SIZE, 4):
        inside, before = update_before(transports.tree(gradient), before)
        outside, after = update_after(transports.tree(gradient), after)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), inside, outside)
    np.testing.assert_allclose(before[1].buckets[0].residual, 0.5 * after[0].buckets[0].residual, rtol=1e-6)


@pytest.mark.full
def test_momentum_correction():
    """``per_worker(trace)`` before the all-reduce: each worker's own momentum accumulates."""
    tx = optax.chain(jsparse.per_worker(optax.trace(0.9)), jsparse.topk_allgather(AXIS, density=0.1))
    state, update = vmapped(tx)
    momentum, residual = np.zeros((SIZE, N)), np.zeros((SIZE, N))
    for gradient in scenarios.take("ordinary", SIZE, 5):
        momentum = 0.9 * momentum + gradient
        updates, state = update(transports.tree(gradient), state)
        got = np.asarray(state[1].buckets[0].residual)
        total = SIZE * transports.flat(updates, SIZE)[0]
        np.testing.assert_allclose((residual + momentum).sum(0), got.sum(0) + total, rtol=1e-4, atol=1e-2)
        assert np.count_nonzero(total) <= SIZE * round(0.1 * N)
        residual = got
    np.testing.assert_allclose(transports.flat(state[0].inner.trace, SIZE), momentum, rtol=1e-5, atol=1e-3)


@pytest.mark.full
def test_apply_if_finite_after_it_skips_the_step():
    tx = optax.chain(
        jsparse.oktopk(AXIS, density=0.1), optax.apply_if_finite(optax.sgd(1.0, momentum=0.9), max_consecutive_errors=3)
    )
    state, update = vmapped(tx)
    gradients = scenarios.take("ordinary", SIZE, 3)
    spoilt = gradients[1].copy()
    spoilt[2, 600] = np.nan
    for number, gradient in enumerate([gradients[0], spoilt, gradients[2]]):
        before = state
        updates, state = update(transports.tree(gradient), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
        if number == 1:
            assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
            np.testing.assert_array_equal(state[0].buckets[0].residual, before[0].buckets[0].residual)
            jax.tree.map(np.testing.assert_array_equal, state[1].inner_state, before[1].inner_state)
            assert (state[1].notfinite_count == 1).all()


@pytest.mark.parametrize("row, size", [pytest.param(row, 8, id="oktopk-8") for row in ROWS if row.name == "oktopk"])
@pytest.mark.full
def test_finite_gradients_never_make_the_residual_infinite(row: Row, size: int):
    state, update = transports.workers(row, size)
    huge = np.full((size, N), 3e38, np.float32)
    for _ in range(4):
        updates, state = update(transports.tree(huge), state)
        assert np.isfinite(transports.flat(updates, size)).all()
    assert np.isfinite(state.buckets[0].residual).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_the_largest_addends_have_finite_sums(dtype):
    """Added in the order of ranks, each sum rounded; for bfloat16, by the limit of float32."""
    for size in range(1, 300):
        limit = dtype(largest_addend(np.promote_types(dtype, np.float32), size))
        assert np.isfinite(functools.reduce(lambda total, _: dtype(total + limit), range(size), dtype(0))), size


@pytest.mark.parametrize("preset", [jsparse.gtopk, jsparse.oktopk])
def test_one_run_is_divided_before_it_is_dense(preset):
    """That divides k elements, and no vector as long as the gradient."""
    grads, tx = jnp.ones((4, 4096)), preset(AXIS, density=0.01)
    state = jax.vmap(tx.init, axis_name=AXIS)(grads)
    program = str(jax.make_jaxpr(jax.vmap(tx.update, axis_name=AXIS))(grads, state))
    assert "f32[4,4096] = scatter" in program
    assert "f32[4,4096] = div" not in program


@pytest.mark.full
def test_ten_workers_with_huge_gradients():
    tx = jsparse.topk_allgather(AXIS, density=0.5)
    huge = {"w": np.full((10, 8), 3e38, np.float32)}
    state = jax.vmap(tx.init, axis_name=AXIS)(huge)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for _ in range(2):
        updates, state = update(huge, state)
        assert np.isfinite(updates["w"]).all()
    assert np.isfinite(jsparse.residual(jax.tree.map(lambda x: x.reshape(-1), state))).all()


def test_one_executable_for_all_steps():
    """Invariant 5: no step compiles anew, whatever the data."""
    tx = jsparse.oktopk(AXIS, density=0.05, tau_threshold=2, tau_region=3)
    state, update = vmapped(tx)
    for name in ("ordinary", "zeros", "one_region", "uneven"):
        for gradient in scenarios.take(name, SIZE, 4):
            _, state = update(transports.tree(gradient), state)
    assert update._cache_size() == 1


@pytest.mark.full
def test_two_axes_are_one():
    """A tuple of mesh axes is taken as one axis, in row-major order."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("hosts", "devices"))
    both = ("hosts", "devices")
    gradient = scenarios.take("ordinary", 4, 1)[0]
    results = []
    for axis, on in ((both, mesh), (AXIS, transports.mesh(4))):
        tx = jsparse.oktopk(axis, density=0.1)
        state = jsparse.init(tx, transports.zeros(), on, axis)
        step = jax.shard_map(
            lambda g, s, tx=tx: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=on,
            in_specs=PartitionSpec(axis),
            out_specs=(PartitionSpec(), PartitionSpec(axis)),
        )
        updates, state = jax.jit(step)(transports.tree(gradient), state)
        results.append((updates, jsparse.residual(state)))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64])
def test_many_workers(size: int):
    for tx in (jsparse.oktopk(AXIS, density=0.2), jsparse.topk_allgather(AXIS, density=0.2)):
        state = jax.vmap(lambda _, tx=tx: tx.init(transports.zeros()), axis_name=AXIS)(jnp.arange(size))
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        residual = np.zeros((size, N))
        for gradient in scenarios.take("ordinary", size, 6):
            updates, state = update(transports.tree(gradient), state)
            flat = transports.flat(updates, size)
            assert (flat == flat[:1]).all()
            left = np.asarray(state.buckets[0].residual, np.float64)
            np.testing.assert_array_equal((gradient + residual).sum(0), left.sum(0) + np.round(flat[0] * float(size)))
            residual = left
