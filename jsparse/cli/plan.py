"""``jsparse plan``: predicts what each algorithm costs on a cluster, and names the cheapest.

The model of the network has a latency and a bandwidth. Nothing overlaps, except local steps as
told by ``--overlap``: a step is computation, selection (sparse algorithms only) and communication,
one after the other. A worker is one GPU, or several that hold a model in shards.
"""

import argparse
import dataclasses
import inspect
import math
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
from ..bench.command import add_output_options, numbers, output, subplots
from ..bench.options import real, whole
from ..quantize import Block8

HELP = "predict what each algorithm costs on a cluster, and name the cheapest one"
NOT_SPARSE = cost.DENSE + cost.DIFFERING + cost.ROUNDING
# On one level hitopk equals topk_allgather, and the other two equal dense.
TWO_LEVELS = ("hitopk", "torus", "dense_hierarchical")
# The most workers in the plot, and the most for which programs are traced.
MOST_WORKERS = 4096
MOST_TRACED = 1024
# A bandwidth may be infinite, where only latencies are to count.
BANDWIDTH, TIME = real(above=0, infinite=True), real(0)
# Options that are numbers: the name, the type, the default, the unit, and what it says.
OPTIONS = (
    ("--latency", TIME, 50.0, "US", "latency of a link between nodes, in µs"),
    ("--node-bandwidth", BANDWIDTH, 200.0, "GBIT", "bandwidth of each GPU inside a node, in Gbit/s"),
    ("--node-latency", TIME, 5.0, "US", "latency inside a node, in µs"),
    ("--step-time", TIME, 0.0, "MS", "time of a step without communication, in ms"),
    ("--selection-time", TIME, 0.0, "MS", "time that selection adds to a step, in ms; see `jsparse bench select`"),
)

