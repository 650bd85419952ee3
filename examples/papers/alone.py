"""Figures of computing alone, without a network."""

import abc
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from matplotlib.axes import Axes

import jsparse
from jsparse.bench import alone as comm
from jsparse.bench.gradients import draw as draw_values
from jsparse.bench.timing import spread, timed

from .figure import Figure, Line, Setting, shown, values
from .times import command


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
