"""2. Text: an LSTM learns to predict the next word of the Penn Treebank.

Run it from the root of a checkout, after ``pip install '.[examples]'``::

    python -m examples.2_text DIR    # the directory of ptb.train.txt and the two others
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jsparse
from examples.data import read_ptb, windows
from examples.models import LanguageModel
from examples.options import told
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, help="of ptb.train.txt, ptb.valid.txt and ptb.test.txt")
parser.add_argument("--epochs", type=whole(1), default=2, help="default 2")
args = parser.parse_args()

jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

# Rows of 20 words, and the words that follow each of them.
with told(parser):
    text = read_ptb(args.directory)
train, valid = windows(text.train, 20), windows(text.valid, 20)
model = LanguageModel(len(text.words), width=64, layers=1, rngs=nnx.Rngs(0))
graph, params = nnx.split(model, nnx.Param)
params = nnx.as_pure(params)


def loss_fn(params, batch):
    return nnx.merge(graph, params).loss(*batch)


# What comes after the all-reduce sees the mean of all workers: here its norm is clipped.
tx = optax.chain(jsparse.oktopk("data", density=0.01), optax.clip_by_global_norm(1.0), optax.adam(5e-3))
step = jsparse.train_step(loss_fn, tx, mesh, "data")
state = step.init(params)
evaluate = jax.jit(loss_fn)


def perplexity(params, rows):
    """e to the mean loss of a word, computed for 100 rows at once."""
    parts = ([part[i : i + 100] for part in rows] for i in range(0, len(rows[0]), 100))
    return np.exp(np.mean([evaluate(params, part) for part in parts]))


rng = np.random.default_rng(0)
size = 16 * mesh.size
print(f"before training: perplexity {perplexity(params, valid):,.0f}")
for epoch in range(args.epochs):
    order = rng.permutation(len(train[0]))
    losses = []
    for i in range(0, len(order) - size + 1, size):
        state, loss = step(state, tuple(part[order[i : i + size]] for part in train))
        losses.append(float(loss))
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.2f}, perplexity {perplexity(state.params, valid):,.0f}")

n = sum(leaf.size for leaf in jax.tree.leaves(params))
sent, dense = 4 * jsparse.stats(state.opt_state).words.max(), 8 * n * (mesh.size - 1) // mesh.size
print(f"{n:,} parameters: a worker sent {sent:,} bytes in the last step; dense sends {dense:,}")
