"""Reading of bytes and lines, with errors that say where and what is wrong."""

import pathlib


def damaged(path: pathlib.Path, what: str, page: str, line: int | None = None) -> ValueError:
    """The error for a damaged file.

    Args:
      path: of the file.
      what: is wrong.
      page: from which the file can be fetched.
      line: number of the line, from 1 on.
    """
    place = path if line is None else f"{path}, line {line}"
    return ValueError(f"{place}: {what}; fetch the file from {page}")


def read_bytes(path: pathlib.Path, page: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"can't be read ({error.strerror})", page) from error


def read_lines(path: pathlib.Path, page: str) -> list[str]:
    """The lines of a text in UTF-8, without their ends; an empty file is damaged."""
    raw = read_bytes(path, page).removesuffix(b"\n")
    if not raw:
        raise damaged(path, "is empty", page)
    found = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            found.append(line.decode())
        except UnicodeDecodeError as error:
            raise damaged(path, f"byte {error.start} is not UTF-8", page, number) from error
    return found
