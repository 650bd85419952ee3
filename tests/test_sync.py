"""Synchronisation without a dense update, and the memory it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jsparse
import scenarios
import transports
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
@pytest.mark.parametrize("checked", quick([True, False], True))
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


@pytest.mark.parametrize(
    ("split", "select", "flat"),
    [
        pytest.param("all_to_all", jsparse.select.TopK, False, marks=pytest.mark.full),
        pytest.param("rotate", jsparse.select.TopK, False, marks=pytest.mark.full),
        pytest.param("all_to_all", jsparse.select.SampledThreshold, False, marks=pytest.mark.full),
        pytest.param("rotate", jsparse.select.SampledThreshold, False, marks=pytest.mark.full),
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


def test_sync_refuses_what_is_not_one_sparse_vector():
    mesh = transports.mesh(SIZE)
    grads = transports.tree(np.ones((SIZE, N), np.float32))
    for tx in (jsparse.dense(AXIS), jsparse.oktopk(AXIS, density=0.1, scope="leaf")):
        state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
        with pytest.raises(ValueError, match=r"tx\.update"):
            synchroniser(tx)(grads, state)
