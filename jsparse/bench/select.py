"""``jsparse bench select``: times the selectors beside JAX's own, and counts what they select."""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from jax import lax

import kernels_pallas

from .. import select
from .._vector.density import check_density, elements_kept
from .command import add_output_options, numbers, output, progress_bar, subplots
from .gradients import DISTRIBUTIONS, draw
from .options import LONGEST, check_memory, whole
from .timing import spread, timed

HELP = "time the selectors beside lax.top_k, lax.approx_max_k and jnp.nonzero"


class Form(NamedTuple):
    """One way to select.

    Attributes:
      name: its name in the table.
      task: what it selects; compare only forms of the same task.
      run: a function of the vector, a threshold and the step's number. It returns
        ``(indices, count)``, or a single number.
    """

    name: str
    task: str
    run: Callable[[jax.Array, jax.Array, jax.Array], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        type=whole(1, LONGEST),
        default=14_728_266,
        help="n, the vector's length (default: that of VGG-16's gradient)",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="gaussian",
        help="distribution of the values (default gaussian); digits: the gradient of a net of about n "
        "parameters on scikit-learn's digits",
    )
    parser.add_argument(
        "--repeats", type=whole(1), default=9, help="runs of each form; the forms take turns (default 9)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the random values (default 0)")
    add_output_options(parser, plot="the times")


def run(args: argparse.Namespace) -> None:
    check_density(args.density)
    check_memory(8 * args.size, f"--size is {args.size:,}")  # The vector, and a copy of it.
    x = jnp.asarray(draw(args.distribution, args.size, args.seed))
    k = elements_kept(args.density, x.shape[0])
    figures = {
        "size": x.shape[0],
        "k": k,
        "distribution": args.distribution,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "forms": measure(x, k, args.density, args.repeats),
    }
    output(args, figures, show, draw_times)


def forms(n: int, k: int, density: float) -> list[Form]:
    """The forms that are compared.

    Args:
      n: the vector's length.
      k: how many elements to select.
      density: k / n, for the selectors.
    """

    def jax_top_k(top_k):
        def run(x, threshold, step):
            return top_k(jnp.abs(x), k)[1], jnp.int32(k)

        return run

    def nonzero(x, threshold, step):
        mask = jnp.abs(x) >= threshold
        return jnp.nonzero(mask, size=k, fill_value=n)[0], kernels_pallas.count_above(x, threshold)

    def selector(select):
        def run(x, threshold, step):
            # As in the middle of a run: the state holds the threshold of the step before.
            state = select.init(n, x.dtype)._replace(threshold=threshold[None])
            chosen, state = select(x, state, step, jnp.int32(0))
            return chosen.indices, state.selected[0]

        return run

    def fixed(x, threshold, step):
        # FixedThreshold takes a Python number; this threshold is not known at compile time.
        chosen, state = select.fixed.take_above(x, threshold, density, step)
        return chosen.indices, state.selected[0]

    above, top, about, threshold = "above a threshold", "k largest", "about k largest", "k-th magnitude"
    return [
        Form("lax.top_k", top, jax_top_k(lax.top_k)),
        Form("lax.approx_max_k", top, jax_top_k(lax.approx_max_k)),
        Form("TopK", top, selector(select.TopK(density))),
        Form("MSTopK", about, selector(select.MSTopK(density))),
        Form("SampledThreshold", about, selector(select.SampledThreshold(density))),
        Form("ReusedThreshold", about, selector(select.ReusedThreshold(density))),
        Form("GaussianThreshold", about, selector(select.GaussianThreshold(density))),
        Form("DgcThreshold", about, selector(select.DgcThreshold(density))),
        Form("BucketedTopK", "largest of every 512", selector(select.BucketedTopK(density))),
        Form("BlockTopK", "largest of every 4096", selector(select.BlockTopK(max(1, round(4096 * density))))),
        Form("ChunkedTopK", "largest of each n/k", selector(select.ChunkedTopK(density))),
        Form("StochasticTopK", "at random, by size", selector(select.StochasticTopK(density))),
        Form("StochasticTopK, capped", "at random, by size", selector(select.StochasticTopK(density, "capped"))),
        Form("RandomK", "at random", selector(select.RandomK(density))),
        Form("kth_magnitude", threshold, lambda x, *_: kernels_pallas.kth_magnitude(x, k)),
        Form("jnp.nonzero(size=k)", above, nonzero),
        Form("FixedThreshold", above, fixed),
        Form("select_above", above, lambda x, threshold, _: kernels_pallas.select_above(x, threshold, k)[1:]),
        Form("count_above", "count", lambda x, threshold, _: kernels_pallas.count_above(x, threshold)),
    ]


