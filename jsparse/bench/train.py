"""``jsparse bench train``: trains a Flax net over slow links, dense and sparse, by the clock.

The hosts are processes of this machine, each with a network of its own, like those of ``jsparse
network``. They train one net by SGD with momentum, with one form of synchronisation after the
other. Every training starts from the same parameters and sees the same batches. It ends at the
target accuracy on the test images, or after the largest number of steps. The clock runs while the
hosts train, not while they test or compile.

A step has three parts. The first two are measured by themselves, on all hosts at once:

- computation: a step without any synchronisation.
- selection: accumulation and selection.
- communication: the rest of the step, which is messages, sums of what arrives, and waiting for the
  cores that the hosts share.

``--json`` writes the figures of each training as soon as it ends. A run that was stopped goes on
by ``--resume`` with the forms that the file lacks.

The net is the one that the SparCML thesis trains on MNIST, with two hidden layers of 4,096; VGG-16
or ResNet-20 for images of 32 x 32; or LSTM-PTB for words. Needs Linux, root and Flax; the digits
need scikit-learn, too.
"""

import argparse
import importlib.util
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console
import rich.table

from .command import add_output_options, numbers, subplots
from .forms import FORMS
from .job import Job, add_job_options
from .options import real, whole
from .reports import Reports, run_workers, slowest
from .resume import Result, measure_forms

HELP = "train over slow links to a target accuracy, dense and sparse"
NETS = ("dense", "vgg16", "resnet20", "lstm")
DEFAULT = ("dense", "oktopk", "oktopk, compact bf16")
PARTS = ("computation", "selection", "communication")
# Shades of grey, because the colours stand for the forms.
SHADES = ("0.85", "0.6", "0.3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = (
        "train with this form of jsparse bench network, of one level and jsparse's own, beside dense; repeatable "
        f"(default: {'; '.join(DEFAULT)})"
    )
    add_job_options(parser, form=form)
    parser.add_argument("--net", choices=NETS, default="dense", help="net to train (default dense)")
    parser.add_argument(
        "--width", type=whole(1), default=4096, help="width of the dense net's hidden layers (default 4096)"
    )
    parser.add_argument(
        "--data",
        choices=["digits", "mnist", "cifar10", "random"],
        default="digits",
        help="images: scikit-learn's digits (default), MNIST's or CIFAR-10's from files, or noise of 32 x 32, or for "
        "the lstm random words, from which there is nothing to learn",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="directory of MNIST's or CIFAR-10's files")
    parser.add_argument("--batch", type=whole(1), default=32, help="examples a host and step (default 32)")
    parser.add_argument(
        "--learning-rate", type=real(above=0), default=0.05, help="of SGD with momentum 0.9 (default 0.05)"
    )
    parser.add_argument(
        "--target", type=real(), default=0.95, help="test accuracy at which training ends (default 0.95)"
    )
    parser.add_argument("--steps", type=whole(1), default=1000, help="largest number of steps (default 1000)")
    parser.add_argument("--every", type=whole(1), default=10, help="steps from one test to the next (default 10)")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of the parameters and batches (default 0)")
    plot = "accuracy by the clock and the parts of a step"
    add_output_options(parser, plot=plot, figures="the figures, as they come,")


def run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("flax") is None:
        raise ValueError("jsparse bench train needs Flax: pip install flax")
    from .train_worker import TrainJob

    if args.net in ("vgg16", "resnet20") and args.data not in ("cifar10", "random"):
        raise ValueError(f"{args.net} takes images of 32 x 32: choose --data cifar10 or random, not {args.data}")
    if args.net == "lstm" and args.data != "random":
        raise ValueError(f"the lstm takes words: choose --data random, not {args.data}")
    if args.data == "random":
        args.target = None  # There is nothing to learn from noise.
    job = TrainJob.chosen(args, [form.name for form in FORMS if not form.levels], DEFAULT)
    count = len(job.images().train_y)
    if count < job.hosts * job.batch:
        raise ValueError(
            f"a batch of {job.hosts * job.batch} is more than the {count} training examples: lower --hosts or --batch"
        )
    measure_forms(args, job, "runs", measure=measure, combine=combine, describe=describe, show=show, draw=draw)


def describe(job: Job, results: list[Result]) -> dict[str, Any]:
    """The figures: the job, the version of JAX, and the trainings."""
    return {**vars(job), "jax": jax.__version__, "runs": results}


def measure(job: Job, keep: Callable[[Reports], None]) -> Reports:
    """Runs the job, and returns each host's reports, one for each training.

    Args:
      job: the job.
      keep: takes the reports so far, whenever there are more.

    Raises:
      WorkerFailedError: a worker failed.
    """
    return run_workers([("jsparse.bench.train_worker", job)], keep)


def combine(reports: Reports) -> list[Result]:
    """Combines the reports of all hosts, which tell of the same trainings in the same order."""
    return [of_all_hosts(told) for told in zip(*reports, strict=True)]


def of_all_hosts(told: Sequence[dict[str, Any]]) -> Result:
    """Combines the hosts' reports of one training; a step's time is that of the slowest host."""
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
    """Whether a training reached the target accuracy; False where there is no target."""
    return target is not None and bool(run["accuracy"]) and run["accuracy"][-1] >= target


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    target, runs = figures["target"], figures["runs"]
    table = rich.table.Table(
        "rate",
        "form",
        *numbers("steps", "accuracy", "seconds", "over dense", "ms", "over dense", *PARTS, "MB"),
        title=f"{figures['net']}: {runs[0]['parameters']:,} parameters, {figures['data']}, {figures['hosts']} hosts, "
        f"density {100 * figures['density']:g} %",
        caption="seconds: of training until the target. ms: median time of a step and of its parts. over dense: times "
        "as fast as dense. MB: sent by a host in a step, as its interface counts them.",
    )
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
    """Draws test accuracy by the clock (the loss where there is no target), and a step's parts."""
    runs = figures["runs"]
    rates = [rate for rate in figures["rates"] if any(run["rate"] == rate for run in runs)]
    names = list(dict.fromkeys(run["name"] for run in runs))
    figure, axes = subplots(len(rates), 2, size=(11, 4 * len(rates)), squeeze=False)
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
    figure.savefig(path, dpi=110)
