"""PowerSGD beside PyTorch's hook: the accuracy and the bytes of both, by rank.

Four workers train the same net of two hidden layers, with SGD and momentum, from the same
parameters and with the same batches: once by ``jsparse.powersgd`` in one ``jax.vmap``, and once by
PyTorch's DistributedDataParallel, with its ``powerSGD_hook``, in four processes. Rank 0 stands for
dense sums. Needs PyTorch (``pip install torch``). Run it from the root of a checkout::

    python -m examples.powersgd --data mnist --data-dir DIR
"""

import argparse
import importlib.util
import itertools
import math
import pathlib
import statistics
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.table

import jsparse
from examples.options import told
from jsparse.bench.images import Images, load_images
from jsparse.bench.options import real, whole

WORKERS, AXIS = 4, "workers"
Layers = list[tuple[np.ndarray, np.ndarray]]


def first_layers(images: Images, width: int, seed: int) -> Layers:
    """Random weights, shape ``(inputs, outputs)``, and biases, with which both begin."""
    rng = np.random.default_rng(seed)
    sizes = [math.prod(images.train_x.shape[1:]), width, width, 10]
    return [
        (rng.normal(0, math.sqrt(2 / a), (a, b)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def batches(images: Images, steps: int, batch: int, seed: int) -> np.ndarray:
    """Which examples each worker takes in each step: shape ``(steps, WORKERS, batch)``."""
    return np.random.default_rng(1000 + seed).integers(0, len(images.train_x), (steps, WORKERS, batch))


def logits(layers: Any, x: Any) -> jax.Array:
    x = jnp.asarray(x).reshape(len(x), -1)
    for number, (weights, bias) in enumerate(layers):
        x = (jax.nn.relu(x) if number else x) @ weights + bias[None]
    return x


def accuracy(layers: Any, images: Images) -> float:
    return float(jnp.mean(jnp.argmax(logits(layers, images.test_x), -1) == images.test_y))


def here(images: Images, rank: int, seed: int, args: argparse.Namespace) -> tuple[Layers, float]:
    """Trains with jsparse; returns the parameters, and how many numbers a step sums."""

    def loss_fn(layers, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(layers, x), y).mean()

    sync = jsparse.powersgd(AXIS, rank=rank) if rank else jsparse.dense(AXIS)
    tx = optax.chain(sync, optax.sgd(args.learning_rate, momentum=0.9))
    step = jsparse.train_step(loss_fn, tx, None, AXIS)
    params = jax.tree.map(jnp.asarray, first_layers(images, args.width, seed))
    state = jax.vmap(lambda _: step.init(params), axis_name=AXIS)(jnp.arange(WORKERS))
    go_on = jax.jit(jax.vmap(step, axis_name=AXIS), donate_argnums=0)
    for taken in batches(images, args.steps, args.batch, seed):
        state, _ = go_on(state, (images.train_x[taken], images.train_y[taken]))
    words = float(jsparse.stats(state.opt_state).words.max())
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), state.params), words / (2 * (WORKERS - 1) / WORKERS)


def there(images: Images, rank: int, seed: int, args: argparse.Namespace) -> tuple[Layers, float]:
    """The same with PyTorch."""
    multiprocessing = importlib.import_module("torch.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, images, rank, seed, args)
        multiprocessing.spawn(worker, args=given, nprocs=WORKERS)
        with np.load(pathlib.Path(folder) / "found.npz") as found:
            layers = [(found[f"{2 * i}.weight"].T, found[f"{2 * i}.bias"]) for i in range(3)]
            return layers, float(found["summed"])


def worker(number: int, folder: str, images: Images, rank: int, seed: int, args: argparse.Namespace) -> None:
    """One of PyTorch's processes. The first one writes what came out."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=WORKERS)
    layers = first_layers(images, args.width, seed)
    parts: list[Any] = []
    for weights, bias in layers:
        linear = torch.nn.Linear(*weights.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weights.T.copy()))
            linear.bias.copy_(torch.from_numpy(bias))
        parts += [linear, torch.nn.ReLU()]
    net = torch.nn.Sequential(*parts[:-1])
    model = torch.nn.parallel.DistributedDataParallel(net)
    # Two dense steps are the fewest that the hook allows.
    state = hooks.PowerSGDState(None, matrix_approximation_rank=rank or 1, start_powerSGD_iter=2)
    if rank:
        model.register_comm_hook(state, hooks.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    for taken in batches(images, args.steps, args.batch, seed)[:, number]:
        x = torch.from_numpy(images.train_x[taken].reshape(args.batch, -1))
        y = torch.from_numpy(images.train_y[taken].astype(np.int64))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if number == 0:
        found = {name: value.numpy() for name, value in net.state_dict().items()}
        whole = sum(value.size for value in found.values())
        summed = state.total_numel_after_compression / (args.steps - 2) if rank else whole
        np.savez(pathlib.Path(folder) / "found.npz", summed=summed, **found)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="images (default digits)")
    parser.add_argument("--data-dir", type=pathlib.Path, metavar="DIR", help="directory of MNIST's files")
    parser.add_argument(
        "--ranks", type=whole(0), nargs="+", default=[0, 1, 2, 4, 8, 16, 32], help="default 0 1 2 4 8 16 32"
    )
    parser.add_argument("--width", type=whole(1), default=200, help="of the hidden layers (default 200)")
    parser.add_argument("--batch", type=whole(1), default=16, help="examples a worker and step (default 16)")
    parser.add_argument("--steps", type=whole(3), default=600, help="more than PyTorch's 2 dense ones (default 600)")
    parser.add_argument("--learning-rate", type=real(above=0), default=0.02, help="default 0.02")
    parser.add_argument("--seeds", type=whole(1), default=3, help="how many trainings of each (default 3)")
    args = parser.parse_args(argv)
    if not importlib.util.find_spec("torch"):
        parser.error("PyTorch is missing: pip install torch")
    with told(parser):
        images = load_images(args.data, args.data_dir)
    table = rich.table.Table(
        title=f"{args.data}, {args.steps} steps of {WORKERS} workers",
        caption="accuracy: on the tests, %, mean and range over the seeds. summed: numbers that a step sums.",
    )
    for name in ("rank", "jsparse: accuracy", "from - to", "summed", "PyTorch: accuracy", "from - to", "summed"):
        table.add_column(name, justify="right")
    for rank in args.ranks:
        row = [str(rank) if rank else "dense"]
        for train in here, there:
            found = [train(images, rank, seed, args) for seed in range(args.seeds)]
            accuracies = [100 * accuracy(layers, images) for layers, _ in found]
            row += [
                f"{statistics.fmean(accuracies):.2f}",
                f"{min(accuracies):.2f} - {max(accuracies):.2f}",
                f"{found[0][1]:,.0f}",
            ]
        table.add_row(*row)
        jax.clear_caches()
    rich.console.Console(width=120).print(table)


if __name__ == "__main__":
    main()
