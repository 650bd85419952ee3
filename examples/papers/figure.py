"""What all figures have in common: runs that are lines of a file, a table and a plot."""

import abc
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import matplotlib
import numpy as np
import rich.table
from jax.experimental import multihost_utils

from examples import lines as runs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Line = dict[str, Any]
Setting = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Figure(abc.ABC):
    """A figure or table of a paper, and how it is made again. Its fields say how at full size.

    Attributes:
      claim: what the paper says by it.
      small: the fields that are different at the small size.
    """

    claim: str
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)

    def sized(self, full: bool) -> Self:
        """The figure at one of its sizes."""
        return self if full else dataclasses.replace(self, small={}, **self.small)

    @abc.abstractmethod
    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        """What is to be run: at the paper's size if ``full``, else at a small one.

        Args:
          full: the paper's size.
          lines: the runs so far. It grows, so that later settings may depend on earlier results.
        """

    @abc.abstractmethod
    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        """Makes a run, and returns its figures.

        Args:
          setting: what it depends on.
          files: the directory with one folder for each data set.
        """

    @abc.abstractmethod
    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        """What came out."""

    def draw(self, lines: Sequence[Line], path: pathlib.Path) -> None:
        """Draws what came out."""
        panels = self.panels(lines)
        figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), layout="constrained", squeeze=False)
        for panel, draw in zip(axes.flat, panels, strict=True):
            draw(panel)
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                panel.legend(fontsize="small")
        figure.savefig(path, dpi=110)
        plt.close(figure)

    @abc.abstractmethod
    def panels(self, lines: Sequence[Line]) -> list[Any]:
        """A function of matplotlib's axes for each panel of the plot."""


def make(
    figure: Figure, path: pathlib.Path, *, full: bool, files: pathlib.Path | None, until: float = math.inf
) -> list[Line]:
    """Makes the runs that a file lacks, and adds each to it as a line.

    Several processes make a run together. All of them read the file, and the first one writes it.

    Args:
      figure: whose runs.
      path: of the lines, JSON objects.
      full: at the paper's size.
      files: the directory of the data sets' folders.
      until: the time, by ``time.monotonic``, after which no run begins.

    Returns:
      The lines of all runs of the figure that are in the file now.
    """
    lines, own = runs.read(path), []
    for setting in figure.settings(full, lines):
        if not found(lines, setting) and first_says(time.monotonic() <= until):
            start = time.perf_counter()
            line = setting | figure.measure(setting, files)
            lines.append(line | {"took": time.perf_counter() - start})
            if jax.process_index() == 0:
                runs.add(path, lines[-1])
            jax.clear_caches()
        own += found(lines, setting)[:1]
    return own


def first_says(answer: bool) -> bool:
    """The answer of the first process, so that all do the same."""
    return bool(multihost_utils.broadcast_one_to_all(np.array(answer)))


def found(lines: Sequence[Line], wanted: Mapping[str, Any]) -> list[Line]:
    """The lines that have all of these entries."""
    return [line for line in lines if wanted.items() <= line.items()]


def values(lines: Sequence[Line], name: str) -> list[Any]:
    """The values that an entry has in the lines, each once, in their order."""
    return list(dict.fromkeys(line[name] for line in lines))


def shown(title: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
    """A table whose first column is on the left, and the others on the right."""
    out = rich.table.Table(title=title, caption=caption)
    for number, column in enumerate(columns):
        out.add_column(column, justify="right" if number else "left")
    for row in rows:
        out.add_row(*row)
    return out
