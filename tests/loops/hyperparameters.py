"""A learning rate that the loop sets in the optimizer's state: optax.inject_hyperparams."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)
mesh = Mesh(np.array(jax.devices()), ("data",))


def loss_fn(params, batch):
    x, y = batch
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


keys = jax.random.split(jax.random.key(0))
params = {"hidden": jax.random.normal(keys[0], (64, 256)) / 8, "out": jax.random.normal(keys[1], (256, 10)) / 16}
params = jax.device_put(params, NamedSharding(mesh, P()))
opt_state = tx.init(params)
losses = []
for i in range(0, 1280, 128):
    opt_state.hyperparams["learning_rate"] = jnp.float32(1e-2 if i else 1e-3)
    batch = jax.device_put((x[i : i + 128], y[i : i + 128]), NamedSharding(mesh, P("data")))
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(float(loss))
