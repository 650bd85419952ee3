"""Strict settings for every test: eight CPU devices, no silent rank promotion; and which tier of
them is run.

``make test`` runs the quick tests, ``make test-rest`` the others, ``make test-all`` both: see
``tiers.py``. Tests that are marked ``slow`` take minutes: they are of the rest, and skipped
without ``--slow``. ``--share 2/3`` runs the second of three shares.
"""

import argparse
import gc
import itertools
import os
import pathlib
import sys

import jax
import pytest

import processes
from tiers import TIER_OF, TIERS, chosen, row_of, tier

# Most of the suite's time is compilation: cheap machine code will do, unless asked otherwise.
CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):  # Later ones end the process at a flag that they do not know.
    CHEAP += " --xla_cpu_use_fusion_emitters=false"

# What compiles for GPUs stands apart: found by every process, it would complain that there is
# none.
PLUGIN = pathlib.Path(sys.prefix) / "cuda"
if PLUGIN.is_dir():
    sys.path.append(str(PLUGIN))
    jax.config.update("jax_platforms", "cpu")

gc.set_threshold(*processes.GARBAGE)

# Files whose tests share executables with each other.
TOGETHER = {"test_allreduce.py", "test_gather.py", "test_kernels.py", "test_quantize.py", "test_selectors.py"}

PROCESS = pathlib.Path("/proc/self/maps")
TESTS = itertools.count(1)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--optimise", action="store_true", help="let XLA optimise machine code, as it does by default")
    parser.addoption(
        "--slow", action="store_true", help="run the tests that take minutes, too: with --tier rest or all"
    )
    parser.addoption(
        "--tier",
        choices=(*TIERS, "all"),
        default="quick",
        help="which tests to run: quick ones (the default), the rest, or all",
    )
    parser.addoption("--share", type=share, default=(1, 1), help="which share of them to run: 2/3 is the second of 3")


def share(text: str) -> tuple[int, int]:
    number, _, shares = text.partition("/")
    if not (number.isdigit() and shares.isdigit() and 1 <= int(number) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{text!r} must be like 2/3, the second of 3")
    return int(number), int(shares)


def pytest_configure(config):
    if not config.getoption("--optimise"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CHEAP}"


def pytest_report_header(config):
    if config.getoption("--tier") == "quick":
        return "tier: quick (--tier all runs every test)"
    return f"tier: {config.getoption('--tier')}"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the tier that is run."""
    config.stash[TIER_OF] = {item.nodeid: tier(item) for item in items}
    left = chosen(items, config.getoption("--tier"), config.getoption("--share"))
    if len(left) < len(items):
        kept = set(left)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = left


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(config, items):
    select(config, items)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --slow runs it"))
        # Tests that share an executable run in the same process: those of a row, one test with
        # all its parameters, and of some files all that is left.
        if row := row_of(item):
            item.add_marker(pytest.mark.xdist_group(row))
        elif not item.get_closest_marker("xdist_group"):
            together = item.path.name if item.path.name in TOGETHER else item.nodeid.partition("[")[0]
            item.add_marker(pytest.mark.xdist_group(together))


def pytest_runtest_teardown(item, nextitem):
    # Executables stay mapped into memory, and Linux grants a process 65,530 mappings: then it
    # dies in the compiler. One test may need hundreds.
    if PROCESS.exists() and next(TESTS) % 10 == 0 and len(PROCESS.read_bytes().splitlines()) > 30_000:
        jax.clear_caches()
        gc.collect()
