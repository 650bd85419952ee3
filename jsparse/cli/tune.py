"""``jsparse tune``: measures a cluster, and chooses an algorithm and its settings for it.

Run it like the training: with the same launcher, on the same machines, one command in each
process. Every process measures. The first one prints the figures and writes the choice to a file,
from which ``jsparse.from_file(path, comm)`` makes the transformation.

The command works in four steps:

1. It measures the network's α and β (by a ping-pong, and sums, all-gathers and all-to-alls of
   several lengths), selection, and, if a model is named, the model's step.
2. From these it predicts the cost of all algorithms that ``jsparse plan`` has.
3. It measures whole synchronisations with the most promising sparse algorithms and the dense ones.
   Where ``jsparse network`` made the hosts, each program is compiled on one of them.
4. It measures the fastest sparse algorithm, and those that take up to a quarter longer, also with
   compact wires, and the fastest of these with a sampled threshold.
"""

import argparse
import contextlib
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import cost
from .._presets.files import build, describe, write
from .._train.placement import state_specs
from .._train.workers import init
from .._vector.density import check_density
from .._vector.random import key_of
from ..bench.command import add_output_options, output, output_file, progress_bar
from ..bench.compiler import Compiler
from ..bench.options import LONGEST, real, whole
from ..bench.timing import timed
from ..quantize import BFloat16
from ..select import SampledThreshold, TopK
from ..wire import Compact
from . import processes
from .links import BETWEEN, INSIDE, Fit, Sample, agreed, fit, measure, seconds_of
from .model import load_model
from .plan import NOT_SPARSE, forecast, preset_of
from .tune_report import draw_times, recommended, show

HELP = "measure this cluster, and choose an algorithm for it"
# Lengths, in words, of the messages that measure the network.
PAYLOADS = (1, 2**8, 2**12, 2**16, 2**20)
# How many sparse algorithms are measured: those that the cost model takes for the fastest.
CANDIDATES = 6
# Compact wires are measured with algorithms that take up to so many times as long as the fastest.
NEAR = 1.25
WIRES = {"compact": Compact(), "compact bf16": Compact(BFloat16())}


