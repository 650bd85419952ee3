"""The tiers of the suite, quick and rest: every test is in one of them.

A test is quick unless it is marked ``full`` or ``slow``. Whole tests are marked where they stand;
of the table of algorithms, ``case`` in ``algorithms.py`` marks all but one number of workers of
the quick rows.
"""

from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("quick", "rest")
# The tier of each test that was collected, by its name, whichever tier is run.
TIER_OF = pytest.StashKey[dict[str, str]]()


def tier(item: pytest.Item) -> str:
    return "rest" if item.get_closest_marker("full") or item.get_closest_marker("slow") else "quick"


def chosen(items: list[pytest.Item], wanted: str) -> list[pytest.Item]:
    """The tests of a tier, or all."""
    return [item for item in items if wanted in ("all", tier(item))]


def quick(values: Iterable[Any], *few: Any) -> list[Any]:
    """A test's parameters, all but a few marked ``full``."""
    values = list(values)
    assert few, "name the quick ones"
    assert all(value in values for value in few), f"{few} are not all among {values}"
    return [value if value in few else pytest.param(value, marks=pytest.mark.full) for value in values]
