"""The benchmarks of ``jsparse bench``, the PyTorch workers they compare with, and their data.

``select``, ``pto``, ``network`` and ``train`` are the four benchmarks, each in the module of its
name. Only the command line imports this package; the library does not.
"""

import argparse


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmarks to the parser of ``jsparse bench``. Only this function imports them."""
    from . import network, pto, select, train

    benchmarks = parser.add_subparsers(required=True, metavar="WHAT")
    for benchmark in (select, pto, network, train):
        benchmark.add_parser(benchmarks)
