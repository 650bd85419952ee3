"""Measures how far sparse sums fill in, and how unevenly their elements lie, on one device.

Simulates many workers in one ``jax.vmap`` and trains a convolutional net with several numbers of
workers. It measures the same quantities that Ok-Topk's paper reports of its own runs:

- Fill-in (section 5.2): the density of TopkDSA's result. TopkA has the same result and compiles
  faster, so it runs here.
- The load that equal and balanced regions put on their owners when the regions are reduced
  (sections 3.1.1 and 5.3).
- The largest part of the global top-k that one owner has before the parts are balanced (sections
  3.1.2 and 5.3).

Run ``python -m examples.fill_in --help`` from the repository's root.
"""

import argparse
import concurrent.futures
import json
import os
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
from examples.models import ConvNet
from jsparse import cost
from jsparse.bench.command import image_file, output_file
from jsparse.bench.images import Images, load_images
from jsparse.bench.options import whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOADS = {"equal": "equal regions", "balanced": "balanced regions", "part": "largest part"}


class Task(NamedTuple):
    """A net and the images that it learns.

    Attributes:
      images: the images.
      params: the net's parameters.
      gradients: a function of the parameters, and of images and labels stacked by worker, that
        returns every worker's gradient.
    """

    images: Images
    params: Any
    gradients: Callable[..., Any]


def task(images: Images, seed: int) -> Task:
    """The task of a :class:`ConvNet` with random parameters."""
    graph, params = nnx.split(ConvNet(*images.train_x.shape[1:], rngs=nnx.Rngs(seed)), nnx.Param)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    return Task(images, nnx.as_pure(params), jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0))))


