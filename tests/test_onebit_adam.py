"""1-bit Adam: dense at first, then signs of a shared momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsparse
import oracles
from tiers import full, quick
from transports import AXIS

SIZE, N = 4, 2048
B1, B2, EPS = 0.9, 0.99, 1e-8


def start(tx):
    state = jax.jit(jax.vmap(lambda _: tx.init(jnp.zeros(N)), axis_name=AXIS))(jnp.arange(SIZE))
    return state, jax.jit(jax.vmap(lambda g, s: tx.update(g, s, jnp.zeros(N)), axis_name=AXIS))


def gradients(steps: int) -> np.ndarray:
    """A common direction, and noise of each worker."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(N)
    return (common + rng.standard_normal((steps, SIZE, N))).astype(np.float32)


def test_it_is_adam_at_first_then_its_moments_are_frozen():
    freeze, rate = 6, 0.5
    state, update = start(jsparse.onebit_adam(AXIS, rate, freeze_step=freeze, b1=B1, b2=B2, eps=EPS))
    momentum, second = np.zeros(N), np.zeros(N)
    for number, gradient in enumerate(gradients(12)):
        updates, state = update(gradient, state)
        got = np.asarray(updates)
        assert (got == got[:1]).all()
        if number < freeze:
            mean = gradient.mean(0, dtype=np.float64)
            momentum, second = B1 * momentum + (1 - B1) * mean, B2 * second + (1 - B2) * mean**2
        else:
            momentum = np.asarray(state[0].buckets[0].memory.velocity, np.float64)[0]
        want = -rate * momentum / (np.sqrt(second) + EPS)
        np.testing.assert_allclose(got[0], want, rtol=2e-4, atol=2e-4)


def test_what_is_rounded_is_fed_back():
    """Sums of signs: an update has few magnitudes, and the mean of updates is the momentum's."""
    tx = jsparse.onebit_momentum(AXIS, freeze_step=1, momentum=B1)
    state, update = start(tx)
    exact, off, wanted = np.zeros(N), np.zeros(N), np.zeros(N)
    for number, gradient in enumerate(gradients(300)):
        updates, state = update(gradient, state)
        exact = B1 * exact + (1 - B1) * gradient.mean(0)
        if number:
            # Each part of the sum has a scale for each of its buckets of 512.
            assert len(np.unique(np.abs(np.asarray(updates)[0]))) <= N / 512 + SIZE
        off, wanted = off + np.asarray(updates, np.float64)[0], wanted + exact
    assert np.abs(off - wanted).mean() < 0.1 * np.abs(wanted).mean()


def test_it_trains_as_adam_does():
    rng = np.random.default_rng(0)
    true = jnp.asarray(rng.standard_normal(64), jnp.float32)
    x = jnp.asarray(rng.standard_normal((SIZE, 128, 64)), jnp.float32)

    def run(tx):
        def each(x):
            def step(carry, _):
                params, state = carry
                value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ (w - true)) ** 2))(params)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), value

            return jax.lax.scan(step, (jnp.zeros(64), tx.init(jnp.zeros(64))), None, 300)[1]

        return np.asarray(jax.jit(jax.vmap(each, axis_name=AXIS))(x)).mean(0)

    rate = optax.linear_schedule(0.03, 0.0, 300)
    one_bit = run(jsparse.onebit_adam(AXIS, rate, freeze_step=60, b2=B2))
    adam = run(optax.chain(jsparse.dense(AXIS), optax.adam(rate, b2=B2)))
    assert adam[-1] < 0.01 * adam[0]
    assert one_bit[-1] < 0.01 * one_bit[0]


def test_a_bad_step_changes_nothing():
    tx = jsparse.onebit_adam(AXIS, 0.1, freeze_step=2)
    state, update = start(tx)
    given = gradients(4)
    for number, gradient in enumerate(given):
        spoilt = gradient.copy()
        spoilt[1, 7] = np.nan
        updates, after = update(spoilt, state)
        assert np.isnan(updates).all()
        assert (np.asarray(after[1].count) == number).all()
        jax.tree.map(np.testing.assert_array_equal, (after[0].buckets, after[1]), (state[0].buckets, state[1]))
        _, state = update(gradient, state)


