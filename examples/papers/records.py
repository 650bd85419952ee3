"""Figures of what happens inside a training: what is selected, and how far it is from a rule."""

import abc
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.table
from flax import nnx
from matplotlib.axes import Axes

import jsparse
from examples.paper_rule import largest, paper_rule
from examples.tasks import Task
from examples.train import SCHEDULES

from .convergence import task_of
from .figure import Figure, Line, Setting, shown

AXIS = "workers"
ALGORITHMS: dict[str, Callable[[float], Any]] = {
    "topk_allgather": lambda density: jsparse.topk_allgather(AXIS, density=density),
    "oktopk": lambda density: jsparse.oktopk(AXIS, density=density),
    # Nearly the paper's rule: thresholds are exact in every 32nd step, and kept in between. But of
    # more than k elements that reach one, k are sent.
    "oktopk, thresholds kept": lambda density: jsparse.sparse_allreduce(
        AXIS,
        select=jsparse.select.ReusedThreshold(density, correct=False),
        allreduce=jsparse.allreduce.OkTopk(correct=False, tau_region=64),
    ),
    "oktopk, thresholds corrected": lambda density: jsparse.oktopk(
        AXIS, density=density, select=jsparse.select.ReusedThreshold(density)
    ),
    "oktopk, equal regions": lambda density: jsparse.oktopk(AXIS, density=density, tau_region=None),
    "oktopk, not balanced": lambda density: jsparse.sparse_allreduce(
        AXIS, select=jsparse.select.TopK(density), allreduce=jsparse.allreduce.OkTopk(balance_above=math.inf)
    ),
    "gaussiank": lambda density: jsparse.gaussiank(AXIS, density=density),
    "gaussiank, not adjusted": lambda density: jsparse.gaussiank(
        AXIS, density=density, select=jsparse.select.GaussianThreshold(density, adjust="never")
    ),
    "dense": lambda density: jsparse.dense(AXIS),
}


class Step(NamedTuple):
    """A step of a training.

    Attributes:
      number: from 0.
      grads: each worker's gradient, shape ``(P, n)``.
      accs: the same with the residual added.
      update: the mean that was applied, shape ``(n,)``.
      stats: of ``jsparse.stats``, each leaf of shape ``(P, 1)``.
    """

    number: int
    grads: np.ndarray
    accs: np.ndarray
    update: np.ndarray
    stats: Any


@dataclasses.dataclass(frozen=True)
class Record(Figure):
    """Figures of some steps of a training, all of whose workers are in one process.

    Attributes:
      model, data: of ``examples.tasks``.
      algorithms: names in ``ALGORITHMS``.
      workers, batch: the number of workers, and of a worker's examples in a step.
      densities: k / n.
      steps, every: the length of the training, and how often a step is recorded.
      rate, momentum: of SGD.
      schedule: how the rate falls, one of ``examples.train.SCHEDULES``, or ``"constant"``.
    """

    model: str
    data: str
    algorithms: tuple[str, ...]
    workers: int
    densities: tuple[float, ...]
    batch: int
    steps: int
    every: int
    rate: float
    momentum: float = 0.9
    schedule: str = "constant"

    @abc.abstractmethod
    def record(self, step: Step, k: int) -> dict[str, Any]:
        """What is kept of a step."""

    def settings(self, full: bool, lines: Sequence[Line]) -> Iterator[Setting]:
        sized = self.sized(full)
        names = ("model", "data", "workers", "batch", "steps", "every", "rate", "momentum", "schedule")
        for density in sized.densities:
            for algorithm in sized.algorithms:
                yield {"full": full, "algorithm": algorithm, "density": density} | {
                    name: getattr(sized, name) for name in names
                }

    def measure(self, setting: Setting, files: pathlib.Path | None) -> Line:
        task = task_of(setting["model"], setting["data"], files, 0, 0)
        kept: dict[str, list[Any]] = {}
        n = 0
        for step in trained(task, setting):
            n = len(step.update)
            k = max(1, round(setting["density"] * n))
            for name, value in ({"step": step.number} | self.record(step, k)).items():
                kept.setdefault(name, []).append(value)
        return {"parameters": n} | kept

    def curves(self, axes: Axes, lines: Sequence[Line], names: Sequence[str], over: str = "") -> None:
        """Draws entries by step, one curve for each run and entry."""
        for line in lines:
            for name in names:
                label = named(line) + (f": {name}" if len(names) > 1 else "")
                axes.plot(line["step"], line[name], label=label, linewidth=1)
        axes.set(xlabel="step", ylabel=over or names[0])


