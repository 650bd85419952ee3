"""Equinox: a model that is a pytree, and filter_jit."""

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)
mesh = Mesh(np.array(jax.devices()), ("data",))
model = eqx.nn.MLP(64, 10, 256, 1, key=jax.random.key(0))
model = eqx.filter_shard(model, NamedSharding(mesh, P()))
tx = optax.adam(1e-2)
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def step(model, opt_state, batch):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


losses = []
for i in range(0, 1280, 128):
    batch = jax.device_put((x[i : i + 128], y[i : i + 128]), NamedSharding(mesh, P("data")))
    model, opt_state, loss = step(model, opt_state, batch)
    losses.append(float(loss))
params = eqx.filter(model, eqx.is_inexact_array)
