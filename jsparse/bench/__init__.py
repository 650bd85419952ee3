"""The benchmarks of ``jsparse bench``, the PyTorch workers they compare with, and their data.

``select``, ``pto``, ``network`` and ``train`` are the four benchmarks, each in the module of its
name. Only the command line imports this package; the library does not.
"""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds ``jsparse bench``, and imports the benchmarks only when it is called.

    Args:
      commands: the subparsers of a :class:`.command.LazyParser`.
    """
    commands.add_parser("bench", help="measure on this machine", add_arguments=_add_benchmarks)


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    from . import network, pto, select, train

    benchmarks = parser.add_subparsers(required=True, metavar="WHAT")
    for benchmark in (select, pto, network, train):
        benchmark.add_parser(benchmarks)
