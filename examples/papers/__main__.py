"""The figures and tables of five papers, made again; and the cost model beside what is measured.

Each figure has a claim of its paper, and the runs that answer it: at the paper's size, for a
machine with an accelerator for each worker, or one for all of them (``--full``), or at a small
size, for two cores. Runs are lines of JSON, in one file for each figure. What is in a file is not
run again, so the program may be ended at any time. Then it prints what came out, and draws it.

Run it from the root of a checkout, after ``pip install '.[examples]'``. DIR has a folder for each
data set, ``mnist``, ``cifar10``, ``ptb``, ``wikitext-2``, ``an4`` and ``atis``, with the standard
files::

    python -m examples.papers                                   # says what there is
    python -m examples.papers 'gtopk 1' 'oktopk 5' --data-dir DIR --out papers
    python -m examples.papers all --data-dir DIR --out papers --minutes 60

What is measured over slow links needs Linux and root.

Trainings also run in several processes, such as one for each machine of a cluster, with the same
options and ``--distributed`` (docs/clusters.md). All processes must see the directories. The other
figures are made by one process.
"""

import argparse
import contextlib
import math
import os
import pathlib
import sys
import time

import jax
import rich.console
import rich.markup

from examples.options import output_folder
from jsparse.cli import processes

from . import a2sgd, commlib, gtopk, oktopk, scale, thesis
from .convergence import Convergence
from .figure import Figure, make
from .times import PingPong, Synchronised, TimeToAccuracy, Tuned

PAPERS = {"oktopk": oktopk, "gtopk": gtopk, "a2sgd": a2sgd, "commlib": commlib, "thesis": thesis, "scale": scale}
FIGURES: dict[str, Figure] = {
    f"{paper} {name}": figure for paper, module in PAPERS.items() for name, figure in module.FIGURES.items()
}


def file_of(name: str, suffix: str) -> str:
    """The name of a figure's file."""
    return name.replace(" ", "_").replace(",", "") + suffix


def workers_of(figure: Figure, full: bool) -> int:
    """How many devices a figure's runs need."""
    return max(case["workers"] for case in figure.sized(full).cases()) if isinstance(figure, Convergence) else 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", nargs="*", metavar="FIGURE", help="such as 'gtopk 1', or a paper, or all")
    parser.add_argument("--data-dir", type=pathlib.Path, metavar="DIR", help="with a folder for each data set")
    parser.add_argument(
        "--out", type=output_folder, default=pathlib.Path("papers"), metavar="DIR", help="default papers"
    )
    parser.add_argument("--full", action="store_true", help="at the papers' sizes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--show", action="store_true", help="show the runs that there are, and make none")
    processes.add_arguments(parser)
    args = parser.parse_args(argv)
    console = rich.console.Console(width=140)
    if not args.figure:
        for name, figure in FIGURES.items():
            console.print(f"[bold]{name}[/bold] {type(figure).__name__}: {figure.claim}", highlight=False)
        return
    names = [name for name in FIGURES if {name, name.split()[0], "all"} & set(args.figure)]
    unknown = set(args.figure) - set(FIGURES) - set(PAPERS) - {"all"}
    if unknown:
        parser.error(
            f"there is no figure {', '.join(sorted(unknown))}: without arguments the program says what there is"
        )

    # Without accelerators the workers of trainings are virtual devices, of which accelerators need
    # none. Times are those of one device alone.
    devices = max(workers_of(FIGURES[name], args.full) for name in names)
    with contextlib.suppress(RuntimeError):  # It is too late if this process has used JAX already.
        jax.config.update("jax_num_cpu_devices", devices)
    try:
        processes.join(args)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    first = jax.process_index() == 0
    console.quiet = not first
    failed = False
    until = -math.inf if args.show else time.monotonic() + 60 * args.minutes
    for name in names:
        figure = FIGURES[name]
        console.print(f"\n[bold]{name}[/bold]: {figure.claim}", highlight=False)
        if isinstance(figure, Synchronised | PingPong | TimeToAccuracy | Tuned) and os.geteuid() and not args.show:
            console.print("not run: it makes networks, for which it has to be root")
            continue
        if args.distributed and not isinstance(figure, Convergence):
            console.print("not run: one process makes it, without --distributed")
            continue
        try:
            lines = make(figure, args.out / file_of(name, ".jsonl"), full=args.full, files=args.data_dir, until=until)
        except ValueError as error:
            console.print(f"[red]not run[/red]: {rich.markup.escape(str(error))}", highlight=False, soft_wrap=True)
            failed = True
            continue
        if lines and first:
            console.print(figure.table(lines))
            figure.draw(lines, args.out / file_of(name, ".png"))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
