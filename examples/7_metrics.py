"""7. Metrics: what the synchronisation does in each step of a training, for loggers and a plot.

Run it from the root of a checkout, after ``pip install '.[examples]'``, and for TensorBoard also
``pip install '.[tensorboard]'``::

    python -m examples.7_metrics metrics.jsonl --plot metrics.png
    python -m examples.7_metrics metrics.jsonl --tensorboard runs
"""

import argparse
import json

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jsparse
from examples import report
from examples.options import output_folder, told
from jsparse.bench.command import image_file, output_file
from jsparse.bench.images import load_images
from jsparse.bench.options import whole

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=output_file, help="one JSON object a line is written to it, for each step")
parser.add_argument("--epochs", type=whole(1), default=20, help="default 20")
parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
parser.add_argument("--plot", type=image_file, metavar="FILE", help="draw the run to this image file")
parser.add_argument("--tensorboard", type=output_folder, metavar="DIR", help="write TensorBoard's event files there")
args = parser.parse_args()

board = None
if args.tensorboard:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        parser.error("--tensorboard needs tensorboardX: pip install 'jsparse[tensorboard]'")
    board = SummaryWriter(str(args.tensorboard))

# The workers are this machine's accelerators. Where there are none, they are eight CPU devices.
jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

images, rngs = load_images("digits", None), nnx.Rngs(0)
pixels = images.train_x[0].size
net = nnx.Sequential(
    lambda x: x.reshape(len(x), -1), nnx.Linear(pixels, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 10, rngs=rngs)
)
graph, params = nnx.split(net, nnx.Param)


def loss_fn(params, batch):
    x, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), labels).mean()


with told(parser):
    sync = jsparse.oktopk("data", density=args.density)
# The snapshot keeps what the all-reduce returns. Some metrics compare the residual with it.
tx = optax.chain(
    sync,
    optax.snapshot("mean", lambda updates: updates),
    optax.sgd(0.05, momentum=0.9),
)
step = jsparse.train_step(loss_fn, tx, mesh, "data")
state = step.init(nnx.as_pure(params))

rng, size, lines = np.random.default_rng(0), 16 * mesh.size, []
with args.file.open("w") as file:
    for epoch in range(args.epochs):
        order = rng.permutation(len(images.train_x))
        for i in range(0, len(order) - size + 1, size):
            batch = order[i : i + size]
            state, loss = step(state, (images.train_x[batch], images.train_y[batch]))
            figures = {"loss": loss} | jsparse.metrics(state, optax.tree.get(state.opt_state, "mean"))
            lines.append({name: figure.item() for name, figure in figures.items()})
            file.write(json.dumps(lines[-1]) + "\n")
            if board:
                for name, figure in lines[-1].items():
                    board.add_scalar(name, figure, epoch * (len(order) // size) + i // size)
        print(f"epoch {epoch + 1}: loss {lines[-1]['loss']:.3f}, age {lines[-1]['jsparse/age']:.1f} steps")
if board:
    board.close()
if args.plot:
    report.plot_metrics(lines, args.plot)
