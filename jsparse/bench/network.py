"""``jsparse bench network``: what a synchronisation costs over slow links, in every form; hosts of this one machine.

Each host is a process with a network of its own (see ``jsparse network --help``). Forms are measured one after the
other; of each, the median of some steps that all hosts begin together, by the slowest host.

selection: accumulating and selecting, by itself on every host at once. The whole of the computing is measured likewise,
by a program in which what a host sends comes back to it at once: the part of it that is not selection is the rest. What
the synchronisation takes beyond its computing is communication, which includes waiting for the cores that the hosts
share. floor: the bytes of the busiest host over the rate, without which nothing can do.

Where PyTorch is installed, its gloo all-reduce, its float16 hook, top-k with an all-gather, and PowerSGD of rank 4 are
measured in the same run. Needs Linux and root.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
from typing import Any

import jax
import rich.console
import rich.progress
import rich.table

from .._vector.density import check_density, elements_kept
from ..cli.plan import whole_number
from .forms import FORMS
from .hosts import Network, bits_per_second, wait_for_all
from .job import REPORT, Job
from .output import put_out, pyplot
from .torch_worker import TORCH_FORMS

PARTS = ("selection", "rest", "communication")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "network",
        help="time a synchronisation over slow links, in every form",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="P", help="how many (default 4)")
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit"], help="of each link, either way: one or several (default 1gbit)"
    )
    parser.add_argument("--size", type=whole_number, default=14_728_266, metavar="N", help="n (default 14728266)")
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each form (default 9)")
    parser.add_argument(
        "--form", action="append", metavar="NAME", help="measure this one (beside dense); may be given again"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for the standard output")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the times there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_density(args.density)
    if args.hosts < 2 or args.size < 1 or args.repeats < 1:
        raise ValueError("--hosts is at least 2, --size and --repeats are at least 1")
    names = [form.name for form in FORMS] + list(TORCH_FORMS)
    unknown = [name for name in args.form or () if name not in names]
    if unknown:
        raise ValueError(f"--form is {unknown[0]!r}; choose from {', '.join(names)}")
    for rate in args.rate:
        bits_per_second(rate)
    forms = None if args.form is None else ("dense", *args.form)
    job = Job(args.hosts, args.size, args.density, tuple(args.rate), args.repeats, forms)
    put_out(args, {**describe(job), "forms": measure(job)}, show, draw_times)


def describe(job: Job) -> dict[str, Any]:
    return {
        "hosts": job.hosts,
        "size": job.size,
        "density": job.density,
        "k": elements_kept(job.density, job.size),
        "rates": list(job.rates),
        "repeats": job.repeats,
        "jax": jax.__version__,
        "torch": importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None,
    }


def measure(job: Job) -> list[dict[str, Any]]:
    """Runs the job, and returns the figures of every form at every rate."""
    jobs = [("jsparse.bench.worker", job)]
    if importlib.util.find_spec("torch") and any(job.wants(name) for name in TORCH_FORMS):
        jobs.append(("jsparse.bench.torch_worker", job))
    total = len(job.rates) * sum(job.wants(name) for name in [*(form.name for form in FORMS), *TORCH_FORMS])
    columns = (rich.progress.TextColumn("{task.description}"), *rich.progress.Progress.get_default_columns()[1:])
    reports: list[list[dict[str, Any]]] = [[] for _ in range(job.hosts)]
    with (
        Network(job.hosts, job.rates[0]) as network,
        rich.progress.Progress(*columns, console=rich.console.Console(file=sys.stderr), transient=True) as progress,
    ):
        task = progress.add_task("starting", total=total)

        def heard(report: dict[str, Any]) -> None:
            progress.update(task, description=report["name"], advance=1)

        for module, todo in jobs:
            for told, more in zip(reports, work(network, module, todo, heard), strict=True):
                told.extend(more)
    return combine(job, reports)


def work(network: Network, module: str, job: Job, heard: Any) -> list[list[dict[str, Any]]]:
    """Runs a worker on every host: what each reports."""
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            network.start(
                rank,
                [sys.executable, "-m", module, job.written()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for rank in range(network.hosts)
        ]
        reports: list[list[dict[str, Any]]] = [[] for _ in processes]

        failures: list[Exception] = []

        def listen(rank: int, process: Any) -> None:
            try:
                for line in process.stdout:
                    if line.startswith(REPORT):
                        hear(rank, process, json.loads(line.removeprefix(REPORT)))
            except Exception as error:
                failures.append(error)
                process.kill()

        def hear(rank: int, process: Any, report: dict[str, Any]) -> None:
            if "ask" in report:
                network.set_rate(report["ask"])
                process.stdin.write("\n")
                process.stdin.flush()
                return
            reports[rank].append(report)
            if rank == 0:
                heard(report)

        listeners = [
            threading.Thread(target=listen, args=(rank, process), daemon=True) for rank, process in enumerate(processes)
        ]
        for listener in listeners:
            listener.start()
        wait_for_all(processes)
        for listener in listeners:
            listener.join(timeout=5)
        if failures:
            raise failures[0]
        if any(process.returncode for process in processes):
            errors.seek(0)
            lines = errors.read().splitlines()
            raise ValueError("a worker failed:\n" + "\n".join(lines[-30:]))
    return reports


def combine(job: Job, reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The figures of each form at each rate, of what all hosts tell of it.

    Args:
      job: the job.
      reports: of each host, in the same order.
    """
    results: list[dict[str, Any]] = []
    for told in zip(*reports, strict=True):
        first = told[0]
        ms = slowest(told, "ms")
        result: dict[str, Any] = {
            "name": first["name"],
            "rate": first["rate"],
            "dense_update": first["dense_update"],
            "median_ms": statistics.median(ms),
            "min_ms": min(ms),
            "max_ms": max(ms),
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
        if "computing_ms" in first:
            computing = statistics.median(slowest(told, "computing_ms"))
            selection = statistics.median(slowest(told, "selection_ms")) if "selection_ms" in first else 0.0
            result["selection_ms"] = selection
            result["rest_ms"] = max(computing - selection, 0.0)
            result["communication_ms"] = max(result["median_ms"] - computing, 0.0)
        results.append(result)
    for rate in job.rates:
        here = [result for result in results if result["rate"] == rate]
        dense = next(result["median_ms"] for result in here if result["name"] == "dense")
        for result in here:
            result["times_faster_than_dense"] = dense / result["median_ms"]
    return results


def slowest(told: tuple[dict[str, Any], ...], what: str) -> list[float]:
    """Of each step the time of the host that took longest."""
    return [max(times) for times in zip(*(report[what] for report in told), strict=True)]


def show(figures: dict[str, Any]) -> None:
    """Prints a table for every rate."""
    for rate in figures["rates"]:
        table = rich.table.Table(
            title=f"{figures['hosts']} hosts at {rate}, n = {figures['size']:,}, k = {figures['k']:,}; jax "
            f"{figures['jax']}" + (f", torch {figures['torch']}" if figures["torch"] else ""),
            caption="ms: median of a synchronisation, and of its parts. over dense: how many times faster. MB: sent by "
            "a host, by its interface and as jsparse states it. floor: ms that the bytes alone take. memory: "
            "temporary, over the gradient's.",
        )
        table.add_column("form")
        for name in ("ms", "min to max", "over dense", *PARTS, "floor", "MB", "stated", "memory"):
            table.add_column(name, justify="right")
        for result in sorted(
            (result for result in figures["forms"] if result["rate"] == rate), key=lambda result: result["median_ms"]
        ):
            stated, memory = result.get("stated_bytes"), result["memory"]
            parts = [result.get(f"{part}_ms") for part in PARTS]
            table.add_row(
                result["name"],
                f"{result['median_ms']:,.1f}",
                f"{result['min_ms']:,.0f} to {result['max_ms']:,.0f}",
                f"{result['times_faster_than_dense']:.2f} x",
                *("" if part is None else f"{part:,.1f}" for part in parts),
                f"{result['floor_ms']:,.1f}",
                f"{result['bytes'] / 1e6:.3f}",
                "" if stated is None else f"{stated / 1e6:.3f}",
                "" if memory is None else f"{memory:.2f}",
            )
        rich.console.Console(width=150, highlight=False).print(table)


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a bar for each form, in its parts, and its floor; a panel for each rate."""
    plt = pyplot()
    count = len(figures["rates"])
    names = list(dict.fromkeys(result["name"] for result in figures["forms"]))
    figure, panels = plt.subplots(
        1, count, figsize=(5 + 5 * count, 1.5 + 0.3 * len(names)), layout="constrained", squeeze=False
    )
    for rate, axes in zip(figures["rates"], panels[0], strict=True):
        here = {result["name"]: result for result in figures["forms"] if result["rate"] == rate}
        ordered = sorted(here.values(), key=lambda result: -result["median_ms"])
        labels, begin = [result["name"] for result in ordered], [0.0] * len(ordered)
        for number, part in enumerate(PARTS):
            widths = [result.get(f"{part}_ms", 0.0) for result in ordered]
            axes.barh(labels, widths, left=begin, color=f"C{number}", label=part)
            begin = [b + w for b, w in zip(begin, widths, strict=True)]
        # PyTorch's, whose parts are not told apart; and what noise has made shorter than its computing.
        ends = [max(result["median_ms"], b) for result, b in zip(ordered, begin, strict=True)]
        rest = [end - b for end, b in zip(ends, begin, strict=True)]
        axes.barh(labels, rest, left=begin, color="0.6", label="not told apart")
        axes.plot([result["floor_ms"] for result in ordered], labels, "|k", markersize=9, label="floor")
        # The longest would leave the others no room: they are cut off.
        limit = 1.15 * sorted(result["median_ms"] for result in ordered)[-1 - len(ordered) // 5]
        for label, end, result in zip(labels, ends, ordered, strict=True):
            text, cut = f"{result['median_ms']:,.0f}", end > limit
            offset, side, color = (-3, "right", "white") if cut else (3, "left", "black")
            place = {"textcoords": "offset points", "ha": side, "va": "center"}
            axes.annotate(text, (min(end, limit), label), (offset, 0), color=color, fontsize="small", **place)
        axes.set(xlim=(0, limit), xlabel="ms", title=f"{figures['hosts']} hosts at {rate}")
    panels[0][-1].legend(fontsize="small", loc="upper right")
    figure.savefig(path, dpi=80)
    plt.close(figure)
