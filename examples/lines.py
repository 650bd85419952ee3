"""Runs that are lines of a file, JSON objects, so that a program may be ended and goes on.

A program that is ended while it writes a line leaves a torn one: without a newline, and no JSON.
"""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file, but for a torn one at its end.

    Raises:
      ValueError: a line is no JSON object.
    """
    *lines, last = _bytes(path).split(b"\n")
    found = [_parsed(line) for line in (lines if _parsed(last) is None else [*lines, last])]
    for number, line in enumerate(found, 1):
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: it is no JSON object; name another file, or remove the line")
    return found


def add(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Writes a line at the end of a file, in place of a torn one."""
    before = _bytes(path)
    last = before.rpartition(b"\n")[2]
    with path.open("ab") as file:
        if _parsed(last) is None:
            file.truncate(len(before) - len(last))
        else:
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def _bytes(path: pathlib.Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _parsed(line: bytes) -> Any:
    """What a line says; None if it is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None
