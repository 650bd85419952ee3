"""``jsparse bench pto``: times replicated computation, done whole by every worker and in parts.

Replicated computation gives the same result on all workers, such as an optimizer's update after
the all-reduce. Here it is that of ResNet-50's 161 parameter arrays: LARS's trust ratios, LARS,
and Adam. In parts, each worker computes its share and an all-gather collects the results (PTO,
the parallel tensor operator).

Two times are taken. *Together*: all workers at once, with the all-gather. Virtual devices of one
processor share its cores, so this time shows the work saved in total. *Alone*: worker 0 by itself
on one device, without a network. This time shows the work saved on a worker of a real cluster.
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
import optax
import rich.console
import rich.table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.traffic import traffic
from .._share.sharded import sharded
from .._share.trust_ratio import lars, sums_of_squares
from .._train.placement import state_specs
from .alone import Alone
from .command import add_output_options, numbers, output, progress_bar, subplots
from .options import check_memory, whole
from .timing import spread, timed

HELP = "time trust ratios, LARS and Adam, done whole by every worker and in parts"
AXIS = "workers"
ON_ALL = PartitionSpec()


def resnet50(width: int = 64) -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 parameter arrays.

    They are those of 53 convolutions, each with a scale and a bias, and of the classifier.

    Args:
      width: channels of the first stage, 64 in ResNet-50; fewer make a narrower net of as many
        layers.
    """

    def convolution(size, inputs, outputs):
        return [(size, size, inputs, outputs), (outputs,), (outputs,)]

    shapes, inputs = convolution(7, 3, width), width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            shapes += convolution(1, inputs, inner) + convolution(3, inner, inner) + convolution(1, inner, 4 * inner)
            if not block:
                shapes += convolution(1, inputs, 4 * inner)
            inputs = 4 * inner
    return [*shapes, (inputs, 1000), (1000,)]


class Form(NamedTuple):
    """One way to do a task.

    Attributes:
      task: the task's name.
      name: the way's name.
      tx: does it. Its updates are the task's result.
    """

    task: str
    name: str
    tx: optax.GradientTransformation


def tasks(comm: Any) -> list[list[Form]]:
    """The forms of each task; in the first form every worker does the whole task.

    Args:
      comm: the workers.
    """

    def trust_ratios(comm):
        def update(grads, state, params):
            sums = sums_of_squares(comm, list(zip(grads, params, strict=True)))
            return jnp.stack([jnp.sqrt(weights / updates) for updates, weights in sums]), state

        return optax.GradientTransformation(lambda params: (), update)  # type: ignore[arg-type]

    whole, parts, itself = "each worker", "in parts", Alone(1)
    return [
        [Form("trust ratios", whole, trust_ratios(itself)), Form("trust ratios", parts, trust_ratios(comm))],
        [
            Form("LARS", whole, lars(itself, 0.1, weight_decay=1e-4)),  # type: ignore[arg-type]
            Form("LARS", parts, lars(comm, 0.1, weight_decay=1e-4)),
            Form("LARS", "optax", optax.lars(0.1, weight_decay=1e-4)),
        ],
        [Form("Adam", whole, optax.adam(1e-3)), Form("Adam", parts, sharded(optax.adam(1e-3), comm))],
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=whole(1), default=8, help="P (default 8); virtual devices where there are too few real ones"
    )
    parser.add_argument(
        "--width", type=whole(1), default=64, help="channels of the first stage (default 64, as in ResNet-50)"
    )
    parser.add_argument(
        "--repeats", type=whole(1), default=9, help="runs of each form; the forms take turns (default 9)"
    )
    add_output_options(parser, plot="the times")


def run(args: argparse.Namespace) -> None:
    with contextlib.suppress(RuntimeError):  # It is too late if this process has used JAX already.
        jax.config.update("jax_num_cpu_devices", args.workers)
    devices = jax.devices() if len(jax.devices()) >= args.workers else jax.devices("cpu")
    if len(devices) < args.workers:
        raise ValueError(
            f"{args.workers} workers need as many devices; this process has {len(devices)}: lower --workers"
        )
    shapes = resnet50(args.width)
    parameters = sum(math.prod(shape) for shape in shapes)
    check_memory(8 * parameters, f"--width is {args.width:,}")  # The parameters and a gradient.
    figures = {
        "workers": args.workers,
        "layers": len(shapes),
        "parameters": parameters,
        "device": devices[0].device_kind,
        "jax": jax.__version__,
        "forms": measure(devices[: args.workers], shapes, args.repeats),
    }
    output(args, figures, show, draw_times)


class Program:
    """A compiled form with its arguments; each call runs it once, on the state of the last call.

    Attributes:
      state_bytes: size of the state; of the global arrays where all workers run together.
      sent: what a worker sends in one run.
    """

    def __init__(self, fn: Callable[..., Any], grads: Any, state: Any, params: Any):
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self.sent = traffic(fn, grads, state, params)
        self._run = jax.jit(fn, donate_argnums=1).lower(grads, state, params).compile()
        self._grads, self._state, self._params = grads, state, params
        self()

    def __call__(self) -> None:
        result, self._state = self._run(self._grads, self._state, self._params)
        jax.block_until_ready((result, self._state))


