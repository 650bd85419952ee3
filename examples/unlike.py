"""Trains workers that have like or unlike data, and compares what algorithms leave in residuals.

Simulates the workers in one ``jax.vmap``. They train a net of two hidden layers on scikit-learn's
digits or on MNIST, with momentum. Each worker draws its batches from all ten digits, or from a few
of them. Where workers have unlike data, their largest elements nearly cancel, and a global top-k
cuts them again and again. Then it matters who keeps what is cut.

Run ``python -m examples.unlike --help`` from the repository's root.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from flax import nnx
from jax import lax

import jsparse
from jsparse.bench.command import output_file
from jsparse.bench.images import Images, load_images
from jsparse.bench.nets import CLASSES, dense
from jsparse.bench.options import real, whole

# The name before the hyphen is the preset. These are its further arguments.
ALGORITHMS: dict[str, dict[str, str]] = {
    "topk_allgather": {},
    "gtopk": {},
    "gtopk-owner": {"put_back": "owner"},
    "gtopk-paper": {"put_back": "paper"},
    "gtopk-tree": {"topology": "tree"},
    "gtopk-tree-paper": {"topology": "tree", "put_back": "paper"},
    "gtopk-allgather": {"topology": "allgather"},
    "gtopk-allgather-owner": {"topology": "allgather", "put_back": "owner"},
    "gtopk-allgather-paper": {"topology": "allgather", "put_back": "paper"},
    "oktopk": {},
    "oktopk-owner": {"put_back": "owner"},
    "oktopk-server": {"put_back": "server"},
}
# The steps, from the last one back, whose means are reported.
LAST = 50


def net(images: Images, width: int, seed: int) -> tuple[Any, Any]:
    """The net of two hidden layers: its graph, and its random parameters."""
    graph, params = nnx.split(dense(images.train_x.shape[1:], width, nnx.Rngs(seed)), nnx.Param)
    return graph, nnx.as_pure(params)


def training(name: str, density: float, images: Images, args: argparse.Namespace) -> Callable[..., Any]:
    """Compiles a training.

    Returns:
      A function of the net's parameters and of batches, which are places among the training
      images, shape ``(steps, workers, batch)``. It returns each worker's loss, norm of the
      gradient and norm of the residual in each step, each of shape ``(steps, workers)``.
    """
    preset = getattr(jsparse, name.partition("-")[0])
    tx = optax.chain(
        preset("workers", density=density, **ALGORITHMS[name]), optax.sgd(args.learning_rate, args.momentum)
    )
    graph, _ = net(images, args.width, 0)
    x, y = jnp.asarray(images.train_x), jnp.asarray(images.train_y)

    def worker(params, state, batch):
        def loss_fn(params):
            logits = nnx.merge(graph, params)(x[batch])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y[batch]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        figures = loss, optax.tree.norm(grads), jsparse.stats(state).residual_norm[0]
        return optax.apply_updates(params, updates), state, figures

    def step(carry, batch):
        params, state = carry
        params, state, figures = jax.vmap(worker, axis_name="workers")(params, state, batch)
        return (params, state), figures

    @jax.jit
    def run(params, batches):
        params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (args.workers, *leaf.shape)), params)
        state = jax.vmap(tx.init, axis_name="workers")(params)
        return lax.scan(step, (params, state), batches)[1]

    return run


def draw(labels: np.ndarray, classes: int, seed: int, args: argparse.Namespace) -> np.ndarray:
    """Random batches for :func:`training`.

    Worker ``i`` has the images of ``classes`` digits, from ``i * classes`` (modulo 10) on.
    """
    rng = np.random.default_rng(seed)
    owned = [np.flatnonzero((labels - classes * worker) % CLASSES < classes) for worker in range(args.workers)]
    return np.stack([rng.choice(places, (args.steps, args.batch)) for places in owned], axis=1)


def measure(
    run: Callable[..., Any], classes: int, images: Images, args: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, float]:
    """Trains once for each seed, and returns means over the last steps: of the loss, and of the
    norm of all residuals over that of all gradients.
    """
    losses, ratios = [], []
    for seed in range(args.seeds):
        batches = draw(images.train_y, classes, seed, args)
        figures = run(net(images, args.width, seed)[1], batches)
        loss, gradient, residual = (np.asarray(figure, np.float64)[-LAST:] for figure in figures)
        losses.append(loss.mean())
        ratios.append(np.linalg.norm(residual) / np.linalg.norm(gradient))
        advance()
    return {"loss": float(np.mean(losses)), "residual": float(np.mean(ratios))}


def table(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints one row for each algorithm, and one column for each setting."""
    out = rich.table.Table(
        title="loss (residual over gradient)",
        caption=f"{args.workers} workers, each with images of so many digits; means of the last {LAST} of {args.steps} "
        f"steps, {args.seeds} seeds",
    )
    columns = list(dict.fromkeys((run["classes"], run["density"]) for run in runs))
    for name in ("", *(f"{classes} digits\n{100 * density:g} %" for classes, density in columns)):
        out.add_column(name, justify="right" if name else "left")
    for name, cells in itertools.groupby(runs, key=lambda run: run["algorithm"]):
        out.add_row(name, *(f"{cell['loss']:.3g} ({cell['residual']:.2g})" for cell in cells))
    rich.console.Console(width=100).print(out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--algorithm",
        action="append",
        choices=ALGORITHMS,
        metavar="NAME",
        help=f"one of {', '.join(ALGORITHMS)}; repeatable (default: all)",
    )
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="default digits")
    parser.add_argument("--data-dir", type=pathlib.Path, help="directory of MNIST's files")
    parser.add_argument(
        "--width", type=whole(1), default=191, help="of the hidden layers (default 191: 51,007 parameters)"
    )
    parser.add_argument("--workers", type=whole(1), default=8, metavar="P", help="workers (default 8)")
    parser.add_argument(
        "--classes",
        type=int,
        nargs="+",
        default=[CLASSES, 2],
        choices=range(1, CLASSES + 1),
        metavar="C",
        help="of how many digits a worker has images (default 10 2)",
    )
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.002], help="k / n (default 0.01 0.002)")
    parser.add_argument("--steps", type=whole(1), default=500, help="training steps (default 500)")
    parser.add_argument("--batch", type=whole(1), default=16, help="examples a worker and step (default 16)")
    parser.add_argument("--learning-rate", type=real(above=0), default=0.05, metavar="RATE", help="default 0.05")
    parser.add_argument("--momentum", type=real(0), default=0.9, metavar="M", help="default 0.9")
    parser.add_argument("--seeds", type=whole(1), default=3, help="of parameters and batches: how many (default 3)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args(argv)

    names, runs = args.algorithm or list(ALGORITHMS), []
    try:
        images = load_images(args.data, args.data_dir)
        with rich.progress.Progress() as progress:
            bar = progress.add_task("trainings", total=len(names) * len(args.density) * len(args.classes) * args.seeds)
            for name in names:
                trained = {density: training(name, density, images, args) for density in args.density}
                for classes, density in itertools.product(args.classes, args.density):
                    figures = measure(trained[density], classes, images, args, lambda: progress.advance(bar))
                    runs.append({"algorithm": name, "classes": classes, "density": density, **figures})
    except ValueError as error:
        parser.error(str(error))
    table(runs, args)
    if args.json:
        args.json.write_text(json.dumps(runs))
        print(f"figures: {args.json}")


if __name__ == "__main__":
    main()