def simulate(
    task: Task, reduce: jsparse.SparseAllReduce, workers: int, args: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Trains with an all-reduce over ``"workers"``, and returns the figures of each step.

    Returns:
      ``"union"``: how many elements at least one worker selected. Ok-Topk has also ``"updated"``,
      the number of elements of the update, and three figures over the mean of all owners.
      ``"equal"`` and ``"balanced"`` are the elements that the busiest owner of such regions
      receives; ``"part"`` is the most elements of the global top-k that one owner has.
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
    states = jax.jit(jax.vmap(lambda _: reduce.init(params), axis_name="workers"))(np.arange(workers))
    rng = np.random.default_rng(args.seed)
    steps = []
    for _ in range(args.steps):
        batch = rng.integers(len(task.images.train_y), size=(workers, args.batch))
        grads = task.gradients(params, task.images.train_x[batch], task.images.train_y[batch])
        before = states
        params, states, momentum, selected = step(params, states, momentum, grads)
        sender, index = np.nonzero(selected)
        figures = {"union": len(np.unique(index))}
        reduced = states.buckets[0].reducer.reduce
        if reduced:
            # The regions of a step are in the state before it.
            starts = np.asarray(before.buckets[0].reducer.reduce.starts[0])
            parts = np.asarray(reduced.part)
            figures |= {
                "updated": int(states.report.updated[0, 0]),
                "equal": busiest(sender, index, selected.shape[1] * np.arange(workers) // workers),
                "balanced": busiest(sender, index, starts),
                "part": float(parts.max() / parts.mean()),
            }
        steps.append(figures)
        advance()
    return {name: [figures[name] for figures in steps] for name in steps[0]}


def busiest(sender: np.ndarray, index: np.ndarray, starts: np.ndarray) -> float:
    """How many elements the busiest owner of a region receives, over the mean of all owners.

    What an owner selects itself does not count.

    Args:
      sender: the worker that selects each element.
      index: the elements' indices.
      starts: the first index of each worker's region.
    """
    owner = np.searchsorted(starts, index, side="right") - 1
    received = np.bincount(owner[owner != sender], minlength=len(starts))
    return float(received.max() / received.mean())


def compare(task: Task, workers: int, density: float, args: argparse.Namespace, advance: Callable[[], None]) -> dict:
    """Runs TopkA, and Ok-Topk at the first density.

    Returns:
      Means over the steps, and the figures of every step.
    """
    n = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    steps = simulate(task, jsparse.topk_allgather("workers", density=density), workers, args, advance)
    run = {
        "parameters": n,
        "workers": workers,
        "density": density,
        "topk_dsa": np.mean(steps["union"]) / n,
        "uniform": cost.expected_union(n, max(1, round(density * n)), workers) / n,
        "steps": {"topk_dsa": steps},
    }
    if density == args.density[0]:
        reduce = jsparse.oktopk("workers", density=density, tau_region=args.tau_region)
        steps = run["steps"]["oktopk"] = simulate(task, reduce, workers, args, advance)
        run["oktopk"] = np.mean(steps["updated"]) / n
        run |= {name: np.mean(steps[name]) for name in ("equal", "balanced", "part")}
    return run


def table(runs: list[dict[str, Any]]) -> None:
    """Prints one row for each density and number of workers."""
    steps = len(runs[0]["steps"]["topk_dsa"]["union"])
    out = rich.table.Table(
        title=f"{runs[0]['parameters']:,} parameters, means of {steps} steps",
        caption="TopkDSA, uniform, Ok-Topk: densities of the sum; uniform: with uniformly drawn indices. regions: "
        "elements that the busiest owner receives, over the mean. largest part: of the global top-k, over the mean.",
    )
    for name in ("density", "workers", "TopkDSA", "uniform", "Ok-Topk", "equal\nregions", "balanced\nregions"):
        out.add_column(name, justify="right")
    out.add_column("largest\npart", justify="right")
    for run in runs:
        out.add_row(
            f"{100 * run['density']:g} %",
            str(run["workers"]),
            *(f"{100 * run[name]:.2f} %" if name in run else "" for name in ("topk_dsa", "uniform", "oktopk")),
            *(f"{run[name]:.2f}" if name in run else "" for name in LOADS),
        )
    rich.console.Console(width=100).print(out)


def plot(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws densities and loads against workers."""
    figure, (filled, loads) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")

    def draw(axes, density: float, name: str, scale: float, label: str, **style) -> None:
        chosen = [run for run in runs if run["density"] == density and name in run]
        if chosen:
            axes.plot([run["workers"] for run in chosen], [scale * run[name] for run in chosen], label=label, **style)

    for number, density in enumerate(sorted({run["density"] for run in runs})):
        style = {"color": f"C{number}", "marker": "."}
        draw(filled, density, "topk_dsa", 100, f"TopkDSA, {100 * density:g} %", **style)
        draw(filled, density, "uniform", 100, f"uniform indices, {100 * density:g} %", linestyle=":", **style)
        draw(filled, density, "oktopk", 100, f"Ok-Topk, {100 * density:g} %", linestyle="--", **style)
    for name, label in LOADS.items():
        draw(loads, runs[0]["density"], name, 1, label, marker=".")
    filled.set(ylabel="density of the sum, %")
    loads.set(ylabel="busiest owner, over the mean")
    for axes in (filled, loads):
        axes.set(xlabel="workers")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist", "cifar10"], default="digits", help="default digits")
    parser.add_argument("--data-dir", type=pathlib.Path, help="directory of MNIST's or CIFAR-10's files")
    parser.add_argument(
        "--workers",
        type=whole(2),
        nargs="+",
        default=[2, 4, 8, 16, 32, 64],
        metavar="P",
        help="numbers of workers (default 2 to 64)",
    )
    parser.add_argument(
        "--density",
        type=float,
        nargs="+",
        default=[0.01, 0.02],
        help="k / n (default 0.01 0.02); Ok-Topk runs at the first",
    )
    parser.add_argument("--steps", type=whole(1), default=30, help="training steps (default 30)")
    parser.add_argument("--tau-region", type=whole(1), default=1, help="steps between repartitions (default 1)")
    parser.add_argument("--batch", type=whole(1), default=16, help="examples a worker and step (default 16)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the parameters and batches (default 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this JSON file")
    parser.add_argument("--plot", type=image_file, metavar="FILE", help="draw the table to this image file")
    args = parser.parse_args(argv)

    try:
        setting = task(load_images(args.data, args.data_dir), args.seed)

        def run(case: tuple[int, float]) -> dict[str, Any]:
            return compare(setting, *case, args, lambda: progress.advance(bar))

        cases = [(workers, density) for density in args.density for workers in args.workers]
        # Most of the time goes into compilation, which uses one core for each case.
        with rich.progress.Progress() as progress, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            bar = progress.add_task("steps", total=args.steps * (len(cases) + len(args.workers)))
            runs = list(pool.map(run, cases))
    except ValueError as error:
        parser.error(str(error))
    table(runs)
    if args.json:
        args.json.write_text(json.dumps(runs))
        print(f"figures: {args.json}")
    if args.plot:
        plot(runs, args.plot)
        print(f"plot: {args.plot}")


if __name__ == "__main__":
    main()