# Options of rounds of local steps; the least is the default.
ROUNDS = (
    ("--every", 1, "H", "synchronise after so many local steps"),
    ("--fragments", 1, "F", "parts of the parameters, synchronised one after the other"),
    ("--overlap", 0, "T", "local steps that are taken while messages are under way"),
)
# The parts of the time in which steps are computed for which bandwidths are told.
UTILISATIONS = (0.5, 0.8, 0.95)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--parameters", type=whole(1), required=True, metavar="N", help="length of the gradient, such as 25e6"
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument(
        "--workers", type=whole(1), required=True, metavar="P", help="number of workers, of --shards GPUs each"
    )
    parser.add_argument(
        "--shards", type=whole(1), default=1, metavar="S", help="GPUs that hold a worker's model in shards (default 1)"
    )
    parser.add_argument(
        "--gpus-per-node", type=whole(1), metavar="G", help="GPUs of a node, which share its links (default: --shards)"
    )
    parser.add_argument(
        "--links",
        type=whole(1),
        default=1,
        metavar="L",
        help="links of a node to the others, such as network cards (default 1)",
    )
    parser.add_argument(
        "--bandwidth", type=BANDWIDTH, required=True, metavar="GBIT", help="bandwidth of each link, in Gbit/s"
    )
    for option, read, default, unit, what in OPTIONS:
        text = f"{what} (default {default:g})"
        parser.add_argument(option, type=read, default=default, metavar=unit, help=text)
    for option, least, metavar, what in ROUNDS:
        parser.add_argument(option, type=whole(least), default=least, metavar=metavar, help=f"{what} (default {least})")
    parser.add_argument(
        "--ring",
        action="store_true",
        help="sums and all-gathers run round a ring: 2(P-1) and P-1 messages in place of the papers' 2 log P and log P",
    )
    add_output_options(parser, plot="communication time against workers")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    output(args, predict(args), show, draw_times)


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Predicts from the command's options; returns :func:`forecast`'s figures."""
    alpha, beta = cost.link(args.bandwidth, args.latency)
    gpus = args.shards if args.gpus_per_node is None else args.gpus_per_node
    node = cost.Node(gpus, *cost.link(args.node_bandwidth, args.node_latency), args.links)
    times, rounds = (args.step_time, args.selection_time), cost.Rounds(args.every, args.fragments, args.overlap)
    sizes = args.parameters, args.density, args.workers
    return forecast(*sizes, alpha, beta, node, *times, args.ring, args.shards, rounds)


def forecast(
    n: int,
    density: float,
    workers: int,
    alpha: float,
    beta: float,
    node: cost.Node,
    step_time: float,
    selection_time: float,
    ring: bool = False,
    shards: int = 1,
    rounds: cost.Rounds | None = None,
) -> dict[str, Any]:
    """Predicts what each algorithm costs on a cluster.

    Args:
      n: the gradient's length.
      density: k / n.
      workers: P.
      alpha, beta: seconds a message and a word on a link between nodes.
      node: what a node holds.
      step_time: milliseconds of a step without communication.
      selection_time: milliseconds that selection adds to it.
      ring: whether sums and all-gathers run round a ring.
      shards: the number of GPUs that hold a worker's model in shards.
      rounds: how often workers synchronise; None for every step.

    Returns:
      The figures, with the algorithms ordered by the time of a step, the fastest first. ``bytes``,
      ``sends_bytes`` and messages are those of one GPU, ``worker_bytes`` those of all of a worker,
      all of a round. The time of a step is the mean over a round. ``gbit`` is the bandwidth at
      which steps are computed in 50, 80 and 95 % of the time: None without ``step_time``, and for
      what latencies alone prevent.
    """
    check_density(density)
    if n < 1:
        raise ValueError(f"--parameters is {n}; it is the gradient's length, at least 1")
    rounds = cost.Rounds() if rounds is None else rounds
    k, parts = elements_kept(density, n), rounds.fragments
    # Of a fragment; those of a round are as many times as much.
    lengths, options = (-(-n // parts), -(-k // parts)), {"node": node, "ring": ring, "shards": shards}
    results = []
    for name in names(node, shards):
        prediction = cost.predict(name, *lengths, workers, alpha, beta, **options)
        cases = {case: getattr(prediction, case) for case in ("best", "expected", "worst")}
        sends = exact(name, lengths[0], density, workers, node, shards)

        def needed(budget: float, name: str = name) -> float | None:
            if budget <= 0:
                return None
            found = cost.bandwidth(name, *lengths, workers, alpha, budget, **options)
            return found if math.isfinite(found) else None

        selecting = 0 if name in NOT_SPARSE else selection_time
        budgets = [rounds.budget(step_time / 1e3, part) - selecting / 1e3 / parts for part in UTILISATIONS]
        results.append(
            {
                "name": name,
                "messages": parts * prediction.expected.messages,
                "bytes": {case: 4 * parts * load.words for case, load in cases.items()},
                "worker_bytes": {case: 4 * parts * load.worker_words for case, load in cases.items()},
                "communication_ms": {case: 1e3 * parts * load.seconds for case, load in cases.items()},
                "step_ms": (rounds.seconds(step_time, 1e3 * prediction.expected.seconds) + selecting) / rounds.every,
                "sends_bytes": [parts * part.bytes for part in sends] if sends else None,
                "sends_messages": [parts * part.messages for part in sends] if sends else None,
                "gbit": dict(zip(UTILISATIONS, map(needed, budgets), strict=True)) if step_time else None,
            }
        )
    compared = [result for result in results if result["name"] not in cost.DIFFERING + cost.ROUNDING]
    dense = min(result["step_ms"] for result in results if result["name"] in cost.DENSE)
    for result in results:
        result["times_faster_than_dense"] = dense / result["step_ms"] if result["step_ms"] else 1.0
    results.sort(key=lambda result: result["step_ms"])
    cheapest = min(compared, key=lambda result: result["step_ms"])["name"]
    return {
        "parameters": n,
        "k": k,
        "workers": workers,
        "shards": shards,
        "alpha": alpha,
        "beta": beta,
        "node": dataclasses.asdict(node),
        "ring": ring,
        "rounds": dataclasses.asdict(rounds),
        "step_time_ms": step_time,
        "selection_time_ms": selection_time,
        "cheapest": cheapest,
        "dense_wins": cheapest in cost.DENSE,
        "algorithms": results,
    }


def names(node: cost.Node, shards: int) -> list[str]:
    """The algorithms to compare on such nodes."""
    return [name for name in cost.ALGORITHMS if node.workers(shards) > 1 or name not in TWO_LEVELS]


def preset_of(name: str, density: float) -> tuple[str, dict[str, Any]] | None:
    """The preset of a modelled algorithm, as its name and options; None where there is none."""
    options: dict[str, Any] = {"quantize": Block8()} if name == "quantized" else {}
    if name == "gtopk_tree":
        name, options = "gtopk", {"topology": "tree"}
    preset = presets().get(name)
    if preset is None:
        return None
    if "density" in inspect.signature(preset).parameters:
        options["density"] = density
    return name, options


def exact(name: str, n: int, density: float, workers: int, node: cost.Node, shards: int) -> tuple[Cost, Cost] | None:
    """What a GPU sends by an algorithm's preset, at least and at most; None without a preset.

    None, too, for more elements than one vector can have, and for so many workers that to trace
    the preset's program would take minutes.
    """
    found, own = preset_of(name, density), -(-n // shards)
    if found is None or own >= 2**31 or workers > MOST_TRACED:
        return None
    preset, options = found
    tx = build(describe(preset, **options), ("nodes", "gpus"))
    local = min(node.workers(shards), workers)
    size = (workers // local, local) if len(tx.synchroniser.levels) == 2 else workers
    return cost.exact(tx, jax.ShapeDtypeStruct((shards, own), jnp.float32), size, shards=shards)


def show(figures: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    node, shards = figures["node"], figures["shards"]
    of = f" of {shards} GPUs" if shards > 1 else ""
    nodes = f" in nodes of {node['gpus']}" if node["gpus"] != shards else ""
    links = f" with {node['links']} links a node" if node["links"] > 1 else ""
    every, gbit = figures["rounds"]["every"], figures["step_time_ms"] > 0
    rounds = f", rounds of {every} steps" if every > 1 else ""
    per_round = " a round" if every > 1 else ""
    sizes = {"bytes": "MB a GPU", "worker_bytes": "MB a worker"} if shards > 1 else {"bytes": "MB"}
    table = rich.table.Table(
        "algorithm",
        *numbers("messages", *sizes.values(), "best ms", "ms", "worst ms", "step ms", "over dense", "jsparse MB"),
        *(numbers(*(f"Gbit/s {100 * part:.0f} %" for part in UTILISATIONS)) if gbit else ()),
        title=f"n = {figures['parameters']:,}, k = {figures['k']:,}, {figures['workers']} workers{of}{nodes}{links}"
        f"{rounds}",
        caption=f"ms: predicted time of communication{per_round}, expected under uniform indices; step ms: of a whole "
        "step. Gbit/s: of a link, for steps to be computed in that part of the time. MB: "
        "predicted for the busiest worker. jsparse MB: what a GPU sends in this library, at least and at most "
        f"(up to {MOST_TRACED:,} workers and 2^31 parameters a GPU). "
        f"Not compared: {', '.join(cost.DIFFERING)}, whose replicas differ; {', '.join(cost.ROUNDING)}, which round.",
    )
    for result in figures["algorithms"]:
        times, sends = result["communication_ms"], result["sends_bytes"]
        table.add_row(
            result["name"],
            f"{result['messages']:,.0f}",
            *(short(result[key]["expected"] / 1e6) for key in sizes),
            *(short(times[case]) for case in ("best", "expected", "worst")),
            short(result["step_ms"]),
            "" if result["name"] in cost.DIFFERING else f"{result['times_faster_than_dense']:.2f} x",
            " to ".join(dict.fromkeys(short(part / 1e6) for part in sends)) if sends else "",
            *("never" if part is None else short(part) for part in (result["gbit"] or {}).values()),
        )
    console = rich.console.Console(width=106 + 14 * len(sizes) + 54 * gbit, highlight=False)
    console.print(table)
    console.print(verdict(figures))


def short(figure: float) -> str:
    """Writes a number with three digits, or with all the digits before the point."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def verdict(figures: dict[str, Any]) -> str:
    """Says in words which algorithm to take."""
    results = figures["algorithms"]
    sparse = next(result for result in results if result["name"] not in NOT_SPARSE)
    times = sparse["times_faster_than_dense"]
    if figures["dense_wins"]:
        advice = (
            f"Dense wins: no sparse algorithm is predicted to be faster than {figures['cheapest']}. The fastest sparse "
            f"one, {sparse['name']}, "
            + (f"makes a step {1 / times:.2f} times as long." if times else "takes time to select, and dense none.")
        )
    else:
        advice = (
            f"Sparse wins: a step with {sparse['name']} is {times:.2f} times as fast as with the fastest dense one."
        )
    if figures["rounds"]["every"] == 1:
        dense = next(result for result in results if result["name"] == "dense")
        fastest = next(result for result in results if result["name"] == figures["cheapest"])
        advice += rounds_instead(figures["step_time_ms"], fastest["step_ms"], dense["communication_ms"]["expected"])
    if not figures["selection_time_ms"]:
        advice += " Selection counts as free here: give --selection-time."
    return advice


