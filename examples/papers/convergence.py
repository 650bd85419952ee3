"""Figures of accuracy: algorithms that train the same model, each with its best learning rate."""

import argparse
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.progress
import rich.table
from matplotlib.axes import Axes

from examples import train
from examples.tasks import make_task

from .figure import Figure, Line, Setting, found, values


@dataclasses.dataclass(frozen=True)
class Convergence(Figure):
    """Algorithms of ``examples.train`` by accuracy: each step, and each byte.

    Each algorithm tries the same learning rates with the first seed. As long as the one with the
    highest last accuracy, or the one with the lowest last loss, is the largest or the smallest, it
    tries one beyond it. The one with the highest accuracy is run with the other seeds.

    Attributes:
      algorithms: names in ``examples.train.ALGORITHMS``.
      model, data, workers, density, batch, epochs, optimizer, schedule, warm_up, resolutions: of
        ``examples.train``.
      rates: the learning rates that are tried.
      vary: an option and the values that it takes in turn: one panel each.
      seeds: how many.
      examples: how many of the training examples are read, and a fifth as many tests; 0 for all.
    """

    algorithms: tuple[str, ...]
    model: str
    data: str
    workers: int
    density: float
    batch: int
    epochs: int
    rates: tuple[float, ...]
    optimizer: str = "momentum"
    schedule: str = "constant"
    warm_up: float | None = None
    resolutions: str = ""
    vary: tuple[str, tuple[Any, ...]] | None = None
    seeds: int = 3
    examples: int = 0

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        sized = self.sized(full)
        for case in sized.cases():
            for algorithm in sized.algorithms:
                first = {"full": full, "algorithm": algorithm, "seed": 0} | case
                yield from ({**first, "rate": rate} for rate in sized.rates)
                tried = list(sized.rates)
                while rate := further(tried, found(lines, first)):
                    yield {**first, "rate": rate}
                    tried.append(rate)
                if best := best_of(found(lines, first)):
                    yield from ({**first, "seed": seed, "rate": best["rate"]} for seed in range(1, sized.seeds))

    def cases(self) -> Iterator[Setting]:
        """The options of the runs, but for the algorithm, the rate and the seed."""
        names = ("model", "data", "workers", "density", "batch", "epochs", "optimizer", "schedule", "warm_up")
        case = {name: getattr(self, name) for name in (*names, "resolutions", "examples")}
        name, given = self.vary or ("density", (self.density,))
        return ({**case, name: value} for value in given)

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        task = task_of(setting["model"], setting["data"], files, setting["seed"], setting["examples"])
        each, rest = divmod(setting["workers"], jax.process_count())
        if rest:
            raise ValueError(
                f"{setting['workers']} workers can't be divided among {jax.process_count()} processes: start a number "
                "of processes that divides them"
            )
        own = setting | {"workers": each, "learning_rate": setting["rate"], "checkpoint": None, "simulate": False}
        options = argparse.Namespace(**own)
        with rich.progress.Progress(transient=True, disable=jax.process_index() > 0) as progress:
            run = train.train(setting["algorithm"], task, options, progress)
        every = run["steps_per_epoch"]
        last = np.arange(every, len(run["loss"]) + 1, every)
        epochs = {name: [run[name][end - every : end] for end in last] for name in ("loss", "milliseconds")}
        return {
            "parameters": run["parameters"],
            "steps": len(run["loss"]),
            "accuracy": run["accuracy"],
            "test loss": run["test_loss"],
            "loss": [statistics.fmean(epoch) for epoch in epochs["loss"]],
            "step ms": [statistics.median(epoch) for epoch in epochs["milliseconds"]],
            "bytes": np.cumsum(run["bytes"])[last - 1].tolist(),
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        first = lines[0]
        varied = self.vary[0] if self.vary else None
        out = rich.table.Table(
            title=f"{first['model']} on {first['data']}, {first['parameters']:,} parameters, {first['epochs']} epochs",
            caption="accuracy: on the tests after the last epoch, %; from, to: of the seeds. The rate was chosen with "
            "the first seed. loss: of the last epoch; and of the tests after it. MB: that a worker sent in all. ms: a "
            "step, medians of the epochs, from the least to the most.",
        )
        of_runs = "accuracy", "from", "to", "seeds", "loss", "test loss", "MB", "rate", "ms"
        for name in (*filter(None, [varied]), "algorithm", *of_runs):
            out.add_column(name, justify="left" if name == "algorithm" else "right")
        for case, algorithm, runs in self.best(lines):
            last = [100 * run["accuracy"][-1] for run in runs]
            each = [statistics.median(run["step ms"][i] for run in runs) for i in range(len(runs[0]["step ms"]))]
            out.add_row(
                *([] if case is None else [shown_option(case)]),
                algorithm,
                *(f"{value:.2f}" for value in (statistics.fmean(last), min(last), max(last))),
                str(len(runs)),
                *(f"{statistics.fmean(run[name][-1] for run in runs):.3f}" for name in ("loss", "test loss")),
                f"{runs[0]['bytes'][-1] / 1e6:.3g}",
                f"{runs[0]['rate']:g}",
                f"{min(each):.0f} - {max(each):.0f}",
            )
        return out

    def panels(self, lines: Sequence[Line]) -> list[Callable[[Axes], None]]:
        cases = [None] if self.vary is None else values(lines, self.vary[0])
        return [functools.partial(self._draw, lines, case, of_bytes) for case in cases for of_bytes in (False, True)]

    def _draw(self, lines: Sequence[Line], case: Any, of_bytes: bool, axes: Axes) -> None:
        for number, (_, algorithm, runs) in enumerate(row for row in self.best(lines) if row[0] == case):
            accuracy = 100 * np.array([run["accuracy"] for run in runs])
            x = np.array(runs[0]["bytes"]) if of_bytes else np.arange(1, accuracy.shape[1] + 1)
            axes.plot(x, accuracy.mean(0), color=f"C{number}", label=algorithm, marker=".")
            axes.fill_between(x, accuracy.min(0), accuracy.max(0), color=f"C{number}", alpha=0.2)
        axes.set(xlabel="bytes that a worker sent" if of_bytes else "epoch", ylabel="test accuracy, %")
        if of_bytes:
            axes.set_xscale("log")
        if case is not None and self.vary:
            axes.set_title(f"{self.vary[0]} {shown_option(case)}")

    def best(self, lines: Sequence[Line]) -> Iterator[tuple[Any, str, list[Line]]]:
        """The varied option, the algorithm, and the runs of all seeds at its best rate."""
        for case in values(lines, self.vary[0]) if self.vary else [None]:
            wanted = {self.vary[0]: case} if self.vary else {}
            for algorithm in values(lines, "algorithm"):
                runs = found(lines, {**wanted, "algorithm": algorithm})
                best = best_of(found(runs, {"seed": 0}))
                if best:
                    yield case, algorithm, found(runs, {"rate": best["rate"]})


def shown_option(value: Any) -> str:
    """The value of an option in words."""
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"


def best_of(runs: Sequence[Line]) -> Line | None:
    """The run with the highest last accuracy; of several, that with the lowest loss."""
    return max(runs, key=lambda run: (run["accuracy"][-1], -run["loss"][-1]), default=None)


def further(rates: Sequence[float], runs: Sequence[Line]) -> float | None:
    """The next rate to try, if the best run by accuracy or by loss is at an end of the rates.

    Among rates that are all bad, accuracies are near chance and say little. Losses say more.
    """
    finite = (run for run in runs if math.isfinite(run["loss"][-1]))
    lowest = min(finite, key=lambda run: run["loss"][-1], default=None)
    ends = (beyond(rates, run["rate"]) for run in (best_of(runs), lowest) if run)
    return next(filter(None, ends), None)


def beyond(rates: Sequence[float], best: float) -> float | None:
    """The next rate by the ratio of the last two, if the best one is at an end of several."""
    ordered = sorted(rates)
    if len(ordered) > 1 and best >= ordered[-1]:
        return float(f"{ordered[-1] ** 2 / ordered[-2]:.3g}")
    if len(ordered) > 1 and best <= ordered[0]:
        return float(f"{ordered[0] ** 2 / ordered[1]:.3g}")
    return None


@functools.lru_cache(maxsize=1)
def task_of(model: str, name: str, files: pathlib.Path | None, seed: int, examples: int) -> Any:
    """The task of ``examples.tasks``, with some of the examples only."""
    folder = files / {"wikitext2": "wikitext-2"}.get(name, name) if files else None
    task = make_task(model, name, None if name == "digits" else folder, seed)
    if not examples:
        return task
    return task._replace(
        train=tuple(array[:examples].copy() for array in task.train),
        test=tuple(array[: examples // 5].copy() for array in task.test),
    )
