"""Trains a model data-parallel, once with each algorithm, and compares the runs.

Run ``python -m examples.train --help`` from the repository's root. The workers are accelerators
where there are enough of them. Where there are too few, all workers share the first, and
``jax.vmap`` simulates them. Without accelerators they are virtual CPU devices. They belong to this
process, or to several processes (docs/clusters.md), which do not simulate.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress
from flax import nnx
from jax.sharding import Mesh

import jsparse
from examples import cluster, report
from examples.models import DeepSpeech
from examples.options import output_folder
from examples.tasks import DATA, MODELS, Task, make_task
from examples.workers import OnMesh, OnOneDevice, Workers
from jsparse import quantize, select, wire
from jsparse.bench.command import image_file, output_file
from jsparse.bench.options import real, whole
from jsparse.cli import processes


def falling_densities(density: float, steps: int) -> jsparse.SparseAllReduce:
    """gTop-k's warm-up, as in its paper: four densities, each for a quarter of the warm-up."""
    densities = [max(density, high) for high in (0.25, 0.0725, 0.015, 0.004)]
    first = [(max(1, steps // 4), jsparse.gtopk("workers", density=high)) for high in densities]
    return jsparse.phases((*first, jsparse.gtopk("workers", density=density)))


def dense_first(density: float, steps: int) -> jsparse.SparseAllReduce:
    """Ok-Topk's warm-up, as in its authors' code: dense steps."""
    return jsparse.phases(((steps, jsparse.dense("workers")), jsparse.oktopk("workers", density=density)))


def sparse_first(density: float, steps: int) -> jsparse.SparseAllReduce:
    """The order of CommLib's Table 4: sparse sums while images are small, and then dense ones."""
    return jsparse.phases(((steps, jsparse.hitopk("nodes", "gpus", density=density)), jsparse.torus("nodes", "gpus")))


def selecting(kind: Callable[[float], jsparse.select.Selector], density: float) -> jsparse.SparseAllReduce:
    """A preset that delivers all elements that a selector of this kind selects."""
    return jsparse.topk_allgather("workers", density=density, select=kind(density))


SELECTORS = {
    "bucketed": select.BucketedTopK,
    "chunked": select.ChunkedTopK,
    "dgc": select.DgcThreshold,
    "mstopk": select.MSTopK,
    "random": select.RandomK,
    "reused": select.ReusedThreshold,
    "sampled": select.SampledThreshold,
    "stochastic": select.StochasticTopK,
}
ALGORITHMS = {
    "dense": lambda density: jsparse.dense("workers"),
    "torus": lambda density: jsparse.torus("nodes", "gpus"),
    "parameter_server": lambda density: jsparse.parameter_server("workers"),
    "a2sgd": lambda density: jsparse.a2sgd("workers"),
    "topk_allgather": lambda density: jsparse.topk_allgather("workers", density=density),
    "gaussiank": lambda density: jsparse.gaussiank("workers", density=density),
    "topk_dsa": lambda density: jsparse.topk_dsa("workers", density=density),
    "ssar_recursive_doubling": lambda density: jsparse.ssar_recursive_doubling("workers", density=density),
    "ssar_split_allgather": lambda density: jsparse.ssar_split_allgather("workers", density=density),
    "dsar_split_allgather": lambda density: jsparse.dsar_split_allgather("workers", density=density),
    "hitopk": lambda density: jsparse.hitopk("nodes", "gpus", density=density),
    "dgc": lambda density: jsparse.dgc("workers", density=density),
    "gtopk": lambda density: jsparse.gtopk("workers", density=density),
    "oktopk": lambda density: jsparse.oktopk("workers", density=density),
    "oktopk-compact": lambda density: jsparse.oktopk("workers", density=density, wire=wire.Compact()),
    "oktopk-bf16": lambda density: jsparse.oktopk("workers", density=density, wire=wire.Compact(quantize.BFloat16())),
    "oktopk-4bit": lambda density: jsparse.oktopk("workers", density=density, wire=wire.Compact(quantize.Codebook(4))),
    "oktopk-2bit": lambda density: jsparse.oktopk("workers", density=density, wire=wire.Compact(quantize.Codebook(2))),
    "powersgd": lambda density: jsparse.powersgd("workers"),
    "scale_by_dion": lambda density: jsparse.scale_by_dion("workers"),
    "scalecom": lambda density: jsparse.scalecom("workers", density=density),
    "ef21_changes": lambda density: jsparse.ef21_changes("workers", density=density),
    "demo": lambda density: jsparse.demo("workers", k=max(1, round(4096 * density))),
    "vote": lambda density: jsparse.vote("workers"),
    "onebit_momentum": lambda density: jsparse.onebit_momentum("workers", freeze_step=20),
    "quantized-bf16": lambda density: jsparse.quantized("workers", quantize=quantize.BFloat16()),
    "quantized-fp16": lambda density: jsparse.quantized("workers", quantize=quantize.Float16()),
    "quantized-8bit": lambda density: jsparse.quantized("workers", quantize=quantize.Block8()),
    "quantized-sign": lambda density: jsparse.quantized("workers", quantize=quantize.Sign(64), split=False),
    "quantized-terngrad": lambda density: jsparse.quantized("workers", quantize=quantize.TernGrad(512), split=False),
    "qsgd": lambda density: jsparse.qsgd("workers"),
    # As in the SparCML thesis's trainings (section 5.4).
    "ssar_recursive_doubling-stochastic": lambda density: jsparse.ssar_recursive_doubling(
        "workers", select=select.StochasticTopK(density, bucket=512), scope="leaf", dense_below=10_000
    ),
    # The same selection, sent as one message.
    "ssar_recursive_doubling-per_leaf": lambda density: jsparse.ssar_recursive_doubling(
        "workers", select=select.PerLeaf(select.StochasticTopK(density, bucket=512)), dense_below=10_000
    ),
    **{f"topk_allgather-{name}": functools.partial(selecting, kind) for name, kind in SELECTORS.items()},
}
# Functions of the density and the steps of the warm-up, in which they do something else.
WARM_UPS = {"gtopk-warmup": falling_densities, "oktopk-warmup": dense_first, "hitopk-warmup": sparse_first}
DEFAULT = ("dense", "topk_allgather", "topk_dsa", "gtopk", "oktopk")
TWO_LEVELS = ("hitopk", "hitopk-warmup", "torus")
REPLICAS_DIFFER = ("a2sgd",)
# Models that take images of any size.
OF_ANY_SIZE = ("resnet20", "resnet110")
# Their updates have momentum already.
OWN_MOMENTUM = ("dgc", "ef21_changes", "demo", "scale_by_dion", "onebit_momentum")
# What must not change when a run goes on from a checkpoint; see also settings_of.
SETTINGS = (
    "model",
    "data",
    "workers",
    "density",
    "batch",
    "resolutions",
    "optimizer",
    "learning_rate",
    "schedule",
    "warm_up",
    "seed",
)
# The figures of each step or epoch.
FIGURES = ("loss", "milliseconds", "bytes", "messages", "selected", "delivered", "updated", "accuracy", "test_loss")
# Test examples that are evaluated at once.
AT_ONCE = 100
# The default learning rates.
RATES = {"sgd": 0.1, "momentum": 0.05, "adam": 1e-3, "adamw": 1e-3, "lars": 5.0, "lamb": 0.01}
# How the learning rate falls after the warm-up, by the number of steps that are left.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
    "square": lambda rate, steps: optax.polynomial_schedule(rate, 0.0, 2, steps),
    "steps": lambda rate, steps: optax.piecewise_constant_schedule(rate, {steps // 2: 0.1, 3 * steps // 4: 0.1}),
}


def make_preset(name: str, density: float, steps: int) -> jsparse.SparseAllReduce:
    """The preset of an algorithm, whose warm-up takes ``steps`` steps if it has one."""
    return WARM_UPS[name](density, steps) if name in WARM_UPS else ALGORITHMS[name](density)


def warm_up_steps(args: argparse.Namespace, every: int) -> int:
    """The steps of the warm-up, with ``every`` steps in an epoch."""
    epochs = args.epochs / 8 if args.warm_up is None else args.warm_up
    if not 0 <= epochs < args.epochs:
        raise ValueError(f"--warm-up is {epochs:g}; it must be at least 0, and less than the {args.epochs} epochs")
    return round(epochs * every)


def make_rate(args: argparse.Namespace, every: int) -> optax.ScalarOrSchedule:
    """The learning rate, with ``every`` steps in an epoch."""
    rate = RATES[args.optimizer] if args.learning_rate is None else args.learning_rate
    first = warm_up_steps(args, every)
    if args.schedule == "constant":
        return rate
    falls = SCHEDULES[args.schedule](rate, args.epochs * every - first)
    return optax.join_schedules([optax.linear_schedule(rate / 10, rate, first), falls], [first]) if first else falls


def make_optimizer(
    name: str, axis: str | tuple[str, ...] | None, args: argparse.Namespace, every: int
) -> optax.GradientTransformation:
    """The transformation that follows the all-reduce.

    Args:
      name: the algorithm.
      axis: the mesh axes of the workers, among whom norms of layers are shared out; or None.
      args: the command's options.
      every: the number of steps in an epoch.
    """
    rate = make_rate(args, every)
    match args.optimizer:
        case "adam":
            return optax.adam(rate)
        case "adamw":
            return optax.adamw(rate, weight_decay=0.01)
        case "lars":
            return jsparse.lars(axis, rate) if axis else optax.lars(rate)
        case "lamb":
            return jsparse.lamb(axis, rate) if axis else optax.lamb(rate)
    sgd = optax.sgd(rate, momentum=0.9 if args.optimizer == "momentum" and name not in OWN_MOMENTUM else None)
    return optax.chain(optax.trace(1.0), sgd) if name == "ef21_changes" else sgd


def resolutions(given: str, epochs: int) -> list[int | None]:
    """The side in pixels of each epoch's images; None as they are.

    Args:
      given: such as "16:2 24:1": two epochs with 16 pixels, and one with 24.
      epochs: of the run.
    """
    try:
        parts = [tuple(map(int, part.split(":"))) for part in given.split()]
        sides = [side for side, count in parts for _ in range(count)]
        if any(side < 1 or count < 1 for side, count in parts) or len(sides) > epochs:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--resolutions is {given!r}; it must be pixels and epochs, of {epochs} epochs at most, such as '16:2 24:1'"
        ) from None
    return sides + [None] * (epochs - len(sides))


@functools.partial(jax.jit, static_argnums=1)
def resized(images: jax.Array, side: int) -> jax.Array:
    """Square images of another resolution."""
    return jax.image.resize(images, (images.shape[0], side, side, images.shape[3]), "linear")


def settings_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What must not change when a run goes on from a checkpoint.

    The number of epochs may, where neither the learning rate nor a warm-up depends on it.
    """
    depends = args.schedule != "constant" or (name in WARM_UPS and args.warm_up is None)
    return {key: getattr(args, key) for key in (*SETTINGS, *["epochs"] * depends)}


def make_workers(name: str, args: argparse.Namespace) -> Workers:
    """The workers of all processes, each on its own device or all on one.

    For an algorithm of two levels each process is a node if there are several processes of several
    workers. Otherwise there are two nodes where the number of workers is even, else one.

    Args:
      name: the algorithm.
      args: the command's options.
    """
    size = args.workers * jax.process_count()
    nodes = jax.process_count() if args.workers > 1 and jax.process_count() > 1 else 1 + (size % 2 == 0)
    two = name in TWO_LEVELS
    shape, axis = ((nodes, size // nodes), ("nodes", "gpus")) if two else ((size,), "workers")
    if cluster.on_one_device(args.workers, args.simulate):
        return OnOneDevice(shape, axis, in_turn=jax.default_backend() != "cpu")
    return OnMesh(Mesh(np.array(cluster.devices(args.workers)).reshape(shape), axis), axis)


def train(name: str, task: Task, args: argparse.Namespace, progress: rich.progress.Progress) -> dict[str, Any]:
    """Trains with one algorithm, and returns the run's settings and figures as plain numbers."""
    # The rest is the running averages of BatchNorm.
    graph, params, rest = nnx.split(task.model, nnx.Param, nnx.BatchStat)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    has_rest = bool(jax.tree.leaves(rest))

    def loss_fn(params, batch, model_state=rest):
        model = nnx.merge(graph, params, model_state)
        loss = model.loss(*batch)
        return (loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))) if has_rest else loss

    @jax.jit
    def evaluate(params, rest, batch):
        model = nnx.merge(graph, params, rest)
        model.eval()
        return jnp.stack([model.accuracy(*batch), model.loss(*batch)])

    def tested(params, rest) -> list[float]:
        """The accuracy and the loss of the tests."""
        count = len(task.test[0])
        starts = range(0, count, AT_ONCE)
        parts = [tuple(array[start : start + AT_ONCE] for array in task.test) for start in starts]
        sums = [np.asarray(evaluate(params, rest, part)) * len(part[0]) for part in parts]
        return (np.sum(sums, axis=0) / count).tolist()

    workers = make_workers(name, args)
    rng = np.random.default_rng(args.seed)
    size = args.batch * workers.size
    count = len(task.train[0])
    steps = count // size
    if not steps:
        raise ValueError(
            f"a batch of {size} is more than the {count} training examples: take fewer workers, or lower --batch"
        )
    sides = resolutions(args.resolutions, args.epochs)
    if any(sides) and args.model not in OF_ANY_SIZE:
        raise ValueError(
            f"{args.model} takes its examples as they are: --resolutions is for {' and '.join(OF_ANY_SIZE)}"
        )
    preset = make_preset(name, args.density, max(1, warm_up_steps(args, steps)))
    tx = optax.chain(preset, make_optimizer(name, workers.shares, args, steps))
    differ = name in REPLICAS_DIFFER
    step = workers.train_step(
        loss_fn,
        tx,
        params="per_worker" if differ else "replicated",
        model_state="mean" if has_rest else None,
        check_vma=not isinstance(task.model, DeepSpeech),  # optax's CTC loss does not pass the check.
    )
    n = sum(leaf.size for leaf in jax.tree.leaves(params))
    run: dict[str, Any] = {
        "algorithm": name,
        "parameters": n,
        "k": max(1, round(args.density * n)),
        "workers": workers.size,
        "steps_per_epoch": steps,
        "settings": settings_of(name, args),
        **{figure: [] for figure in FIGURES},
    }

    with cluster.Checkpoints.open(args.checkpoint, name) as checkpoints:
        done, state, run = checkpoints.restore(step.init(params, rest if has_rest else None), run)
        bar = progress.add_task(name, total=args.epochs * steps, completed=done * steps)
        for epoch in range(args.epochs):
            order = rng.permutation(count)[: steps * size].reshape(steps, size)
            for batch in order if epoch >= done else ():
                own = batch[cluster.own_part(size)]
                first, *others = (array[own] for array in task.train)
                side = sides[epoch]
                first = first if side is None else np.asarray(resized(first, side))
                start = time.perf_counter()
                state, loss = step(state, (first, *others))
                stats = jsparse.stats(state.opt_state)
                loss.block_until_ready()
                run["milliseconds"].append(1e3 * (time.perf_counter() - start))
                loss, stats = jax.device_get((loss, stats))
                run["loss"].append(float(loss))
                run["bytes"].append(4 * int(stats.words[0]))
                run["messages"].append(int(stats.messages[0]))
                run["selected"].append(stats.selected.tolist())
                run["delivered"].append(stats.delivered.tolist())
                run["updated"].append(int(stats.updated[0]))
                progress.advance(bar)
            if epoch >= done:
                mean = workers.sync_params(state) if differ else state.params
                accuracy, test_loss = tested(mean, state.model_state if has_rest else rest)
                run["accuracy"].append(accuracy)
                run["test_loss"].append(test_loss)
                checkpoints.save(epoch + 1, state, run)
    return run


def main(argv: list[str] | None = None) -> None:
    known = [*ALGORITHMS, *WARM_UPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--algorithm",
        action="append",
        choices=[*known, "all"],
        metavar="NAME",
        help=f"all, or one of {', '.join(known)}; repeatable (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="convnet",
        metavar="NAME",
        help=f"one of {', '.join(MODELS)} (default convnet)",
    )
    parser.add_argument("--data", choices=DATA, help="what it learns (default: what its model is for)")
    parser.add_argument("--data-dir", type=pathlib.Path, help="directory of the data's files; the digits need none")
    parser.add_argument(
        "--workers", type=int, help="workers of each process (default: 8 in one process, 1 in each of several)"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="all workers share the first device, by jax.vmap (default: if there are accelerators, and fewer than "
        "workers)",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument("--epochs", type=whole(1), help="epochs of training (default: 40 for digits, 3 for the others)")
    parser.add_argument("--batch", type=whole(1), default=16, help="examples a worker and step (default 16)")
    parser.add_argument("--optimizer", choices=RATES, default="momentum", help="default momentum: SGD with 0.9")
    parser.add_argument(
        "--learning-rate",
        type=real(above=0),
        help=f"default: {', '.join(f'{rate} for {name}' for name, rate in RATES.items())}",
    )
    parser.add_argument(
        "--schedule",
        choices=["constant", *SCHEDULES],
        default="constant",
        help="of the learning rate. But for a constant one, it rises from a tenth in the warm-up. Then it falls to 0, "
        "as a line or a square; or in steps, to a tenth after half of the steps that are left, and to a hundredth "
        "after three quarters",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        metavar="EPOCHS",
        help="how long the learning rate rises, and algorithms called -warmup have their warm-up (default: an eighth)",
    )
    parser.add_argument(
        "--resolutions",
        default="",
        metavar="SIDE:EPOCHS ...",
        help="images are first made so many pixels high and wide, for so many epochs: '16:2 24:1'; tests are not",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the parameters and batches (default 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this JSON file")
    parser.add_argument(
        "--plot",
        type=image_file,
        metavar="FILE",
        default="train.png",
        help="draw the runs to this image file (default train.png)",
    )
    parser.add_argument(
        "--checkpoint",
        type=output_folder,
        metavar="DIR",
        help="save every epoch in this directory, and go on from the last one; all processes must see the directory. "
        "A run may go on for more epochs if neither its learning rate nor a warm-up depends on their number",
    )
    processes.add_arguments(parser)
    args = parser.parse_args(argv)
    names = args.algorithm or DEFAULT
    args.algorithm = list(known if "all" in names else names)
    args.data = args.data or MODELS[args.model].data[0]
    if args.epochs is None:
        args.epochs = 40 if args.data == "digits" else 3
    if args.workers is None:
        args.workers = 1 if args.distributed else 8

    with contextlib.suppress(RuntimeError):  # It is too late if this process has used JAX already.
        jax.config.update("jax_num_cpu_devices", max(args.workers, 1))
    try:
        processes.join(args)  # Before JAX computes anything.
        task = make_task(args.model, args.data, args.data_dir, args.seed)
        for name in args.algorithm:  # Wrong options raise here, before anything is trained.
            make_preset(name, args.density, 1)
        resolutions(args.resolutions, args.epochs)
        columns = *rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn()
        with rich.progress.Progress(*columns, disable=jax.process_index() > 0) as progress:
            runs = [train(name, task, args, progress) for name in args.algorithm]
    except ValueError as error:
        parser.error(str(error))
    if jax.process_index():
        return
    report.table(runs)
    if args.json:
        args.json.write_text(json.dumps(runs))
        print(f"figures: {args.json}")
    report.plot(runs, args.plot)
    print(f"plot: {args.plot}")


if __name__ == "__main__":
    main()
