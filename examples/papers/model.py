"""Figures of the cost model."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import rich.table
from matplotlib.axes import Axes

from jsparse import cost

from .figure import Figure, Line, Setting, found, shown, values


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
