"""The command line: ``jsparse plan``, ``jsparse tune``, ``jsparse network``, ``jsparse bench``."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
      argv: the command's name and its arguments; by default those of the process.
    """
    try:
        import rich  # noqa: F401
    except ImportError:
        raise SystemExit("jsparse: error: the command line needs rich: pip install 'jsparse[cli]'") from None
    # These modules import rich.
    from .. import bench
    from ..bench.command import add_commands, check_files_differ
    from . import network, plan, tune

    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="jsparse", description="Sparse gradient all-reduce for JAX.")
    commands = add_commands(parser, "COMMAND", plan, tune, network)
    benchmarks = commands.add_parser("bench", help="measure on this machine")
    if "bench" in argv:  # The other commands do without the benchmarks' modules.
        bench.add_benchmarks(benchmarks)
    args = parser.parse_args(argv)
    try:
        check_files_differ(args)
        args.run(args)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:  # Such as a file that vanished, or a full disk.
        parser.exit(1, f"jsparse: error: {error}\n")
