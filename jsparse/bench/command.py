"""Helpers that all ``jsparse`` commands share: options, progress bars, output of figures."""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress


class LazyParser(argparse.ArgumentParser):
    """A parser that can add its arguments later, when it first parses.

    Args:
      add_arguments: a function that adds the arguments to the parser it is given. It may import
        the modules that the command needs.
      **options: those of ``argparse.ArgumentParser``.
    """

    def __init__(self, *, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any):
        super().__init__(**options)
        self._add_arguments = add_arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        add_arguments, self._add_arguments = self._add_arguments, None
        if add_arguments:
            add_arguments(self)
        return super().parse_known_args(args, namespace)


def whole_number(text: str) -> int:
    """Reads a whole number, which may be written like 25e6."""
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(number)


def add_output_options(parser: argparse.ArgumentParser, *, plot: str, figures: str = "the figures") -> None:
    """Adds ``--json`` and ``--plot``.

    Args:
      parser: the command's parser.
      plot: what the plot shows, for the help text.
      figures: what the JSON file holds, for the help text.
    """
    parser.add_argument("--json", metavar="FILE", help=f"write {figures} to this JSON file; - for the standard output")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help=f"draw {plot} to this image file")


def output(
    args: argparse.Namespace,
    figures: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], pathlib.Path], None],
) -> None:
    """Prints, writes and draws the figures as ``--json`` and ``--plot`` say.

    Args:
      args: the options of :func:`add_output_options`.
      figures: what was measured, as plain numbers.
      show: prints the figures as a table. ``--json -`` prints them as JSON instead.
      draw: draws the figures to a file.
    """
    if args.json == "-":
        print(json.dumps(figures, indent=2))
    else:
        show(figures)
    try:
        if args.json and args.json != "-":
            pathlib.Path(args.json).write_text(json.dumps(figures, indent=2))
        if args.plot:
            draw(figures, args.plot)
    except OSError as error:
        raise ValueError(f"{error}: give --json and --plot files that can be written") from error


def progress_bar(*, disable: bool = False) -> rich.progress.Progress:
    """A progress bar on the standard error; it vanishes at the end.

    Args:
      disable: show nothing, for all processes but the first.
    """
    columns = (rich.progress.TextColumn("{task.description}"), *rich.progress.Progress.get_default_columns()[1:])
    console = rich.console.Console(file=sys.stderr)
    return rich.progress.Progress(*columns, console=console, transient=True, disable=disable)


def pyplot() -> Any:
    """Returns ``matplotlib.pyplot``, set to draw to files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