def trained(task: Task, setting: Setting) -> Iterator[Step]:
    """Trains with SGD, and gives the steps that are to be recorded."""
    graph, params, rest = nnx.split(task.model, nnx.Param, ...)
    params, rest, workers = nnx.as_pure(params), nnx.as_pure(rest), setting["workers"]
    reduce = ALGORITHMS[setting["algorithm"]](setting["density"])
    rate, falls = setting["rate"], SCHEDULES.get(setting["schedule"])
    optimizer = optax.sgd(falls(rate, setting["steps"]) if falls else rate, momentum=setting["momentum"] or None)

    def loss_fn(params, batch):
        return nnx.merge(graph, params, rest).loss(*batch)

    def flat(tree) -> jax.Array:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])

    def worker(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        residual = jsparse.residual(state)
        updates, state = reduce.update(grads, state)
        stats = jax.tree.map(lambda leaf: leaf.reshape(-1)[:1], jsparse.stats(state))
        vector = flat(grads)
        return updates, state, vector, vector + residual[0] if residual.size else vector, stats

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, states, momentum, batch):
        run = jax.vmap(worker, axis_name=AXIS, in_axes=(None, 0, 0))
        updates, states, *told = run(params, states, batch)
        update = jax.tree.map(lambda leaf: leaf[0], updates)
        change, momentum = optimizer.update(update, momentum)
        return optax.apply_updates(params, change), states, momentum, flat(update), told

    momentum, rng = optimizer.init(params), np.random.default_rng(0)
    states = jax.jit(jax.vmap(lambda _: reduce.init(params), axis_name=AXIS))(np.arange(workers))
    for number in range(setting["steps"]):
        rows = rng.integers(len(task.train[0]), size=(workers, setting["batch"]))
        batch = tuple(array[rows] for array in task.train)
        params, states, momentum, update, (grads, accs, stats) = step(params, states, momentum, batch)
        if number % setting["every"] == 0:
            grads, accs, update, stats = jax.tree.map(np.asarray, (grads, accs, update, stats))
            yield Step(number, grads, accs, update, stats)


def named(line: Line) -> str:
    return f"{line['algorithm']}, {100 * line['density']:g} %"


def about(line: Line) -> str:
    """What was trained, in words."""
    return (
        f"{line['model']} on {line['data']}, {line['parameters']:,} parameters, {line['workers']} workers, "
        f"{line['steps']} steps"
    )


