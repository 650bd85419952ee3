"""jax.pmap, with parameters that flax.jax_utils replicates."""

import jax
import numpy as np
import optax
from flax import jax_utils
from sklearn.datasets import load_digits

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)


def loss_fn(params, batch):
    x, y = batch
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


tx = optax.adam(1e-2)


def local_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    loss, grads = jax.lax.pmean((loss, grads), "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


step = jax.pmap(local_step, axis_name="data")
keys = jax.random.split(jax.random.key(0))
params = {"hidden": jax.random.normal(keys[0], (64, 256)) / 8, "out": jax.random.normal(keys[1], (256, 10)) / 16}
opt_state = jax_utils.replicate(tx.init(params))
params = jax_utils.replicate(params)
losses = []
for i in range(0, 1280, 128):
    batch = x[i : i + 128].reshape(8, 16, 64), y[i : i + 128].reshape(8, 16)
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(float(loss[0]))
params = jax_utils.unreplicate(params)
