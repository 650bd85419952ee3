"""Flax's linen and TrainState.create."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)
mesh = Mesh(np.array(jax.devices()), ("data",))
model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), x[:1])["params"]
params = jax.device_put(params, NamedSharding(mesh, P()))
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


@jax.jit
def step(state, batch):
    def loss_fn(params, batch):
        logits = state.apply_fn({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


losses = []
for i in range(0, 1280, 128):
    batch = jax.device_put((x[i : i + 128], y[i : i + 128]), NamedSharding(mesh, P("data")))
    state, loss = step(state, batch)
    losses.append(float(loss))
params = state.params
