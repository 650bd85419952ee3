"""Matrices in the order of tiles: the order, what is selected in it, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jsparse
import oracles
from jsparse._comm.comm import AxisComm
from jsparse._engine.memory import ErrorFeedback
from jsparse._engine.reducer import Selecting
from jsparse._engine.space import Shards
from jsparse._engine.synchroniser import Composition
from jsparse._vector.tiles import has_tiles, into_tiles, out_of_tiles
from jsparse.allreduce import TopkAllGather
from jsparse.select import BlockTopK
from tiers import quick

AXIS, SIZE = "workers", 4
# Whole tiles alone; edges on both sides; one tile that is not whole; three axes; no matrices.
SHAPES = {"a": (16, 8), "b": (11, 14), "c": (2, 3), "d": (3, 2, 9), "e": (1, 12), "f": (5,), "g": ()}
N = 16 * 8 + 11 * 14 + 6 + 54 + 12 + 5 + 1


@pytest.mark.parametrize("side", quick([1, 4, 7, 64], 4))
@pytest.mark.parametrize("shape", [(16, 8), (11, 14), (3, 2, 9), (1, 9, 1, 12, 1), (2, 2)])
def test_tiles_in_numpy(shape: tuple[int, ...], side: int):
    x = np.random.default_rng(0).permutation(int(np.prod(shape))).astype(np.float32).reshape(shape)
    order = oracles.tile_order(shape, side)
    got = into_tiles(jnp.asarray(x), side)
    assert got.shape == shape
    np.testing.assert_array_equal(got.reshape(-1), x.reshape(-1)[order])
    np.testing.assert_array_equal(out_of_tiles(got, side), x)
    np.testing.assert_array_equal(into_tiles(x, side), got)
    assert isinstance(out_of_tiles(x, side), np.ndarray)


def test_the_first_elements_are_a_tile():
    x = np.arange(130 * 200, dtype=np.float32).reshape(130, 200)
    first, second = into_tiles(jnp.asarray(x), 64).reshape(-1)[:8192].reshape(2, 64, 64)
    np.testing.assert_array_equal(first, x[:64, :64])
    np.testing.assert_array_equal(second, x[:64, 64:128])


def test_what_has_tiles():
    assert [has_tiles(shape, 4) for shape in SHAPES.values()] == [True] * 4 + [False] * 3
    assert not any(has_tiles(shape, None) for shape in SHAPES.values())


def gradients(steps: int, dtype=np.float32) -> list[dict[str, np.ndarray]]:
    """Of shape ``(P, ...)``: some elements alike on all workers, some not."""
    rng, given = np.random.default_rng(0), []
    common = {name: 3 * rng.standard_t(2, shape) for name, shape in SHAPES.items()}
    for _ in range(steps):
        given.append({name: (x + rng.standard_normal((SIZE, *x.shape))).astype(dtype) for name, x in common.items()})
    return given


def run(tx, given):
    """Yields ``(updates, state)`` of each step, workers first."""
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), given[0])
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(SIZE))
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for gradient in given:
        updates, state = step(gradient, state)
        yield updates, state


def by_tiles(leaves, side: int = 4, names=tuple(SHAPES)) -> np.ndarray:
    """The leaves of each worker in the order of their tiles, in numpy."""
    parts = [np.asarray(leaves[name], np.float64).reshape(SIZE, -1) for name in names]
    orders = [oracles.tile_order(SHAPES[name], side) for name in names]
    return np.concatenate([part[:, order] for part, order in zip(parts, orders, strict=True)], axis=1)


def in_tiles(**kwargs):
    return jsparse.sparse_allreduce(AXIS, select=BlockTopK(2, 16), allreduce=TopkAllGather(), tiles=4, **kwargs)


@pytest.mark.parametrize("mean", ["workers", "contributors"])
def test_a_block_is_a_tile(mean):
    """The two largest of each tile of 4 by 4 are sent, and all else waits, in the tiles' order."""
    residual = np.zeros((SIZE, N))
    for gradient, (updates, state) in zip(gradients(6), run(in_tiles(mean=mean), gradients(6)), strict=True):
        acc = residual + by_tiles(gradient)
        sent = np.zeros_like(acc)
        for worker in range(SIZE):
            chosen = oracles.block_top_k(acc[worker].astype(np.float32), 2, 16)
            sent[worker, chosen] = acc[worker, chosen]
        residual = acc - sent
        counts = np.maximum(np.count_nonzero(sent, axis=0), 1) if mean == "contributors" else SIZE
        np.testing.assert_allclose(state.buckets[0].residual, residual, atol=1e-4)
        np.testing.assert_allclose(by_tiles(updates), np.tile(sent.sum(0) / counts, (SIZE, 1)), atol=1e-4)
        # "a" has eight whole tiles, which are blocks.
        tiles = np.asarray(updates["a"])[0].reshape(4, 4, 2, 4).swapaxes(1, 2).reshape(8, 16)
        assert (np.count_nonzero(tiles, axis=1) >= 2).all()
    assert np.abs(residual).max() > 0.1


