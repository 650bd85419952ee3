"""Runs that are lines of a file, JSON objects, so that a program may be ended and goes on."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file. If a program was ended while it wrote the last one, that is cut off."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return list(map(json.loads, whole.splitlines()))


def add(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Writes a line at the end of a file."""
    with path.open("a") as file:
        print(json.dumps(line), file=file)
