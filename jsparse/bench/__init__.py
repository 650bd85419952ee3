"""The benchmarks of ``jsparse bench``, the PyTorch workers they compare with, and their data.

``select``, ``pto``, ``data``, ``network``, ``profile`` and ``train`` are the benchmarks, each in
the module of its name. The command line and the examples import this package; the library does
not.
"""

import argparse


def add_benchmarks(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmarks to the parser of ``jsparse bench``. Only this function imports them."""
    from . import data, network, profile, pto, select, train
    from .command import add_commands

    add_commands(parser, "WHAT", select, pto, data, network, profile, train)
