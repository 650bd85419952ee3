"""DeMo against the paper's algorithm and the published codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
import oracles
from jsparse import quantize, wire
from transports import AXIS

SIZE, SIDE, K = 3, 4, 2
# In the order of the tree's leaves. All have a multiple of a tile's elements but the last.
SHAPES = {"a": (8, 12), "b": (16,), "c": (2, 4, 8), "d": (7, 9), "e": (5,)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())


def start(tx):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = jax.jit(jax.vmap(lambda _: tx.init(params), axis_name=AXIS))(jnp.arange(SIZE))
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS))


def gradients(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {name: rng.standard_normal((SIZE, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(steps)
    ]


def in_tiles(tree) -> np.ndarray:
    parts = [np.asarray(tree[name], np.float64).reshape(SIZE, -1) for name in SHAPES]
    orders = [oracles.tile_order(shape, SIDE) for shape in SHAPES.values()]
    return np.concatenate([part[:, order] for part, order in zip(parts, orders, strict=True)], axis=1)


@pytest.mark.parametrize("mean", ["contributors", "workers"])
def test_it_is_the_published_algorithm(mean: str):
    """Momentum in full, the k largest frequencies of each tile, their mean, and back."""
    shapes, decay = list(SHAPES.values()), 0.9
    state, update = start(jsparse.demo(AXIS, k=K, chunk=SIDE, decay=decay, mean=mean))
    momenta = np.zeros((SIZE, N))  # In the order of tiles, not as frequencies.
    for gradient in gradients(8):
        updates, state = update(gradient, state)
        momenta = momenta + in_tiles(gradient)
        turned = oracles.frequencies(momenta, shapes, SIDE)
        sent = np.zeros_like(turned)
        for worker in range(SIZE):
            chosen = oracles.block_top_k(turned[worker], K, SIDE**2)
            sent[worker, chosen] = turned[worker, chosen]
        momenta = decay * (momenta - oracles.frequencies(sent, shapes, SIDE, back=True))
        counts = np.maximum(np.count_nonzero(sent, axis=0), 1) if mean == "contributors" else SIZE
        wanted = oracles.frequencies((sent.sum(0) / counts)[None], shapes, SIDE, back=True)[0]
        np.testing.assert_allclose(in_tiles(updates), np.tile(wanted, (SIZE, 1)), atol=1e-4)
        kept = oracles.frequencies(np.asarray(state.buckets[0].residual), shapes, SIDE, back=True)
        np.testing.assert_allclose(kept, momenta, atol=1e-4)


@pytest.mark.full
def test_a_leaf_of_its_own_begins_with_a_tile():
    """And what is too short for that goes densely, as it is."""
    tx = jsparse.demo(AXIS, k=K, chunk=SIDE, mean="workers", scope="leaf", dense_below=20)
    state, update = start(tx)
    (gradient,) = gradients(1)
    updates, state = update(gradient, state)
    for name in ("b", "e"):
        np.testing.assert_allclose(updates[name][0], gradient[name].mean(0), atol=1e-6)
    for name in ("a", "c", "d"):
        coefficients = oracles.frequencies(
            np.asarray(updates[name], np.float64).reshape(SIZE, -1)[:, oracles.tile_order(SHAPES[name], SIDE)],
            [SHAPES[name]],
            SIDE,
        )
        assert np.count_nonzero(np.abs(coefficients[0]) > 1e-4) <= SIZE * (K * -(-coefficients.shape[1] // SIDE**2))


@pytest.mark.full
def test_signs_alone():
    """In DisTrO's code what signs round away is lost; by default it is kept."""
    signs = wire.Compact(quantize.Sign(None, zeros=False))
    with pytest.warns(UserWarning, match="subtract is 'sent'"):
        lossy = jsparse.ErrorFeedback(subtract="sent")
    lost = {}
    for name, feedback in (("kept", jsparse.ErrorFeedback()), ("lost", lossy)):
        tx = jsparse.demo(AXIS, k=K, chunk=SIDE, mean="workers", wire=signs, error_feedback=feedback)
        state, update = start(tx)
        off, before = 0.0, np.zeros((SIZE, N))
        for gradient in gradients(5):
            updates, state = update(gradient, state)
            residual = np.asarray(state.buckets[0].residual, np.float64)
            turned = oracles.frequencies(in_tiles(gradient), list(SHAPES.values()), SIDE)
            total = SIZE * oracles.frequencies(in_tiles(updates)[:1], list(SHAPES.values()), SIDE)[0]
            off = max(off, np.abs((before + turned - residual).sum(0) - total).max())
            before = residual
        lost[name] = off
    assert lost["kept"] < 1e-4
    assert lost["lost"] > 0.1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:subtract is 'sent'")
def test_each_worker_has_a_vote():
    """In DisTrO values are -1 and 1; with a magnitude the worker of large gradients decides."""
    with pytest.warns(UserWarning, match="subtract is 'sent'"):
        lossy = jsparse.ErrorFeedback(subtract="sent")
    gradient = next(iter(gradients(1)))
    large = np.where(np.arange(SIZE) == 1, 1000, 1)
    scaled = {name: x * large.reshape(-1, *[1] * (x.ndim - 1)) for name, x in gradient.items()}
    alone = np.sign(oracles.frequencies(in_tiles(gradient), list(SHAPES.values()), SIDE)[1])
    agree = {}
    for norm in ("mean", "one"):
        signs = wire.Compact(quantize.Sign(None, zeros=False, norm=norm))
        state, update = start(jsparse.demo(AXIS, k=SIDE**2, chunk=SIDE, wire=signs, error_feedback=lossy))
        updates, _ = update(scaled, state)
        found = oracles.frequencies(in_tiles(updates)[:1], list(SHAPES.values()), SIDE)[0]
        assert norm == "mean" or np.abs(found).max() < 1.001
        agree[norm] = (np.sign(np.round(found, 3)) == alone).mean()
    assert agree["mean"] > 0.99
    assert agree["one"] < 0.9


@pytest.mark.full
def test_huge_gradients_leave_it_finite():
    """Sums of a tile's elements would pass the largest float."""
    params = jnp.zeros((64, 64))
    tx = jsparse.demo(AXIS, k=8)
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(2))
    signs = np.where(np.arange(64) % 3, 1.0, -1.0)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for scale in (3e38, -3e38, 1.0):
        gradient = np.tile(np.float32(scale) * signs.astype(np.float32), (2, 64, 1))
        updates, state = update(gradient, state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))


def test_what_it_sends():
    """k of each c coefficients, to each of the other workers."""
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    tx = jsparse.demo(AXIS, k=32)
    least, most = jsparse.cost.exact(tx, params, 4)
    opening = 2 * 4 * 2 * 3 // 4
    assert least == most
    assert least.bytes == 8 * 32 * 16 * 3 + opening
