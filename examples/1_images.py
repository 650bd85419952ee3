"""1. Images: a small net learns to read digits, on workers that exchange sparse gradients.

Run it from the root of a checkout, after ``pip install '.[examples]'``::

    python -m examples.1_images                  # scikit-learn's digits, which need no files
    python -m examples.1_images DIR --epochs 2   # MNIST, from the directory of its four files
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jsparse
from examples.options import told
from jsparse.bench.images import load_images
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, nargs="?", help="of MNIST's files; without it, the digits")
parser.add_argument("--epochs", type=whole(1), default=20, help="default 20")
args = parser.parse_args()

# The workers are this machine's accelerators. Where there are none, they are eight CPU devices.
jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

with told(parser):
    images = load_images("mnist" if args.directory else "digits", args.directory)
height, width, channels = images.train_x.shape[1:]
rngs = nnx.Rngs(0)
net = nnx.Sequential(
    nnx.Conv(channels, 32, (3, 3), strides=2, rngs=rngs),
    nnx.relu,
    nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs),
    nnx.relu,
    lambda x: x.reshape(len(x), -1),
    nnx.Linear(64 * (height // 4) * (width // 4), 128, rngs=rngs),
    nnx.relu,
    nnx.Linear(128, 10, rngs=rngs),
)
graph, params = nnx.split(net, nnx.Param)
params = nnx.as_pure(params)


def loss_fn(params, batch):
    x, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), labels).mean()


@jax.jit
def accuracy(params, x, labels):
    return (nnx.merge(graph, params)(x).argmax(-1) == labels).mean()


# The sparse all-reduce comes first, in place of pmean. Any optimizer may follow it.
tx = optax.chain(jsparse.oktopk("data", density=0.01), optax.sgd(0.05, momentum=0.9))
step = jsparse.train_step(loss_fn, tx, mesh, "data")
state = step.init(params)

rng = np.random.default_rng(0)
size = 16 * mesh.size
for epoch in range(args.epochs):
    order = rng.permutation(len(images.train_x))
    losses = []
    for i in range(0, len(order) - size + 1, size):
        batch = order[i : i + size]
        state, loss = step(state, (images.train_x[batch], images.train_y[batch]))
        losses.append(float(loss))
    correct = accuracy(state.params, images.test_x, images.test_y)
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, test accuracy {100 * correct:.1f} %")

n = sum(leaf.size for leaf in jax.tree.leaves(params))
sent, dense = 4 * jsparse.stats(state.opt_state).words.max(), 8 * n * (mesh.size - 1) // mesh.size
print(f"{n:,} parameters: a worker sent {sent:,} bytes in the last step; dense sends {dense:,}")
