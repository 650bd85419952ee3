"""``jsparse bench data``: times epochs of reading from a slow store, with and without DataCache.

The store is simulated: it waits for each sample, as long as the latency and the sample's bytes at
the rate take. One thread reads every sample once an epoch, in another order each time. Nothing is
prepared, so that the times are those of reading alone.
"""

import argparse
import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import rich.console
import rich.table

from ..data import DataCache
from .command import add_output_options, numbers, output, progress_bar, subplots
from .options import LONGEST, check_memory, real, whole
from .timing import spread, timed

HELP = "time epochs of reading from a slow store, with and without a cache on the local disk and in memory"
FORMS = ("no cache", "cache", "cache, second run", "cache, no memory")
# Seconds that the store may wait for a sample.
MOST_WAIT = 3600


class Store:
    """Samples of random bytes, each behind a wait.

    Args:
      samples: how many samples.
      size: bytes of a sample.
      seconds: wait for each sample.
    """

    def __init__(self, samples: int, size: int, seconds: float):
        rng = np.random.default_rng(0)
        self.samples = [rng.integers(0, 256, size, np.uint8) for _ in range(samples)]
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self._seconds)
        return self.samples[index].copy()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=whole(1, LONGEST), default=1000, help="samples in an epoch (default 1000)")
    parser.add_argument(
        "--size", type=whole(0, LONGEST), default=27_648, help="bytes of a sample (default: an image of 96 x 96 x 3)"
    )
    parser.add_argument("--latency", type=real(0), default=1.0, metavar="MS", help="of the store (default 1 ms)")
    parser.add_argument(
        "--rate", type=real(above=0), default=1.0, metavar="GBIT/S", help="of the store (default 1 Gbit/s)"
    )
    parser.add_argument("--epochs", type=whole(1), default=3, help="epochs of each run (default 3)")
    parser.add_argument(
        "--repeats", type=whole(1), default=5, help="runs of each form; the forms take turns (default 5)"
    )
    parser.add_argument(
        "--directory", type=pathlib.Path, help="where the cache makes a directory (default: for temporary files)"
    )
    add_output_options(parser, plot="the times")


def run(args: argparse.Namespace) -> None:
    # The store and the cache have the samples in memory.
    check_memory(2 * args.samples * args.size, f"--samples is {args.samples:,} and --size {args.size:,}")
    wait = args.latency / 1e3 + 8 * args.size / (args.rate * 1e9)
    if wait > MOST_WAIT:
        raise ValueError(
            f"--latency is {args.latency:g} and --rate {args.rate:g}; so a sample takes {wait:.3g} s, and at most "
            f"{MOST_WAIT} s are allowed: lower --latency, or raise --rate"
        )
    try:
        parent = tempfile.TemporaryDirectory(dir=args.directory)
    except OSError as error:
        raise ValueError(
            f"--directory is {args.directory or 'not given'}, and no directory can be made there ({error}): name a "
            "directory that you may write to"
        ) from error
    figures = {name: getattr(args, name) for name in ("samples", "size", "latency", "rate", "repeats")}
    with parent as directory:
        store = Store(args.samples, args.size, wait)
        measured = measure(store, args.epochs, args.repeats, pathlib.Path(directory))
    output(args, figures | {"forms": measured}, show, draw_times)


def measure(store: Store, epochs: int, repeats: int, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Times each epoch of each form.

    Args:
      store: what is read.
      epochs: epochs of each run.
      repeats: runs of each form.
      directory: where the caches' directories are made.

    Returns:
      The figures of each form.
    """
    times: dict[tuple[str, int], list[float]] = {(form, epoch): [] for form in FORMS for epoch in range(epochs)}
    tiers: dict[tuple[str, int], str] = {}
    rng = np.random.default_rng(0)

    def read(source: Any) -> None:
        for index in rng.permutation(len(store)):
            source[index]

    # All directories stay to the end: ext4 creates files slowly after many were deleted.
    with progress_bar() as progress:
        task = progress.add_task("reading", total=repeats * len(times))
        memory = 2 * sum(len(sample) + 1000 for sample in store.samples)
        for number in range(repeats):
            for form in FORMS:  # The second run finds what the first one wrote.
                source: Any = store
                if form != "no cache":
                    size, name = (0, "own") if form == "cache, no memory" else (memory, "shared")
                    where = directory / f"{number}-{name}"
                    source = DataCache(store, where, key="benchmark", memory_bytes=size)
                for epoch in range(epochs):
                    before = source.stats if form != "no cache" else None
                    times[form, epoch].append(timed(read, source)[0])
                    tiers[form, epoch] = "source" if before is None else most(before, source.stats)
                    progress.advance(task)
    results = []
    for form in FORMS:
        found = []
        for epoch in range(epochs):
            time_of = spread(times[form, epoch])
            naive = spread(times["no cache", epoch])["median_ms"]
            found.append(time_of | {"from": tiers[form, epoch], "times_faster": naive / time_of["median_ms"]})
        results.append({"name": form, "epochs": found})
    return results


def most(before: Any, after: Any) -> str:
    """The tier from which most of an epoch's samples came."""
    return max(
        ("source", "disk", "memory"), key=lambda tier: getattr(after, tier).samples - getattr(before, tier).samples
    )


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    table = rich.table.Table(
        rich.table.Column("form", no_wrap=True),
        *numbers("epoch"),
        "from",
        *numbers("ms", "min to max", "faster"),
        title=f"{figures['samples']:,} samples of {figures['size']:,} bytes; store: {figures['latency']:g} ms, "
        f"{figures['rate']:g} Gbit/s; {figures['repeats']} runs",
        caption="ms: median time of reading an epoch. faster: times as fast as the same epoch without a cache. "
        "second run: another cache in the directory that the first one filled.",
    )
    for form in figures["forms"]:
        for number, epoch in enumerate(form["epochs"], 1):
            table.add_row(
                form["name"] if number == 1 else "",
                str(number),
                epoch["from"],
                f"{epoch['median_ms']:,.1f}",
                f"{epoch['min_ms']:,.1f} to {epoch['max_ms']:,.1f}",
                f"{epoch['times_faster']:.1f} x",
            )
    rich.console.Console(width=100, highlight=False).print(table)


def draw_times(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a line of the epochs' median times for each form."""
    figure, axes = subplots(size=(7, 4))
    for form in figures["forms"]:
        times = [epoch["median_ms"] for epoch in form["epochs"]]
        axes.plot(range(1, len(times) + 1), times, "o-", label=form["name"])
    axes.set(yscale="log", xlabel="epoch", ylabel="ms", xticks=range(1, len(figures["forms"][0]["epochs"]) + 1))
    axes.legend()
    figure.savefig(path, dpi=120)
