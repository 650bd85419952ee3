"""Folders as options, and errors of one line."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator


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