def test_each_leaf_begins_with_a_block():
    """With a vector of its own, whatever the leaves before it have."""
    (gradient,) = gradients(1)
    ((updates, state),) = run(in_tiles(scope="leaf", dense_below=20), gradients(1))
    kept = [bucket.residual for bucket in state.buckets]
    for name, residual in zip("abd", kept, strict=False):
        acc = by_tiles(gradient, names=(name,))
        sent = np.zeros_like(acc)
        for worker in range(SIZE):
            chosen = oracles.block_top_k(acc[worker], 2, 16)
            sent[worker, chosen] = acc[worker, chosen]
        np.testing.assert_allclose(residual, acc - sent, atol=1e-6)
        np.testing.assert_allclose(by_tiles(updates, names=(name,))[0], sent.mean(0), atol=1e-6)
    assert kept[3:] == [None]
    for name in "cefg":  # Dense, all together.
        np.testing.assert_allclose(updates[name][0], gradient[name].mean(0), atol=1e-6)


@pytest.mark.full
def test_narrow_gradients_keep_their_types():
    """The mean is rounded once, as without tiles."""
    given = gradients(1, jnp.bfloat16)
    every = {"select": BlockTopK(16, 16), "allreduce": TopkAllGather()}
    ((tiled, _),) = run(jsparse.sparse_allreduce(AXIS, tiles=4, **every), given)
    ((plain, _),) = run(jsparse.sparse_allreduce(AXIS, **every), given)
    jax.tree.map(np.testing.assert_array_equal, tiled, plain)
    assert {leaf.dtype for leaf in jax.tree.leaves(tiled)} == {jnp.dtype(jnp.bfloat16)}


def test_leaves_without_tiles_stay_sparse():
    """A vector without matrices is as it would be without the option."""
    tx, grads = in_tiles(), jnp.arange(100.0)

    def sync(x):
        return jsparse.sync(tx, x, tx.init(x))[0]

    assert isinstance(jax.eval_shape(jax.vmap(sync, axis_name=AXIS), jnp.stack([grads] * SIZE)), jsparse.SparseVector)
    matrix = jax.eval_shape(jax.vmap(sync, axis_name=AXIS), jnp.zeros((SIZE, 10, 10)))
    assert matrix.shape == (SIZE, 100)


@pytest.mark.full
def test_sync_gives_the_order_of_the_leaves():
    (gradient,) = gradients(1)
    tx = in_tiles()
    means, updates = jax.vmap(
        lambda x: (jsparse.sync(tx, x, tx.init(x))[0], tx.update(x, tx.init(x))[0]), axis_name=AXIS
    )(gradient)
    flat = np.concatenate([np.asarray(updates[name]).reshape(SIZE, -1) for name in SHAPES], axis=1)
    np.testing.assert_array_equal(means, flat)


@pytest.mark.full
def test_what_waits_goes_to_other_workers():
    """From 4 workers to 2. A phase that delivers all then gives the mean of what waited."""
    waits = in_tiles()
    *_, (_, state) = run(waits, gradients(3))
    residual = np.asarray(state.buckets[0].residual, np.float64)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), gradients(1)[0])
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    moved = jsparse.reshard(waits, state, params, mesh, AXIS)
    all_of_it = jsparse.sparse_allreduce(AXIS, select=BlockTopK(16, 16), allreduce=TopkAllGather(), tiles=4)
    moved = jax.tree.map(lambda x: np.asarray(x).reshape(2, -1), moved)
    nothing = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), params)
    updates, _ = jax.vmap(all_of_it.update, axis_name=AXIS)(nothing, moved)
    same_for_all = jax.tree.map(lambda x: jnp.concatenate([x, x]), updates)
    np.testing.assert_allclose(by_tiles(same_for_all), np.tile(residual.mean(0), (SIZE, 1)), atol=1e-5)
    assert np.abs(residual.mean(0)).max() > 0.1


@pytest.mark.parametrize("intra", quick([1, 2, 4], 2))
def test_tiles_over_two_levels(intra: int):
    """A node sums its vectors in the tiles' order, and each worker selects from its shard."""
    comms = AxisComm("nodes"), AxisComm("gpus")
    reducer = Selecting(BlockTopK(2, 16), TopkAllGather())
    space = Shards(tiles=4, intra=comms[1])
    tx = jsparse.SparseAllReduce.of(Composition(comms[0], reducer, ErrorFeedback(), space))

    def step(x):
        updates, state = tx.update(x, tx.init(x))
        return updates, state.buckets[0].residual

    (gradient,) = gradients(1)
    nodes = SIZE // intra
    split = jax.tree.map(lambda x: x.reshape(nodes, intra, *x.shape[1:]), gradient)
    updates, residual = jax.jit(jax.vmap(jax.vmap(step, axis_name="gpus"), axis_name="nodes"))(split)
    updates = jax.tree.map(lambda x: x.reshape(SIZE, *x.shape[2:]), updates)
    width = -(-N // intra)
    sums = np.pad(by_tiles(gradient).reshape(nodes, intra, N).sum(1), ((0, 0), (0, width * intra - N)))
    sent = np.zeros((nodes, intra, width))
    for node, shards in enumerate(sums.reshape(nodes, intra, width)):
        for rank, shard in enumerate(shards):
            chosen = oracles.block_top_k(shard.astype(np.float32), 2, 16)
            sent[node, rank, chosen] = shard[chosen]
    np.testing.assert_allclose(residual, sums.reshape(sent.shape) - sent, atol=1e-4)
    expected = sent.sum(0).reshape(-1)[:N] / SIZE
    np.testing.assert_allclose(by_tiles(updates), np.tile(expected, (SIZE, 1)), atol=1e-5)
