"""The command line: ``jsparse plan``, ``jsparse tune``, ``jsparse network``, ``jsparse bench``."""

import argparse
from collections.abc import Sequence

from ..bench import network as bench_network
from ..bench import pto, select, train
from . import network, plan, tune


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
      argv: its arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="jsparse", description="Sparse gradient all-reduce for JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_parser(commands)
    tune.add_parser(commands)
    network.add_parser(commands)
    bench = commands.add_parser("bench", help="measure on this machine").add_subparsers(required=True, metavar="WHAT")
    select.add_parser(bench)
    pto.add_parser(bench)
    bench_network.add_parser(bench)
    train.add_parser(bench)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except ValueError as error:
        parser.error(str(error))
