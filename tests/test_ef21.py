"""EF21-SGDM against the paper's algorithm, and what an estimate must survive."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsparse
import oracles
from tiers import quick
from transports import AXIS

SIZE, N, K = 4, 300, 15
PARAMS = {"a": jnp.zeros((10, 20)), "b": jnp.zeros(100)}


def start(tx, size: int = SIZE):
    state = jax.jit(jax.vmap(lambda _: tx.init(PARAMS), axis_name=AXIS))(jnp.arange(size))
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS))


def gradients(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, (steps, SIZE, N)).astype(np.float32)


def leaves(x: np.ndarray):
    return {"a": x[:, :200].reshape(-1, 10, 20), "b": x[:, 200:]}


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).reshape(SIZE, -1) for leaf in jax.tree.leaves(tree)], axis=1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_published_algorithm(momentum: float):
    """Algorithm 1, with momenta that begin with zeros: v, c = C(v - h), h + c, g + mean c."""
    state, update = start(jsparse.ef21(AXIS, density=K / N, momentum=momentum))
    velocity, known, estimate = np.zeros((SIZE, N)), np.zeros((SIZE, N)), np.zeros(N)
    for gradient in gradients(30):
        updates, state = update(leaves(gradient), state)
        velocity += (1 - momentum) * (gradient - velocity)
        for worker in range(SIZE):
            chosen = oracles.top_k((velocity - known)[worker], K)
            change = np.zeros(N)
            change[chosen] = (velocity - known)[worker, chosen]
            known[worker] += change
            estimate += change / SIZE
        np.testing.assert_allclose(flat(updates), np.tile(estimate, (SIZE, 1)), atol=2e-5)
        memory = state[0].buckets[0].memory
        np.testing.assert_allclose(memory.velocity - memory.residual, known, atol=2e-5)


@pytest.mark.parametrize("make", quick([jsparse.allreduce.OkTopk, jsparse.allreduce.GTopk], jsparse.allreduce.GTopk))
def test_the_estimate_is_the_mean_of_what_is_known(make):
    """Over any all-reduce: h is the mean of v - residual."""
    state, update = start(jsparse.ef21(AXIS, density=K / N, allreduce=make()))
    for gradient in gradients(20):
        updates, state = update(leaves(gradient), state)
        memory = state[0].buckets[0].memory
        known = np.asarray(memory.velocity, np.float64) - memory.residual
        np.testing.assert_allclose(flat(updates)[0], known.mean(0), atol=1e-5)
        assert (flat(updates) == flat(updates)[:1]).all()


def test_at_density_one_it_is_momentum():
    state, update = start(jsparse.ef21(AXIS, density=1.0, momentum=0.9))
    average = optax.ema(0.9, debias=False)
    wanted = average.init(jnp.zeros(N))
    for gradient in gradients(10):
        updates, state = update(leaves(gradient), state)
        mean, wanted = average.update(jnp.asarray(gradient.mean(0)), wanted)
        np.testing.assert_allclose(flat(updates)[0], mean, atol=1e-5)


def test_a_dense_phase_delivers_the_residual():
    """Also where a step was skipped, by what the docs put after the phases."""
    changes = jsparse.phases(((3, jsparse.ef21_changes(AXIS, density=K / N)), jsparse.dense(AXIS)))
    state, update = start(optax.chain(changes, optax.apply_if_finite(optax.trace(1.0), 5)))
    for number, gradient in enumerate(gradients(5)):
        if number == 1:
            gradient[2, 17] = np.nan
        updates, state = update(leaves(gradient), state)
        assert np.isfinite(flat(updates)).all()
    memory = state[0].buckets[0].memory
    assert not np.any(memory.residual)
    np.testing.assert_allclose(flat(updates)[0], np.asarray(memory.velocity).mean(0), atol=1e-5)


def test_a_bad_step_changes_nothing():
    state, update = start(jsparse.ef21(AXIS, density=K / N))
    first, bad, last = gradients(3)
    _, before = update(leaves(first), state)
    bad[2, 17] = np.nan
    updates, after = update(leaves(bad), before)
    assert np.isnan(flat(updates)).all()
    jax.tree.map(np.testing.assert_array_equal, (before[0].buckets, before[1]), (after[0].buckets, after[1]))
    skipped, straight = update(leaves(last), after)[0], update(leaves(last), before)[0]
    np.testing.assert_array_equal(flat(skipped), flat(straight))


@pytest.mark.full
def test_small_leaves_go_densely():
    tx = jsparse.ef21(AXIS, density=0.05, momentum=0.5, dense_below=150)
    state, update = start(tx)
    velocity = np.zeros((SIZE, N))
    for gradient in gradients(5):
        updates, state = update(leaves(gradient), state)
        velocity = 0.5 * velocity + 0.5 * gradient
        np.testing.assert_allclose(updates["b"][0], velocity[:, 200:].mean(0), atol=1e-5)


def test_narrow_leaves_forget_no_small_change():
    """The estimate is in float32, whatever the leaves are."""
    tx = jsparse.ef21(AXIS, density=1.0, momentum=0.99)
    params = jnp.zeros(4, jnp.bfloat16)
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(2))

    def step(state, _):
        updates, state = jax.vmap(tx.update, axis_name=AXIS)(jnp.ones((2, 4), jnp.bfloat16), state)
        return state, updates

    state, updates = jax.lax.scan(step, state, None, 500)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_allclose(updates[-1].astype(jnp.float32), 1 - 0.99**500, rtol=1e-2)


def test_huge_gradients_leave_it_finite():
    state, update = start(jsparse.ef21(AXIS, density=1.0, momentum=0.0))
    for sign in (1, -1, 1, 0):
        updates, state = update(leaves(np.full((SIZE, N), sign * 3e38, np.float32)), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
    assert np.abs(flat(updates)).max() < 1e32


@pytest.mark.full
def test_changes_that_float16_does_not_hold():
    """A change of twice the largest gradient is finite in its leaf's type."""
    tx = jsparse.ef21(AXIS, density=1.0, momentum=0.0)
    zeros = jnp.zeros(4, jnp.float16)
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(2))
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for first, wanted in ((60_000, 32_752), (-60_000, -32_752), (1, 1), (1, 1)):
        gradient = jnp.tile(jnp.array([first, 1, 2, 3], jnp.float16), (2, 1))
        updates, state = update(gradient, state)
        # Changes are rounded to float16, whose step is 16 there.
        assert abs(float(updates[0, 0]) - wanted) <= 16
        np.testing.assert_array_equal(updates[0, 1:], [1, 2, 3])


@pytest.mark.parametrize("feedback", [False, jsparse.ErrorFeedback(0.9), jsparse.ErrorFeedback(low_pass=0.5)])
def test_its_residual_must_not_decay(feedback):
    with pytest.raises(ValueError, match=r"error_feedback is .*must not decay: leave it out"):
        jsparse.ef21(AXIS, density=0.1, error_feedback=feedback)


def test_momentum_is_below_one():
    with pytest.raises(ValueError, match=r"momentum is 1\.0; it is at least 0 and below 1"):
        jsparse.ef21(AXIS, density=0.1, momentum=1.0)
