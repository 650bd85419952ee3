"""Helpers that all ``jsparse`` commands share: parsers, options, progress bars, figures."""

import argparse
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress
import rich.table

from .._presets.files import write


def add_commands(parser: argparse.ArgumentParser, metavar: str, *modules: Any) -> Any:
    """Adds commands to a parser.

    Args:
      parser: the parser.
      metavar: what help texts call the command.
      *modules: the commands. A module has the command's name. Its docstring is the description,
        ``HELP`` the short help; ``add_arguments`` adds the options to a parser, and ``run`` runs
        the command with what was parsed.

    Returns:
      The subparsers, as argparse's ``add_subparsers`` does.
    """
    commands = parser.add_subparsers(required=True, metavar=metavar)
    for module in modules:
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return commands


def output_file(text: str) -> pathlib.Path:
    """Reads the name of a file that a command writes later, and refuses one that it can't."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be written: name a file in a folder that you may write to")
    return path


def image_file(text: str) -> pathlib.Path:
    """Reads the name of an image that a command draws later, and refuses one that it can't."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install matplotlib") from error
    path, known = output_file(text), sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise argparse.ArgumentTypeError(f"{text} is no image file: let its name end with one of {', '.join(known)}")
    return path


def add_output_options(parser: argparse.ArgumentParser, *, plot: str, figures: str = "the figures") -> None:
    """Adds ``--json`` and ``--plot``.

    Args:
      parser: the command's parser.
      plot: what the plot shows, for the help text.
      figures: what the JSON file holds, for the help text.
    """
    parser.add_argument(
        "--json",
        type=lambda text: text if text == "-" else output_file(text),
        metavar="FILE",
        help=f"write {figures} to this JSON file; - for the standard output",
    )
    parser.add_argument("--plot", type=image_file, metavar="FILE", help=f"draw {plot} to this image file")


def check_files_differ(args: argparse.Namespace) -> None:
    """Refuses one file for two of ``--out``, ``--json`` and ``--plot``: one would be lost.

    Raises:
      ValueError: two are the same file.
    """
    given = {option: getattr(args, option, None) for option in ("out", "json", "plot")}
    files = [(option, path.resolve()) for option, path in given.items() if isinstance(path, pathlib.Path)]
    for (first, path), (second, other) in itertools.combinations(files, 2):
        if path == other and (path.is_file() or not path.exists()):
            raise ValueError(f"--{first} and --{second} are both {given[first]}: name two files")


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
        if args.json:
            write(args.json, figures)
    if args.plot:
        draw(figures, args.plot)


def progress_bar(*, disable: bool = False) -> rich.progress.Progress:
    """A progress bar on the standard error; it vanishes at the end.

    Args:
      disable: show nothing, for all processes but the first.
    """
    columns = (rich.progress.TextColumn("{task.description}"), *rich.progress.Progress.get_default_columns()[1:])
    console = rich.console.Console(file=sys.stderr)
    return rich.progress.Progress(*columns, console=console, transient=True, disable=disable)


def numbers(*names: str) -> list[rich.table.Column]:
    """Columns of numbers for a table: on the right."""
    return [rich.table.Column(name, justify="right") for name in names]


def subplots(*shape: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure that is drawn to a file, and its axes.

    Args:
      *shape: rows and columns of axes; nothing for a single one.
      size: width and height, in inches.
      **options: those of matplotlib's ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(*shape, **options)
