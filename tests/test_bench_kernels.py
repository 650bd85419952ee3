"""Tests the benchmark of the kernels without a GPU: it runs, and it notices wrong results."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import shapes
from kernels_pallas.bench import __main__ as bench
from kernels_pallas.bench import timing
from kernels_pallas.bench.operations import Operation, operations

HERE = ("--implementation", "xla", "interpret", "--size", "1500", "--groups", "2", "--seconds", "0")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    monkeypatch.setattr(timing, "CACHE", 10_000)


def run(tmp_path, *args: str) -> dict:
    path = tmp_path / "figures.json"
    bench.main([*HERE, "--density", "0.01", "--json", str(path), *args])
    return json.loads(path.read_text())


@pytest.mark.full
def test_every_operation_runs_and_its_kernels_are_right(tmp_path, capsys):
    rows = run(tmp_path, "--check")["rows"]
    assert {row["operation"] for row in rows} == {op.name for op in operations()}
    assert all(row["right"] is (True if row["form"] == "interpret" else None) for row in rows)
    kernels = {row["operation"] for row in rows if row["form"] == "interpret"}
    assert kernels == {op.name for op in operations() if "triton" in op.forms}
    assert "accumulate_and_select" in capsys.readouterr().out


@pytest.mark.full
def test_figures(tmp_path):
    figures = run(tmp_path, "--ops", "add_sparse", "--clustered")
    rows = {(row["operation"], row["form"]): row for row in figures["rows"]}
    plain, kernel = (rows["add_sparse", form] for form in ("xla", "interpret"))
    assert (kernel["n"], kernel["k"]) == (1500, 15)
    assert kernel["bytes_an_element"] == pytest.approx(16 * 15 / 1500)
    assert kernel["least_microseconds"] <= kernel["microseconds"] <= kernel["most_microseconds"]
    assert kernel["gigabytes_a_second"] == pytest.approx(16 * 15 / kernel["microseconds"] / 1000)
    assert kernel["times_as_fast_as"]["xla"] == pytest.approx(plain["microseconds"] / kernel["microseconds"])
    assert rows["copy", "xla"]["share_of_copy"] == 1
    assert kernel["share_of_copy"] == kernel["gigabytes_a_second"] / figures["copy_gigabytes_a_second"]


@pytest.mark.full
def test_tuning_tries_every_combination(tmp_path):
    rows = run(tmp_path, "--tune", "--ops", "magnitude_statistics", "--implementation", "interpret")["rows"]
    tried = [row["options"] for row in rows if row["operation"] != "copy"]
    assert tried == [{"block": block} for block in (1024, 2048, 4096, 8192)]
    assert all(row["right"] for row in rows if row["operation"] != "copy")


@pytest.mark.full
def test_wrong_results_end_it(monkeypatch, tmp_path):
    def wrong(n, k, implementation):
        return lambda x: x if implementation == "xla" else x.at[3].add(1)

    rows = [Operation("identity", ("x",), wrong, lambda n, k: 8 * n)]
    monkeypatch.setattr(bench, "operations", lambda: rows)
    with pytest.raises(SystemExit, match=r"differ.*identity \(interpret\)"):
        run(tmp_path, "--check")


@pytest.mark.full
def test_a_form_that_fails_does_not_end_it(monkeypatch, tmp_path, capsys):
    def fails(n, k, implementation):
        def run(x):
            if implementation == "interpret":
                raise RuntimeError("out of memory")
            return x + 1

        return run

    copy = next(op for op in operations() if op.name == "copy")
    rows = [Operation("one that fails", ("x",), fails, lambda n, k: 8 * n), copy]
    monkeypatch.setattr(bench, "operations", lambda: rows)
    with pytest.raises(SystemExit, match="some forms failed"):
        run(tmp_path)
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [("failed" in row, "share_of_copy" in row) for row in rows] == [(False, True), (True, False), (False, True)]
    assert "out of memory" in capsys.readouterr().err


def test_inputs_in_turn_exceed_the_cache(monkeypatch):
    monkeypatch.undo()
    for shape in shapes.MODELS:
        size = 4 * shape.n
        assert timing.sets_of(size) % timing.IN_A_ROW == 0
        assert timing.sets_of(size) * size >= 2 * 60 * 10**6


def test_calls_in_a_row(monkeypatch):
    """Two calls in a program: each has inputs of its own, and overwrites those that it donates."""
    monkeypatch.setattr(timing, "IN_A_ROW", 2)
    sets = [[jnp.float32(i), jnp.float32(0)] for i in (1, 10, 100, 1000)]
    run = jax.jit(timing.in_a_row(lambda x, y: (x, y + x), (1,)), donate_argnums=0)
    call = timing.jax_calls(run, sets, (1,))
    totals = [[float(total) for _, total in call(number)] for number in range(4)]
    assert totals == [[1, 10], [100, 1000], [2, 20], [200, 2000]]


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "no GPU.*--implementation xla interpret --size"),
        (["--implementation", "triton", "--size", "100"], "no GPU"),
        (["--implementation", "xla"], "no GPU"),
        ([*HERE, "--size", "0"], "at least 1"),
        ([*HERE, "--density", "2"], "above 0"),
        ([*HERE, "--ops", "sort"], "there are copy, accumulate_and_select"),
    ],
)
def test_what_cannot_be_run_is_refused(args: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        bench.main(args)
    assert re.search(message, capsys.readouterr().err)


def test_shapes():
    """The models of the papers, and the number of elements kept of each."""
    assert [shape.n for shape in shapes.MODELS] == [1_000_000, 14_728_266, 27_569_568, 110_000_000, 133_547_324]
    assert [shapes.MODELS[1].k(density) for density in shapes.DENSITIES] == [14_728, 147_283]
    assert [shapes.Shape("", n).k(0.01) for n in (0, 1, 10, 1000)] == [0, 1, 1, 10]
