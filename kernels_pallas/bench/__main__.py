"""Times the operations of kernels_pallas in each form, beside what JAX and PyTorch offer."""

import argparse
import gc
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError as error:
    raise SystemExit(f"the benchmark needs rich ({error}): pip install rich") from error

from .._implementation import IMPLEMENTATIONS, sees_cuda
from ..shapes import DENSITIES, MODELS, Shape
from .operations import Operation, draw, operations
from .timing import IN_A_ROW, in_a_row, jax_calls, sets_of, split, time_calls
from .torch_forms import cuda_torch, torch_calls

# The tolerance for sums of floats, because no two forms add in the same order.
TOLERANCE = 1e-5


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark.

    Args:
      argv: the command line arguments; by default those of the process.
    """
    names = [operation.name for operation in operations()]
    parser = argparse.ArgumentParser(
        prog="python -m kernels_pallas.bench",
        description=__doc__,
        epilog=f"{IN_A_ROW} calls make a program. Programs are queued in groups, and the time ends when the last one "
        "of a group is done. Figures are medians over the groups. Several sets of inputs, which together exceed the "
        "cache, are used in turn. Before a kernel is timed, its results are compared with those of the plain form.",
    )
    parser.add_argument(
        "--size", type=int, nargs="+", metavar="N", help="lengths of the vectors (default: those of the papers)"
    )
    parser.add_argument("--density", type=float, nargs="+", default=DENSITIES, help="k / n (default: 0.001 0.01)")
    parser.add_argument(
        "--ops",
        nargs="+",
        metavar="NAME",
        help=f"only operations whose names begin with one of these (default: all: {', '.join(names)})",
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=IMPLEMENTATIONS,
        help="only these forms, and nothing of JAX or PyTorch beside them (default: all)",
    )
    parser.add_argument(
        "--clustered", action="store_true", help="put the large elements of gradients in a sixteenth of the vector"
    )
    parser.add_argument("--groups", type=int, default=9, help="number of timed groups of programs (default 9)")
    parser.add_argument("--seconds", type=float, default=0.03, help="aimed duration of a group (default 0.03)")
    parser.add_argument("--check", action="store_true", help="compare the results, and time nothing")
    parser.add_argument(
        "--tune", action="store_true", help="instead time each operation with all values of its options"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    console = rich.console.Console(width=160)
    try:
        shapes = check(args)
    except ValueError as error:
        parser.error(str(error))
    figures = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "clustered": args.clustered,
        "rows": [],
    }
    for row in rows(args, shapes):
        figures["rows"].append(row)
        write(figures, args.json)  # After every row: an interrupted run has written what it had.
    if not args.check:
        compare(figures)
        write(figures, args.json)
    show(figures, console)
    for row in figures["rows"]:
        if "failed" in row:
            print(f"{row['operation']} ({row['form']}) at n = {row['n']:,}: {row['failed']}", file=sys.stderr)
    wrong = sorted({f"{row['operation']} ({row['form']})" for row in figures["rows"] if row["right"] is False})
    if wrong:
        sys.exit(f"results differ from those of the plain form: {', '.join(wrong)}")
    if any("failed" in row for row in figures["rows"]):
        sys.exit("some forms failed")


def write(figures: dict[str, Any], path: pathlib.Path | None) -> None:
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def check(args: argparse.Namespace) -> list[Shape]:
    """Checks the arguments, and returns the shapes to measure."""
    if not (sees_cuda() or (args.size and args.implementation and not {"triton", "mosaic"} & {*args.implementation})):
        raise ValueError(
            "JAX sees no GPU here, so there is nothing to time. To try the benchmark on a CPU, name forms that run "
            "there and a small size, such as --implementation xla interpret --size 10000"
        )
    if any(not 0 < density <= 1 for density in args.density):
        raise ValueError(f"--density is {args.density}; each density must be above 0 and at most 1")
    if any(n < 1 for n in args.size or ()) or args.groups < 1:
        raise ValueError("--size and --groups must be at least 1")
    if args.ops and not all(any(op.name.startswith(name) for op in operations()) for name in args.ops):
        raise ValueError(
            f"--ops is {' '.join(args.ops)}; each must be the beginning of an operation's name: "
            f"there are {', '.join(op.name for op in operations())}"
        )
    return [Shape(f"{n:,}", n) for n in args.size] if args.size else list(MODELS)


def rows(args: argparse.Namespace, shapes: list[Shape]) -> Iterator[dict[str, Any]]:
    """Measures, and yields one row after the other."""
    chosen = [op for op in operations() if not args.ops or op.name.startswith(tuple(args.ops)) or op.name == "copy"]
    todo = [(shape, density, op) for shape in shapes for density in args.density for op in chosen]
    torch = None if args.implementation or args.check or args.tune else cuda_torch()
    # Progress goes to the standard error, so that the table can be redirected.
    console = rich.console.Console(file=sys.stderr)
    for shape, density, operation in rich.progress.track(todo, "measuring", console=console, transient=True):
        n, k = shape.n, shape.k(density)
        where = {"operation": operation.name, "model": shape.name, "n": n, "density": density, "k": k}
        sets = inputs(operation, n, k, args)
        result = None
        if args.tune or args.check or {"xla"} != {*(args.implementation or operation.forms)}:
            result = jax.jit(operation.ours(n, k, "xla"))(*sets[0])
        for form, options, make in forms(operation, n, k, args):
            # Only kernels are compared. The others choose other elements among equal magnitudes,
            # or return elements in no order.
            kernel = form.split(",")[0] in IMPLEMENTATIONS and form != "xla"
            figures = attempt(measure, operation, make, n, k, sets, args, result if kernel else None)
            yield where | {"form": form, "options": options} | figures
        if torch and operation.torch:
            yield where | {"form": "torch", "options": {}} | attempt(measure_torch, operation, torch, n, k, sets, args)
        gc.collect()


def attempt(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Measures. If that fails, returns the reason, and the benchmark goes on.

    A form can run out of memory, for example, or fail to compile.
    """
    try:
        return measure(*args)
    except RuntimeError as error:
        return {"right": None, "failed": str(error)}


