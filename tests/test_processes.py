"""Several processes with jax.distributed, against one with as many virtual devices."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import process_presets
import processes

CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)


@functools.cache
def in_one_process(name: str, workers: int) -> dict[str, np.ndarray]:
    case = process_presets.CASES[name]
    _, axis = process_presets.make_mesh(case)
    devices = np.array(jax.devices()[:workers])
    mesh = Mesh(devices.reshape(-1, 2), axis) if case.two_levels else Mesh(devices, (axis,))
    return process_presets.train(case, mesh, axis)


@pytest.mark.parametrize(("count", "devices"), [(2, 1), (2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_process_ends_as_one_process_does(count: int, devices: int, tmp_path: pathlib.Path):
    """To the bit, where the order of a sum does not matter: for whole numbers."""
    processes.run("process_presets.py", count, tmp_path, devices=devices)
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(count)]
    for name, case in process_presets.CASES.items():
        expected = dict(in_one_process(name, count * devices))
        assert expected["params"].any()
        rows = expected.pop("residual", np.zeros(0))
        for what, value in expected.items():
            for mine in found:
                compare = np.testing.assert_array_equal if case.exact else CLOSE
                compare(mine[f"{name}/{what}"], value, err_msg=f"{name} {what}")
        if rows.size:
            assert rows.any()
            together = np.concatenate([mine[f"{name}/residual"] for mine in found])
            np.testing.assert_array_equal(together, rows, err_msg=f"{name} residual")


def test_contracts_over_processes():
    """What only a process of several can see; it asserts for itself."""
    for text in processes.run("process_contracts.py", 2, devices=2):
        assert "all held" in text
