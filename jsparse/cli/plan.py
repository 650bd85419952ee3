"""``jsparse plan``: predicts what each algorithm costs on a cluster, and names the cheapest.

The model of the network has a latency and a bandwidth. Nothing overlaps: a step is computation,
selection (sparse algorithms only) and communication, one after the other.
"""

import argparse
import inspect
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

from .. import cost
from .._comm.cost import Cost
from .._presets.files import build, describe, presets
from .._vector.density import check_density, elements_kept
from ..bench.command import add_output_options, numbers, output, subplots, whole_number

HELP = "predict what each algorithm costs on a cluster, and name the cheapest one"
# On one level hitopk equals topk_allgather, and the other two equal dense.
TWO_LEVELS = ("hitopk", "torus", "dense_hierarchical")
MOST_WORKERS = 4096
# Options that are numbers: the name, the default, the unit, and what it says.
OPTIONS = (
    ("--latency", 50.0, "US", "latency of a node's link, in µs"),
    ("--node-bandwidth", 200.0, "GBIT", "bandwidth of each GPU inside a node, in Gbit/s"),
    ("--node-latency", 5.0, "US", "latency inside a node, in µs"),
    ("--step-time", 0.0, "MS", "time of a step without communication, in ms"),
    ("--selection-time", 0.0, "MS", "time that selection adds to a step, in ms; see `jsparse bench select`"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--parameters", type=whole_number, required=True, metavar="N", help="length of the gradient, such as 25e6"
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument("--workers", type=int, required=True, metavar="P", help="number of GPUs in total")
    parser.add_argument(
        "--gpus-per-node", type=int, default=1, metavar="G", help="workers that share a node's link (default 1)"
    )
    parser.add_argument(
        "--bandwidth", type=float, required=True, metavar="GBIT", help="bandwidth of a node's link, in Gbit/s"
    )
    for option, default, unit, what in OPTIONS:
        text = f"{what} (default {default:g})"
        parser.add_argument(option, type=float, default=default, metavar=unit, help=text)
    add_output_options(parser, plot="communication time against workers")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.step_time < 0 or args.selection_time < 0:
        raise ValueError(
            f"--step-time is {args.step_time} and --selection-time {args.selection_time}; "
            "they are milliseconds, at least 0"
        )
    alpha, beta = cost.link(args.bandwidth, args.latency)
    node = cost.Node(args.gpus_per_node, *cost.link(args.node_bandwidth, args.node_latency))
    times = args.step_time, args.selection_time
    figures = forecast(args.parameters, args.density, args.workers, alpha, beta, node, *times)
    output(args, figures, show, draw_times)


def forecast(
    n: int,
    density: float,
    workers: int,
    alpha: float,
    beta: float,
    node: cost.Node,
    step_time: float,
    selection_time: float,
) -> dict[str, Any]:
    """Predicts what each algorithm costs on a cluster.

    Args:
      n: the gradient's length.
      density: k / n.
      workers: P.
      alpha, beta: seconds a message and a word between nodes.
      node: what is inside a node.
      step_time: milliseconds of a step without communication.
      selection_time: milliseconds that selection adds to it.

    Returns:
      The figures, with the algorithms ordered by the time of a step, the fastest first.
    """
    check_density(density)
    if n < 1:
        raise ValueError(f"--parameters is {n}; it is the gradient's length, at least 1")
    k = elements_kept(density, n)
    results = []
    for name in names(node.gpus):
        prediction = cost.predict(name, n, k, workers, alpha, beta, node=node)
        cases = {case: getattr(prediction, case) for case in ("best", "expected", "worst")}
        step = step_time + 1e3 * prediction.expected.seconds
        sends = exact(name, n, density, workers, node.gpus)
        results.append(
            {
                "name": name,
                "messages": prediction.expected.messages,
                "bytes": {case: 4 * load.words for case, load in cases.items()},
                "communication_ms": {case: 1e3 * load.seconds for case, load in cases.items()},
                "step_ms": step if name in cost.DENSE else step + selection_time,
                "sends_bytes": [part.bytes for part in sends] if sends else None,
                "sends_messages": [part.messages for part in sends] if sends else None,
            }
        )
    alike = [result for result in results if result["name"] not in cost.DIFFERING]
    dense = min(result["step_ms"] for result in results if result["name"] in cost.DENSE)
    for result in results:
        result["times_faster_than_dense"] = dense / result["step_ms"] if result["step_ms"] else 1.0
    results.sort(key=lambda result: result["step_ms"])
    cheapest = min(alike, key=lambda result: result["step_ms"])["name"]
    return {
        "parameters": n,
        "k": k,
        "workers": workers,
        "alpha": alpha,
        "beta": beta,
        "node": {"gpus": node.gpus, "alpha": node.alpha, "beta": node.beta},
        "step_time_ms": step_time,
        "selection_time_ms": selection_time,
        "cheapest": cheapest,
        "dense_wins": cheapest in cost.DENSE,
        "algorithms": results,
    }


def names(gpus: int) -> list[str]:
    """The algorithms to compare on nodes of so many GPUs."""
    return [name for name in cost.ALGORITHMS if gpus > 1 or name not in TWO_LEVELS]


def preset_of(name: str, density: float) -> tuple[str, dict[str, Any]] | None:
    """The preset of a modelled algorithm, as its name and options; None where there is none."""
    options: dict[str, Any] = {}
    if name == "gtopk_tree":
        name, options = "gtopk", {"topology": "tree"}
    preset = presets().get(name)
    if preset is None:
        return None
    if "density" in inspect.signature(preset).parameters:
        options["density"] = density
    return name, options


def exact(name: str, n: int, density: float, workers: int, gpus: int) -> tuple[Cost, Cost] | None:
    """What an algorithm's preset sends, at least and at most; None where there is no preset."""
    found = preset_of(name, density)
    if found is None:
        return None
    preset, options = found
    tx = build(describe(preset, **options), ("nodes", "gpus"))
    gpus = min(gpus, workers)
    size = (workers // gpus, gpus) if len(tx.synchroniser.levels) == 2 else workers
    return cost.exact(tx, jax.ShapeDtypeStruct((n,), jnp.float32), size)


def show(figures: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    node = figures["node"]
    nodes = f" in nodes of {node['gpus']}" if node["gpus"] > 1 else ""
    table = rich.table.Table(
        "algorithm",
        *numbers("messages", "MB", "best ms", "ms", "worst ms", "step ms", "over dense", "jsparse MB"),
        title=f"n = {figures['parameters']:,}, k = {figures['k']:,}, {figures['workers']} workers{nodes}",
        caption="ms: predicted time of communication, expected under uniform indices; step ms: of a whole step. MB: "
        "predicted for the busiest worker. jsparse MB: what a worker sends in this library, at least and at most. "
        f"Not compared, because its replicas differ: {', '.join(cost.DIFFERING)}.",
    )
    for result in figures["algorithms"]:
        times, sends = result["communication_ms"], result["sends_bytes"]
        table.add_row(
            result["name"],
            f"{result['messages']:,.0f}",
            short(result["bytes"]["expected"] / 1e6),
            *(short(times[case]) for case in ("best", "expected", "worst")),
            short(result["step_ms"]),
            "" if result["name"] in cost.DIFFERING else f"{result['times_faster_than_dense']:.2f} x",
            " to ".join(dict.fromkeys(short(part / 1e6) for part in sends)) if sends else "",
        )
    console = rich.console.Console(width=120, highlight=False)
    console.print(table)
    console.print(verdict(figures))


def short(figure: float) -> str:
    """Writes a number with three digits, or with all the digits before the point."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def verdict(figures: dict[str, Any]) -> str:
    """Says in words which algorithm to take."""
    results = figures["algorithms"]
    sparse = next(result for result in results if result["name"] not in cost.DENSE + cost.DIFFERING)
    times = sparse["times_faster_than_dense"]
    if figures["dense_wins"]:
        advice = (
            f"Dense wins: no sparse algorithm is predicted to be faster than {figures['cheapest']}. The fastest sparse "
            f"one, {sparse['name']}, makes a step {1 / times:.2f} times as long."
        )
    else:
        advice = (
            f"Sparse wins: a step with {sparse['name']} is {times:.2f} times as fast as with the fastest dense one."
        )
    if not figures["selection_time_ms"]:
        advice += " Selection counts as free here: give --selection-time."
    return advice


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws each algorithm's expected communication time against the number of workers."""
    node = cost.Node(**figures["node"])
    powers = [2**i for i in range(MOST_WORKERS.bit_length())]
    sizes = [P for P in powers if 2 <= P < node.gpus] + [node.gpus * P for P in powers]
    sizes = [P for P in sizes if 2 <= P <= MOST_WORKERS]
    figure, axes = subplots(size=(9, 6))
    compared = [name for name in names(node.gpus) if name not in cost.DIFFERING]
    for number, name in enumerate(compared):
        predictions = [
            cost.predict(name, figures["parameters"], figures["k"], P, figures["alpha"], figures["beta"], node=node)
            for P in sizes
        ]
        style = {"color": "black"} if name == "dense" else {"color": f"C{number % 10}"}
        times = [1e3 * prediction.expected.seconds for prediction in predictions]
        axes.plot(sizes, times, "-" if number < 10 else "--", marker="osv^Dx+"[number % 7], label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        xlabel="workers",
        ylabel="ms of communication, expected",
        title=f"n = {figures['parameters']:,}, k = {figures['k']:,}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
