"""Dion: orthonormal updates, from momenta that stay with the workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsparse
import oracles
from transports import AXIS

SHAPES = {"bias": (11,), "conv": (3, 3, 4, 16), "wide": (12, 40)}
MATRICES = {"conv": (36, 16), "wide": (12, 40)}
MOMENTUM, FRACTION = 0.9, 0.25
preset = jsparse.scale_by_dion(AXIS, rank_fraction=FRACTION, momentum=MOMENTUM)


def start(tx, size: int, params=None):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()} if params is None else params
    state = jax.jit(jax.vmap(lambda _: tx.init(params), axis_name=AXIS))(jnp.arange(size))
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS))


def gradients(size: int, steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {name: rng.standard_normal((size, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(steps)
    ]


def test_it_is_the_published_algorithm():
    size = 3
    state, update = start(preset, size)
    q = dict(zip(MATRICES, (np.asarray(q)[0].astype(np.float64) for q in state.buckets[0].reducer.q), strict=True))
    assert {name: x.shape[1] for name, x in q.items()} == {"conv": 4, "wide": 3}
    momenta = {name: np.zeros((size, *shape)) for name, shape in MATRICES.items()}
    for gradient in gradients(size, 8):
        updates, state = update(gradient, state)
        for name, shape in MATRICES.items():
            momenta[name] += gradient[name].reshape(size, *shape)
            want, taken = oracles.dion(momenta[name], q[name], MOMENTUM)
            basis, _ = np.linalg.qr(np.mean(momenta[name] @ q[name], axis=0))
            right = np.mean(momenta[name].transpose(0, 2, 1) @ basis, axis=0)
            q[name] = right / np.linalg.norm(right, axis=0)
            momenta[name] -= taken
            got = np.asarray(updates[name])
            assert (got == got[:1]).all()
            np.testing.assert_allclose(got[0].reshape(shape), want, atol=2e-4)
            singular = np.linalg.svd(got[0].reshape(shape), compute_uv=False)
            assert singular[: q[name].shape[1]].max() < 3 * np.sqrt(shape[1] / shape[0])
        np.testing.assert_allclose(updates["bias"][0], gradient["bias"].mean(0), atol=1e-6)


@pytest.mark.full
def test_momenta_apart_are_one_momentum():
    """The updates of P workers are those of one worker with the mean gradient."""
    size = 4
    many, update = start(preset, size)
    one, alone = start(preset, 1)
    for gradient in gradients(size, 10):
        updates, many = update(gradient, many)
        mean = jax.tree.map(lambda x: x.mean(0, keepdims=True), gradient)
        wanted, one = alone(mean, one)
        for name in SHAPES:
            np.testing.assert_allclose(updates[name][0], wanted[name][0], atol=1e-3)
        np.testing.assert_allclose(np.asarray(many.buckets[0].residual).mean(0), one.buckets[0].residual[0], atol=1e-3)


@pytest.mark.full
def test_a_small_direction_of_a_long_matrix_is_one():
    """Of 50,000 rows the rounding is far below a singular value of 0.4 % of the largest."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((rows, 4)))[0] for rows in (50_000, 4))
    gradient = ((left * [1, 0.5, 0.1, 0.004]) @ right.T)[None].astype(np.float32)
    state, update = start(jsparse.scale_by_dion(AXIS, rank_fraction=1.0), 1, jnp.zeros((50_000, 4)))
    for _ in range(10):
        updates, state = update(gradient, state)
    strength = np.linalg.norm(np.asarray(updates[0], np.float64) @ right, axis=0) / np.sqrt(4 / 50_000)
    np.testing.assert_allclose(strength, 1, rtol=0.01)


def test_rounding_errors_have_no_direction():
    """Of a momentum of rank 2, an update has two directions, which are the momentum's."""
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((64, 2)))[0], np.linalg.qr(rng.standard_normal((64, 2)))[0]
    gradient = {"w": np.tile((left * [3.0, 1.0]) @ right.T, (2, 1, 1)).astype(np.float32)}
    state, update = start(preset, 2, {"w": jnp.zeros((64, 64))})
    for _ in range(4):
        updates, state = update(gradient, state)
        got = np.asarray(updates["w"][0], np.float64)
        np.testing.assert_allclose(left @ (left.T @ got), got, atol=1e-4)
        assert np.linalg.norm(got) == pytest.approx(np.sqrt(2), abs=0.01)


def test_zeros_stay_finite():
    state, update = start(preset, 2)
    zeros = {name: np.zeros((2, *shape), np.float32) for name, shape in SHAPES.items()}
    for gradient in (zeros, *gradients(2, 1), zeros):
        updates, state = update(gradient, state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
    assert np.any(updates["wide"])  # Of the momentum.


def test_the_whole_optimizer():
    """Matrices by Dion; all else, and the leaf that is left out, by Adam on dense means."""
    size, rate = 2, 0.1
    params = {"embedding": jnp.ones((6, 4)), "kernel": jnp.ones((8, 6)), "bias": jnp.ones(6)}

    def matrices(params):
        return {name: name == "kernel" for name in params}

    tx = jsparse.dion(AXIS, rate, weight_decay=0.5, others=optax.sgd(1.0), matrices=matrices)
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(size))
    rng = np.random.default_rng(0)
    gradient = {name: rng.standard_normal((size, *x.shape)).astype(np.float32) for name, x in params.items()}
    updates, state = jax.jit(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, 0, None)))(gradient, state, params)
    for name in ("embedding", "bias"):
        np.testing.assert_allclose(updates[name][0], -gradient[name].mean(0), atol=1e-6)
    direction = -np.asarray(updates["kernel"])[0] / rate - 0.5
    singular = np.linalg.svd(direction, compute_uv=False)
    assert np.linalg.matrix_rank(direction, tol=1e-4) == 2
    assert 0 < singular[1] <= singular[0] < 2 * np.sqrt(6 / 8)


def test_it_trains():
    """On a regression, over two workers, faster than it would by chance."""
    size = 2
    rng = np.random.default_rng(0)
    true = jnp.asarray(rng.standard_normal((8, 6)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((size, 64, 8)), jnp.float32)
    tx = jsparse.dion(AXIS, optax.linear_schedule(0.2, 0.0, 100), rank_fraction=0.5)

    def run(x):
        def loss(params):
            return jnp.mean((x @ params["w"] + params["b"][None] - x @ true) ** 2)

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        params = {"b": jnp.zeros(6), "w": jnp.zeros((8, 6))}
        return jax.lax.scan(step, (params, tx.init(params)), None, 100)[1]

    losses = np.asarray(jax.jit(jax.vmap(run, axis_name=AXIS))(x)).mean(0)
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rank_fraction": 0.0}, "rank_fraction is 0.0"), ({"momentum": 1.0}, "momentum is 1.0")],
)
def test_bad_arguments(options, message: str):
    with pytest.raises(ValueError, match=message):
        jsparse.scale_by_dion(AXIS, **options)