def measure(x: jax.Array, k: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Times the forms in turn, and compares each form's choice with the exact top-k.

    Args:
      x: the vector to select from.
      k: how many elements to select.
      density: k / n, for the selectors.
      repeats: timed runs of each form.

    Returns:
      The figures of each form.
    """
    n = x.shape[0]
    threshold = jax.jit(functools.partial(kernels_pallas.kth_magnitude, k=k))(x)
    exact = np.zeros(n + 1, bool)
    exact[np.argpartition(np.abs(np.asarray(x)), n - k)[n - k :]] = True
    compared = forms(n, k, density)
    compiled = [jax.jit(form.run).lower(x, threshold, jnp.int32(0)).compile() for form in compared]
    for fn in compiled:
        jax.block_until_ready(fn(x, threshold, jnp.int32(0)))

    times: list[list[float]] = [[] for _ in compared]
    counts: list[list[float]] = [[] for _ in compared]
    found: list[list[float]] = [[] for _ in compared]
    with progress_bar() as progress:
        task = progress.add_task("timing", total=repeats * len(compared))
        for number in range(repeats):
            step = jnp.int32(1 + number)
            for i, fn in enumerate(compiled):
                ms, outcome = timed(fn, x, threshold, step)
                times[i].append(ms)
                if isinstance(outcome, (tuple, list)):
                    chosen = np.asarray(outcome[0])
                    counts[i].append(int(outcome[1]) / k)
                    found[i].append(exact[chosen[chosen < n]].sum() / k)
                progress.advance(task)

    results = []
    slowest = statistics.median(times[0])
    for i, (form, fn) in enumerate(zip(compared, compiled, strict=True)):
        memory = fn.memory_analysis()
        result = {
            "name": form.name,
            "task": form.task,
            **spread(times[i]),
            "times_faster_than_top_k": slowest / statistics.median(times[i]),
            "temporary_memory_over_input": memory.temp_size_in_bytes / x.nbytes if memory else None,
        }
        if counts[i]:
            result["selected_over_k"] = statistics.fmean(counts[i])
            result["deviation_from_k"] = statistics.fmean(abs(count - 1) for count in counts[i])
            result["of_the_exact_top_k"] = statistics.fmean(found[i])
        results.append(result)
    return results


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    table = rich.table.Table(
        "form",
        "selects",
        *numbers("median ms", "min to max", "over top_k", "selected / k", "off k", "in top-k", "memory"),
        title=f"n = {figures['size']:,}, k = {figures['k']:,}, {figures['distribution']}; {figures['device']}, "
        f"jax {figures['jax']}",
        caption="over top_k: how many times as fast as lax.top_k. off k: mean deviation of the count from k, over k. "
        "in top-k: fraction of the k largest that it selected. memory: temporary memory over the vector's own.",
    )
    for form in figures["forms"]:
        memory, selected, off, found = (
            form.get(key)
            for key in ("temporary_memory_over_input", "selected_over_k", "deviation_from_k", "of_the_exact_top_k")
        )
        table.add_row(
            form["name"],
            form["task"],
            f"{form['median_ms']:.2f}",
            f"{form['min_ms']:.2f} to {form['max_ms']:.2f}",
            f"{form['times_faster_than_top_k']:.1f} x",
            "" if selected is None else f"{selected:.3f}",
            "" if off is None else f"{off:.3f}",
            "" if found is None else f"{found:.3f}",
            "" if memory is None else f"{memory:.2f}",
        )
    rich.console.Console(width=140).print(table)


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a bar of the median time for each form."""
    ordered = sorted(figures["forms"], key=lambda form: form["median_ms"])
    figure, axes = subplots(size=(9, 6))
    bars = axes.barh([form["name"] for form in ordered], [form["median_ms"] for form in ordered])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.12)
    axes.set(xscale="log", xlabel="median ms", title=f"n = {figures['size']:,}, k = {figures['k']:,}")
    figure.savefig(path, dpi=120)
