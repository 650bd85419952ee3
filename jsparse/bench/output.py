"""What the commands make of their figures: a table, JSON, a plot."""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any


def put_out(
    args: argparse.Namespace,
    figures: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], pathlib.Path], None],
) -> None:
    """Prints figures by ``show``, or as ``--json -``; writes and draws them where the options say so."""
    if args.json == "-":
        print(json.dumps(figures, indent=2))
    else:
        show(figures)
    if args.json and args.json != "-":
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=2))
    if args.plot:
        draw(figures, args.plot)


def pyplot() -> Any:
    """``matplotlib.pyplot``, for files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