class Xi(Record):
    """Ok-Topk's ξ: how far its sum of the largest is from the largest of the sum (Assumption 1).

    ``ξ = |Topk(mean of acc) - mean of what arrived| / |mean of the gradients|``, with the update
    that was applied, and beside it with the paper's rule, ``Topk`` of the workers' ``Topk``.
    """

    def record(self, step: Step, k: int) -> dict[str, Any]:
        mean, norm = step.accs.mean(0, dtype=np.float64), np.linalg.norm(step.grads.mean(0, dtype=np.float64))
        dense = np.zeros_like(mean)
        chosen = largest(mean, k)
        dense[chosen] = mean[chosen]
        rule = paper_rule(step.accs, k) / len(step.accs)
        return {
            "xi": float(np.linalg.norm(dense - step.update) / norm),
            "xi of the rule": float(np.linalg.norm(dense - rule) / norm),
            "norm": float(norm),
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            xi, rule = np.array(line["xi"]), np.array(line["xi of the rule"])
            quarters = (f"{np.median(quarter):.2f}" for quarter in np.array_split(xi, 4))
            rows.append((named(line), *quarters, f"{xi.max():.2f}", f"{np.median(rule):.2f}", str(line["workers"])))
        columns = ("algorithm", "1st quarter", "2nd", "3rd", "4th", "most", "of the rule", "P")
        return shown(about(lines[0]), "ξ: medians of the quarters of the steps, and the most.", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        return [lambda axes: self.curves(axes, lines, ["xi"], "ξ")]


class Counts(Record):
    """How many elements the workers select, and how many the update has."""

    def record(self, step: Step, k: int) -> dict[str, Any]:
        return {
            "local / k": float(step.stats.selected.mean()) / k,
            "global / k": float(np.count_nonzero(step.update)) / k,
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            local, united = np.array(line["local / k"]), np.array(line["global / k"])
            off = f"{100 * abs(local - 1).mean():.1f} %"
            off_united = f"{100 * abs(united - 1).mean():.1f} %" if line["algorithm"].startswith("oktopk") else ""
            halves = np.array_split(local, 2)
            rows.append(
                (named(line), *(f"{half.mean():.2f}" for half in halves), off, f"{united.mean():.2f}", off_united)
            )
        columns = ("algorithm", "local / k, 1st half", "2nd half", "off by", "global / k", "off by")
        caption = "off by: the mean distance to k. For algorithms other than Ok-Topk global is the fill-in."
        return shown(about(lines[0]), caption, columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(name: str, axes: Axes) -> None:
            self.curves(axes, lines, [name])
            axes.set_yscale("log")

        return [functools.partial(draw, name) for name in ("local / k", "global / k")]


class Thresholds(Record):
    """The distribution of a worker's values, and the thresholds that would select k of them."""

    AGE = 25
    QUANTILES = np.linspace(0, 1, 201)

    def record(self, step: Step, k: int) -> dict[str, Any]:
        acc = step.accs[0].astype(np.float64)
        magnitudes = np.sort(abs(acc))[::-1]
        gaussian = abs(acc.mean()) + acc.std() * statistics.NormalDist().inv_cdf(1 - k / len(acc) / 2)
        return {
            "exact": float(magnitudes[k - 1]),
            "gaussian": float(gaussian),
            "gaussian selects / k": float(np.count_nonzero(magnitudes >= gaussian)) / k,
            "quantiles": np.quantile(acc, self.QUANTILES).tolist(),
            "ranks": (ranks := self._ranks(k, len(acc))).tolist(),
            "magnitudes": magnitudes[ranks - 1].tolist(),
        }

    @staticmethod
    def _ranks(k: int, n: int) -> np.ndarray:
        """The ranks from k / 100 to 100 k, each a hundredth above the one before."""
        return np.unique(np.geomspace(max(1, k // 100), min(n, 100 * k), 930).astype(int))

    def _old(self, line: Line) -> int:
        """How many records ago the old threshold is."""
        if self.AGE % line["every"]:
            raise ValueError(f"every is {line['every']}; it must divide {self.AGE}, the age of the old threshold")
        return self.AGE // line["every"]

    def _reused(self, line: Line) -> np.ndarray:
        """What the threshold of 25 steps before would select, over k."""
        old, k = self._old(line), round(line["density"] * line["parameters"])
        thresholds, found = line["exact"][:-old], []
        for threshold, ranks, magnitudes in zip(thresholds, line["ranks"][old:], line["magnitudes"][old:], strict=True):
            reached = np.searchsorted(-np.array(magnitudes), -threshold, side="right")
            found.append(ranks[max(reached - 1, 0)] / k)
        return np.array(found)

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            reused = self._reused(line)
            gaussian, middle = np.array(line["gaussian selects / k"])[-len(reused) :], len(reused) // 2
            for name, over in (("1st half", slice(None, middle)), ("2nd half", slice(middle, None))):
                rows.append(
                    (
                        named(line),
                        name,
                        f"{np.median(reused[over]):.2f}",
                        f"{reused[over].min():.2f} - {reused[over].max():.2f}",
                        f"{np.median(gaussian[over]):.2f}",
                        f"{gaussian[over].min():.2f} - {gaussian[over].max():.2f}",
                    )
                )
        columns = ("algorithm", "steps", f"{self.AGE} steps old / k", "least - most", "gaussian / k", "least - most")
        caption = (
            "what a threshold would select of worker 0's values: an exact one of some steps before, and that of a "
        )
        return shown(about(lines[0]), caption + "fitted normal distribution. Medians.", columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(line: Line, number: int, axes: Axes) -> None:
            x = np.array(line["quantiles"][number])
            widths = np.maximum(np.diff(x), 1e-12)
            axes.step(x[1:], np.diff(self.QUANTILES) / widths, where="pre", color="0.5", label="values")
            old = max(0, number - self._old(line))
            marks = {
                "exact": line["exact"][number],
                "25 steps old": line["exact"][old],
                "gaussian": line["gaussian"][number],
            }
            for color, (label, at) in enumerate(marks.items()):
                axes.axvline(at, color=f"C{color}", label=label)
                axes.axvline(-at, color=f"C{color}")
            limit = 2 * max(marks.values())
            axes.set(xlim=(-limit, limit), xlabel="value", ylabel="density of probability", yscale="log")
            axes.set_title(f"{100 * line['density']:g} %, step {line['step'][number]}")

        last = [(line, number) for line in lines for number in (len(line["step"]) // 10, len(line["step"]) - 1)]
        return [functools.partial(draw, *one) for one in last]


class Spread(Record):
    """The distribution of a worker's gradient as the training goes on."""

    # Of the histogram, in standard deviations.
    EDGES = np.linspace(-3, 3, 121)

    def record(self, step: Step, k: int) -> dict[str, Any]:
        grads = step.grads[0].astype(np.float64)
        deviation = grads.std()
        return {
            "standard deviation": float(deviation),
            "kurtosis": float(((grads - grads.mean()) ** 4).mean() / deviation**4),
            "median magnitude": float(np.median(abs(grads))),
            "below 1e-4": float((abs(grads) < 1e-4).mean()),
            "histogram": (np.histogram(grads / deviation, self.EDGES)[0] / len(grads)).tolist(),
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            for i in np.unique(np.linspace(0, len(line["step"]) - 1, 6).astype(int)):
                names = ("standard deviation", "median magnitude", "kurtosis", "below 1e-4")
                rows.append(
                    (f"{line['model']}, {named(line)}", str(line["step"][i]), *(f"{line[n][i]:.3g}" for n in names))
                )
        columns = ("training", "step", "deviation", "median magnitude", "kurtosis", "below 1e-4")
        caption = "of worker 0's gradient. kurtosis: 3 for a normal distribution. below 1e-4: the share of magnitudes."
        return shown(about(lines[0]), caption, columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        def draw(line: Line, axes: Axes) -> None:
            middle = (self.EDGES[1:] + self.EDGES[:-1]) / 2
            for i in np.unique(np.linspace(0, len(line["step"]) - 1, 5).astype(int)):
                axes.plot(middle, line["histogram"][i], label=f"step {line['step'][i]}")
            axes.set(
                xlabel="gradient, in standard deviations",
                ylabel="share of the elements",
                yscale="log",
                title=line["model"],
            )

        return [functools.partial(draw, line) for line in lines]


class Distinct(Record):
    """How many indices the first 1, 2, 4, ... workers contribute together."""

    def record(self, step: Step, k: int) -> dict[str, Any]:
        chosen = [set(largest(acc, k).tolist()) for acc in step.accs]
        counts = [1 << i for i in range(len(chosen).bit_length()) if 1 << i <= len(chosen)]
        return {f"{count} workers": len(set().union(*chosen[:count])) / k for count in counts}

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        names = [name for name in lines[0] if name.endswith(" workers")]
        rows = [
            (named(line), *(f"{np.mean(line[name]):.2f}" for name in names), f"{max(line[names[-1]]):.2f}")
            for line in lines
        ]
        caption = "different indices among the workers' largest elements, over k: means, and the most of all workers."
        return shown(about(lines[0]), caption, ("training", *names, "most"), rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        names = [name for name in lines[0] if name.endswith(" workers")]
        return [lambda axes: self.curves(axes, lines, names, "different indices / k")]


class Balance(Record):
    """What Ok-Topk's balance does. Messages have static lengths here: what does not fit waits."""

    def record(self, step: Step, k: int) -> dict[str, Any]:
        stats = step.stats
        return {
            "waits": float(stats.overflowed.sum() / max(1, stats.selected.sum())),
            "words": float(stats.words.max()) / k,
            "messages": float(stats.messages.max()),
        }

    def table(self, lines: Sequence[Line]) -> rich.table.Table:
        rows = []
        for line in lines:
            waits, words = np.array(line["waits"]), np.array(line["words"])
            shares = (f"{100 * share:.2f} %" for share in (waits.mean(), waits.max()))
            messages = f"{np.mean(line['messages']):.0f}"
            rows.append((named(line), *shares, f"{words.mean():.2f}", f"{words.max():.2f}", messages))
        columns = ("algorithm", "waits", "at most", "words / k", "at most", "messages")
        caption = "waits: of what the workers selected, the part that did not fit into the message of its region."
        return shown(about(lines[0]), caption, columns, rows)

    def panels(self, lines: Sequence[Line]) -> list[Any]:
        return [lambda axes, name=name: self.curves(axes, lines, [name]) for name in ("waits", "words")]
