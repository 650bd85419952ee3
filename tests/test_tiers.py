"""The tiers: no test is in both or in none, and the quick one has every algorithm."""

import inspect
import types

import pytest

import jsparse
from algorithms import QUICK, ROWS, Row, case, parts
from tiers import TIER_OF, TIERS, chosen, quick, tier

# Public classes that are protocols, states and results, or parts of no transformation.
OTHERS = {
    *("Selector", "SelectorState", "ReusedThresholdState", "PerLeafState"),
    *("AllReduce", "OkTopkState", "ParameterServerState"),
    *("ReduceReport", "Quantizer", "Wire", "Messages"),
}


class Item:
    """A test with these marks, and maybe parameters."""

    def __init__(self, *marks: str, nodeid: str = "", **params: object):
        self.marks, self.nodeid = marks, nodeid
        self.callspec = types.SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


def test_tiers_are_disjoint_and_together_are_all():
    items = [Item(), Item("slow"), Item("full"), Item("full", "slow"), Item("skip")]
    by_tier = [chosen(items, wanted) for wanted in TIERS]
    assert by_tier == [[items[0], items[4]], items[1:4]]
    assert chosen(items, "all") == items


def test_each_test_is_in_one_share():
    """They are alike in number, and the tests of a row stay together."""
    items = [Item("full", nodeid=f"test[{i}]") for i in range(300)]
    shares = [chosen(items, "rest", (number, 3)) for number in (1, 2, 3)]
    assert sorted((item for share in shares for item in share), key=items.index) == items
    assert min(map(len, shares)) > 70
    rows = [Item("full", nodeid=f"test[{i}]", row="oktopk", size=3) for i in range(50)]
    assert sorted(len(chosen(rows, "rest", (number, 3))) for number in (1, 2, 3)) == [0, 0, 50]
    assert chosen(items, "quick", (1, 3)) == []


def test_this_session_runs_its_tier(request: pytest.FixtureRequest):
    """All that was collected is in one tier, and of that tier nothing was left out but by other
    options.
    """
    tiers, wanted = request.config.stash[TIER_OF], request.config.getoption("--tier")
    running = request.session.items
    assert set(tiers.values()) <= set(TIERS)
    assert chosen(running, wanted) == running
    # pytest-xdist appends a test's group to its name.
    names = {item: item.nodeid if item.nodeid in tiers else item.nodeid.rpartition("@")[0] for item in running}
    assert {tiers[names[item]] == tier(item) for item in running} == {True}


def test_every_file_has_quick_tests(request: pytest.FixtureRequest):
    """Every file that was collected, but that of faults, whose tests restart processes."""
    tiers = request.config.stash[TIER_OF]
    files = {name.partition("::")[0] for name in tiers} - {"tests/test_faults.py"}
    assert files == {name.partition("::")[0] for name, tier in tiers.items() if tier == "quick"}


def test_parameters_are_quick_or_full():
    first, second = quick([1, 2], 1)
    assert first == 1
    assert [mark.name for mark in second.marks] == ["full"]
    with pytest.raises(AssertionError, match="not all among"):
        quick([1, 2], 3)


def test_quick_rows_have_every_algorithm():
    """Every preset, selector, all-reduce, wire format and quantizer has a row that is quick at
    one size.
    """
    rows = [row for row in ROWS if row.name in QUICK]
    presets = {
        name
        for name in jsparse.__all__
        if inspect.isfunction(getattr(jsparse, name))
        and inspect.signature(getattr(jsparse, name)).return_annotation is jsparse.SparseAllReduce
    }
    # The row "general" is of sparse_allreduce; from_file and over_mesh take what the others make.
    assert presets - {"sparse_allreduce", "from_file", "over_mesh"} == {row.preset for row in rows} - {"general"}
    classes = {
        getattr(package, name)
        for package in (jsparse.select, jsparse.allreduce, jsparse.wire, jsparse.quantize)
        for name in package.__all__
        if inspect.isclass(getattr(package, name)) and name not in OTHERS
    }
    assert set().union(*map(parts, rows)) >= classes
    for row in rows:
        assert [size for size in row.sizes if not case(row, size).marks] == [row.usual_size]


def test_other_rows_are_full():
    row = Row("oktopk-other", lambda comm, density: jsparse.oktopk(comm, density=density))
    assert all([mark.name for mark in case(row, size).marks] == ["full"] for size in row.sizes)
