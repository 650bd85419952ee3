"""Several processes with jax.distributed, against one with as many virtual devices."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import process_presets
import process_shards
import processes

CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)


@functools.cache
def in_one_process(name: str, workers: int) -> dict[str, np.ndarray]:
    case = process_presets.CASES[name]
    _, axis = process_presets.make_mesh(case)
    devices = np.array(jax.devices()[:workers])
    mesh = Mesh(devices.reshape(-1, 2), axis) if case.two_levels else Mesh(devices, (axis,))
    return process_presets.train(case, mesh, axis)


@pytest.mark.parametrize(
    ("count", "devices", "names"),
    [
        (2, 1, ["dsar"]),
        pytest.param(2, 2, ["dense", "oktopk-bf16", "gtopk", "hitopk", "a2sgd"], marks=pytest.mark.full),
        pytest.param(4, 1, ["oktopk", "hitopk"], marks=pytest.mark.full),
        pytest.param(2, 1, list(process_presets.CASES), marks=pytest.mark.slow),
        pytest.param(2, 2, list(process_presets.CASES), marks=pytest.mark.slow),
        pytest.param(4, 1, list(process_presets.CASES), marks=pytest.mark.slow),
        pytest.param(4, 2, list(process_presets.CASES), marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{len(value)} presets" if isinstance(value, list) else None,
)
def test_every_process_ends_as_one_process_does(count: int, devices: int, names: list[str], tmp_path: pathlib.Path):
    """Integers, and floats in sums that have an order, have the same bits.

    The order of the loss's sum is that of the transport.
    """
    processes.run("process_presets.py", count, tmp_path, *names, devices=devices)
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(count)]
    for name in names:
        case = process_presets.CASES[name]
        expected = dict(in_one_process(name, count * devices))
        assert expected["params"].any()
        rows = expected.pop("residual", np.zeros(0))
        for what, value in expected.items():
            for mine in found:
                exact = case.exact and what not in ("losses", "residual_norm")
                compare = np.testing.assert_array_equal if exact else CLOSE
                compare(mine[f"{name}/{what}"], value, err_msg=f"{name} {what}")
        if rows.size:
            assert rows.any()
            together = np.concatenate([mine[f"{name}/residual"] for mine in found])
            np.testing.assert_array_equal(together, rows, err_msg=f"{name} residual")


@functools.cache
def sharded_in_one_process(name: str, devices: int) -> dict[str, np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(2, -1), ("replica", "fsdp"))
    return process_shards.train(process_shards.CASES[name], mesh)


@pytest.mark.parametrize(
    ("count", "names"),
    [
        pytest.param(2, ["oktopk", "jit", "rounds"], marks=pytest.mark.full),
        pytest.param(4, ["oktopk", "whole-replica", "jit", "rounds"], marks=pytest.mark.full),
        pytest.param(2, list(process_shards.CASES), marks=pytest.mark.slow),
        pytest.param(4, list(process_shards.CASES), marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) else None,
)
def test_sharded_models(count: int, names: list[str], tmp_path: pathlib.Path):
    """Two replicas of two or four devices: each is one process, or two.

    All arrays have the bits of one process; the rest the processes assert for themselves.
    """
    texts = processes.run("process_shards.py", count, tmp_path, "2", *names, devices=2)
    assert all("all held" in text for text in texts)
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(count)]
    for name in names:
        expected = sharded_in_one_process(name, 2 * count)
        assert expected["delivered"].all()
        mine = [
            {what.removeprefix(f"{name}/"): one[what] for what in one if what.startswith(f"{name}/")} for one in found
        ]
        assert set().union(*mine) == set(expected)
        for what, value in expected.items():
            exact = what not in ("losses", "residual_norm")
            compare = np.testing.assert_array_equal if exact else CLOSE
            for one in mine:
                if what in one:
                    compare(one[what], value, err_msg=f"{name} {what}")


@pytest.mark.full
def test_contracts_over_processes():
    """What only a process of several can see; it asserts for itself."""
    texts = processes.run("process_contracts.py", 2, devices=2)
    assert ["all held" in text for text in texts] == [True, True]


@pytest.mark.parametrize(
    "how",
    [
        "localhost",
        pytest.param(
            "mpirun",
            marks=pytest.mark.skipif(
                not (processes.mpirun() and importlib.util.find_spec("mpi4py")), reason="there is no MPI here"
            ),
        ),
    ],
)
@pytest.mark.full
def test_the_lines_that_start_them(how: str, tmp_path: pathlib.Path):
    """The documented ones, with two processes and a short run."""
    page = pathlib.Path(__file__).parent.parent / "docs/clusters.md"
    (line,) = [block for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S) if how in block]
    options = f"--algorithm gtopk --epochs 1 --batch 64 --plot {tmp_path}/x.png --json {tmp_path}/x.json"
    for old, new in (
        ("python -m examples.train", f"{sys.executable} -m examples.train {options}"),
        ("localhost:12321", f"localhost:{processes.free_port()}"),
        ("rank in 0 1 2 3", "rank in 0 1"),
        ("--processes 4", "--processes 2"),
        ("mpirun -n 4", f"{processes.mpirun()} -n 2 --oversubscribe" + " --allow-run-as-root" * (os.getuid() == 0)),
    ):
        line = line.replace(old, new)
    with (tmp_path / "output").open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", line], cwd=page.parent.parent, stdout=output, stderr=output, start_new_session=True
        )
        try:
            shell.wait(480)
        finally:
            processes.kill_group(shell.pid)
    written = (tmp_path / "output").read_text()
    (run,) = json.loads((tmp_path / "x.json").read_text()) if (tmp_path / "x.json").exists() else pytest.fail(written)
    assert run["workers"] == 2
    assert len(run["loss"]) == run["steps_per_epoch"] == 1440 // 128
    assert run["loss"][-1] < run["loss"][0]
    assert written.count("plot: ") == 1
