"""3. Speech: a small Deep Speech learns to spell what it hears in AN4, with CTC.

Run it from the root of a checkout, after ``pip install '.[examples]'``::

    python -m examples.3_speech DIR    # the directory that has AN4's etc/ and feat/
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jsparse
from examples.data import read_an4
from examples.models import DeepSpeech
from examples.options import told
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, help="of etc/ and feat/")
parser.add_argument("--epochs", type=whole(1), default=20, help="default 20")
args = parser.parse_args()

jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

# A batch has frames, their lengths, the letters, and their counts.
with told(parser):
    train, test = read_an4(args.directory, "mfcc")
model = DeepSpeech(nnx.Rngs(0), bins=13, channels=8, width=64, layers=2)
# BatchNorm keeps running averages beside the parameters: the model's state.
graph, params, averages = nnx.split(model, nnx.Param, nnx.BatchStat)
params, averages = nnx.as_pure(params), nnx.as_pure(averages)


def loss_fn(params, batch, model_state):
    model = nnx.merge(graph, params, model_state)
    loss = model.loss(*batch)
    return loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))


@jax.jit
def letters_right(params, averages, batch):
    model = nnx.merge(graph, params, averages)
    model.eval()
    return model.accuracy(*batch)


# After each step the workers' averages are averaged. optax's CTC loss fails with check_vma=True.
tx = optax.chain(jsparse.oktopk("data", density=0.05), optax.adam(2e-3))
step = jsparse.train_step(loss_fn, tx, mesh, "data", model_state="mean", check_vma=False)
state = step.init(params, averages)

rng = np.random.default_rng(0)
size = 4 * mesh.size
for epoch in range(args.epochs):
    order = rng.permutation(len(train.frames))
    losses = []
    for i in range(0, len(order) - size + 1, size):
        state, loss = step(state, tuple(part[order[i : i + size]] for part in train))
        losses.append(float(loss))
    right = letters_right(state.params, state.model_state, test)
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.2f}, letter error rate {100 * (1 - right):.0f} %")

n = sum(leaf.size for leaf in jax.tree.leaves(params))
sent, dense = 4 * jsparse.stats(state.opt_state).words.max(), 8 * n * (mesh.size - 1) // mesh.size
print(f"{n:,} parameters: a worker sent {sent:,} bytes in the last step; dense sends {dense:,}")
