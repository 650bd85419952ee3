"""The command line: ``jsparse plan``, ``jsparse tune``, ``jsparse network``, ``jsparse bench``."""

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
    from ..bench.command import LazyParser
    from . import network, plan, tune

    parser = LazyParser(prog="jsparse", description="Sparse gradient all-reduce for JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_parser(commands)
    tune.add_parser(commands)
    network.add_parser(commands)
    bench.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except ValueError as error:
        parser.error(str(error))
