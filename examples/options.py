"""Types of options that the examples share, and errors of one line."""

import argparse
import contextlib
import math
import os
import pathlib
from collections.abc import Callable, Iterator


def at_least(least: int, of: int = 1) -> Callable[[str], int]:
    """A type of options: whole numbers that are at least ``least``, and multiples of ``of``."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            number = int(text)
            if number >= least and number % of == 0:
                return number
        kind = f"multiple of {of}" if of > 1 else "whole number"
        raise argparse.ArgumentTypeError(f"it is {text}; give a {kind} that is at least {least}")

    return read


def positive(text: str) -> float:
    """Reads a number, and refuses one that is not finite and above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"it is {text}; give a number above 0")


def output_folder(text: str) -> pathlib.Path:
    """Reads the name of a folder that a program makes, or fills; and refuses one that it can't."""
    path = pathlib.Path(text)
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be a folder for files: name one that you may make or write to")
    return path


def folder_of(*names: str) -> Callable[[str], pathlib.Path]:
    """A type of options: folders that have these files."""

    def read(text: str) -> pathlib.Path:
        path = pathlib.Path(text)
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise argparse.ArgumentTypeError(f"{text} has no {missing[0]}: name a folder with {' and '.join(names)}")
        return path

    return read


@contextlib.contextmanager
def told(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program by an error of one line where the block raises a ValueError."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))
