"""Linear models on sparse data: batches, strategies, and the losses of scikit-learn's solvers."""

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

import processes
from examples import linear
from examples.data import Rows, read_libsvm, sparse
from tiers import quick

DATA = os.environ.get("JSPARSE_DATA")
ROOT = pathlib.Path(__file__).parent.parent
COLUMNS = 300


@pytest.fixture(autouse=True)
def devices() -> None:
    """JAX has been used, so that no option changes how many virtual devices there are."""
    assert len(jax.devices()) == 8


def rows_of(count: int, seed: int = 0) -> Rows:
    return sparse.made_up(count, sparse.Kind(COLUMNS, COLUMNS, 12, 1.01, True), seed)


def dense(rows: Rows) -> np.ndarray:
    result = np.zeros((rows.labels.size, COLUMNS))
    result[np.repeat(np.arange(rows.labels.size), np.diff(rows.indptr)), rows.indices] = rows.values
    return result


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 400 rows."""
    rows = rows_of(400)
    lines = []
    for i, label in enumerate(rows.labels):
        own = slice(rows.indptr[i], rows.indptr[i + 1])
        pairs = zip(rows.indices[own] + 1, rows.values[own], strict=True)
        lines.append(f"{label:+.0f} " + " ".join(f"{column}:{value:.9g}" for column, value in pairs))
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    return tmp_path / "rows"


def trained(path: pathlib.Path | str, *options: str) -> list[dict]:
    written = pathlib.Path(f"{path}.json")
    linear.main([str(path), "--json", str(written), *options])
    return json.loads(written.read_text())


@pytest.mark.parametrize("size", [7, 40, 100])
def test_batches_hold_all_rows(size: int):
    rows = rows_of(100)
    cut = sparse.cut(rows, size, seed=3)
    count, capacity, elements = sparse.sizes(cut)
    assert count == -(-100 // size)
    batches = sparse.pad(cut, size, count + 1, capacity + 2, elements + 5, COLUMNS)
    found = []
    for batch in zip(*batches, strict=True):
        columns, places, numbers, values, labels, present = batch
        assert (np.diff(columns[columns < COLUMNS]) > 0).all()
        assert (np.diff(numbers) >= 0).all()
        matrix = np.zeros((size, COLUMNS + 1))
        np.add.at(matrix, (numbers, columns[places]), values)
        assert not matrix[present == 0].any()
        assert not matrix[:, COLUMNS].any()
        found.append(np.c_[labels, matrix[:, :COLUMNS]][present == 1])
    expected = np.c_[rows.labels, dense(rows)]
    together = np.concatenate(found)
    np.testing.assert_array_equal(together[np.lexsort(together.T)], expected[np.lexsort(expected.T)])


def test_made_up_rows():
    """Columns follow a power law, and labels follow the same weights on all workers."""
    kind = sparse.Kind(columns=1000, used=600, draws=30, exponent=2, spread=False)
    rows = sparse.made_up(3000, kind, seed=1)
    counts = np.bincount(rows.indices, minlength=1000)
    assert not counts[600:].any()
    assert (np.diff(rows.indices)[np.diff(np.repeat(np.arange(3000), np.diff(rows.indptr))) == 0] > 0).all()
    # Ranks from 2^(i+1) on to twice that occur half as often as those before them.
    octaves = [counts[2**i - 1 : 2 ** (i + 1) - 1].sum() for i in range(4, 8)]
    np.testing.assert_allclose(np.divide(octaves[1:], octaves[:-1]), 0.5, rtol=0.15)
    spread = sparse.made_up(3000, kind._replace(spread=True), seed=1)
    np.testing.assert_array_equal(np.sort(np.bincount(spread.indices, minlength=1000)), np.sort(counts))
    assert 0.2 < np.mean(rows.labels > 0) < 0.8


def reference(
    path: pathlib.Path, loss: str, workers: int, size: int, epochs: int, rate: float, l2: float
) -> np.ndarray:
    """The weights after SGD in NumPy, on the same batches."""
    parts = [read_libsvm(path, part, workers) for part in range(workers)]
    cuts = [[(dense(batch), batch.labels) for batch in sparse.cut(rows, size, 0)] for rows in parts]
    steps = max(map(len, cuts))
    mean = sum(rows.labels.size for rows in parts) / steps
    slope = {
        "linear": lambda x, y: x - y,
        "logistic": lambda x, y: -y / (1 + np.exp(y * x)),
        "svm": lambda x, y: -y * (y * x < 1),
    }[loss]
    weights, rng = np.zeros(COLUMNS), np.random.default_rng(0)
    for epoch in range(epochs):
        step = rate * 0.9**epoch
        for number in rng.permutation(steps):
            gradient = np.zeros(COLUMNS)
            for cut in cuts:
                if number < len(cut):
                    x, y = cut[number]
                    gradient += x.T @ slope(x @ weights, y)
            weights = (1 - step * l2) * weights - step * gradient / mean
    return weights


@pytest.mark.parametrize("names", quick(["all", "ssar_split_allgather"], "ssar_split_allgather"))
@pytest.mark.parametrize("loss", quick(list(linear.LOSSES), "logistic"))
def test_every_strategy_takes_the_same_steps(loss: str, names: str, path: pathlib.Path, capsys):
    options = ["--loss", loss, "--workers", "4", "--batch", "30", "--epochs", "2", "--l2", "0.01"]
    runs = trained(path, *options, "--strategy", names)
    rows = read_libsvm(path)
    wanted = linear.objective(rows, reference(path, loss, 4, 30, 2, 1.0, 0.01), loss, 0.01)
    assert [run["strategy"] for run in runs] == (list(linear.STRATEGIES) if names == "all" else [names])
    for run in runs:
        late = run["strategy"] == "parameter_server-async"
        assert run["loss"][-1] == pytest.approx(wanted, rel=0.5 if late else 1e-5), run["strategy"]
        assert run["loss"][-1] < run["loss"][0]
        assert len(run["seconds"]) == len(run["accuracy"]) == 2
        np.testing.assert_allclose(np.add(run["computing"], run["communicating"]), run["seconds"])
        assert run["columns"] == rows.indices.max() + 1
    assert "epoch 2: loss" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["epoch", "inverse"])
def test_step_sizes(schedule: str):
    parsed = linear.argparse.Namespace(schedule=schedule, step_size=2.0, decay=0.5, l2=0.25)
    sizes = [linear.step_size(parsed, epoch, step) for epoch, step in ((0, 0), (0, 3), (1, 4), (2, 9))]
    assert sizes == pytest.approx({"epoch": [2, 2, 1, 0.5], "inverse": [2, 2 / 2.5, 2 / 3, 2 / 5.5]}[schedule])


@pytest.mark.full
def test_what_exceeds_the_capacity_is_learned_later(path: pathlib.Path):
    """With a quarter of the room the loss is nearly the same."""
    options = ["--workers", "4", "--batch", "25", "--epochs", "12", "--strategy", "topk_allgather"]
    (whole,) = trained(path, *options)
    (less,) = trained(path, *options, "--capacity", str(whole["capacity"] // 4))
    assert less["bytes"][0] < 0.3 * whole["bytes"][0]
    assert less["loss"][-1] == pytest.approx(whole["loss"][-1], rel=0.03)
    assert less["loss"][-1] != whole["loss"][-1]


def off(path: pathlib.Path, loss: str, batch: int, step_size: float, l2: float) -> float:
    """How far the loss is off that of scikit-learn's solver, relatively."""
    decay, epochs = "0.95" if loss == "linear" else "0.9", "30" if loss == "logistic" else "60"
    options = ["--loss", loss, "--step-size", str(step_size), "--decay", decay, "--epochs", epochs, "--l2", str(l2)]
    (run,) = trained(path, *options, "--batch", str(batch), "--workers", "8", "--compare")
    return run["relative"]