def drawn(shapes: list[tuple[int, ...]], place: Any) -> list[list[jax.Array]]:
    """Random gradients and parameters of these shapes, on a device or sharding."""
    rng = np.random.default_rng(0)
    return [[jax.device_put(rng.standard_normal(s, np.float32), place) for s in shapes] for _ in range(2)]


def all_together(form: Form, devices: list[Any], shapes: list[tuple[int, ...]]) -> Program:
    """The form on all workers, a device each."""
    mesh = Mesh(np.array(devices), (AXIS,))
    grads, params = drawn(shapes, NamedSharding(mesh, ON_ALL))
    found = []

    def probe(params):
        found.append(state_specs(form.tx.init(params), AXIS))
        return params

    jax.eval_shape(jax.shard_map(probe, mesh=mesh, in_specs=ON_ALL, out_specs=ON_ALL), params)
    state = jax.jit(jax.shard_map(form.tx.init, mesh=mesh, in_specs=ON_ALL, out_specs=found[0]))(params)
    ins, outs = (ON_ALL, found[0], ON_ALL), (ON_ALL, found[0])
    return Program(jax.shard_map(form.tx.update, mesh=mesh, in_specs=ins, out_specs=outs), grads, state, params)


def one_alone(form: Form, devices: list[Any], shapes: list[tuple[int, ...]]) -> Program:
    """The form on worker 0, without the others."""
    grads, params = drawn(shapes, devices[0])
    return Program(form.tx.update, grads, jax.jit(form.tx.init)(params), params)


def measure(devices: list[Any], shapes: list[tuple[int, ...]], repeats: int) -> list[dict[str, Any]]:
    """Times the forms of every task in turn, together and alone.

    Args:
      devices: a device for each worker.
      shapes: the parameters' shapes.
      repeats: timed runs of each form.

    Returns:
      The figures of each form.
    """
    results: list[dict[str, Any]] = []
    together, alone = tasks(AxisComm(AXIS)), tasks(Alone(len(devices)))
    with progress_bar() as progress:
        task = progress.add_task("timing", total=repeats * 2 * sum(map(len, together)))
        for many, one in zip(together, alone, strict=True):
            found: list[dict[str, Any]] = [{"task": form.task, "name": form.name} for form in many]
            for kind, make, forms in (("together", all_together, many), ("alone", one_alone, one)):
                programs = [make(form, devices, shapes) for form in forms]
                times: list[list[float]] = [[] for _ in programs]
                for _ in range(repeats):
                    for program, taken in zip(programs, times, strict=True):
                        taken.append(timed(program)[0])
                        progress.advance(task)
                whole = statistics.median(times[0])
                for result, program, taken in zip(found, programs, times, strict=True):
                    result[kind] = spread(taken) | {"times_faster": whole / statistics.median(taken)}
                    if kind == "together":
                        result |= {"words": -(-program.sent.bytes // 4), "messages": program.sent.messages}
                    else:
                        result["state_bytes"] = program.state_bytes
            results += found
    return results


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    table = rich.table.Table(
        rich.table.Column("task", no_wrap=True),
        rich.table.Column("form", no_wrap=True),
        *numbers("together\nms", "range", "faster", "alone\nms", "faster", "words", "mes-\nsages", "state\nMB"),
        title=f"{figures['layers']} layers, {figures['parameters']:,} parameters, {figures['workers']} workers; "
        f"{figures['device']}, jax {figures['jax']}",
        caption="together: all workers at once on this machine. alone: worker 0 on one device, without a network. "
        "faster: times as fast as where every worker does all of it. words, messages, state: of one worker.",
    )
    for form in figures["forms"]:
        together, alone = form["together"], form["alone"]
        table.add_row(
            form["task"],
            form["name"],
            f"{together['median_ms']:.1f}",
            f"{together['min_ms']:.0f}-{together['max_ms']:.0f}",
            f"{together['times_faster']:.2f} x",
            f"{alone['median_ms']:.1f}",
            f"{alone['times_faster']:.2f} x",
            f"{form['words']:,}",
            str(form["messages"]),
            f"{form['state_bytes'] / 1e6:.1f}",
        )
    rich.console.Console(width=120).print(table)


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the median times of each form, together and alone."""
    figure, axes = subplots(1, 2, size=(9, 4), sharey=True)
    names = [f"{form['task']}, {form['name']}" for form in figures["forms"]]
    for kind, part in zip(("together", "alone"), axes, strict=True):
        part.bar_label(part.barh(names, [form[kind]["median_ms"] for form in figures["forms"]]), fmt="%.1f", padding=3)
        part.set(xlabel="median ms", title=kind)
        part.margins(x=0.2)
    axes[0].invert_yaxis()
    figure.suptitle(f"{figures['parameters']:,} parameters, {figures['workers']} workers")
    figure.savefig(path, dpi=120)
