"""``jsparse bench network``: times one synchronisation over slow links, in every form.

Forms of two levels, and of pairs, are measured where the hosts can be grouped so.

The hosts are processes of this machine, each with a network of its own, like those of ``jsparse
network``. The forms are measured one after the other. All hosts begin each step together, and a
step's time is that of the slowest host; the table shows the median of some steps.

The time of a synchronisation has three parts. Two programs without the network measure them, on
all hosts at once:

- selection: accumulation and selection, measured by the first program.
- rest: all other computation. The second program does all the computation of a synchronisation:
  what a host sends comes back to it at once. The rest is its time without the selection.
- communication: the time of the synchronisation without its computation. It includes waiting for
  the cores that the hosts share.

Selection and rest are also told in passes over the gradient. A pass is what a dense sum computes.
It is measured after each form, and the median of them all is taken.

The floor is the busiest host's bytes over the link's rate: no synchronisation of these bytes can
be faster.

``--json`` writes the figures of each form as soon as there are any. A run that was stopped goes on
by ``--resume`` with the forms that the file lacks.

Where PyTorch is installed, its gloo all-reduce, its float16 hook, top-k with an all-gather, and
PowerSGD are measured in the same run. Needs Linux and root.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import rich.console
import rich.table

from .._vector.density import elements_kept
from .command import add_output_options, numbers, subplots
from .forms import FORMS
from .hosts import bits_per_second
from .job import NetworkJob, add_job_options
from .options import LONGEST, check_memory, whole
from .reports import Reports, run_workers, slowest
from .resume import Result, measure_forms
from .timing import spread
from .torch_worker import TORCH_FORMS

HELP = "time one synchronisation over slow links, in every form"
PARTS = ("selection", "rest", "communication")
# How many forms are measured in one process of a host.
TOGETHER = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, form="measure this form, beside dense; repeatable (default: all)")
    parser.add_argument(
        "--size",
        type=whole(1, LONGEST),
        default=14_728_266,
        metavar="N",
        help="n, the gradient's length (default 14728266)",
    )
    parser.add_argument(
        "--repeats", type=whole(1), default=9, help="timed steps of each form (default 9; fewer for slow ones)"
    )
    parser.add_argument(
        "--devices",
        type=whole(1),
        default=1,
        metavar="D",
        help="workers on each host, each with a gradient (default 1)",
    )
    add_output_options(parser, plot="the times", figures="the figures, as they come,")


def run(args: argparse.Namespace) -> None:
    # A gradient and a residual of each worker.
    workers = args.hosts * args.devices
    check_memory(8 * args.size * workers, f"--size is {args.size:,}, for {workers} workers")
    ours = [form.name for form in FORMS]
    # A process of PyTorch is one worker.
    names = ours if args.devices > 1 else [*ours, *TORCH_FORMS]
    job = NetworkJob.chosen(args, names, default=names if importlib.util.find_spec("torch") else ours)
    for name in args.forms or ():
        if any(form.name == name and not job.fits(form) for form in FORMS):
            raise ValueError(
                f"--form is {name!r}, which needs workers in groups: take an even number of --hosts, or of --devices"
            )
    measure_forms(args, job, "forms", measure=measure, combine=combine, describe=describe, show=show, draw=draw_times)


def describe(job: NetworkJob, results: list[Result]) -> dict[str, Any]:
    """The figures: the job, the versions of JAX and PyTorch, and the results.

    Each result also says how many times as fast as dense it is, at its rate, and for how many
    passes over the gradient it computes.
    """
    dense = {result["rate"]: result["median_ms"] for result in results if result["name"] == "dense"}
    passes = [result["pass_ms"] for result in results if "pass_ms" in result]

    def compared(result: Result) -> Result:
        ratios = {"times_faster_than_dense": dense[result["rate"]] / result["median_ms"]}
        if "pass_ms" in result:
            ratios["passes"] = (result["selection_ms"] + result["rest_ms"]) / statistics.median(passes)
        return result | ratios

    return {
        **vars(job),
        "k": elements_kept(job.density, job.size),
        "jax": jax.__version__,
        "torch": importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None,
        "forms": [compared(result) for result in results],
    }


def measure(job: NetworkJob, keep: Callable[[Reports], None]) -> Reports:
    """Runs the job on as many hosts, and returns what each reports of every form at every rate.

    Processes keep what they free, and their memory grows from form to form. So a few forms at a
    time are measured in new ones.

    Args:
      job: the job.
      keep: takes the reports so far, whenever there are more.

    Raises:
      ValueError: a form of PyTorch is asked for, which is not installed.
      WorkerFailedError: a worker failed.
    """
    ours, theirs = ([name for name in names if name in job.forms] for names in ([f.name for f in FORMS], TORCH_FORMS))
    groups = [ours[begin : begin + TOGETHER] for begin in range(0, len(ours), TOGETHER)]
    runs = [("jsparse.bench.network_worker", dataclasses.replace(job, forms=group)) for group in groups]
    if theirs and not importlib.util.find_spec("torch"):
        raise ValueError(f"--form is {theirs[0]!r}, and PyTorch is not installed: pip install torch")
    if theirs:
        runs.append(("jsparse.bench.torch_worker", dataclasses.replace(job, forms=theirs)))
    return run_workers(runs, keep) if runs else []


def combine(reports: Reports) -> list[Result]:
    """Combines the reports of all hosts, which tell of the same in the same order."""
    results: list[Result] = []
    for told in zip(*reports, strict=True):
        first = told[0]
        ms = slowest(told, "ms")
        result: Result = {
            "name": first["name"],
            "rate": first["rate"],
            "dense_update": first["dense_update"],
            **spread(ms),
            "steps": len(ms),
            "bytes": statistics.fmean(report["sent_bytes"] for report in told),
            "floor_ms": 8e3
            * max(max(report["sent_bytes"], report["received_bytes"]) for report in told)
            / bits_per_second(first["rate"]),
            "memory": first.get("memory"),
        }
        if "stated_bytes" in first:
            result["stated_bytes"] = statistics.fmean(report["stated_bytes"] for report in told)
            result["least_bytes"], result["most_bytes"] = first["least_bytes"], first["most_bytes"]
        if "computing_ms" in first:  # PyTorch's forms have no parts.
            computing = statistics.median(slowest(told, "computing_ms"))
            selection = statistics.median(slowest(told, "selection_ms")) if "selection_ms" in first else 0.0
            result["selection_ms"] = selection
            result["rest_ms"] = max(computing - selection, 0.0)
            result["communication_ms"] = max(result["median_ms"] - computing, 0.0)
            result["pass_ms"] = statistics.median(slowest(told, "pass_ms"))
        results.append(result)
    return results


def hosts(figures: dict[str, Any]) -> str:
    """The hosts, in words."""
    devices = figures["devices"]
    return f"{figures['hosts']} hosts" + (f" of {devices} devices" if devices > 1 else "")


def show(figures: dict[str, Any]) -> None:
    """Prints a table for every rate."""
    for rate in figures["rates"]:
        table = rich.table.Table(
            "form",
            *numbers("ms", "min to max", "over dense", *PARTS, "passes", "floor", "MB", "stated", "memory"),
            title=f"{hosts(figures)} at {rate}, n = {figures['size']:,}, k = {figures['k']:,}; jax "
            f"{figures['jax']}" + (f", torch {figures['torch']}" if figures["torch"] else ""),
            caption="ms: median time of a synchronisation and of its parts. over dense: times as fast as dense. "
            "passes: selection and rest, over the time of one pass over the gradient. floor: ms that the bytes alone "
            "take. MB: sent by a host as its interface counts them, and as jsparse states them. memory: temporary "
            "memory over the gradient's own.",
        )
        for result in sorted(
            (result for result in figures["forms"] if result["rate"] == rate), key=lambda result: result["median_ms"]
        ):
            stated, memory = result.get("stated_bytes"), result["memory"]
            parts = [result.get(f"{part}_ms") for part in PARTS]
            passes = result.get("passes")
            table.add_row(
                result["name"],
                f"{result['median_ms']:,.1f}",
                f"{result['min_ms']:,.0f} to {result['max_ms']:,.0f}",
                f"{result['times_faster_than_dense']:.2f} x",
                *("" if part is None else f"{part:,.1f}" for part in parts),
                "" if passes is None else f"{passes:.1f}",
                f"{result['floor_ms']:,.1f}",
                f"{result['bytes'] / 1e6:.3f}",
                "" if stated is None else f"{stated / 1e6:.3f}",
                "" if memory is None else f"{memory:.2f}",
            )
        rich.console.Console(width=150, highlight=False).print(table)


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws each form's time as a bar of its parts, and its floor; one panel for each rate."""
    rates = [rate for rate in figures["rates"] if any(result["rate"] == rate for result in figures["forms"])]
    count = len(rates)
    names = list(dict.fromkeys(result["name"] for result in figures["forms"]))
    figure, panels = subplots(1, count, size=(5 + 5 * count, 1.5 + 0.3 * len(names)), squeeze=False)
    for rate, axes in zip(rates, panels[0], strict=True):
        here = {result["name"]: result for result in figures["forms"] if result["rate"] == rate}
        ordered = sorted(here.values(), key=lambda result: -result["median_ms"])
        labels, begin = [result["name"] for result in ordered], [0.0] * len(ordered)
        for number, part in enumerate(PARTS):
            widths = [result.get(f"{part}_ms", 0.0) for result in ordered]
            axes.barh(labels, widths, left=begin, color=f"C{number}", label=part)
            begin = [b + w for b, w in zip(begin, widths, strict=True)]
        # PyTorch's forms have no parts. A form's computation alone can take longer than the
        # whole, by noise.
        ends = [max(result["median_ms"], b) for result, b in zip(ordered, begin, strict=True)]
        rest = [end - b for end, b in zip(ends, begin, strict=True)]
        axes.barh(labels, rest, left=begin, color="0.6", label="not told apart")
        axes.plot([result["floor_ms"] for result in ordered], labels, "|k", markersize=9, label="floor")
        # The longest bars are cut off, so that the others can be told apart.
        limit = 1.15 * sorted(result["median_ms"] for result in ordered)[-1 - len(ordered) // 5]
        for label, end, result in zip(labels, ends, ordered, strict=True):
            text, cut = f"{result['median_ms']:,.0f}", end > limit
            offset, side, color = (-3, "right", "white") if cut else (3, "left", "black")
            place = {"textcoords": "offset points", "ha": side, "va": "center"}
            axes.annotate(text, (min(end, limit), label), (offset, 0), color=color, fontsize="small", **place)
        axes.margins(y=0.01)
        axes.set(xlim=(0, limit), xlabel="ms", title=f"{hosts(figures)} at {rate}")
    panels[0][-1].legend(fontsize="small", loc="upper right")
    figure.savefig(path, dpi=80)
