"""Selectors: how near to k they come, over a vector and over a run."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.progress

import jsparse
from examples import data, train
from jsparse.select import FixedThreshold, GaussianThreshold, ReusedThreshold, SampledThreshold, TopK

N = 40_000
DENSITY = 0.01
K = 400
SELECTORS = [
    TopK(DENSITY),
    SampledThreshold(DENSITY),
    ReusedThreshold(DENSITY),
    GaussianThreshold(DENSITY),
    FixedThreshold(2.0, DENSITY),
]


def run(select, gradients, delivered_share: float):
    """Selects with error feedback; of what is selected only a share is delivered, as in Ok-Topk."""
    step = jax.jit(lambda acc, state, t: select(acc, state, jnp.int32(t), jnp.int32(0)))
    state, residual = select.init(N, jnp.float32), np.zeros(N, np.float32)
    rng = np.random.default_rng(0)
    for t, gradient in enumerate(gradients):
        acc = residual + gradient
        x, state = step(jnp.asarray(acc), state, t)
        count = int(x.count)
        indices = np.asarray(x.indices)[:count]
        yield acc, np.asarray(x.values)[:count], indices, state
        residual = acc.copy()
        residual[indices[rng.random(count) < delivered_share]] = 0


def gradients(steps: int, seed: int = 0):
    """Layers of different scales, which change as they do in training."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(rng.normal(0, 1.5, 40)), N // 40)
    for step in range(steps):
        yield (rng.standard_normal(N) * scale * np.exp(0.3 * np.sin(step / 9))).astype(np.float32)


@pytest.mark.parametrize("select", SELECTORS, ids=lambda s: type(s).__name__)
def test_what_is_selected_reaches_the_threshold(select):
    for acc, values, indices, state in run(select, gradients(5), 0.2):
        assert (np.diff(indices) > 0).all()
        np.testing.assert_array_equal(values, acc[indices])
        assert (np.abs(values) >= state.threshold[0]).all()
        assert len(indices) == min(int(state.selected[0]), K)
        assert state.selected[0] == np.count_nonzero(np.abs(acc) >= state.threshold[0])


@pytest.mark.parametrize("share", [1.0, 0.15])
@pytest.mark.parametrize(
    ("select", "limit"), [(TopK(DENSITY), 0.0), (SampledThreshold(DENSITY), 0.05), (ReusedThreshold(DENSITY), 0.11)]
)
def test_the_count_stays_near_k_for_200_steps(select, limit: float, share: float):
    selected = [int(state.selected[0]) for *_, state in run(select, gradients(200), share)]
    assert np.mean(np.abs(np.array(selected) / K - 1)) <= limit
    assert max(selected) <= 2 * K


@pytest.mark.parametrize("name", ["gaussian", "short tails", "heavy tails", "huge"])
def test_gaussian_selects_at_least_three_quarters_of_k(name: str):
    rng = np.random.default_rng(0)
    acc = {
        "gaussian": rng.standard_normal(N),
        "short tails": rng.uniform(-1, 1, N),
        "heavy tails": rng.standard_t(1, N),
        "huge": rng.standard_normal(N) * 1e30,
    }[name].astype(np.float32)
    select = GaussianThreshold(DENSITY)
    _, state = select(jnp.asarray(acc), select.init(N, jnp.float32), jnp.int32(0), jnp.int32(0))
    assert state.selected[0] >= 0.75 * K
    if name == "gaussian":
        assert abs(int(state.selected[0]) / K - 1) < 0.2


def test_reuse_counts_instead_of_searching():
    """Between evaluations the threshold moves with the gradients, and is not the exact one."""
    exact = 0
    for acc, _, _, state in run(ReusedThreshold(DENSITY, tau_threshold=32), gradients(64), 0.15):
        exact += float(state.threshold[0]) == np.sort(np.abs(acc))[-K]
    assert 2 <= exact < 20


def test_a_lost_threshold_is_found_again():
    def jump():
        for step, gradient in enumerate(gradients(12)):
            yield gradient * (1000.0 if step == 6 else 1.0)

    counts = [int(state.selected[0]) for *_, state in run(ReusedThreshold(DENSITY), jump(), 0.15)]
    assert max(np.abs(np.array(counts) - K)) <= 0.5 * K


@pytest.mark.parametrize("select", SELECTORS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", ["zeros", "constant", "few"])
def test_degenerate_vectors(select, name: str):
    acc = {"zeros": np.zeros(N), "constant": np.full(N, 3.0), "few": np.eye(1, N, 7)[0] * 5}[name].astype(np.float32)
    state = select.init(N, jnp.float32)
    for step in range(3):
        x, state = select(jnp.asarray(acc), state, jnp.int32(step), jnp.int32(0))
        assert x.count == {"zeros": 0, "constant": K, "few": 1}[name]
        assert np.isfinite(state.threshold[0])


@pytest.mark.parametrize(
    ("select", "limit"),
    [(None, 0.05), (lambda density: SampledThreshold(density), 0.11), (lambda density: ReusedThreshold(density), 0.11)],
    ids=["default", "sampled", "reused"],
)
def test_counts_on_real_gradients(select, limit: float, monkeypatch):
    """Mean deviation from k of the local and of the global count, training the demo's model for 200 steps."""
    monkeypatch.setitem(
        train.ALGORITHMS,
        "tested",
        lambda density: jsparse.oktopk("workers", density=density, select=select and select(density)),
    )
    args = argparse.Namespace(
        seed=0,
        workers=8,
        density=0.01,
        batch=16,
        epochs=18,
        optimizer="momentum",
        learning_rate=None,
        schedule="constant",
    )
    result = train.train("tested", data.load("digits"), args, rich.progress.Progress(disable=True))
    assert len(result["loss"]) >= 198
    k = result["k"]
    selected, updated = np.array(result["selected"]), np.array(result["updated"])
    assert np.mean(np.abs(selected / k - 1)) < limit
    assert np.mean(np.abs(updated / k - 1)) < limit
