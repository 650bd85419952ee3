"""Haiku: a network with BatchNorm, whose state stands beside the parameters."""

import haiku as hk
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)
mesh = Mesh(np.array(jax.devices()), ("data",))


@hk.transform_with_state
def network(x):
    x = hk.Linear(256)(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
    return hk.Linear(10)(jax.nn.relu(x))


def loss_fn(params, batch, net_state):
    logits, net_state = network.apply(params, net_state, None, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), net_state


tx = optax.adam(1e-2)


@jax.jit
def step(params, net_state, opt_state, batch):
    (loss, net_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, net_state)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), net_state, opt_state, loss


params, net_state = jax.device_put(network.init(jax.random.key(0), x[:8]), NamedSharding(mesh, P()))
opt_state = tx.init(params)
losses = []
for i in range(0, 1280, 128):
    batch = jax.device_put((x[i : i + 128], y[i : i + 128]), NamedSharding(mesh, P("data")))
    params, net_state, opt_state, loss = step(params, net_state, opt_state, batch)
    losses.append(float(loss))
