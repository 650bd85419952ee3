"""The tiers of the suite, quick and rest: every test is in one of them.

A test is quick unless it is marked ``full`` or ``slow``. Whole tests are marked where they stand;
of the table of algorithms, ``case`` in ``algorithms.py`` marks all but one number of workers of
the quick rows.

The rest takes an hour or more on two cores, so it can be divided into shares.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("quick", "rest")
# The tier of each test that was collected, by its name, whichever tier is run.
TIER_OF = pytest.StashKey[dict[str, str]]()


def tier(item: pytest.Item) -> str:
    return "rest" if item.get_closest_marker("full") or item.get_closest_marker("slow") else "quick"


def row_of(item: pytest.Item) -> str | None:
    """The row and number of workers of a test of the table of algorithms, whose tests share
    executables.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    return f"{params['row']}-{params.get('size')}" if "row" in params else None


def chosen(items: list[pytest.Item], wanted: str, share: tuple[int, int] = (1, 1)) -> list[pytest.Item]:
    """The tests of a tier, or all; of them one share, numbered from 1, of as many as are given.

    A test is always in the same share, together with all others of its row.
    """
    number, shares = share
    return [
        item
        for item in items
        if wanted in ("all", tier(item)) and zlib.crc32((row_of(item) or item.nodeid).encode()) % shares == number - 1
    ]


def quick(values: Iterable[Any], *few: Any) -> list[Any]:
    """A test's parameters, all but a few marked ``full``."""
    values = list(values)
    assert few, "name the quick ones"
    assert all(value in values for value in few), f"{few} are not all among {values}"
    return [value if value in few else pytest.param(value, marks=pytest.mark.full) for value in values]


def full(*values: Any) -> Any:
    """One case of a test's parameters, a value for each of them, marked ``full``."""
    return pytest.param(*values, marks=pytest.mark.full)
