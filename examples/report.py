"""Shows training runs: a comparison as a table and a plot, and metrics and rounds as plots."""

import pathlib
from typing import Any

import matplotlib
import numpy as np
import rich.console
import rich.table

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def table(runs: list[dict[str, Any]]) -> None:
    """Prints one row for each run."""
    first = runs[0]
    n, workers = first["parameters"], first["workers"]
    dense_bytes = -(-2 * 4 * n * (workers - 1) // workers)
    out = rich.table.Table(
        title=f"{n:,} parameters, {workers} workers, {len(first['loss'])} steps, k = {first['k']:,}",
        caption="bytes and messages: of a worker in a step. to dense: bytes over those of the dense all-reduce. "
        "selected: elements of one worker that reached the threshold; delivered: how many of them arrived; update: "
        "elements that it has. The last three are means and standard deviations, over k.",
    )
    out.add_column("algorithm", no_wrap=True)
    for name in ("test\naccuracy", "loss", "bytes", "to dense", "messages", "ms\na step"):
        out.add_column(name, justify="right")
    for name in ("selected\n/ k", "delivered\n/ k", "update\n/ k"):
        out.add_column(name, justify="right")
    for run in runs:
        sent = np.mean(run["bytes"])
        out.add_row(
            run["algorithm"],
            f"{100 * run['accuracy'][-1]:.1f} %",
            f"{np.mean(run['loss'][-run['steps_per_epoch'] :]):.3f}",
            f"{sent:,.0f}",
            f"1 / {dense_bytes / sent:.1f}" if sent else "-",
            f"{np.mean(run['messages']):.0f}",
            f"{np.median(run['milliseconds'][1:] or run['milliseconds']):.0f}",
            *(_spread(run[name], run) for name in ("selected", "delivered", "updated")),
        )
    rich.console.Console(width=122).print(out)


def _spread(counts: list[Any], run: dict[str, Any]) -> str:
    """Writes the mean and standard deviation of counts, over k."""
    if not np.any(run["selected"]):
        return "-"
    share = np.array(counts) / run["k"]
    return f"{share.mean():.2f} ± {share.std():.2f}"


def plot(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws loss by step, test accuracy by step and by bytes sent, and bytes by algorithm."""
    figure, ((loss, by_step), (by_bytes, sent)) = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for number, run in enumerate(runs):
        color, every = f"C{number}", run["steps_per_epoch"]
        steps = np.arange(1, len(run["loss"]) + 1)
        smooth = np.convolve(run["loss"], np.ones(every) / every, mode="valid")
        loss.plot(steps, run["loss"], color=color, alpha=0.2)
        loss.plot(steps[every - 1 :], smooth, color=color, label=run["algorithm"])
        accuracy = 100 * np.array(run["accuracy"])
        by_step.plot(steps[every - 1 :: every], accuracy, color=color, marker=".")
        by_bytes.plot(np.cumsum(run["bytes"])[every - 1 :: every], accuracy, color=color, marker=".")
        sent.bar(run["algorithm"], np.mean(run["bytes"]), color=color)
    loss.set(xlabel="step", ylabel="training loss", yscale="log")
    loss.legend()
    by_step.set(xlabel="step", ylabel="test accuracy, %")
    by_bytes.set(xlabel="bytes sent by a worker", ylabel="test accuracy, %", xscale="log")
    sent.set(ylabel="bytes a worker a step", yscale="log")
    sent.tick_params(axis="x", rotation=20)
    for axes in (loss, by_step, by_bytes, sent):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_metrics(lines: list[dict[str, float]], path: pathlib.Path) -> None:
    """Draws what ``jsparse.metrics`` told of each step of a run."""
    panels = {
        "bytes": "bytes sent by a worker",
        "density": "density of the update",
        "residual_over_update": "residual's norm over the update's",
        "age": "age of the residual, steps",
    }
    figure, all_axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained", sharex=True)
    steps = [line["jsparse/step"] for line in lines]
    for axes, (name, label) in zip(all_axes.flat, panels.items(), strict=True):
        axes.plot(steps, [line[f"jsparse/{name}"] for line in lines], linewidth=1)
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    for axes in all_axes[-1]:
        axes.set(xlabel="step")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def plot_rounds(lines: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the validation loss of each method by the clock and by bytes sent."""
    figure, (clock, sent) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for method in dict.fromkeys(line["method"] for line in lines):
        run = [line for line in lines if line["method"] == method]
        loss = [line["loss"] for line in run]
        clock.plot([line["seconds"] for line in run], loss, label=method)
        sent.plot([line["bytes"] for line in run], loss)
    top = 2 * min(line["loss"] for line in lines)  # So that a bad beginning does not flatten the rest.
    clock.set(xlabel="seconds of training", ylabel="validation loss, nats a byte", xscale="log", ylim=(None, top))
    sent.set(xlabel="bytes sent by a worker", xscale="log")
    clock.legend()
    for axes in (clock, sent):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_bytes(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the last validation loss of each run by the bytes sent, and all losses by steps."""

    def first(own: list[dict[str, Any]]) -> dict[str, Any]:
        return next((run for run in own if run["budget"] in (0, 256)), own[0])

    figure, (sent, by_step) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained", sharey=True)
    best = min(run["mean"] for run in runs)
    for number, method in enumerate(dict.fromkeys(run["method"] for run in runs)):
        own = sorted((run for run in runs if run["method"] == method), key=lambda run: run["bytes"][-1])
        style = {"color": f"C{number % 10}", "marker": "os^vD"[number // 10]}
        sent.plot([run["bytes"][-1] for run in own], [run["mean"] for run in own], label=method, **style)
        by_step.plot(first(own)["at"], first(own)["loss"], **style, markersize=3)
    sent.set(
        xlabel="bytes sent by a worker",
        ylabel="validation loss, nats a byte",
        xscale="log",
        ylim=(0.98 * best, 1.6 * best),
    )
    by_step.set(xlabel="step (dense, or 1/256 of its bytes, or what the method sends)")
    figure.legend(*sent.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    for axes in (sent, by_step):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
