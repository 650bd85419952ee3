"""Writes the tables of the README and of the catalogue that are made from the rows of the test
table.

``python docs/tables.py`` rewrites them; ``make tables`` does it in the environment of the tests.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from algorithms import ROWS, Row  # noqa: E402
from jsparse import cost  # noqa: E402

N, DENSITY, WORKERS, NODES = 1_000_000, 0.01, 8, (2, 4)
# The rows that stand for a preset, sparse ones first.
CARDS = [(row, row.card) for sparse in (True, False) for row in ROWS if row.card and row.sparse == sparse]


def named(row: Row) -> tuple[str, ...]:
    """The presets that a row stands for."""
    return (row.name, *row.card.aliases) if row.card else ()


def presets() -> str:
    """What each preset is, sends and is for."""
    lines = ["| preset | paper | bytes a worker sends in a step | memory | when |", "|---|---|---|---|---|"]
    for row, card in CARDS:
        names = ", ".join(f"`jsparse.{name}`" for name in named(row))
        lines.append(f"| {names} | {card.paper} | {card.bytes} | {card.memory} | {card.when} |")
    return "\n".join(lines)


def exact() -> str:
    """What each preset sends at least and at most, read off its traced program."""
    params, k = jax.ShapeDtypeStruct((1000, N // 1000), jnp.float32), round(DENSITY * N)
    lines = ["| | least | most | messages |", "|---|---|---|---|"]
    for row, _ in CARDS:
        axes = ("nodes", "gpus") if row.gpus else "workers"
        least, most = cost.exact(row.make(axes, DENSITY), params, NODES if row.gpus else WORKERS)
        names = ", ".join(f"`{name}`" for name in named(row))
        words = (f"{sent.bytes / 4 / k:.1f}" for sent in (least, most))
        messages = " to ".join(map(str, dict.fromkeys((least.messages, most.messages))))
        lines.append(f"| {names} | {' | '.join(words)} | {messages} |")
    return "\n".join(lines)


TABLES = {"README.md": {"presets": presets}, "docs/algorithms.md": {"exact": exact}}


def written(page: str) -> str:
    """A page with its tables as they should be: each stands between two comments that name it."""
    text = (ROOT / page).read_text()
    for name, make in TABLES[page].items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, make=make: f"{found[1]}\n{make()}\n\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"{page} has {count} places for the table {name!r}: mark one by two comments")
    return text


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(written(page))