@pytest.mark.parametrize("workers, bucket", [full(3, 512), (4, 511), full(8, 64)])
def test_signs_are_those_of_the_oracle(workers: int, bucket: int):
    """Leaves shorter than a bucket, of a whole one, and with a rest; parts of zeros alone."""
    sizes = {"a": 60, "b": bucket, "c": 3 * bucket + 7, "d": 1}
    scales = {"a": 1.0, "b": 1e-3, "c": 10.0, "d": 0.1}
    sign = jsparse.quantize.Sign(bucket, zeros=False, norm="rms")
    tx = jsparse.onebit_momentum(AXIS, freeze_step=1, momentum=B1, quantize=sign)
    zeros = {name: jnp.zeros(size) for name, size in sizes.items()}
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(workers))
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    rng = np.random.default_rng(0)
    for number in range(5):
        given = {
            name: (scales[name] * rng.standard_normal((workers, size))).astype(np.float32)
            for name, size in sizes.items()
        }
        memory = state.buckets[0].memory
        accs = B1 * memory.velocity + (1 - B1) * np.concatenate(list(given.values()), axis=1) + memory.residual
        updates, state = update(given, state)
        if not number:
            continue
        mean, delivered = oracles.one_bit(np.asarray(accs), list(sizes.values()), bucket)
        got = np.concatenate([np.asarray(updates[name][0]) for name in sizes])
        np.testing.assert_allclose(got, mean, rtol=1e-5)
        np.testing.assert_allclose(state.buckets[0].memory.residual, accs - delivered, atol=1e-5)


def test_no_scale_is_for_two_leaves():
    """Quantized with a neighbour of large gradients, a leaf would get momenta of their scale."""
    rng = np.random.default_rng(0)
    sizes = {"bias": 60, "large": 700, "small": 7}
    scales = {"bias": 1e-5, "large": 1.0, "small": 1e-3}
    tx = jsparse.onebit_adam(AXIS, 1.0, freeze_step=8, b2=B2)
    zeros = {name: jnp.zeros(size) for name, size in sizes.items()}
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(SIZE))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, zeros), axis_name=AXIS))
    for number in range(30):
        gradient = {name: jnp.float32(scales[name] * rng.standard_normal((SIZE, size))) for name, size in sizes.items()}
        updates, state = update(gradient, state)
        if number < 8:
            continue
        assert all(np.abs(updates[name]).max() < 10 for name in sizes)
        # A bucket has one magnitude.
        velocity = np.asarray(state[0].buckets[0].memory.velocity)[0]
        assert len(np.unique(np.abs(velocity[:60]))) == 1


@pytest.mark.full
def test_a_short_leaf_has_a_scale_of_its_own_values():
    """Zeros beside it would make it a third, of 60 values in a bucket of 512."""
    tx = jsparse.onebit_momentum(AXIS, freeze_step=10, momentum=B1)
    zeros = {"bias": jnp.zeros(60), "large": jnp.zeros(700)}
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(SIZE))
    gradient = {"bias": jnp.ones((SIZE, 60)), "large": jnp.full((SIZE, 700), 100.0)}
    exact = 0.0
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, zeros), axis_name=AXIS))
    for _ in range(12):
        updates, state = update(gradient, state)
        exact = B1 * exact + (1 - B1)
        np.testing.assert_allclose(updates["bias"], exact, rtol=1e-5)


@pytest.mark.parametrize("bucket", quick([511, 512], 511))
def test_parts_of_workers_begin_with_a_bucket(bucket: int):
    """With three workers, and buckets of an odd length too."""
    sign = jsparse.quantize.Sign(bucket, zeros=False, norm="rms")
    tx = jsparse.onebit_momentum(AXIS, freeze_step=1, momentum=0.0, quantize=sign)
    zeros, scales = [jnp.zeros(511)] * 3, (1.0, 1e-6, 1.0)
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(3))
    gradient = [jnp.full((3, 511), scale) for scale in scales]
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, zeros), axis_name=AXIS))
    for _ in range(3):
        updates, state = update(gradient, state)
    for leaf, scale in zip(updates, scales, strict=True):
        np.testing.assert_allclose(leaf, scale, rtol=1e-5)