class Candidate(NamedTuple):
    """A preset with its settings."""

    name: str
    preset: str
    options: dict[str, Any]

    def changed(self, name: str, **options: Any) -> "Candidate":
        """The same with other settings, and their name."""
        return Candidate(f"{self.name}, {name}", self.preset, self.options | options)

    def content(self) -> dict[str, Any]:
        """What a file says of it."""
        return describe(self.preset, **self.options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--parameters", type=whole(1, LONGEST), metavar="N", help="length of the gradient, such as 25e6")
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (loss_fn, params, batch), where loss_fn(params, batch) is one "
        "worker's loss; its step is measured, too",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument(
        "--step-time",
        type=real(0),
        metavar="MS",
        help="time of a step without communication, in ms (default: the model's, or 0 without one)",
    )
    parser.add_argument(
        "--candidates",
        type=whole(1),
        default=CANDIDATES,
        help=f"number of sparse algorithms to measure (default {CANDIDATES})",
    )
    parser.add_argument("--repeats", type=whole(1), default=7, help="measurements of each (default 7)")
    parser.add_argument(
        "--workers",
        type=whole(1),
        metavar="P",
        help="number of devices (default all); virtual ones where a CPU has too few",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole(1),
        metavar="G",
        help="workers of a node, with a network between them (default: the devices of a process if there are several "
        "processes, else 1)",
    )
    processes.add_arguments(parser)
    parser.add_argument(
        "--out",
        type=output_file,
        default=pathlib.Path("tune.json"),
        metavar="FILE",
        help="file for the choice (default tune.json)",
    )
    add_output_options(parser, plot="the network's samples and the steps' times", figures="all figures")


def run(args: argparse.Namespace) -> None:
    """Runs the command in this process."""
    check_density(args.density)
    processes.join(args)
    if args.workers and args.workers > 1 and not args.distributed:
        with contextlib.suppress(RuntimeError):  # It is too late if this process has used JAX already.
            jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = mesh_of(args)
    first = jax.process_index() == 0
    with progress_bar(disable=not first) as progress:
        task = progress.add_task("measuring")

        def tell(what: str, done: float) -> None:
            progress.update(task, description=what, completed=100 * done)

        figures, content = tune(args, mesh, tell)
    if first:
        # From here on only the first process works; nothing is sent any more.
        try:  # What was measured is shown also where the choice can't be written.
            write(args.out, content | {"tune": figures})
        finally:
            figures["out"] = str(args.out)
            output(args, figures, show, draw_times)


def mesh_of(args: argparse.Namespace) -> Mesh:
    """A mesh of the workers, with one level or two."""
    devices = jax.devices()
    if args.workers and len(devices) < args.workers and jax.process_count() == 1:
        devices = jax.devices("cpu")
    size = args.workers or len(devices)
    if size < 2:
        raise ValueError(
            "there is only one device, and so nothing to tune: start as many processes as the training has, with "
            "--distributed, or try it on virtual devices with --workers 4"
        )
    if size > len(devices) or (jax.process_count() > 1 and size < len(devices)):
        raise ValueError(
            f"--workers is {size}; there are {len(devices)} devices, and several processes use all of them: lower "
            "--workers, or leave it out"
        )
    gpus = args.gpus_per_node or (jax.local_device_count() if jax.process_count() > 1 else 1)
    if size % gpus:
        raise ValueError(f"{size} workers do not fill nodes of {gpus}: give a --gpus-per-node that divides {size}")
    # A single node has only one network.
    gpus = 1 if gpus == size else gpus
    devices = sorted(devices[:size], key=lambda device: (device.process_index, device.id))
    shape, names = ((size // gpus, gpus), (BETWEEN, INSIDE)) if gpus > 1 else ((size,), (BETWEEN,))
    return Mesh(np.array(devices).reshape(shape), names)


def tune(
    args: argparse.Namespace, mesh: Mesh, tell: Callable[[str, float], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures, predicts and chooses; all processes compute the same.

    Args:
      args: the command's options.
      mesh: the workers.
      tell: is called with what is being measured, and the fraction that is done.

    Returns:
      All figures, and the content of the file.
    """
    n, step = args.parameters, args.step_time
    if args.model:
        tell("the model's step", 0)
        n, measured = model_step(args.model, args.repeats)
        step = measured if step is None else step
    links, samples = measure_links(mesh, args.repeats, tell)
    tell("selection", 0.3)
    selection = 1e3 * selection_time(mesh, n, args.density, args.repeats)
    between, inside = links[BETWEEN], links.get(INSIDE, Fit(0, 0, 0))
    node = cost.Node(mesh.shape.get(INSIDE, 1), inside.alpha, inside.beta)
    predicted = forecast(n, args.density, mesh.size, between.alpha, between.beta, node, step or 0.0, selection)
    results = measure_candidates(args, mesh, predicted, tell)
    chosen = recommended(results)
    figures = {
        "workers": mesh.size,
        "nodes": mesh.shape[BETWEEN],
        "processes": jax.process_count(),
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "density": args.density,
        "step_measured": bool(args.model),
        "links": {name: link._asdict() for name, link in links.items()},
        "samples": {name: [sample._asdict() for sample in of] for name, of in samples.items()},
        "predicted": predicted,
        "measured": results,
        "recommended": chosen["name"],
        "dense_wins": chosen["preset"] in cost.DENSE,
        "times_faster_than_dense": chosen["times_faster_than_dense"],
    }
    return figures, chosen["file"]


def model_step(model: str, repeats: int) -> tuple[int, float]:
    """Measures a model's step, which is its loss and gradient, on one device.

    Args:
      model: its function, as ``MODULE:FUNCTION``.
      repeats: measurements, of which the median counts.

    Returns:
      The number of parameters, and milliseconds.
    """
    loss_fn, params, batch = load_model(model)
    params, batch = jax.device_put((params, batch), jax.local_devices()[0])
    step = jax.jit(jax.value_and_grad(loss_fn))

    def times(count):
        return [step(params, batch) for _ in range(count)][-1]

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)), 1e3 * seconds_of(times, repeats)


def measure_links(
    mesh: Mesh, repeats: int, tell: Callable[[str, float], None]
) -> tuple[dict[str, Fit], dict[str, list[Sample]]]:
    """Measures each level of the network; returns its line and its samples."""
    samples: dict[str, list[Sample]] = {}
    for level, axis in enumerate(mesh.axis_names):
        # All workers of a node send over its one link at once.
        sharing = mesh.shape.get(INSIDE, 1) if axis == BETWEEN else 1
        found = samples.setdefault(axis, [])
        for number, sample in enumerate(measure(mesh, axis, PAYLOADS, repeats, sharing)):
            found.append(sample)
            tell(f"network, {sample.what}", (level + (number + 1) / 4 / len(PAYLOADS)) * 0.3 / len(mesh.axis_names))
    return {axis: fit(of) for axis, of in samples.items()}, samples


def gradients(mesh: Mesh, n: int) -> jax.Array:
    """A random normal vector of length n for each worker."""
    axes, comm_rank = PartitionSpec(mesh.axis_names), jnp.arange(mesh.size, dtype=jnp.int32)
    draw = jax.shard_map(
        lambda rank: jax.random.normal(key_of(0, rank[0]), (n,)), mesh=mesh, in_specs=axes, out_specs=axes
    )
    return jax.jit(draw)(comm_rank)


def selection_time(mesh: Mesh, n: int, density: float, repeats: int) -> float:
    """Seconds that an exact top-k takes on all workers at once."""
    axes, select = PartitionSpec(mesh.axis_names), TopK(density)

    def local(acc):
        x, _ = select(acc, select.init(n, acc.dtype), jnp.int32(1), jnp.int32(0))
        return x.values

    chosen = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False))
    acc = gradients(mesh, n)
    return seconds_of(lambda count: [chosen(acc) for _ in range(count)][-1], repeats)


def measure_candidates(
    args: argparse.Namespace, mesh: Mesh, predicted: dict[str, Any], tell: Callable[[str, float], None]
) -> list[dict[str, Any]]:
    """Measures the dense algorithms, the most promising sparse ones, and variants of these.

    The variants of the fastest sparse ones have compact wires, that of the fastest variant a
    sampled threshold.

    Args:
      args: the command's options.
      mesh: the workers.
      predicted: the figures of :func:`.plan.forecast`, whose fastest algorithms are measured.
      tell: as in :func:`tune`.

    Returns:
      The figures of each candidate, the fastest first.
    """
    expected = {result["name"]: result["step_ms"] for result in predicted["algorithms"]}
    dense = [Candidate(name, name, {}) for name in ("dense", "torus") if name in expected]
    sparse = []
    for name in expected:
        preset = preset_of(name, args.density)
        if preset and name not in NOT_SPARSE:
            sparse.append(Candidate(name, *preset))
    first = [*dense, *sparse[: args.candidates]]
    total, results = len(first) + len(WIRES) + 1, []
    acc = gradients(mesh, predicted["parameters"])
    compiler = Compiler(jax.process_index(), jax.process_count())

    def measured(candidate: Candidate) -> dict[str, Any]:
        tell(candidate.name, 0.35 + 0.65 * len(results) / total)
        times = synchronisation_times(mesh, candidate, acc, args.repeats, compiler)
        median = statistics.median(times)
        result = {
            "name": candidate.name,
            "preset": candidate.preset,
            "file": candidate.content(),
            "synchronisation_ms": {"median": median, "min": min(times), "max": max(times)},
            "step_ms": predicted["step_time_ms"] + median,
            "predicted_step_ms": expected.get(candidate.name),
        }
        results.append(result)
        return result

    pairs = [(candidate, measured(candidate)) for candidate in first]
    steps = [(candidate, result["step_ms"]) for candidate, result in pairs if candidate not in dense]
    near = [candidate for candidate, ms in steps if ms <= NEAR * min(ms for _, ms in steps)]
    total += len(WIRES) * (len(near) - 1)
    for plain in near:
        for name, wire in WIRES.items():
            variant = plain.changed(name, wire=wire)
            steps.append((variant, measured(variant)["step_ms"]))
    fastest, _ = min(steps, key=lambda step: step[1])
    measured(fastest.changed("sampled", select=SampledThreshold(args.density)))
    dense_step = min(result["step_ms"] for result in results if result["preset"] in cost.DENSE)
    for result in results:
        result["times_faster_than_dense"] = dense_step / result["step_ms"]
    return sorted(results, key=lambda result: result["step_ms"])


def synchronisation_times(
    mesh: Mesh, candidate: Candidate, acc: jax.Array, repeats: int, compiler: Compiler
) -> list[float]:
    """Milliseconds of whole synchronisations: selection, communication and a dense update."""
    axes: Any = mesh.axis_names if len(mesh.axis_names) > 1 else BETWEEN
    tx: Any = build(candidate.content(), axes)
    n = acc.shape[0] // mesh.size
    state = init(tx, np.zeros(n, np.float32), mesh, axes)
    specs = state_specs(state, axes)
    run = jax.shard_map(tx.update, mesh=mesh, in_specs=(PartitionSpec(axes), specs), out_specs=(PartitionSpec(), specs))
    (step,) = compiler.compile([jax.jit(run, donate_argnums=1).lower(acc, state)])
    times = []
    for number in range(repeats + 1):
        ms, (_, state) = timed(step, acc, state)
        slowest = agreed(ms)
        if number:  # The first step connects workers.
            times.append(slowest)
    return times