def forms(operation: Operation, n: int, k: int, args: argparse.Namespace) -> Iterator[tuple[str, dict, Callable]]:
    """Yields the name, options and function of each form that the arguments ask for."""
    ours = [*operation.forms, *(["interpret"] if "triton" in operation.forms else [])]
    ours = [form for form in ours if form in (args.implementation or operation.forms) or operation.name == "copy"]
    if args.tune and operation.tuned:
        for form in [form for form in ours if form in ("triton", "interpret")]:
            for values in itertools.product(*operation.options.values()):
                options = dict(zip(operation.options, values, strict=True))
                yield form, options, operation.tuned(n, k, form == "interpret", **options)
    elif not args.tune or operation.name == "copy":
        for form in ours:
            yield form, {}, operation.ours(n, k, form)
        if not (args.implementation or args.check or args.tune):
            for name, make in operation.beside.items():
                yield name, {}, make(n, k)


def inputs(operation: Operation, n: int, k: int, args: argparse.Namespace) -> list[list[jax.Array]]:
    """The sets of inputs, which are used in turn."""
    first = draw(operation.inputs, n, k, 0, args.clustered)
    count = 1 if args.check else sets_of(sum(array.nbytes for array in first))
    return [first, *(draw(operation.inputs, n, k, seed, args.clustered) for seed in range(1, count))]


def measure(
    operation: Operation,
    make: Callable[..., Any],
    n: int,
    k: int,
    sets: list[list[jax.Array]],
    args: argparse.Namespace,
    wanted: Any,
) -> dict[str, Any]:
    """Compiles a form, compares its result with ``wanted`` unless that is None, and times it."""
    # Donated inputs are copied, because each call overwrites them.
    sets = [[jnp.copy(x) if i in operation.donate else x for i, x in enumerate(given)] for given in sets]
    run = jax.jit(in_a_row(make, operation.donate), donate_argnums=0)
    compiled = run.lower(*split(sets[:IN_A_ROW], operation.donate)).compile()
    call = jax_calls(compiled, sets, operation.donate)
    got = call(0)
    right = None if wanted is None else alike(got[0], wanted, operation.exact)
    del got  # The next call may overwrite it.
    times = None if args.check else time_calls(call, jax.block_until_ready, args.groups, args.seconds)
    times = times and [seconds / min(len(sets), IN_A_ROW) for seconds in times]
    return figures_of(operation, n, k, times, right, compiled.memory_analysis())