def rounds_instead(step: float, fastest: float, dense: float) -> str:
    """Advice to synchronise less often, where a step communicates for longer than it computes.

    Args:
      step: milliseconds of a step without communication; 0 where that is not known.
      fastest: milliseconds of the whole step with the fastest algorithm.
      dense: milliseconds of a dense sum.
    """
    if not step or fastest <= 2 * step:
        return ""
    # A fifth of the time is left for the sum.
    every = math.ceil(4 * dense / step)
    return (
        f" Even so, only {100 * step / fastest:.0f} % of a step is computing. Synchronise less often, in rounds of "
        f"local steps: with dense sums and {every} steps in a round it is at least 80 % (--every, docs/local_steps.md)."
    )


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws each algorithm's expected communication time of a round, by the number of workers."""
    parts = figures["rounds"]["fragments"]
    node, shards = cost.Node(**figures["node"]), figures["shards"]
    powers, local = [2**i for i in range(MOST_WORKERS.bit_length())], node.workers(shards)
    sizes = [P for P in powers if 2 <= P < local] + [local * P for P in powers]
    sizes = [P for P in sizes if 2 <= P <= MOST_WORKERS]
    figure, axes = subplots(size=(9, 6))
    compared = [name for name in names(node, shards) if name not in cost.DIFFERING]
    for number, name in enumerate(compared):
        lengths = (-(-figures["parameters"] // parts), -(-figures["k"] // parts))
        link = (figures["alpha"], figures["beta"])
        options = {"node": node, "ring": figures["ring"], "shards": shards}
        predictions = [cost.predict(name, *lengths, P, *link, **options) for P in sizes]
        style = {"color": "black"} if name == "dense" else {"color": f"C{number % 10}"}
        times = [1e3 * parts * prediction.expected.seconds for prediction in predictions]
        axes.plot(sizes, times, "-" if number < 10 else "--", marker="osv^Dx+"[number % 7], label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        xlabel="workers",
        ylabel=f"ms of communication{'' if figures['rounds']['every'] == 1 else ' a round'}, expected",
        title=f"n = {figures['parameters']:,}, k = {figures['k']:,}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
