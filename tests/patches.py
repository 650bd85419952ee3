"""The diffs of docs/loops.md, and what they make of a file."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "loops.md"


def diffs() -> dict[str, str]:
    """The diffs by the file that they change: hunks, with ``@@`` between them."""
    return dict(re.findall(r"```diff\n--- (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))


def written(diff: str) -> list[str]:
    """The lines that a diff writes, but for empty ones and imports."""
    lines = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    return [line for line in lines if line and not line.startswith("import ")]


def row(file: str) -> list[str]:
    """What the table says of a file's diff: its lines, and the bytes before and after it."""
    page = PAGE.read_text()
    title = page[: page.index(f"--- {file}\n")].rpartition("\n## ")[2].partition("\n")[0]
    (line,) = (line for line in page.splitlines() if line.startswith(f"| [{title}]("))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def apply(diff: str, text: str) -> str:
    """A text with its diff.

    Raises:
      ValueError: the old lines of a hunk are not in the text, or more than once.
    """
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if (line[:1] or " ") in (" ", sign)) for sign in "-+")
        if text.count(old) != 1:
            raise ValueError(f"the text has these lines {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text
