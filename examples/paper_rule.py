"""Measures how far Ok-Topk is from the rule of its paper, on real gradients, on one device.

Simulates many workers in one ``jax.vmap`` and trains a net. In each step the same accumulated
gradients are given to the paper's rule, written in NumPy with messages of any length and exact
thresholds: ``Topk`` of the sum of the workers' ``Topk`` (Ok-Topk, equation 1). Measured are

- sent: the share of the selected elements that was sent;
- indices: the share of the rule's indices that the update has;
- error: the norm of the update's difference from the rule's, over the norm of the rule's;
- words: 4-byte words that a worker sent, over ``k (P-1)/P``, on average and in the dearest step.

Run ``python -m examples.paper_rule --help`` from the repository's root.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from flax import nnx

import jsparse
from examples.data import read_ptb
from examples.models import ConvNet
from jsparse.bench.command import output_file
from jsparse.bench.images import load_images
from jsparse.bench.nets import dense
from jsparse.bench.options import real, whole

FIRST = 10  # The first steps do not count: the residuals are still empty.
COLUMNS = ("sent", "indices", "error", "words", "most")


class Task(NamedTuple):
    """A net and the batches that it learns from.

    Attributes:
      params: the net's parameters.
      loss_fn: a function of the parameters and of one worker's inputs and targets.
      batches: inputs and targets of each step, stacked by worker.
    """

    params: Any
    loss_fn: Callable[..., jax.Array]
    batches: Iterator[tuple[np.ndarray, np.ndarray]]


class LanguageModel(nnx.Module):
    """An LSTM that predicts the next word."""

    def __init__(self, vocabulary: int, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.lstm = nnx.RNN(nnx.LSTMCell(width, width, rngs=rngs))
        self.last = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        words: jax.Array = self.lstm(self.embed(x))  # pyright: ignore[reportAssignmentType]
        return self.last(words)


def image_task(name: str, workers: int, args: argparse.Namespace, rng: np.random.Generator) -> Task:
    """The demo's net or a dense one on the digits, or the same dense one on MNIST (FNN-3)."""
    images = load_images("mnist" if name == "mnist" else "digits", args.data_dir and args.data_dir / "mnist")
    shape, rngs = images.train_x.shape[1:], nnx.Rngs(args.seed)
    net = ConvNet(*shape, rngs=rngs) if name == "demo" else dense(shape, 200, rngs)

    def batches():
        while True:
            batch = rng.choice(len(images.train_y), (workers, args.batch))
            yield images.train_x[batch], images.train_y[batch]

    return _task(net, batches())


def text_task(workers: int, args: argparse.Namespace, rng: np.random.Generator) -> Task:
    """An LSTM on the Penn Treebank."""
    if args.data_dir is None:
        raise ValueError("ptb is read from a file: name the directory of its folder with --data-dir")
    ptb = read_ptb(args.data_dir / "ptb")
    text = ptb.train
    net, length = LanguageModel(len(ptb.words), 128, nnx.Rngs(args.seed)), 20

    def batches():
        while True:
            begin = rng.integers(len(text) - length - 1, size=(workers, args.batch))
            window = text[begin[..., None] + np.arange(length + 1)]
            yield window[..., :-1], window[..., 1:]

    return _task(net, batches())


def _task(net: nnx.Module, batches: Iterator[tuple[np.ndarray, np.ndarray]]) -> Task:
    # The rest is the state of random number generators, which an LSTM keeps and does not use.
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params, nnx.as_pure(rest))(x), y).mean()

    return Task(nnx.as_pure(params), loss_fn, batches)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest magnitudes, in any order."""
    return np.argpartition(-np.abs(x), k - 1)[:k]


def paper_rule(accs: np.ndarray, k: int) -> np.ndarray:
    """``Topk`` of the sum of each worker's ``Topk``, dense: shape ``(n,)``."""
    total = np.zeros(accs.shape[1])
    for acc in accs:
        chosen = largest(acc, k)
        total[chosen] += acc[chosen]
    chosen = largest(total, k)
    rule = np.zeros_like(total)
    rule[chosen] = total[chosen]
    return rule


def distance(update: np.ndarray, rule: np.ndarray) -> tuple[float, float]:
    """The share of the rule's indices that an update has, and its relative error."""
    found = np.count_nonzero(update[rule != 0]) / max(1, np.count_nonzero(rule))
    return found, float(np.linalg.norm(update - rule) / np.linalg.norm(rule))


