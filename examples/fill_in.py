"""Simulates many workers on one device: how far sparse sums fill in, and how unevenly their elements lie.

Trains a convolutional net with several numbers of workers, all of them in one ``jax.vmap``, and measures in kind what
Ok-Topk's paper reports of its own runs:

- fill-in (section 5.2): the density of TopkDSA's result. TopkA's is the same, and compiles faster: it runs here;
- the load that equal and balanced regions put on their owners when regions are reduced (sections 3.1.1 and 5.3);
- the largest part of the global top-k that one owner has, before parts are balanced (sections 3.1.2 and 5.3).

Run ``python -m examples.fill_in --help`` from the repository's root.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from flax import nnx

import jsparse
from examples import data
from examples.train import ConvNet
from jsparse import cost

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Task(NamedTuple):
    """What is trained, on what: ``gradients(params, x, y)`` are every worker's, of batches stacked by worker."""

    images: data.Images
    params: Any
    gradients: Callable[..., Any]


def task(images: data.Images, seed: int) -> Task:
    graph, params = nnx.split(ConvNet(*images.train_x.shape[1:], rngs=nnx.Rngs(seed)), nnx.Param)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    return Task(images, nnx.as_pure(params), jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0))))


def simulate(
    task: Task, reduce: jsparse.SparseAllReduce, workers: int, args: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Trains with an all-reduce over ``"workers"``; returns figures of each step.

    Returns:
      ``"union"``: elements that any worker selected. Of Ok-Topk also ``"updated"``: elements of the update; and over
      the mean of all owners ``"equal"`` and ``"balanced"``: elements sent to the busiest owner of such regions, and
      ``"part"``: the elements of the global top-k that one owner has at most.
    """
    optimizer = optax.sgd(0.05, momentum=0.9)

    def worker(grads, state):
        acc = jsparse.residual(state)[0] + jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(grads)])
        updates, state = reduce.update(grads, state)
        return updates, state, abs(acc) >= jsparse.stats(state).thresholds[0, 0]

    @jax.jit
    def step(params, states, momentum, grads):
        updates, states, selected = jax.vmap(worker, axis_name="workers")(grads, states)
        updates, momentum = optimizer.update(jax.tree.map(lambda x: x[0], updates), momentum)
        return optax.apply_updates(params, updates), states, momentum, selected

    params, momentum = task.params, optimizer.init(task.params)
    states = jax.vmap(lambda _: reduce.init(params), axis_name="workers")(np.arange(workers))
    rng = np.random.default_rng(args.seed)
    steps = []
    for _ in range(args.steps):
        batch = rng.integers(len(task.images.train_y), size=(workers, args.batch))
        grads = task.gradients(params, task.images.train_x[batch], task.images.train_y[batch])
        params, states, momentum, selected = step(params, states, momentum, grads)
        sender, index = np.nonzero(selected)
        figures = {"union": len(np.unique(index))}
        reduced = states.buckets[0].reduce
        if reduced:
            parts = np.asarray(reduced.part)
            figures |= {
                "updated": int(states.report.updated[0, 0]),
                "equal": busiest(sender, index, selected.shape[1] * np.arange(workers) // workers),
                "balanced": busiest(sender, index, np.asarray(reduced.starts[0])),
                "part": float(parts.max() / parts.mean()),
            }
        steps.append(figures)
        advance()
    return {name: [figures[name] for figures in steps] for name in steps[0]}


def busiest(sender: np.ndarray, index: np.ndarray, starts: np.ndarray) -> float:
    """How many elements the busiest owner of a region receives from the other workers, over the mean of all owners.

    Args:
      sender: the worker of each selected element.
      index: its index.
      starts: the first index of each worker's region.
    """
    owner = np.searchsorted(starts, index, side="right") - 1
    received = np.bincount(owner[owner != sender], minlength=len(starts))
    return float(received.max() / received.mean())


def compare(task: Task, workers: int, density: float, args: argparse.Namespace, advance: Callable[[], None]) -> dict:
    """Runs both algorithms and returns means over the steps, and every step's figures, as plain numbers."""
    n = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    k = max(1, round(density * n))
    gathered = simulate(task, jsparse.topk_allgather("workers", density=density), workers, args, advance)
    reduce = jsparse.oktopk("workers", density=density, tau_region=args.tau_region)
    oktopk = simulate(task, reduce, workers, args, advance)
    return {
        "parameters": n,
        "workers": workers,
        "density": density,
        "topk_dsa": np.mean(gathered["union"]) / n,
        "uniform": cost.expected_union(n, k, workers) / n,
        "oktopk": np.mean(oktopk["updated"]) / n,
        **{name: np.mean(oktopk[name]) for name in ("equal", "balanced", "part")},
        "steps": {"topk_dsa": gathered, "oktopk": oktopk},
    }


def table(runs: list[dict[str, Any]]) -> None:
    """Prints one row for each density and number of workers."""
    out = rich.table.Table(
        title=f"{runs[0]['parameters']:,} parameters, {len(runs[0]['steps']['oktopk']['part'])} steps, means of them",
        caption="uniform: were indices drawn uniformly. Loads: elements that the busiest owner of a region receives, "
        "and the largest part of the global top-k, over the mean.",
    )
    for name in ("density", "workers", "TopkDSA", "uniform", "Ok-Topk", "equal\nregions", "balanced\nregions"):
        out.add_column(name, justify="right")
    out.add_column("largest\npart", justify="right")
    for run in runs:
        out.add_row(
            f"{100 * run['density']:g} %",
            str(run["workers"]),
            *(f"{100 * run[name]:.2f} %" for name in ("topk_dsa", "uniform", "oktopk")),
            *(f"{run[name]:.2f}" for name in ("equal", "balanced", "part")),
        )
    rich.console.Console(width=100).print(out)


def plot(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws densities and loads against workers."""
    densities = sorted({run["density"] for run in runs})
    figure, axes = plt.subplots(2, len(densities), figsize=(5 * len(densities), 8), squeeze=False, layout="constrained")
    for (filled, loads), density in zip(axes.T, densities, strict=True):
        chosen = [run for run in runs if run["density"] == density]
        workers = [run["workers"] for run in chosen]
        for name, label in {"topk_dsa": "TopkDSA", "uniform": "uniform indices", "oktopk": "Ok-Topk"}.items():
            filled.plot(workers, [100 * run[name] for run in chosen], marker=".", label=label)
        for name, label in {"equal": "equal regions", "balanced": "balanced regions", "part": "largest part"}.items():
            loads.plot(workers, [run[name] for run in chosen], marker=".", label=label)
        filled.set(title=f"{100 * density:g} % a worker", ylabel="density of the sum, %")
        loads.set(xlabel="workers", ylabel="busiest owner, over the mean")
        for each in (filled, loads):
            each.set_xscale("log", base=2)
            each.set_yscale("log")
            each.grid(alpha=0.3)
            each.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist", "cifar10"], default="digits")
    parser.add_argument("--data-dir", type=pathlib.Path, help="where MNIST's or CIFAR-10's files are")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], metavar="P")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.02], help="k / n (default 0.01 0.02)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--tau-region", type=int, default=10, help="steps between repartitions (default 10; a long training's is 64)"
    )
    parser.add_argument("--batch", type=int, default=16, help="examples a worker a step (default 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the table there")
    args = parser.parse_args(argv)

    try:
        setting = task(data.load(args.data, args.data_dir), args.seed)
        with rich.progress.Progress() as progress:
            bar = progress.add_task("steps", total=2 * args.steps * len(args.density) * len(args.workers))
            runs = [
                compare(setting, workers, density, args, lambda: progress.advance(bar))
                for density in args.density
                for workers in args.workers
            ]
    except ValueError as error:
        parser.error(str(error))
    table(runs)
    if args.plot:
        plot(runs, args.plot)
        print(f"plot: {args.plot}")
    if args.json:
        args.json.write_text(json.dumps(runs))
        print(f"figures: {args.json}")


if __name__ == "__main__":
    main()
