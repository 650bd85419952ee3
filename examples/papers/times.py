"""Figures of time: synchronisations over slow links beside the cost model, and computing alone."""

import abc
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from matplotlib.axes import Axes

import jsparse
from jsparse import cost
from jsparse.bench import alone as comm
from jsparse.bench.gradients import draw as draw_values
from jsparse.bench.hosts import bits_per_second
from jsparse.bench.timing import spread, timed

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
        names = ("median_ms", "min_ms", "max_ms", "selection_ms", "rest_ms", "communication_ms", "floor_ms", "bytes")
        return {
            "alpha": link["alpha"],
            "beta": link["beta"],
            "times": {form["name"]: {name: form.get(name) for name in names} for form in found["forms"]},
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            for form, times in line["times"].items():
                told = predicted(form, line)
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
        )
        caption = "model: ms of communication by jsparse.cost, expected, with the α and β of a ping-pong of two hosts."
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


@functools.cache
def ping_pong(rate: str) -> dict[str, Any]:
    """What ``jsparse tune`` measures between two hosts with a shaped link.

    Returns:
      ``"link"``, with ``alpha`` and ``beta``, seconds of a message and of a word; and its
      ``"samples"``.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "tune.json"
        tune = [sys.executable, "-m", "jsparse", "tune", "--parameters=10000", "--candidates=1"]
        command("network", "--hosts=2", f"--rate={rate}", "--", *tune, "--distributed=env", f"--out={path}")
        figures = json.loads(path.read_text())["tune"]
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
        return shown("a line through the times of messages", "by least squares of relative errors", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(line: Line, axes: Axes) -> None:
            for number, what in enumerate(values(line["samples"], "what")):
                own = found(line["samples"], {"what": what})
                axes.plot(
                    [s["words"] for s in own], [1e3 * s["seconds"] for s in own], "o", color=f"C{number}", label=what
                )
            axes.set(xlabel="words", ylabel="ms", xscale="log", yscale="log", title=line["rate"])

        return [functools.partial(draw, line) for line in lines]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(Figure):
    """Times of computing alone, without a network; the forms take turns.

    Attributes:
      sizes, densities: n, and k / n; all with all others.
      repeats: how often each form is timed.
    """

    sizes: tuple[int, ...]
    densities: tuple[float, ...] = (0.001,)
    repeats: int = 9

    @abc.abstractmethod
    def forms(self, n: int, density: float) -> Mapping[str, Callable[[], Any]]:
        """What is timed, by its name."""

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        sized = self.sized(full)
        for size in sized.sizes:
            for density in sized.densities:
                yield {"full": full, "size": size, "density": density, "repeats": sized.repeats, "of": self.kind()}

    def kind(self) -> str:
        """What the runs depend on, but for the sizes."""
        return type(self).__name__

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        forms = self.forms(setting["size"], setting["density"])
        times: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(setting["repeats"] + 2):
            for name, run in forms.items():
                ms, _ = timed(run)
                if number > 1:  # The first ones compile.
                    times[name].append(ms)
        return {"times": {name: spread(ms) for name, ms in times.items()}}

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        names = list(lines[0]["times"])
        rows = [
            (
                f"{line['size']:,}, {100 * line['density']:g} %",
                *(f"{line['times'][name]['median_ms']:,.2f}" for name in names),
            )
            for line in lines
        ]
        return shown("computing alone", "medians, in ms", ("n, density", *names), rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        over = "size" if len(values(lines, "size")) > 1 else "density"
        ordered = sorted(lines, key=lambda line: line[over])

        def draw(axes: Axes) -> None:
            for name in lines[0]["times"]:
                ms = [line["times"][name]["median_ms"] for line in ordered]
                axes.plot([line[over] for line in ordered], ms, "o-", label=name)
            axes.set(xlabel=over, ylabel="ms", xscale="log", yscale="log")

        return [draw]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computing(Alone):
    """The computing of one worker's synchronisation, which gets its own messages back.

    Attributes:
      presets: a name, and a function of a comm and of the density that makes a transformation.
      workers: for how many the messages are.
    """

    presets: Mapping[str, Callable[[Any, float], Any]]
    workers: int = 8

    def kind(self) -> str:
        return f"{';'.join(self.presets)} of {self.workers} workers"

    def forms(self, n: int, density: float) -> Mapping[str, Callable[[], Any]]:
        grads = jnp.asarray(draw_values("gaussian", n, seed=0))

        def steps(make: Callable[[Any, float], Any]) -> Callable[[], Any]:
            tx = make(comm.Alone(self.workers), density)
            step = jax.jit(tx.update, donate_argnums=1)
            state = [jax.tree.map(jnp.copy, tx.init(grads))]  # No buffer twice: they are donated.

            def run() -> Any:
                update, state[0] = step(grads, state[0])
                return update

            return run

        return {name: steps(make) for name, make in self.presets.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summing(Alone):
    """The sum of two sparse vectors with uniformly drawn indices, and of two dense ones."""

    def forms(self, n: int, density: float) -> Mapping[str, Callable[[], Any]]:
        rng, k = np.random.default_rng(0), max(1, round(density * n))

        def vector() -> jsparse.SparseVector:
            indices = np.sort(rng.choice(n, k, replace=False)).astype(np.int32)
            return jsparse.SparseVector(jnp.asarray(rng.normal(size=k), jnp.float32), jnp.asarray(indices), n)

        sparse = vector(), vector()
        dense = tuple(one.to_dense() for one in sparse)
        merge, add = jax.jit(lambda a, b: a.beside(b).merge()), jax.jit(jnp.add)
        return {"sparse": lambda: merge(*sparse), "dense": lambda: add(*dense)}


@dataclasses.dataclass(frozen=True)
class Bench(Figure):
    """The times that a command of ``jsparse bench`` measures, once for each value of an option.

    Attributes:
      arguments: of the command.
      times: a function of one of the command's forms that gives its times, medians in ms, by name.
      by: an option, and its values.
    """

    arguments: tuple[str, ...]
    times: Callable[[Mapping[str, Any]], Mapping[str, float]]
    by: tuple[str, tuple[int, ...]]

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        option, given = self.sized(full).by
        for value in given:
            yield {"full": full, "arguments": " ".join(self.arguments), "option": option, "value": value}

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        figures = json.loads(command("bench", *self.arguments, f"{setting['option']}={setting['value']}", "--json=-"))
        return {"ms": {name: ms for form in figures["forms"] for name, ms in self.times(form).items()}}

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = [(name, *(f"{line['ms'][name]:,.2f}" for line in lines)) for name in lines[0]["ms"]]
        columns = ("ms", *(f"{line['option'].strip('-')} {line['value']:,}" for line in lines))
        return shown(f"jsparse bench {lines[0]['arguments']}", "medians", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        ordered = sorted(lines, key=lambda line: line["value"])

        def draw(axes: Axes) -> None:
            if len(ordered) == 1:
                axes.barh(list(ordered[0]["ms"]), list(ordered[0]["ms"].values()))
                axes.set(xlabel="ms", xscale="log")
                return
            for name in ordered[0]["ms"]:
                axes.plot([line["value"] for line in ordered], [line["ms"][name] for line in ordered], "o-", label=name)
            axes.set(xlabel=ordered[0]["option"].strip("-"), ylabel="ms", xscale="log", yscale="log")

        return [draw]


@dataclasses.dataclass(frozen=True)
class Model(Figure):
    """What the cost model says, where the paper's cluster is too large to measure here.

    Attributes:
      what: ``"ms"``, ``"words"`` that a worker sends, or ``"union"``: the elements of the sum of
        uniformly drawn indices. All are expected ones.
      algorithms: of ``jsparse.cost``.
      workers, sizes, densities: all with all others.
      link: α and β, such as ``cost.link(gbit, microseconds)``.
      node: what a node holds.
    """

    what: Literal["ms", "words", "union"]
    algorithms: tuple[str, ...]
    workers: tuple[int, ...]
    sizes: tuple[int, ...]
    densities: tuple[float, ...]
    link: tuple[float, float] = (0.0, 0.0)
    node: cost.Node | None = None

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        # All that a prediction depends on, so that one is not taken for another's.
        cluster = f"{self.what} {self.link} {self.node} {';'.join(self.algorithms)}"
        for size in self.sizes:
            for density in self.densities:
                for workers in self.workers:
                    yield {"full": full, "size": size, "density": density, "workers": workers, "cluster": cluster}

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        n, P = setting["size"], setting["workers"]
        k = max(1, round(setting["density"] * n))
        if self.what == "union":
            return {"union": {"union": cost.expected_union(n, k, P)}}
        loads = {name: cost.predict(name, n, k, P, *self.link, node=self.node).expected for name in self.algorithms}
        return {
            self.what: {
                name: load.words if self.what == "words" else 1e3 * load.seconds for name, load in loads.items()
            }
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        names = list(lines[0][self.what])
        rows = [
            (
                f"{line['size']:,}",
                f"{100 * line['density']:.3g} %",
                str(line["workers"]),
                *(f"{line[self.what][name]:,.4g}" for name in names),
            )
            for line in lines
        ]
        alpha, beta = self.link
        titles = {
            "ms": f"ms, with α = {1e6 * alpha:g} µs and β = {1e9 * beta:g} ns a word",
            "words": "words that a worker sends",
            "union": "elements of the sum",
        }
        return shown(
            titles[self.what], "expected, by jsparse.cost, without computing", ("n", "density", "P", *names), rows
        )

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        over = max(("size", "density", "workers"), key=lambda key: len(values(lines, key)))
        others = [key for key in ("size", "density", "workers") if key != over]
        names = list(lines[0][self.what])

        def draw(axes: Axes) -> None:
            for case in dict.fromkeys(tuple(line[key] for key in others) for line in lines):
                fixed = dict(zip(others, case, strict=True))
                here = sorted(found(lines, fixed), key=lambda line: line[over])
                varied = [key for key in others if len(values(lines, key)) > 1]
                told = "".join(f", {key} {fixed[key]:.3g}" for key in varied)
                for name in names:
                    axes.plot(
                        [line[over] for line in here], [line[self.what][name] for line in here], "o-", label=name + told
                    )
            axes.set(xlabel=over, ylabel=self.what, xscale="log", yscale="log")

        return [draw]