def simulate(task: Task, workers: int, args: argparse.Namespace, advance: Callable[[], None]) -> dict[str, float]:
    """Trains with Ok-Topk, and returns the figures of the run."""
    reduce = jsparse.oktopk("workers", density=args.density)
    optimizer = optax.sgd(args.learning_rate, momentum=args.momentum)
    sizes = [leaf.size for leaf in jax.tree.leaves(task.params)]
    k = max(1, round(args.density * sum(sizes)))

    def flat(tree) -> jax.Array:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])

    def worker(params, state, x, y):
        grads = jax.grad(task.loss_fn)(params, x, y)
        acc = jsparse.residual(state)[0] + flat(grads)
        updates, state = reduce.update(grads, state)
        stats = jax.tree.map(lambda leaf: leaf.reshape(-1)[0], jsparse.stats(state))
        return updates, state, (acc, stats)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, states, momentum, x, y):
        run = jax.vmap(worker, axis_name="workers", in_axes=(None, 0, 0, 0))
        updates, states, told = run(params, states, x, y)
        update = jax.tree.map(lambda leaf: leaf[0], updates)
        change, momentum = optimizer.update(update, momentum)
        return optax.apply_updates(params, change), states, momentum, flat(update), told

    params, momentum = task.params, optimizer.init(task.params)
    states = jax.jit(jax.vmap(lambda _: reduce.init(params), axis_name="workers"))(np.arange(workers))
    figures: dict[str, list[float]] = {name: [] for name in ("sent", "indices", "error", "words")}
    for number in range(args.steps):
        params, states, momentum, update, (accs, stats) = step(params, states, momentum, *next(task.batches))
        if number < FIRST:
            continue
        figures["words"].append(float(stats.words[0]) * workers / (k * max(1, workers - 1)))
        figures["sent"].append(1 - float(stats.overflowed.sum() / stats.selected.sum()))
        if number % args.every == 0:
            indices, error = distance(workers * np.asarray(update, np.float64), paper_rule(np.asarray(accs), k))
            figures["indices"].append(indices)
            figures["error"].append(error)
        advance()
    run = {name: float(np.mean(values)) for name, values in figures.items()}
    return run | {"most": max(figures["words"]), "parameters": sum(sizes), "workers": workers}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["demo", "mlp", "mnist", "ptb"], default="demo", help="default demo")
    parser.add_argument(
        "--data-dir", type=pathlib.Path, help="directory that has a folder mnist or ptb with the standard files"
    )
    parser.add_argument("--workers", type=whole(1), nargs="+", default=[8, 16], metavar="P", help="default 8 16")
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument(
        "--steps", type=whole(FIRST + 1), default=150, help=f"training steps, more than {FIRST} (default 150)"
    )
    parser.add_argument("--every", type=whole(1), default=1, help="compare with the rule in every so many steps")
    parser.add_argument("--batch", type=whole(1), default=16, help="examples a worker and step (default 16)")
    parser.add_argument("--learning-rate", type=real(above=0), default=0.05, help="default 0.05")
    parser.add_argument("--momentum", type=float, default=0.9, help="default 0.9")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the parameters and batches (default 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args(argv)

    runs = []
    try:
        with rich.progress.Progress() as progress:
            bar = progress.add_task("steps", total=(args.steps - FIRST) * len(args.workers))
            for workers in args.workers:
                rng = np.random.default_rng(args.seed)
                make = text_task if args.task == "ptb" else functools.partial(image_task, args.task)
                runs.append(simulate(make(workers, args, rng), workers, args, lambda: progress.advance(bar)))
    except ValueError as error:
        parser.error(str(error))
    out = rich.table.Table(title=f"{args.task}, {runs[0]['parameters']:,} parameters, {100 * args.density:g} %")
    for column in ("P", *COLUMNS):
        out.add_column(column, justify="right")
    for run in runs:
        out.add_row(str(run["workers"]), *(f"{run[column]:.4g}" for column in COLUMNS))
    rich.console.Console(width=100).print(out)
    if args.json:
        args.json.write_text(json.dumps(runs))
        print(f"figures: {args.json}")


if __name__ == "__main__":
    main()