def measure_torch(
    operation: Operation, torch: Any, n: int, k: int, sets: list[list[jax.Array]], args: argparse.Namespace
) -> dict[str, Any]:
    times = time_calls(*torch_calls(torch, operation, k, sets), args.groups, args.seconds)
    return figures_of(operation, n, k, times)


def alike(got: Any, wanted: Any, exact: bool) -> bool:
    """Whether results are the same: bit for bit if ``exact``, else up to rounding."""

    def same(a: jax.Array, b: jax.Array) -> bool:
        if exact or not jnp.issubdtype(a.dtype, jnp.floating):
            return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.floating)))
        return bool(jnp.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE))

    return all(jax.tree.leaves(jax.tree.map(same, got, wanted)))


def figures_of(
    operation: Operation, n: int, k: int, times: list[float] | None, right: bool | None = None, memory: Any = None
) -> dict[str, Any]:
    """The figures of one form."""
    moved = operation.moved(n, k)
    figures = {"bytes_an_element": moved / n, "right": right}
    if times:
        median = statistics.median(times)
        figures |= {
            "microseconds": 1e6 * median,
            "least_microseconds": 1e6 * min(times),
            "most_microseconds": 1e6 * max(times),
            "gigabytes_a_second": 1e-9 * moved / median,
            "temporary_bytes_an_element": memory.temp_size_in_bytes / n if memory else None,
        }
    return figures


def compare(figures: dict[str, Any]) -> None:
    """Adds comparisons to each row.

    They are its rate as a share of the best rate of a copy in the run, and how many times as fast
    it is as each other form of the same operation.
    """
    timed = [row for row in figures["rows"] if "microseconds" in row]
    copied = max(row["gigabytes_a_second"] for row in timed if row["operation"] == "copy")
    figures["copy_gigabytes_a_second"] = copied
    for row in timed:
        row["share_of_copy"] = row["gigabytes_a_second"] / copied
        row["times_as_fast_as"] = {
            other["form"]: other["microseconds"] / row["microseconds"]
            for other in timed
            if other is not row and all(other[key] == row[key] for key in ("operation", "n", "density"))
        }


def show(figures: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the table."""
    rate = figures.get("copy_gigabytes_a_second")
    table = rich.table.Table(
        title=f"{figures['device']}, jax {figures['jax']}" + (", clustered" if figures["clustered"] else ""),
        caption=None
        if rate is None
        else f"B: bytes that the operation must move for each element. of copy: the rate of these bytes, as a share of "
        f"the best rate of a copy in this run, {rate:,.0f} GB/s. temp: temporary memory, in bytes for each element. "
        "over top_k, over torch: how many times as fast as these.",
    )
    for name in ("operation", "form"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "k / n", "µs", "least to most", "B", "of copy", "temp", "over top_k", "over torch", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in figures["rows"]:
        options = " ".join(f"{name}={value}" for name, value in row["options"].items())
        timed = [""] * 7
        if "microseconds" in row:
            temporary, beside = row["temporary_bytes_an_element"], row["times_as_fast_as"]
            timed = [
                f"{row['microseconds']:,.1f}",
                f"{row['least_microseconds']:,.1f} to {row['most_microseconds']:,.1f}",
                f"{row['bytes_an_element']:.2f}",
                f"{row['share_of_copy']:.0%}",
                "" if temporary is None else f"{temporary:.2f}",
                *(f"{beside[name]:.1f}" if name in beside else "" for name in ("lax.top_k", "torch")),
            ]
        right = "failed" if "failed" in row else {None: "", True: "yes", False: "NO"}[row["right"]]
        place = [f"{row['n']:,}", f"{row['density']:.2%}"]
        table.add_row(row["operation"], f"{row['form']} {options}".strip(), *place, *timed, right)
    console.print(table)


if __name__ == "__main__":
    main()