@pytest.mark.full
def test_the_end_of_a_leaf_has_a_scale_of_its_own():
    """513 elements are a bucket, and another of the last alone."""
    tx = jsparse.onebit_momentum(AXIS, freeze_step=1, momentum=0.0)
    zeros = jnp.zeros(513)
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(SIZE))
    gradient = jnp.ones((SIZE, 513)).at[:, -1].set(1e-5)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, zeros), axis_name=AXIS))
    for _ in range(3):
        updates, state = update(gradient, state)
    np.testing.assert_allclose(updates, gradient, rtol=1e-5)


@pytest.mark.parametrize("make", [jsparse.onebit_adam, jsparse.dion])
def test_a_bad_step_is_skipped_by_what_follows(make):
    """As docs/non_finite.md says."""
    options = {"freeze_step": 2} if make is jsparse.onebit_adam else {}
    if make is jsparse.dion:
        options["others"] = optax.apply_if_finite(optax.adam(0.1), 5)
    tx = optax.chain(make(AXIS, 0.1, **options), optax.apply_if_finite(optax.identity(), 5))
    params = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones(4)}
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(SIZE))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params), axis_name=AXIS))
    rng = np.random.default_rng(0)
    for number in range(5):
        gradient = jax.tree.map(lambda p: rng.standard_normal((SIZE, *p.shape)).astype(np.float32), params)
        if number in (1, 3):
            gradient["matrix"][1, 0, 0] = gradient["vector"][2, 1] = np.nan
        updates, state = update(gradient, state)
        for leaf in jax.tree.leaves(updates):
            assert np.isfinite(leaf).all()
            assert (np.abs(leaf).max() > 0) == (number not in (1, 3))


def test_what_it_sends():
    """Bits and scales, one for each 512."""
    tx = jsparse.onebit_momentum("data", freeze_step=1)
    n, size = 2**20, 4
    least, most = jsparse.cost.exact(tx, jax.ShapeDtypeStruct((n,), jnp.float32), size)
    opening = 2 * 4 * 2 * (size - 1) // size
    assert least.bytes == 2 * (size - 1) * (n // size) // 8 * (1 + 32 / 512) + opening
    assert most.bytes == 8 * n * (size - 1) // size + opening
    # However many leaves there are, the messages are those of one vector.
    leaves = [jax.ShapeDtypeStruct((1000,), jnp.float32)] * 50
    many, _ = jsparse.cost.exact(tx, leaves, size)
    assert many.messages == least.messages
    assert many.bytes < 2 * (size - 1) * 50 * 1024 / size / 8 * (1 + 32 / 512) + 2 * 512 + opening


@pytest.mark.full
def test_small_gradients_in_half_precision():
    """Second moments of float16 leaves are in float32: their squares would become 0."""
    tx = jsparse.onebit_adam(AXIS, 1.0, freeze_step=3)
    zeros = jnp.zeros(3, jnp.float16)
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(2))
    gradient = jnp.tile(jnp.array([1.0, 0.01, 1e-3], jnp.float16), (2, 1))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, zeros), axis_name=AXIS))
    for _ in range(6):
        updates, state = update(gradient, state)
        assert updates.dtype == jnp.float16
        assert np.isfinite(updates).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="momentum is 1"):
        jsparse.onebit_momentum(AXIS, freeze_step=3, momentum=1.0)
    for name, value in (("b2", 1.5), ("b2", -1.0), ("eps", -1.0), ("weight_decay", -0.1)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            jsparse.onebit_adam(AXIS, 0.1, freeze_step=3, **{name: value})
    with pytest.raises(ValueError, match="freeze_step is 0"):
        jsparse.onebit_momentum(AXIS, freeze_step=0)
    with pytest.raises(ValueError, match="rounds at random"):
        jsparse.onebit_momentum(AXIS, freeze_step=3, quantize=jsparse.quantize.QSGD())
    with pytest.raises(ValueError, match="one scale for the values of all leaves"):
        jsparse.onebit_momentum(AXIS, freeze_step=3, quantize=jsparse.quantize.Sign(None))
    with pytest.raises(ValueError, match="one scale for the values of all leaves"):
        jsparse.onebit_momentum(AXIS, freeze_step=3, quantize=jsparse.quantize.Rotated(jsparse.quantize.Int4(None)))
