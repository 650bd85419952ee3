"""Figures of synchronisations and messages over slow links, beside the cost model."""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import rich.table
from matplotlib.axes import Axes

from jsparse import cost
from jsparse.bench.hosts import bits_per_second
from jsparse.cli.tune import CANDIDATES

from .convergence import beyond
from .figure import Figure, Line, Setting, found, shown, values

# The forms of `jsparse bench network` that the cost model has, by their names in the model.
MODELLED = {
    "dense": "dense",
    "a2sgd": "a2sgd",
    "topk_allgather": "topk_allgather",
    "gaussiank": "gaussiank",
    "topk_dsa": "topk_dsa",
    "gtopk": "gtopk",
    "gtopk, tree": "gtopk_tree",
    "oktopk": "oktopk",
    "ssar_recursive_doubling": "ssar_recursive_doubling",
    "ssar_split_allgather": "ssar_split_allgather",
    "dsar_split_allgather": "dsar_split_allgather",
    "qsgd": "qsgd",
    "parameter_server": "parameter_server",
}


def bits(rate: str) -> float:
    """Gbit/s of a rate such as ``"100mbit"``."""
    return bits_per_second(rate) / 1e9


@dataclasses.dataclass(frozen=True)
class Synchronised(Figure):
    """Synchronisations on hosts of this machine with shaped links (``jsparse bench network``).

    Needs Linux and root. Hosts share this machine's cores, so only *communication*, which leaves
    computing out, is compared with the cost model.

    Attributes:
      forms: of ``jsparse bench network``.
      hosts, sizes, densities, rates: what they are measured with, all of them with all others.
      over: the plot's axis: ``"hosts"``, ``"size"`` or ``"density"``.
      devices: workers on each host.
      repeats: steps of each form.
    """

    forms: tuple[str, ...]
    hosts: tuple[int, ...] = (4,)
    sizes: tuple[int, ...] = (14_728_266,)
    densities: tuple[float, ...] = (0.01,)
    rates: tuple[str, ...] = ("1gbit",)
    over: str = "hosts"
    devices: int = 1
    repeats: int = 9

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        sized = self.sized(full)
        for size in sized.sizes:
            for hosts in sized.hosts:
                for rate in sized.rates:
                    for density in sized.densities:
                        yield {
                            "full": full,
                            "hosts": hosts,
                            "size": size,
                            "density": density,
                            "rate": rate,
                            "devices": sized.devices,
                            "repeats": sized.repeats,
                            "forms": ";".join(sized.forms),
                        }

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        link = ping_pong(setting["rate"])["link"]
        options = [f"--{name}={setting[name]}" for name in ("hosts", "size", "density", "rate", "devices", "repeats")]
        options += [f"--form={form}" for form in setting["forms"].split(";")]
        found = json.loads(command("bench", "network", *options, "--json=-"))
        spread, parts = ("median_ms", "min_ms", "max_ms"), ("selection_ms", "rest_ms", "communication_ms", "floor_ms")
        names = (*spread, *parts, "bytes", "memory")
        return {
            "alpha": link["alpha"],
            "beta": link["beta"],
            "times": {form["name"]: {name: form.get(name) for name in names} for form in found["forms"]},
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            for form, times in line["times"].items():
                told, memory = predicted(form, line), times.get("memory")
                parts = (times["median_ms"], times["selection_ms"], times["rest_ms"], times["communication_ms"])
                rows.append(
                    (
                        form,
                        *(str(line[name]) for name in ("hosts", "rate")),
                        f"{line['size']:,}",
                        f"{100 * line['density']:g} %",
                        *("" if part is None else f"{part:,.1f}" for part in parts),
                        f"{times['floor_ms']:,.1f}",
                        "" if told is None else f"{told:,.1f}",
                        "" if memory is None else f"{memory:.2f}",
                    )
                )
        columns = (
            "form",
            "hosts",
            "rate",
            "n",
            "density",
            "ms",
            "selection",
            "rest",
            "communication",
            "floor",
            "model",
            "memory",
        )
        caption = (
            "model: ms of communication by jsparse.cost, expected, with the α and β of a ping-pong of two hosts. "
            "memory: temporary memory of a step over the gradient's own."
        )
        return shown("synchronisations over shaped links", caption, columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(name: str, fixed: Setting, axes: Axes) -> None:
            here = found(lines, fixed)
            for number, form in enumerate(dict.fromkeys(form for line in here for form in line["times"])):
                own = sorted((line for line in here if form in line["times"]), key=lambda line: line[self.over])
                x = [line[self.over] for line in own]
                axes.plot(x, [line["times"][form][name] for line in own], marker="o", color=f"C{number}", label=form)
                model = [told for told in (predicted(form, line) for line in own) if told is not None]
                if name == "communication_ms" and len(model) == len(own):
                    axes.plot(x, model, linestyle=":", color=f"C{number}")
            axes.set(xlabel=self.over, xscale="log", yscale="log", ylabel=f"ms, {name.removesuffix('_ms')}")
            axes.set_title(", ".join(f"{key} {value}" for key, value in fixed.items()))

        others = [name for name in ("hosts", "size", "density", "rate") if name != self.over]
        cases = [
            dict(zip(others, case, strict=True))
            for case in dict.fromkeys(tuple(line[o] for o in others) for line in lines)
        ]
        return [functools.partial(draw, name, case) for case in cases for name in ("median_ms", "communication_ms")]


def predicted(form: str, line: Line) -> float | None:
    """Milliseconds of communication by the cost model, or None where it does not have the form."""
    if form not in MODELLED or line["devices"] > 1:
        return None
    n, k = line["size"], max(1, round(line["density"] * line["size"]))
    prediction = cost.predict(MODELLED[form], n, k, line["hosts"], line["alpha"], line["beta"])
    return 1e3 * prediction.expected.seconds


def command(*arguments: str) -> str:
    """Runs a command of jsparse, and returns what it prints.

    Raises:
      ValueError: it failed; the message has the end of what it wrote.
    """
    done = subprocess.run([sys.executable, "-m", "jsparse", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"jsparse {' '.join(arguments)} failed: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def tuned(hosts: int, rate: str, *options: str) -> dict[str, Any]:
    """The figures of ``jsparse tune`` on hosts with shaped links."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "tune.json"
        tune = [sys.executable, "-m", "jsparse", "tune", *options, "--distributed=env", f"--out={path}"]
        command("network", f"--hosts={hosts}", f"--rate={rate}", "--", *tune)
        return json.loads(path.read_text())["tune"]


@functools.cache
def ping_pong(rate: str) -> dict[str, Any]:
    """What ``jsparse tune`` measures between two hosts with a shaped link.

    Returns:
      ``"link"``, with ``alpha`` and ``beta``, seconds of a message and of a word; and its
      ``"samples"``.
    """
    figures = tuned(2, rate, "--parameters=10000", "--candidates=1")
    between = next(iter(figures["links"]))
    return {"link": figures["links"][between], "samples": figures["samples"][between]}


@dataclasses.dataclass(frozen=True)
class PingPong(Figure):
    """The time of a message by its length, between hosts with a shaped link (``jsparse tune``).

    Attributes:
      rates: of the link.
    """

    rates: tuple[str, ...] = ("1gbit",)

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        yield from ({"full": full, "rate": rate} for rate in self.rates)

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        return ping_pong(setting["rate"])

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            link = line["link"]
            nominal = 4 * 8 / (bits(line["rate"]) * 1e9)
            rows.append(
                (line["rate"], f"{1e6 * link['alpha']:,.0f}", f"{1e9 * link['beta']:.1f}", f"{1e9 * nominal:.1f}")
            )
        columns = ("rate", "α, µs a message", "β, ns a word", "of the rate alone")
        return shown("a line through the times of messages", "by the least mean of relative errors", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(line: Line, axes: Axes) -> None:
            for number, what in enumerate(values(line["samples"], "what")):
                own = found(line["samples"], {"what": what})
                axes.plot(
                    [s["words"] for s in own], [1e3 * s["seconds"] for s in own], "o", color=f"C{number}", label=what
                )
            axes.set(xlabel="words", ylabel="ms", xscale="log", yscale="log", title=line["rate"])

        return [functools.partial(draw, line) for line in lines]


@dataclasses.dataclass(frozen=True)
class Tuned(Figure):
    """Whether what ``jsparse tune`` recommends is the fastest, over shaped links.

    It measures only what the cost model expects to be fast. In a second run it measures all.

    Attributes:
      cases: hosts, rate, length and density.
    """

    ALL = 99

    cases: tuple[tuple[int, str, int, float], ...]

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        for case in self.sized(full).cases:
            for candidates in (CANDIDATES, self.ALL):
                names = ("hosts", "rate", "size", "density")
                yield {"full": full, **dict(zip(names, case, strict=True)), "candidates": candidates}

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        names = {"size": "parameters", "density": "density", "candidates": "candidates"}
        options = [f"--{option}={setting[name]}" for name, option in names.items()]
        figures = tuned(setting["hosts"], setting["rate"], *options)
        times = {result["name"]: result["synchronisation_ms"] for result in figures["measured"]}
        return {"recommended": figures["recommended"], "times": times}

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in found(lines, {"candidates": self.ALL}):
            case = {name: line[name] for name in ("hosts", "rate", "size", "density")}
            times = line["times"]
            dense, best = times["dense"]["median"], min(times, key=lambda form: times[form]["median"])
            for own in (one for one in found(lines, case) if one is not line):
                name = own["recommended"]
                own_ms, best_ms = (times.get(name) or own["times"][name])["median"], times[best]["median"]
                rows.append(
                    (
                        *(str(line[key]) for key in ("hosts", "rate")),
                        f"{line['size']:,}",
                        f"{100 * line['density']:g} %",
                        *(name, f"{own_ms:,.1f}", best, f"{best_ms:,.1f}", f"{own_ms / best_ms:.2f}", f"{dense:,.1f}"),
                    )
                )
        columns = ("hosts", "rate", "n", "density", "recommended", "ms", "fastest of all", "ms", "ratio", "dense")
        return shown("what jsparse tune recommends", "ms of a synchronisation with a dense update", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(line: Line, axes: Axes) -> None:
            names = sorted(line["times"], key=lambda name: -line["times"][name]["median"])
            axes.barh(names, [line["times"][name]["median"] for name in names])
            axes.set(xlabel="ms", xscale="log")
            axes.set_title(f"{line['hosts']} hosts, {line['rate']}, n {line['size']:,}, {100 * line['density']:g} %")

        return [functools.partial(draw, line) for line in found(lines, {"candidates": self.ALL})]


@dataclasses.dataclass(frozen=True)
class TimeToAccuracy(Figure):
    """Seconds of training until an accuracy, over shaped links (``jsparse bench train``).

    Every form tries the same learning rates with the first seed, and more beyond them while its
    best one, by seconds, is the largest or the smallest. Its best one is run with the other seeds.

    Attributes:
      forms: of ``jsparse bench network``, dense among them.
      learning_rates: that are tried.
      hosts, rate, width, density, batch, target, steps: of ``jsparse bench train``, on MNIST.
      seeds: how many.
    """

    forms: tuple[str, ...]
    learning_rates: tuple[float, ...]
    hosts: int = 4
    rate: str = "1gbit"
    width: int = 4096
    density: float = 0.01
    batch: int = 32
    target: float = 0.95
    steps: int = 1000
    seeds: int = 3

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        sized = self.sized(full)
        names = ("hosts", "rate", "width", "density", "batch", "target", "steps")
        case = {"full": full} | {name: getattr(sized, name) for name in names}

        def trained(forms: Sequence[str], rate: float, seed: int) -> Setting:
            return {**case, "forms": ";".join(forms), "learning_rate": rate, "seed": seed}

        def best() -> dict[str, float]:
            runs = {form: fastest(found(lines, case | {"seed": 0}), form) for form in sized.forms}
            return {form: line["learning_rate"] for form, line in runs.items() if line}

        tried = dict.fromkeys(sized.forms, sized.learning_rates)
        yield from (trained(sized.forms, rate, 0) for rate in sized.learning_rates)
        while further := {f: rate for f, chosen in best().items() if (rate := beyond(tried[f], chosen))}:
            for rate in dict.fromkeys(further.values()):
                yield trained([form for form in further if further[form] == rate], rate, 0)
            tried |= {form: (*tried[form], rate) for form, rate in further.items()}
        for seed in range(1, sized.seeds):
            for rate in dict.fromkeys(best().values()):
                yield trained([form for form, chosen in best().items() if chosen == rate], rate, seed)

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        if files is None:
            raise ValueError("MNIST is read from files: name the directory with --data-dir")
        names = ("hosts", "rate", "width", "density", "batch", "target", "steps", "seed", "learning_rate")
        options = [f"--{name.replace('_', '-')}={setting[name]}" for name in names]
        forms = setting["forms"].split(";")
        options += ["--data=mnist", f"--data-dir={files / 'mnist'}", *(f"--form={form}" for form in forms)]
        runs = json.loads(command("bench", "train", *options, "--json=-"))["runs"]
        kept = ("steps", "seconds", "median_ms", "computation_ms", "selection_ms", "communication_ms", "sent_bytes")
        return {
            "runs": {
                run["name"]: {name: run[name] for name in kept} | {"accuracy": run["accuracy"][-1]}
                for run in runs
                if run["name"] in forms
            }
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows, of_dense = [], math.nan
        for form in trained_forms(lines):
            best = fastest(found(lines, {"seed": 0}), form)
            if best is None:
                rows.append((form, *"-----------"))
                continue
            runs = [
                line["runs"][form]
                for line in found(lines, {"learning_rate": best["learning_rate"]})
                if form in line["runs"]
            ]
            seconds = [run["seconds"] for run in runs if run["accuracy"] >= best["target"]]
            mean = statistics.fmean(seconds)
            of_dense = mean if form == "dense" else of_dense
            parts = ("median_ms", "computation_ms", "selection_ms", "communication_ms")
            rows.append(
                (
                    form,
                    f"{best['learning_rate']:g}",
                    f"{len(seconds)} of {len(runs)}",
                    f"{mean:.1f}",
                    f"{min(seconds):.1f} - {max(seconds):.1f}",
                    f"{of_dense / mean:.2f}",
                    f"{statistics.fmean(run['steps'] for run in runs):.0f}",
                    *(f"{statistics.fmean(run[part] for run in runs):.0f}" for part in parts),
                    f"{runs[0]['sent_bytes'] / 1e6:.2f}",
                )
            )
        columns = ("form", "learning rate", "reached", "seconds", "from - to", "over dense", "steps")
        columns += ("ms a step", "computation", "selection", "communication", "MB a step")
        first = lines[0]
        title = f"MNIST to {100 * first['target']:g} %, {first['hosts']} hosts, {first['rate']}, width {first['width']}"
        return shown(title, "means over the seeds", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(axes: Axes) -> None:
            for number, form in enumerate(trained_forms(lines)):
                runs = [
                    (line["learning_rate"], line["runs"][form]["seconds"])
                    for line in lines
                    if form in line["runs"] and line["runs"][form]["accuracy"] >= line["target"]
                ]
                axes.plot([r for r, _ in runs], [s for _, s in runs], "o", color=f"C{number}", label=form)
            axes.set(xlabel="learning rate", ylabel="seconds to the accuracy", xscale="log", yscale="log")

        return [draw]


def trained_forms(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(form for line in lines for form in line["runs"]))


def fastest(lines: Sequence[Line], form: str) -> Line | None:
    """The run in which a form needed the fewest seconds to the accuracy, if it was reached."""
    reached = [line for line in lines if form in line["runs"] and line["runs"][form]["accuracy"] >= line["target"]]
    return min(reached, key=lambda line: line["runs"][form]["seconds"], default=None)
