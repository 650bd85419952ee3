"""``jsparse bench train``: a Flax net trained over slow links, dense and sparse, by the clock; hosts of this machine.

Each host is a process with a network of its own (see ``jsparse network --help``). All train the same net from the same
parameters on the same batches, by SGD with momentum, one form of synchronisation after the other, until the target
accuracy on the test images, or as many steps as are allowed. The clock runs while they train, not while they test or
compile.

computation: a step without any synchronisation; selection: accumulating and selecting; both by themselves on every
host at once. The rest of a step is communication: messages, summing what they bring, and waiting for the cores that the
hosts share.

The net is the SparCML thesis's for MNIST, two hidden layers of 4,096, or VGG-16 for images of 32 x 32. Needs Linux,
root and Flax.
"""

import argparse
import importlib.util
import pathlib
import statistics
import sys
from typing import Any

import rich.console
import rich.progress
import rich.table

from .._vector.density import check_density
from .forms import FORMS
from .hosts import Network, bits_per_second
from .network import slowest, work
from .output import put_out, pyplot

DEFAULT = ("dense", "oktopk", "oktopk, compact bf16")
PARTS = ("computation", "selection", "communication")
SHADES = ("0.75", "C1", "C0")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train over slow links to a target accuracy, dense and sparse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="P", help="how many (default 4)")
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit"], help="of each link, either way: one or several (default 1gbit)"
    )
    parser.add_argument("--net", choices=["dense", "vgg16"], default="dense", help="what to train (default dense)")
    parser.add_argument("--width", type=int, default=4096, help="of the dense net's hidden layers (default 4096)")
    parser.add_argument(
        "--data",
        choices=["digits", "mnist", "cifar10", "random"],
        default="digits",
        help="images: scikit-learn's (the default), from files, or noise of 32 x 32, which has nothing to be learnt",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where MNIST's or CIFAR-10's files are")
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument("--batch", type=int, default=32, help="examples a host a step (default 32)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD, momentum 0.9 (default 0.05)")
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy to be reached (default 0.95)")
    parser.add_argument("--steps", type=int, default=1000, help="at most so many (default 1000)")
    parser.add_argument("--every", type=int, default=10, help="steps from one test to the next (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--form",
        action="append",
        metavar="NAME",
        help=f"train by this one (beside dense), as jsparse bench network names them; may be given again (default: "
        f"{'; '.join(DEFAULT)})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for the standard output")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw them there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("flax") is None:
        raise ValueError("jsparse bench train needs Flax: pip install flax")
    from .train_worker import TrainJob

    check_density(args.density)
    least = {"--hosts": 2, "--width": 1, "--batch": 1, "--steps": 1, "--every": 1}
    for option, number in least.items():
        given = getattr(args, option[2:])
        if given < number:
            raise ValueError(f"{option} is {given}; it is at least {number}")
    names = [form.name for form in FORMS if not form.levels]
    forms = tuple(dict.fromkeys(("dense", *(args.form or DEFAULT))))
    for name in forms:
        if name not in names:
            raise ValueError(f"--form is {name!r}; choose from {', '.join(names)}")
    for rate in args.rate:
        bits_per_second(rate)
    if args.net == "vgg16" and args.data not in ("cifar10", "random"):
        raise ValueError(f"vgg16 takes images of 32 x 32: --data cifar10 or random, not {args.data}")
    job = TrainJob(
        hosts=args.hosts,
        density=args.density,
        rates=tuple(args.rate),
        forms=forms,
        net=args.net,
        width=args.width,
        data=args.data,
        data_dir=args.data_dir,
        batch=args.batch,
        learning_rate=args.learning_rate,
        target=None if args.data == "random" else args.target,
        steps=args.steps,
        every=args.every,
        repeats=9,
        seed=args.seed,
    )
    count = len(job.images().train_y)
    if count < job.hosts * job.batch:
        raise ValueError(f"a batch of {job.hosts * job.batch} is more than the {count} training images")
    runs = [combine(told) for told in zip(*train(job), strict=True)]
    put_out(args, {**vars(job), "runs": runs}, show, draw)


def train(job: Any) -> list[list[dict[str, Any]]]:
    """Runs the job: what each host tells of each training."""
    trainings = len(job.forms) * len(job.rates)
    with (
        Network(job.hosts, job.rates[0]) as network,
        rich.progress.Progress(console=rich.console.Console(file=sys.stderr), transient=True) as progress,
    ):
        task = progress.add_task("starting", total=trainings * job.steps)

        def heard(report: dict[str, Any]) -> None:
            progress.update(task, description=report["name"], completed=report["done"])

        reports = work(network, "jsparse.bench.train_worker", job, heard)
    return [[report for report in told if "step_ms" in report] for told in reports]


def combine(told: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One training, of what its hosts told: a step takes as long as on the slowest."""
    first = told[0]
    step = slowest(told, "step_ms")
    median = statistics.median(step)
    selection = statistics.median(slowest(told, "selection_ms")) if "selection_ms" in first else 0.0
    computation = statistics.median(slowest(told, "computation_ms"))
    return {
        "name": first["name"],
        "rate": first["rate"],
        "parameters": first["parameters"],
        "steps": len(step),
        "accuracy": first["accuracy"],
        "loss": first["loss"],
        "step_ms": step,
        "median_ms": median,
        "computation_ms": computation,
        "selection_ms": selection,
        "communication_ms": max(0.0, median - computation - selection),
        "seconds": sum(step) / 1e3,
        "sent_bytes": max(one["sent_bytes"] for one in told),
        "stated_bytes": max(one["stated_bytes"] for one in told),
    }


def reached(run: dict[str, Any], target: float | None) -> bool:
    return target is not None and bool(run["accuracy"]) and run["accuracy"][-1] >= target


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    target, runs = figures["target"], figures["runs"]
    table = rich.table.Table(
        title=f"{figures['net']}: {runs[0]['parameters']:,} parameters, {figures['data']}, {figures['hosts']} hosts, "
        f"density {100 * figures['density']:g} %",
        caption="seconds: of training, until the target; and how many times faster than dense. ms: the median of a "
        "step, and of its parts. MB: sent by a host in a step, by its interface.",
    )
    table.add_column("rate")
    table.add_column("form")
    columns = ["steps", "accuracy", "seconds", "over dense", "ms", "over dense", *PARTS, "MB"]
    for column in columns:
        table.add_column(column, justify="right")
    for run in sorted(runs, key=lambda run: figures["rates"].index(run["rate"])):
        dense = next(other for other in runs if other["rate"] == run["rate"] and other["name"] == "dense")
        both = reached(run, target) and reached(dense, target)
        table.add_row(
            run["rate"],
            run["name"],
            str(run["steps"]),
            f"{100 * run['accuracy'][-1]:.1f} %" if run["accuracy"] else "-",
            f"{run['seconds']:.1f}" if reached(run, target) else "-",
            f"{dense['seconds'] / run['seconds']:.2f} x" if both else "-",
            f"{run['median_ms']:.0f}",
            f"{dense['median_ms'] / run['median_ms']:.2f} x",
            *(f"{run[f'{part}_ms']:.0f}" for part in PARTS),
            f"{run['sent_bytes'] / 1e6:.3f}",
        )
    rich.console.Console(width=140).print(table)


def draw(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws accuracy by the clock, where there is one, and of what a step's time is made up."""
    plt = pyplot()
    runs, rates = figures["runs"], figures["rates"]
    names = list(dict.fromkeys(run["name"] for run in runs))
    plot, axes = plt.subplots(len(rates), 2, figsize=(11, 4 * len(rates)), layout="constrained", squeeze=False)
    for (clock, bars), rate in zip(axes, rates, strict=True):
        here = [run for run in runs if run["rate"] == rate]
        for run in here:
            seconds = [sum(run["step_ms"][:number]) / 1e3 for number in range(1, run["steps"] + 1)]
            color = f"C{names.index(run['name'])}"
            if run["accuracy"]:
                tested = [min(figures["every"] * (i + 1), run["steps"]) - 1 for i in range(len(run["accuracy"]))]
                accuracy = [100 * value for value in run["accuracy"]]
                clock.plot([seconds[i] for i in tested], accuracy, color=color, label=run["name"])
            else:
                clock.plot(seconds, run["loss"], color=color, label=run["name"])
        clock.set(
            xlabel="seconds of training", ylabel="test accuracy, %" if here[0]["accuracy"] else "loss", title=rate
        )
        clock.legend()
        clock.grid(alpha=0.3)
        bottom = [0.0] * len(here)
        for part, shade in zip(PARTS, SHADES, strict=True):
            heights = [run[f"{part}_ms"] for run in here]
            bars.bar([run["name"] for run in here], heights, bottom=bottom, color=shade, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        bars.set(ylabel="ms a step", title=rate)
        bars.tick_params(axis="x", rotation=15)
        bars.legend()
    plot.savefig(path, dpi=110)
    plt.close(plot)
