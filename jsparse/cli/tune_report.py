"""The recommendation, tables and plots that ``jsparse tune`` makes of its figures."""

import pathlib
from typing import Any

import rich.console
import rich.table

from .. import cost
from ..bench.command import numbers, subplots
from .links import INSIDE
from .plan import rounds_instead, short

# A sparse algorithm is recommended only if a step is faster by this factor. A smaller gain may be
# noise, and dense sums lose no accuracy.
MARGIN = 1.05


def recommended(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest result, or the fastest dense one where no other is clearly faster."""
    if results[0]["times_faster_than_dense"] >= MARGIN:
        return results[0]
    return next(result for result in results if result["preset"] in cost.DENSE)


def show(figures: dict[str, Any]) -> None:
    """Prints the network's figures, the table, and the verdict."""
    predicted, console = figures["predicted"], rich.console.Console(width=120, highlight=False)
    for name, link in figures["links"].items():
        rate = f"{32e-9 / link['beta']:.3g} Gbit/s" if link["beta"] else "a rate beyond measure"
        where = "inside a node" if name == INSIDE else "between nodes" if INSIDE in figures["links"] else "network"
        console.print(
            f"{where}: {1e6 * link['alpha']:.3g} µs a message, {rate} (typical error {100 * link['error']:.0f} %)"
        )
    table = rich.table.Table(
        "algorithm",
        *numbers("synchronisation ms", "range", "step ms", "predicted ms", "over dense"),
        title=f"n = {predicted['parameters']:,}, k = {predicted['k']:,}, {figures['workers']} workers on "
        f"{figures['nodes']} nodes; {figures['device']}, jax {figures['jax']}",
        caption="synchronisation: selection and communication, measured. step: synchronisation and "
        f"{short(predicted['step_time_ms'])} ms of computation. predicted: the step as the model predicts it, with "
        f"{short(predicted['selection_time_ms'])} ms of selection.",
    )
    for result in figures["measured"]:
        times, guess = result["synchronisation_ms"], result["predicted_step_ms"]
        table.add_row(
            result["name"],
            short(times["median"]),
            f"{short(times['min'])} to {short(times['max'])}",
            short(result["step_ms"]),
            "" if guess is None else short(guess),
            f"{result['times_faster_than_dense']:.2f} x",
        )
    console.print(table)
    console.print(verdict(figures))


def verdict(figures: dict[str, Any]) -> str:
    """Says in words which algorithm to take."""
    name, results = figures["recommended"], figures["measured"]
    if figures["dense_wins"]:
        near = next((result for result in results if result["preset"] not in cost.DENSE), None)
        advice = f"Dense wins: take {name}."
        if near:
            advice += (
                f" The fastest sparse one, {near['name']}, makes a step "
                f"{1 / near['times_faster_than_dense']:.2f} times as long (it is taken below {1 / MARGIN:.2f})."
            )
    else:
        advice = (
            f"Take {name} at density {figures['density']}: a step is {figures['times_faster_than_dense']:.2f} times as "
            "fast as with the fastest dense one."
        )
    step = figures["predicted"]["step_time_ms"]
    dense = next(result for result in results if result["preset"] == "dense")
    advice += rounds_instead(step, results[0]["step_ms"], dense["step_ms"] - step)
    if not step:
        advice += " The computation of a step counts as free here: give --model or --step-time."
    return f"{advice} jsparse.from_file reads this choice from {figures['out']}."


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the network's samples with the fitted lines, and each algorithm's step time."""
    figure, (left, right) = subplots(1, 2, size=(12, 5))
    for name, samples in figures["samples"].items():
        link = figures["links"][name]
        for number, what in enumerate(dict.fromkeys(sample["what"] for sample in samples)):
            of = [sample for sample in samples if sample["what"] == what]
            style = {"color": f"C{number}", "marker": "s" if name == INSIDE else "o"}
            left.plot(
                [s["payload"] for s in of], [1e3 * s["seconds"] for s in of], ls="", label=f"{what}, {name}", **style
            )
            line = [1e3 * (link["alpha"] * s["messages"] + link["beta"] * s["words"]) for s in of]
            left.plot([s["payload"] for s in of], line, color=f"C{number}", lw=1)
    left.set(xscale="log", yscale="log", xlabel="words", ylabel="ms", title="messages and the α-β model")
    left.legend(fontsize="small")
    results = figures["measured"][::-1]
    bars = right.barh([result["name"] for result in results], [result["step_ms"] for result in results])
    right.bar_label(bars, fmt="%.3g", padding=3)
    guesses = [(i, r["predicted_step_ms"]) for i, r in enumerate(results) if r["predicted_step_ms"] is not None]
    right.plot([guess for _, guess in guesses], [i for i, _ in guesses], "k|", ms=14, label="predicted")
    right.margins(x=0.15)
    right.set(xlabel="ms a step", title=f"n = {figures['predicted']['parameters']:,}, density {figures['density']}")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
