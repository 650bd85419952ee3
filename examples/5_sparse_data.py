"""5. Sparse data: a linear classifier, whose gradients are sparse by themselves.

Run it from the root of a checkout, after ``pip install '.[examples]'``, with a file in LIBSVM's
format, such as a9a of https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets::

    python -m examples.5_sparse_data DIR/a9a
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jsparse
from examples.data import read_libsvm, sparse
from examples.options import told
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=pathlib.Path, help="examples in LIBSVM's format")
parser.add_argument("--epochs", type=whole(1), default=10, help="default 10")
args = parser.parse_args()
size, rate = 100, 1.0  # Rows of a worker's batch, and the step size.

# The workers are this machine's accelerators. Where there are none, they are eight CPU devices.
jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

# Each worker reads its own part of the file. All batches are padded to the same lengths.
with told(parser):
    parts = [read_libsvm(args.file, part, mesh.size) for part in range(mesh.size)]
cuts = [sparse.cut(rows, size, seed=0) for rows in parts]
steps, capacity, elements = np.max([sparse.sizes(cut) for cut in cuts], axis=0)
columns = 1 + max(int(rows.indices.max()) for rows in parts)
padded = [sparse.pad(cut, size, steps, capacity, elements, columns) for cut in cuts]
batches = jax.tree.map(lambda *arrays: np.stack(arrays), *padded)

# The capacity is the most distinct columns of any batch: everything is sent, and nothing waits.
tx = jsparse.ssar_split_allgather("data", select=jsparse.select.NonZero(capacity / columns), error_feedback=False)


def loss_fn(own, batch):
    """The logistic loss, from the weights of the batch's columns."""
    margins = jax.ops.segment_sum(batch.values * own[batch.places], batch.rows, size)
    return jnp.sum(batch.present * jnp.logaddexp(0, -batch.labels * margins)) / size


@functools.partial(jax.jit, donate_argnums=(0, 1))
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P("data"), P("data"))
)
def step(weights, state, batch):
    batch = jax.tree.map(lambda array: array[0], batch)
    own = weights.at[batch.columns].get(mode="fill", fill_value=0)
    loss, values = jax.value_and_grad(loss_fn)(own, batch)
    gradient = jsparse.SparseVector(values, batch.columns, columns)  # As long as the batch's columns, not the weights.
    mean, state = jsparse.sync(tx, gradient, state)
    return jsparse.apply_sparse(weights, mean, -rate), state, loss[None]


weights = jnp.zeros(columns)
state = jsparse.init(tx, weights, mesh, "data")
for epoch in range(args.epochs):
    losses = []
    for number in np.random.default_rng(epoch).permutation(steps):
        weights, state, loss = step(weights, state, jax.tree.map(lambda array, i=number: array[:, i], batches))
        losses.append(float(loss.mean()))
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
print(f"a worker sent {4 * jsparse.stats(state).words.max():,} bytes in the last step")
