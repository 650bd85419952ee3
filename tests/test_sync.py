"""Synchronisation without a dense update, and the memory it takes."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

import jsparse
import scenarios
import transports
from algorithms import ROWS, Row, case
from tiers import quick
from transports import AXIS, N

SIZE = 4
ALONG = PartitionSpec(AXIS)
VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def vgg16_shapes() -> list[tuple[int, ...]]:
    """The leaves of VGG-16 for CIFAR-10, with batch normalisation."""
    shapes, channels = [], 3
    for width in VGG16:
        shapes += [(3, 3, channels, width), (width,), (width,), (width,)]
        channels = width
    return [*shapes, (512, 10), (10,)]


def synchroniser(tx, **kwargs):
    """Runs ``sync`` under shard_map; the update is returned as replicated."""

    def local(grads, state):
        return jsparse.sync(tx, jax.tree.map(lambda x: x[0], grads), state)

    return jax.jit(
        jax.shard_map(
            local, mesh=transports.mesh(SIZE), in_specs=(ALONG, ALONG), out_specs=(PartitionSpec(), ALONG), **kwargs
        ),
        donate_argnums=1,
    )


@pytest.mark.full
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "tx", [jsparse.oktopk(AXIS, density=0.05), jsparse.topk_allgather(AXIS, density=0.05)], ids=["oktopk", "topk"]
)
def test_sync_is_update_left_sparse(tx: jsparse.SparseAllReduce, checked: bool):
    mesh = transports.mesh(SIZE)
    state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
    dense_state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
    run = synchroniser(tx, check_vma=checked)
    dense = jax.jit(
        jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh,
            in_specs=(ALONG, ALONG),
            out_specs=(PartitionSpec(), ALONG),
        )
    )
    apply = jax.jit(lambda params, update: jsparse.apply_sparse(params, update, -0.5), donate_argnums=0)
    params = jax.tree.map(jnp.ones_like, transports.zeros())
    for gradient in scenarios.take("ordinary", SIZE, 4):
        grads = transports.tree(gradient)
        update, state = run(grads, state)
        expected, dense_state = dense(grads, dense_state)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(expected)])
        np.testing.assert_allclose(update.to_dense(), flat, rtol=3e-7)
        np.testing.assert_array_equal(jsparse.residual(state), jsparse.residual(dense_state))
        wanted = jax.tree.map(lambda p, u: p - 0.5 * u, params, expected)
        params = apply(params, update)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), params, wanted)
    gradient[0, 5] = np.inf
    before = np.asarray(jsparse.residual(state))
    update, state = run(transports.tree(gradient), state)
    assert not np.isfinite(update.to_dense()).all()
    np.testing.assert_array_equal(jsparse.residual(state), before)


@pytest.mark.full
@pytest.mark.parametrize(
    ("split", "select", "flat"),
    [
        ("all_to_all", jsparse.select.TopK, False),
        ("rotate", jsparse.select.TopK, False),
        ("all_to_all", jsparse.select.SampledThreshold, False),
        ("rotate", jsparse.select.SampledThreshold, False),
        ("all_to_all", jsparse.select.SampledThreshold, True),
    ],
)
def test_nothing_as_long_as_the_gradient_is_copied(split, select, flat: bool):
    """The compiled step's temporaries are small.

    They are under 0.25 of the gradient's bytes and 32 words an element of capacity.

    Whether the gradient has VGG-16's leaves, or is one flat vector.
    """
    density = 0.01
    shapes = vgg16_shapes()
    n = sum(int(np.prod(shape)) for shape in shapes)
    k = round(density * n)
    assert n == 14_728_266
    shapes = [(n,)] if flat else shapes
    mesh = transports.mesh(SIZE)
    tx = jsparse.oktopk(AXIS, density=density, split=split, select=select(density))

    def global_shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, ALONG))

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=ALONG)
    state = jax.tree.map(global_shape, jax.eval_shape(init, params))
    grads = [global_shape(jax.ShapeDtypeStruct((SIZE, *shape), jnp.float32)) for shape in shapes]
    memory = synchroniser(tx).lower(grads, state).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 0.25 * 4 * n + 32 * 4 * k
    # The residual is updated in place.
    assert memory.alias_size_in_bytes >= 4 * n


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_apply_sparse(dtype):
    params = {"a": jnp.arange(3, dtype=dtype), "b": jnp.ones((2, 2), dtype), "c": jnp.zeros((0,), dtype)}
    runs = jsparse.SparseVector(
        jnp.array([[1.0, 2.0, 0.0], [4.0, 8.0, 16.0]]), jnp.array([[0, 4, 7], [0, 2, 6]], jnp.int32), 7
    )
    got = jsparse.apply_sparse(params, runs, 2.0)
    np.testing.assert_array_equal(got["a"].astype(jnp.float32), [10, 1, 18])
    np.testing.assert_array_equal(got["b"].astype(jnp.float32), [[1, 5], [1, 33]])
    assert got["a"].dtype == dtype
    assert got["c"].shape == (0,)


def test_apply_sparse_crosses_chunks_and_leaves():
    rng = np.random.default_rng(0)
    sizes = [1, 5000, 1024, 3, 2048, 9000]
    n = sum(sizes)
    indices = np.sort(rng.permutation(n)[:6000]).astype(np.int32)
    values = rng.standard_normal(6000).astype(np.float32)
    params = [jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes]
    expected = np.concatenate(params)
    expected[indices] += values
    update = jsparse.SparseVector(jnp.asarray(values), jnp.asarray(indices), n)
    np.testing.assert_array_equal(np.concatenate(jax.jit(jsparse.apply_sparse)(params, update)), expected)


@pytest.mark.parametrize("preset", quick(["dense", "dsar_split_allgather"], "dense"))
def test_a_dense_mean_is_an_array(preset: str):
    """It is that of ``tx.update``, and is applied like a sparse one."""
    tx = jsparse.dense(AXIS) if preset == "dense" else jsparse.dsar_split_allgather(AXIS, density=0.1)
    sync = jax.jit(jax.vmap(functools.partial(jsparse.sync, tx), axis_name=AXIS))
    state = jax.vmap(lambda _: tx.init(transports.zeros()), axis_name=AXIS)(np.arange(SIZE))
    gradient = np.random.default_rng(0).standard_normal((SIZE, N)).astype(np.float32)
    mean, after = sync(transports.tree(gradient), state)
    updates, _ = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(transports.tree(gradient), state)
    np.testing.assert_array_equal(mean, transports.flat(updates, SIZE))
    params = jax.tree.map(jnp.ones_like, transports.zeros())
    moved = transports.flat(jax.tree.map(lambda x: x[None], jsparse.apply_sparse(params, mean[0], -0.5)), 1)
    np.testing.assert_array_equal(moved[0], 1 - 0.5 * np.asarray(mean[0]))
    gradient[1, 7] = np.nan
    mean, _ = sync(transports.tree(gradient), after)
    assert np.isnan(mean).any(axis=1).all()


@pytest.mark.full
def test_sync_refuses_several_vectors():
    mesh = transports.mesh(SIZE)
    grads = transports.tree(np.ones((SIZE, N), np.float32))
    tx = jsparse.oktopk(AXIS, density=0.1, scope="leaf")
    with pytest.raises(ValueError, match=r"tx\.update"):
        synchroniser(tx)(grads, jsparse.init(tx, transports.zeros(), mesh, AXIS))


# The quick ones: one of each memory, and one whose replicas differ.
SPARSE_LEAVES = ("a2sgd", "dgc", "topk_allgather-nonzero")


@pytest.mark.parametrize("row, size", [case(row, row.usual_size, full=row.name not in SPARSE_LEAVES) for row in ROWS])
def test_a_leaf_may_be_a_sparse_vector(row: Row, size: int):
    """The update and the state are those of an array in its place."""
    rng, n = np.random.default_rng(0), transports.SHAPES["v"][0]
    state, update = transports.workers(row, size)
    states = [state, state]
    for _ in range(3):
        gradient = row.scale * rng.integers(-9, 10, (size, N)).astype(np.float32)
        array = transports.tree(gradient)
        array["v"] *= rng.random((size, n)) < 0.03
        sparse = array | {"v": sparse_rows(array["v"], n // 10)}
        outcomes = [update(grads, state) for grads, state in zip((array, sparse), states, strict=True)]
        states = [state for _, state in outcomes]
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
        jax.tree.map(compare if row.mixes else np.testing.assert_array_equal, *outcomes)


def sparse_rows(rows: np.ndarray, capacity: int) -> jsparse.SparseVector:
    """The rows as sparse vectors, each with unused places."""
    n = rows.shape[1]
    indices = np.array([np.pad(i, (0, capacity - i.size), constant_values=n) for i in map(np.flatnonzero, rows)])
    values = np.take_along_axis(np.pad(rows, ((0, 0), (0, 1))), indices, axis=1)
    return jsparse.SparseVector(jnp.asarray(values), jnp.asarray(indices, jnp.int32), n)


STRAIGHT = {
    "topk_allgather": jsparse.topk_allgather,
    "ssar_split_allgather": jsparse.ssar_split_allgather,
    "ssar_recursive_doubling": jsparse.ssar_recursive_doubling,
    "oktopk": jsparse.oktopk,
    "oktopk-rotate": functools.partial(jsparse.oktopk, split="rotate"),
    "gtopk": jsparse.gtopk,
}


@pytest.mark.parametrize("name", quick(list(STRAIGHT), "topk_allgather"))
def test_a_sparse_gradient_goes_straight_to_the_all_reduce(name: str):
    """All that fits is sent, and the program has no array of length n."""
    n, capacity = 1_000_000, 40
    tx = STRAIGHT[name](AXIS, select=jsparse.select.NonZero(capacity / n), error_feedback=False)
    rng = np.random.default_rng(0)
    rows = np.zeros((SIZE, n), np.float32)
    for row in rows:
        row[np.unique(np.r_[:20, rng.integers(0, n, 18)])] = rng.integers(1, 9)
    x = sparse_rows(rows, capacity)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(n)), axis_name=AXIS)(np.arange(SIZE))
    run = jax.jit(jax.vmap(functools.partial(jsparse.sync, tx), axis_name=AXIS))
    # Bitmaps have n / 32 words.
    assert max(map(math.prod, shapes(jax.make_jaxpr(run)(x, state).jaxpr))) <= SIZE * SIZE * (n // 32 + 1)
    mean, after = run(x, state)
    stats = jsparse.stats(after)
    np.testing.assert_array_equal(stats.selected, np.count_nonzero(rows, axis=1))
    if not name.startswith(("oktopk", "gtopk")):
        np.testing.assert_array_equal(jax.vmap(lambda x: x.to_dense())(mean), np.tile(rows.mean(0), (SIZE, 1)))
    bad = jsparse.SparseVector(x.values.at[1, 0].set(np.nan), x.indices, n)
    mean, again = run(bad, after)
    assert np.isnan(mean.values).any(axis=tuple(range(1, mean.values.ndim))).all()
    assert int(again.step[0, 0]) == int(after.step[0, 0]) == 1


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Those of all results in a program, of inner programs too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in core.jaxprs_in_params(equation.params):
            yield from shapes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("kept", [True, False])
def test_what_exceeds_the_capacity_waits_or_is_lost(kept: bool):
    """With error feedback the rest of a sparse gradient comes in the next steps."""
    n, capacity = 5000, 7
    tx = jsparse.topk_allgather(AXIS, select=jsparse.select.NonZero(capacity / n), error_feedback=kept)
    rows = np.zeros((2, n), np.float32)
    rows[0, 10:30], rows[1, 20:40] = 2, 4
    state = jax.vmap(lambda _: tx.init(jnp.zeros(n)), axis_name=AXIS)(np.arange(2))
    run = jax.jit(jax.vmap(functools.partial(jsparse.sync, tx), axis_name=AXIS))
    total = np.zeros(n)
    for gradient in (rows, 0 * rows, 0 * rows):
        mean, state = run(sparse_rows(gradient, 25), state)
        total += np.asarray(jax.vmap(lambda x: x.to_dense())(mean))[0]
    if kept:
        np.testing.assert_array_equal(total, rows.mean(0))
    else:
        assert total.sum() == (2 + 4) / 2 * capacity


@pytest.mark.parametrize(
    ("values", "indices"),
    [
        (np.ones(2, np.float32), np.ones(2, np.float32)),
        (np.ones(3, np.float32), np.arange(2, dtype=np.int32)),
        (np.float32(1), np.int32(1)),
        (np.ones((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.int32)),
    ],
    ids=["float indices", "lengths", "scalars", "three axes"],
)
def test_a_malformed_sparse_vector_is_refused(values, indices):
    tx = jsparse.topk_allgather(AXIS, density=0.1)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(20)), axis_name=AXIS)(np.arange(2))
    x = jsparse.SparseVector(*(np.stack([part, part]) for part in (values, indices)), 20)
    with pytest.raises(ValueError, match="the indices are int32"):
        jax.vmap(functools.partial(jsparse.sync, tx), axis_name=AXIS)(x, state)


@pytest.mark.full
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("density", [0.02, 0.3])
@pytest.mark.parametrize("capacity", [0, 12])
@pytest.mark.parametrize("preset", [jsparse.oktopk, jsparse.gtopk, jsparse.topk_allgather])
def test_buffers_of_any_length(preset, capacity: int, density: float, kept: bool):
    """Of a sparse leaf and of the selector: the results are those of an array."""
    n = 100
    tx = preset(AXIS, select=jsparse.select.NonZero(density), error_feedback=kept)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(n)), axis_name=AXIS)(np.arange(3))
    rows = np.zeros((3, n), np.float32)
    if capacity:
        rows[:, [3, 60]], rows[[0, 1, 2], [7, 8, 9]] = 1, 2
    states, run = [state, state], jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for _ in range(3):
        outcomes = [run(x, s) for x, s in zip((rows, sparse_rows(rows, capacity)), states, strict=True)]
        means, states = zip(*outcomes, strict=True)
        np.testing.assert_array_equal(*means)
        if kept:
            np.testing.assert_array_equal(*map(jsparse.residual, states))


def test_runs_that_add_up_to_infinity_are_seen():
    """A sparse leaf of several runs is their sum."""
    tx = jsparse.topk_allgather(AXIS, select=jsparse.select.NonZero(0.1), error_feedback=False)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(20)), axis_name=AXIS)(np.arange(2))
    x = jsparse.SparseVector(jnp.full((2, 2, 1), 3e38), jnp.full((2, 2, 1), 4), 20)
    mean, state = jax.jit(jax.vmap(functools.partial(jsparse.sync, tx), axis_name=AXIS))(x, state)
    assert np.isnan(mean.values).any()
    assert not state.step.any()
