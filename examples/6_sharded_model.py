"""6. Sharded model: a Transformer in shards inside each host, and slow links between hosts.

A host's devices hold the model together (FSDP). Hosts exchange sparse gradients. Run it from the
root of a checkout, after ``pip install '.[examples]'``, in one process that stands for four hosts
of two devices, or in a process a host, here over the slow links of ``jsparse network``::

    python -m examples.6_sharded_model --algorithm oktopk dense
    jsparse network --rate 100mbit -- python -m examples.6_sharded_model --distributed env
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jsparse
from examples.models import Transformer
from examples.options import told
from jsparse.bench.hosts import counters
from jsparse.bench.options import whole
from jsparse.cli import processes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--algorithm", nargs="+", choices=["oktopk", "dense"], default=["oktopk"], help="default oktopk")
parser.add_argument("--width", type=whole(8, of=8), default=128, help="of the model, a multiple of 8 (default 128)")
parser.add_argument("--rows", type=whole(2, of=2), default=4, help="of 32 letters, a host and step; even (default 4)")
parser.add_argument("--steps", type=whole(6), default=200, help="more than 5 (default 200)")
processes.add_arguments(parser)
args = parser.parse_args()

# Where there are no accelerators, a host has two CPU devices.
jax.config.update("jax_num_cpu_devices", 2 if args.distributed else 8)
with told(parser):
    processes.join(args)
inside = jax.local_device_count() if args.distributed else 2
mesh = Mesh(np.array(jax.devices()).reshape(-1, inside), ("replica", "fsdp"))
hosts = mesh.shape["replica"] // jax.process_count()  # Those of this process.

# This project's documents, letter by letter. Each host reads rows of its own.
pages = sorted(pathlib.Path("docs").glob("*.md"))
letters = np.concatenate([np.frombuffer(page.read_text().encode("ascii", "ignore"), np.uint8) for page in pages])

model = Transformer(128, args.width, heads=4, inner=4 * args.width, layers=1, rngs=nnx.Rngs(0))
graph, params = nnx.split(model, nnx.Param)
params = nnx.as_pure(params)
# The devices of a host hold a part each of every parameter, cut along its longest axis.
specs = jax.tree.map(lambda x: P(*("fsdp" if i == np.argmax(x.shape) else None for i in range(x.ndim))), params)


def loss_fn(params, batch):
    return nnx.merge(graph, params).loss(*batch)


def share(number):
    """This process's examples in a step: rows of letters, and the letters that follow them."""
    begin = []
    for host in range(jax.process_index() * hosts, (jax.process_index() + 1) * hosts):
        begin.append(np.random.default_rng([number, host]).integers(0, len(letters) - 33, (args.rows, 1)))
    rows = letters[np.concatenate(begin) + np.arange(33)].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def sent():
    """The bytes that the interface of this host of ``jsparse network`` has sent."""
    return counters().sent if args.distributed == "env" else 0


def tell(text):
    if jax.process_index() == 0:
        print(text, flush=True)


def train(name, preset):
    # What follows the all-reduce is in shards, too: each device has its part of Adam's moments.
    tx = optax.chain(preset, optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    step = jsparse.train_step(loss_fn, tx, mesh, "replica", param_specs=specs, batch_spec=P(("replica", "fsdp")))
    state = step.init(params)
    between = jsparse.traffic(step.lower(state, share(0)).compile(), mesh=mesh).over("replica")
    assert all(part.ours for part in between.collectives)  # XLA sends nothing between hosts.
    losses, steps = [], []
    for number in range(args.steps):
        batch, before, start = share(number), sent(), time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds, counted = time.perf_counter() - start, sent() - before
        losses.append(float(loss))
        words = jsparse.stats(state).words  # Of each device.
        steps.append((seconds, counted, 4 * float(jnp.sum(words)) / mesh.shape["replica"]))
        if (number + 1) % 50 == 0:
            tell(f"{name}, step {number + 1}: loss {np.mean(losses[-50:]):.3f}")
    steps = np.array(steps[5:])  # The first ones compile, and find their thresholds.
    tell(
        f"{name}: {1000 * np.median(steps[:, 0]):,.0f} ms a step; a host sent {np.mean(steps[:, 2]):,.0f} bytes, of at "
        f"most {inside * between.bytes:,} by the program"
        + (f"; its interface counted {np.mean(steps[:, 1]):,.0f}" if args.distributed == "env" else "")
    )


n = sum(leaf.size for leaf in jax.tree.leaves(params))
tell(f"{n:,} parameters on {mesh.shape['replica']} hosts of {inside} devices")
presets = {"oktopk": jsparse.oktopk("replica", density=0.01), "dense": jsparse.dense("replica")}
for name in args.algorithm:
    train(name, presets[name])