@pytest.mark.full
@pytest.mark.parametrize("loss", list(linear.LOSSES))
def test_the_loss_is_that_of_scikit_learn(loss: str, path: pathlib.Path):
    assert abs(off(path, loss, 5, 0.3 if loss == "linear" else 2, 0.1)) < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="JSPARSE_DATA names no directory of data sets")
@pytest.mark.parametrize(
    "name, step_sizes",
    [
        ("a9a", {"linear": 0.1, "logistic": 1, "svm": 1}),
        ("w8a", {"linear": 0.2, "logistic": 1, "svm": 1}),
        ("reuters_earn_tfidf.train", {"linear": 3, "logistic": 10, "svm": 10}),
    ],
)
@pytest.mark.parametrize("loss", linear.LOSSES)
def test_the_loss_is_that_of_scikit_learn_on_real_data(
    loss: str, name: str, step_sizes: dict[str, float], tmp_path: pathlib.Path
):
    (tmp_path / name).symlink_to(pathlib.Path(str(DATA)) / "libsvm" / name)
    assert abs(off(tmp_path / name, loss, 25, step_sizes[loss], 1e-3)) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("how", ["distributed", "mpi"])
def test_over_processes(how: str, path: pathlib.Path):
    """The documented lines; the losses are those of workers in one process."""
    if how == "mpi" and not (processes.mpirun() and importlib.util.find_spec("mpi4jax")):
        pytest.skip("there is no MPI here")
    options = f"{path} --batch 30 --epochs 2 --strategy dense --strategy ssar_split_allgather"
    page = (ROOT / "docs/linear.md").read_text()
    (line,) = [
        line
        for line in re.findall(r"```sh\n(.*?)```", page, flags=re.S)
        if f"--{how}" in line and "network" not in line
    ]
    for old, new in (
        ("python", sys.executable),
        ("DIR/a9a", f"{options} --json {path}.over"),
        ("localhost:12321", f"localhost:{processes.free_port()}"),
        ("mpirun -n 4", f"{processes.mpirun()} -n 4 --oversubscribe" + " --allow-run-as-root" * (os.getuid() == 0)),
    ):
        line = line.replace(old, new)
    subprocess.run(["bash", "-c", line], cwd=ROOT, check=True, timeout=480)
    over = json.loads(pathlib.Path(f"{path}.over").read_text())
    here = trained(*options.split(), "--workers", "4")
    for one, other in zip(over, here, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/nowhere/x"], "can't be read"),
        (["url", "--compare"], "is made up"),
        (["url", "--schedule", "inverse", "--l2", "0"], "which is 0"),
        (["x", "--strategy", "best"], "invalid choice"),
        (["url", "--rows", "10", "--workers", "1000"], "1000 workers need as many devices"),
        (["url", "--l2", "0", "--compare"], "is made up"),
        (["x", "--l2", "0", "--compare"], "take a penalty above 0"),
        (["x", "--l2", "-1"], "argument --l2: it is -1; give a finite number, at least 0"),
        (["x", "--step-size", "nan"], "argument --step-size: it is nan"),
        (["x", "--step-size", "1", "--l2", "1"], "all of them"),
        (["x", "--capacity", "0"], "argument --capacity: it is 0; give a whole number, at least 1"),
        (["x", "--batch", "0"], "argument --batch: it is 0"),
        (["x", "--decay", "nan"], "--decay: it is nan"),
        (["x", "--json", "/nowhere/x"], "can't be written"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        linear.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 rows and no features"),
        ("1\n-1\n", "2 rows and no features"),
        ("1 1:2\n1 2:3\n", "the labels are 1;"),
        ("1 1:2\n2 2:3\n3 1:1\n", "the labels are 1, 2, 3;"),
    ],
)
def test_files_that_no_classifier_learns(text: str, message: str, tmp_path: pathlib.Path, capsys):
    (tmp_path / "x").write_text(text)
    with pytest.raises(SystemExit):
        linear.main([str(tmp_path / "x"), "--workers", "2"])
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_labels_of_any_two_kinds(path: pathlib.Path):
    """And a penalty so large that the scale of the weights becomes small."""
    options = ["--workers", "2", "--batch", "5", "--epochs", "3", "--l2", "0.5"]
    (run,) = trained(path, *options)
    assert np.isfinite(run["loss"][-1])
    path.write_text(re.sub("^-1", "1", re.sub(r"^\+1", "2", path.read_text(), flags=re.M), flags=re.M))
    assert trained(path, *options)[0]["loss"] == run["loss"]
