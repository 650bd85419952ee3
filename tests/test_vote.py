"""Majority vote, and the optimizers that are made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
import oracles
from tiers import quick
from transports import AXIS


def votes(tx, gradient: np.ndarray) -> np.ndarray:
    def each(x):
        return tx.update(x, tx.init(x))[0]

    return np.asarray(jax.jit(jax.vmap(each, axis_name=AXIS))(gradient))


@pytest.mark.parametrize("size", quick([1, 2, 3, 8], 3))
def test_ties_and_zeros(size: int):
    rng = np.random.default_rng(0)
    gradient = rng.integers(-1, 2, (size, 1003)).astype(np.float32) * rng.random((size, 1003)).astype(np.float32)
    got = votes(jsparse.vote(AXIS), gradient)
    np.testing.assert_array_equal(got, np.tile(oracles.vote(gradient), (size, 1)))
    one_bit = votes(jsparse.vote(AXIS, zeros=False), gradient)
    wanted = np.where(np.where(gradient < 0, -1, 1).sum(0) < 0, -1, 1)
    np.testing.assert_array_equal(one_bit, np.tile(wanted, (size, 1)))


def test_magnitudes_have_no_vote():
    gradient = np.array([[1e30, 1e-30, -1.0], [-1e-30, 1e-37, 1e30], [-1e-30, -1e30, 1e-10]], np.float32)
    np.testing.assert_array_equal(votes(jsparse.vote(AXIS), gradient)[0], [-1, 1, 1])


def test_what_it_sends():
    n, size = 2**20, 4
    for zeros, digits in ((True, 20), (False, 32)):
        least, most = jsparse.cost.exact(
            jsparse.vote("data", zeros=zeros), jax.ShapeDtypeStruct((n,), jnp.float32), size
        )
        words = -(-(n // size) // digits) + 1  # And a scale.
        assert least == most
        assert least.bytes == 4 * 2 * (size - 1) * words


@pytest.mark.full
def test_leaves_that_cannot_be_cut_vote_too():
    """On a sharded model, of leaves that every device has whole."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    specs = {"b": P(), "w": P("fsdp")}
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in shapes(np.zeros).items()}
    tx = jsparse.over_mesh(jsparse.vote("data"), mesh, "data", specs)
    rng = np.random.default_rng(0)
    gradient = shapes(lambda shape: rng.standard_normal((2, *shape)).astype(np.float32))
    updates, _ = jax.jit(tx.update)(gradient, tx.init(params))
    for name, x in gradient.items():
        np.testing.assert_array_equal(updates[name], oracles.vote(x))


def shapes(make):
    return {"b": make((3,)), "w": make((4, 6))}


@pytest.mark.parametrize("rule", quick(["signum", "lion"], "signum"))
def test_it_trains(rule: str):
    """The docstring's optimizers, through a training step: replicas agree, and the loss falls."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rng = np.random.default_rng(0)
    true = rng.standard_normal((20, 1)).astype(np.float32)
    x = rng.standard_normal((200, 64, 20)).astype(np.float32)
    first = {"signum": optax.ema(0.9, debias=False), "lion": optax.scale_by_lion()}[rule]
    rate = optax.scale_by_learning_rate(optax.linear_schedule(0.05, 0.001, 200))
    tx = optax.chain(jsparse.per_worker(first), jsparse.vote("data"), rate)
    step = jsparse.train_step(lambda p, b: jnp.mean((b[0] @ p["w"] - b[1]) ** 2), tx, mesh, "data")
    state, losses = step.init({"w": jnp.zeros((20, 1))}), []
    for part in x:
        state, loss = step(state, (part, part @ true))
        losses.append(float(loss))
    assert losses[-1] < 0.01 * losses[0]
