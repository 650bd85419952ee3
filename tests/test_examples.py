"""The examples and the command line, run as users run them."""

import argparse
import gzip
import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.axes
import numpy as np
import pytest
from flax import nnx
from test_readers import learnable

import jsparse
import processes
from examples import cluster, fill_in, lines, loss_for_a_byte, models, paper_rule, powersgd, train, unlike, workers
from jsparse import cli, cost
from jsparse._presets import files
from jsparse.bench import pto
from jsparse.bench.images import load_images
from jsparse.cli import plan

DATA = os.environ.get("JSPARSE_DATA")
ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def devices() -> None:
    """JAX has been used, so that no option changes how many virtual devices there are."""
    assert len(jax.devices()) == 8


def figures_of(example: str, wanted: str, *arguments) -> list[float]:
    """The numbers that a numbered example prints behind some words, run as users run it."""
    command = [sys.executable, "-m", f"examples.{example}", *map(str, arguments)]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    if example < "4":  # The fourth sends nothing, and rows of few columns are not worth a sparse sum.
        (sent,) = re.findall(r"sent ([\d,]+) bytes .*; dense sends ([\d,]+)", out)
        sparse, dense = (int(number.replace(",", "")) for number in sent)
        assert 0 < sparse < dense / 3
    return [float(number) for number in re.findall(rf"{wanted} ([\d.]+)", out)]


@pytest.mark.full
def test_example_1_images():
    right = figures_of("1_images", "accuracy", "--epochs", 8)
    assert len(right) == 8
    assert right[-1] > 70


@pytest.mark.full
def test_example_2_text(tmp_path):
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("a b c d e f g h i j\n" * (1500 if part == "train" else 20))
    perplexities = figures_of("2_text", "perplexity", tmp_path, "--epochs", 10)
    assert len(perplexities) == 11
    assert perplexities[-1] < perplexities[0] / 2


@pytest.mark.full
def test_example_3_speech(tmp_path):
    losses = figures_of("3_speech", "loss", learnable("an4", tmp_path), "--epochs", 10)
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2


@pytest.mark.full
def test_example_4_data_cache(tmp_path):
    """Only the first epoch of the first run reads the store."""
    read = [number for _ in range(2) for number in figures_of("4_data_cache", "'source':", tmp_path)]
    assert len(read) == 6
    assert read[0] > 0
    assert not any(read[1:])


@pytest.mark.full
def test_example_5_sparse_data(tmp_path):
    rng = np.random.default_rng(0)
    rows = [np.unique(rng.integers(1, 50, 8)) for _ in range(200)]
    lines = [f"{1 if 3 in row else -1} {' '.join(f'{column}:1' for column in row)}\n" for row in rows]
    (tmp_path / "rows").write_text("".join(lines))
    losses = figures_of("5_sparse_data", "loss", tmp_path / "rows", "--epochs", 30)
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 2


@pytest.mark.full
def test_example_6_sharded_model():
    """In one process that stands for four hosts."""
    losses = figures_of("6_sharded_model", "loss", "--algorithm", "oktopk", "dense", "--steps", 100)
    assert len(losses) == 4
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]


@pytest.mark.full
def test_example_6_in_a_process_for_each_host():
    """Two of them; the bytes are those of the program's longest messages, or fewer."""
    options = ["--algorithm", "oktopk", "dense", "--width", "16", "--steps", "8"]
    options += ["--distributed", f"localhost:{processes.free_port()}", "--processes", "2", "--rank"]
    command = [sys.executable, "-m", "examples.6_sharded_model", *options]
    started = [subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        out = [process.communicate(timeout=480)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert "parameters on 2 hosts of 2 devices" in out[0]
    figures = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+)(?= bytes, of| by the)", out[0])]
    sparse, longest, dense, all_of_it = figures
    assert 0 < sparse <= longest < dense / 3
    assert dense < all_of_it < 1.01 * dense


@pytest.mark.full
def test_example_7_metrics(tmp_path):
    """A line of JSON for each step, a plot, and the same figures in TensorBoard's file."""
    board = [] if importlib.util.find_spec("tensorboardX") is None else ["--tensorboard", tmp_path / "runs"]
    plot = tmp_path / "x.png"
    ages = figures_of("7_metrics", "age", tmp_path / "x.jsonl", "--epochs", 3, "--plot", plot, *board)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["jsparse/step"] for line in lines] == list(range(1, 1 + len(lines)))
    assert ages == [round(line["jsparse/age"], 1) for line in lines[len(lines) // 3 - 1 :: len(lines) // 3]]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(0 < line["jsparse/share_of_dense"] < 0.1 for line in lines)
    if board:
        (events,) = (tmp_path / "runs").iterdir()
        written = list(scalars(events.read_bytes()))
        wanted = [(name, number) for number, line in enumerate(lines) for name in line]
        assert [(name, number) for name, number, _ in written] == wanted
        np.testing.assert_allclose([value for _, _, value in written], [x for line in lines for x in line.values()])


@pytest.mark.full
def test_example_8_local_steps(tmp_path):
    """A round sends what a step of dense sends, or less; the log has what is printed."""
    plot, methods = tmp_path / "x.png", ("dense", "diloco", "streaming", "sparseloco", "oktopk")
    options = ["--rounds", 3, "--log", tmp_path / "x.jsonl", "--plot", plot]
    losses = figures_of("8_local_steps", "loss", "--method", *methods, *options)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [round(line["loss"], 3) for line in lines] == losses
    assert [(line["method"], line["step"]) for line in lines] == [(name, 30 * i) for name in methods for i in (1, 2, 3)]
    sent = ([line["bytes"] for line in lines[i : i + 3]] for i in (0, 3, 6, 9, 12))
    dense, diloco, streaming, sparseloco, oktopk = sent
    assert dense == [30 * sent for sent in diloco]
    assert 0 < oktopk[-1] < dense[-1] / 50
    assert all(sent < diloco[-1] / 4 for sent in streaming)
    assert 0 < sparseloco[-1] < streaming[-1] / 4
    assert losses[2] < losses[0]
    assert losses[5] < losses[3]


@pytest.fixture
def text(tmp_path) -> pathlib.Path:
    """A text that one can learn: words in turn."""
    for part, count in (("train", 400), ("valid", 40)):
        (tmp_path / f"{part}.txt").write_text("one two three four five six seven\n" * count)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("name", loss_for_a_byte.METHODS)
def test_every_method_of_the_comparison_keeps_its_budget(name: str, text: pathlib.Path):
    budget = 4 if loss_for_a_byte.METHODS[name].budgets != (0,) else 0
    method = loss_for_a_byte.METHODS[name]
    setting = loss_for_a_byte.Setting(name, budget, method.rates[1], method.outers[-1], 0, 20)
    with jax.numpy_rank_promotion("allow"):  # The example is its own program.
        line = loss_for_a_byte.train(loss_for_a_byte.task_of(text, 0), setting)
    assert line["at"][-1] == 20
    assert np.isfinite(line["loss"]).all()
    dense = 20 * 6 * 132_992
    assert 0 < line["bytes"][-1] <= (dense / budget if budget else 1.1 * dense)


def test_the_comparison_goes_on_where_it_was(text: pathlib.Path, monkeypatch, capsys):
    """First all rates; then of the best a seed, other budgets, a seed; nothing is run twice."""
    runs = []

    def train(task, setting):
        runs.append(setting)
        loss = 1 + abs(setting.rate - 4e-3) + setting.seed / 100
        return setting._asdict() | {"every": 0, "seconds": 0.0, "at": [20], "bytes": [1e6], "loss": [loss]}

    monkeypatch.setattr(loss_for_a_byte, "train", train)
    monkeypatch.setattr(loss_for_a_byte, "task_of", lambda directory, seed: None)
    out, plot = text / "runs.jsonl", text / "x.png"
    options = ["x", str(text), "--out", str(out), "--steps", "20", "--method", "dense", "oktopk", "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", options)
    loss_for_a_byte.main()
    assert len(runs) == 18
    assert {run.rate for run in runs[12:]} == {4e-3}
    assert [(run.method, run.budget, run.seed) for run in runs[12:]] == [
        *(("dense", 0, 1), ("oktopk", 256, 1), ("oktopk", 32, 0), ("oktopk", 1500, 0)),
        *(("dense", 0, 2), ("oktopk", 256, 2)),
    ]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "1.000 - 1.020" in printed
    # The last line is torn.
    out.write_text(out.read_text()[:-7])
    loss_for_a_byte.main()
    assert runs[-1] == runs[-2]
    assert len(out.read_text().splitlines()) == len(runs) - 1 == 18


def test_lines_are_read_and_torn_ones_replaced(tmp_path):
    """A last line without a newline counts if it is whole. A torn one makes room for the next."""
    path = tmp_path / "x"
    assert lines.read(path) == []
    assert not path.exists()
    for last, kept in (("", []), ('{"b": 2}', [{"b": 2}]), ('{"b": 2', []), ('{"b": "\\u00', [])):
        path.write_text(f'{{"a": 1}}\n{last}')
        text, file = path.read_text(), path.stat().st_ino
        assert lines.read(path) == [{"a": 1}, *kept]
        assert path.read_text() == text
        lines.add(path, {"c": 3})
        assert path.read_text().splitlines() == ['{"a": 1}', *([last] if kept else []), '{"c": 3}']
        assert path.read_text().endswith("\n")
        assert path.stat().st_ino == file


@pytest.mark.parametrize(
    ("text", "number"),
    [('{"a": 1}\n{"b"\n{"c": 3}\n', 2), ("[1]", 1), ('{"a": 1}\n3\n', 2), ("{\n}\n", 1), ('{"a": 1}\n\n', 2)],
)
def test_a_file_of_something_else_is_refused_and_kept(text: str, number: int, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"x.json, line {number}: it is no JSON object; name another"):
        lines.read(path)
    with pytest.raises(SystemExit):
        loss_for_a_byte.main(["--out", str(path)])
    assert f"error: {path}, line {number}: it is no JSON object" in capsys.readouterr().err
    assert path.read_text() == text


def test_the_comparison_keeps_a_line_of_something_else(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    loss_for_a_byte.main(["--out", str(path)])
    assert path.read_text() == '{"a": 1}'


def scalars(data: bytes):
    """The name, step and value of each scalar in one of TensorBoard's files.

    A record has its length in 8 bytes, their check sum in 4, the event, and its check sum.
    """
    from tensorboardX.proto import event_pb2

    while data:
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
        data = data[16 + length :]


@pytest.mark.full
def test_the_demo_compares_algorithms(tmp_path, capsys, monkeypatch):
    """A short run makes the table, the plot and the figures."""
    monkeypatch.chdir(tmp_path)
    train.main(["--epochs", "3", "--json", "runs.json"])
    out = capsys.readouterr().out
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert (tmp_path / "train.png").read_bytes()[:4] == b"\x89PNG"
    assert [run["algorithm"] for run in runs] == list(train.DEFAULT)
    for run in runs:
        assert run["algorithm"] in out
        assert len(run["loss"]) == 3 * run["steps_per_epoch"]
        assert len(run["accuracy"]) == 3
        assert np.mean(run["loss"][-5:]) < 0.75 * np.mean(run["loss"][:5])
    sent = {run["algorithm"]: np.mean(run["bytes"]) for run in runs}
    assert sent["oktopk"] < sent["topk_allgather"] < sent["dense"]
    assert len({run["loss"][0] for run in runs}) == 1  # All have the same seeds.


def test_the_demo_has_every_preset():
    # The name before the hyphen is the preset, the one after it a variant.
    assert {name.partition("-")[0] for name in train.ALGORITHMS | train.WARM_UPS} == set(files.presets()) - {
        "sparse_allreduce"
    }


@pytest.mark.parametrize(
    "names",
    [
        ["hitopk", "dsar_split_allgather"],
        ["a2sgd", "dgc", "oktopk-warmup", "hitopk-warmup"],
        pytest.param(["all"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
@pytest.mark.full
def test_the_demo_takes_algorithms_by_name(names: list[str], tmp_path):
    figures = tmp_path / "runs.json"
    chosen = [argument for name in names for argument in ("--algorithm", name)]
    options = ["--epochs", "1", "--workers", "4", "--json", str(figures), "--plot", str(tmp_path / "x.png")]
    train.main([*chosen, *options])
    runs = json.loads(figures.read_text())
    assert [run["algorithm"] for run in runs] == ([*train.ALGORITHMS, *train.WARM_UPS] if names == ["all"] else names)
    assert all(run["loss"][-1] < run["loss"][0] for run in runs)


@pytest.mark.parametrize(
    ("optimizer", "algorithm"),
    [
        pytest.param("sgd", "oktopk", marks=pytest.mark.full),
        pytest.param("adam", "oktopk", marks=pytest.mark.full),
        pytest.param("lars", "topk_allgather", marks=pytest.mark.full),
        pytest.param("lamb", "torus", marks=pytest.mark.full),
    ],
)
def test_options_of_the_demo(optimizer: str, algorithm: str, tmp_path):
    arguments = ["--algorithm", algorithm, "--epochs", "1", "--workers", "3", "--density", "0.05", "--seed", "3"]
    figures = tmp_path / "runs.json"
    schedule = ["--schedule", "square" if optimizer == "adam" else "constant"]
    train.main(
        [*arguments, "--optimizer", optimizer, *schedule, "--json", str(figures), "--plot", str(tmp_path / "x.png")]
    )
    (run,) = json.loads(figures.read_text())
    assert run["workers"] == 3
    assert np.mean(run["loss"][-5:]) < np.mean(run["loss"][:5])
    assert (tmp_path / "x.png").exists()


def rates(schedule: str, warm_up: float | None) -> list[float]:
    """The learning rates of 8 epochs of 10 steps."""
    args = argparse.Namespace(optimizer="sgd", learning_rate=2.0, schedule=schedule, epochs=8, warm_up=warm_up)
    rate = train.make_rate(args, 10)
    return [float(rate(step)) if callable(rate) else rate for step in range(81)]


@pytest.mark.parametrize(
    ("schedule", "later"),
    [("linear", {45: 1.0, 80: 0.0}), ("square", {45: 0.5, 80: 0.0}), ("steps", {44: 2.0, 46: 0.2, 61: 0.2, 63: 0.02})],
)
def test_a_learning_rate_rises_and_falls(schedule: str, later: dict[int, float]):
    found = rates(schedule, None)
    assert found[0] == pytest.approx(0.2)
    assert found[5] == pytest.approx(1.1)
    assert found[10] == pytest.approx(2.0)
    assert {step: found[step] for step in later} == pytest.approx(later)
    assert rates(schedule, 4.0)[20] == pytest.approx(1.1)
    assert rates(schedule, 0.0)[0] == pytest.approx(2.0)
    assert set(rates("constant", 4.0)) == {2.0}


@pytest.mark.full
def test_the_demo_trains_on_small_images_first(tmp_path, monkeypatch):
    sides, resize = [], train.resized

    def resized(images, side):
        sides.append((images.shape, side))
        return resize(images, side)

    monkeypatch.setattr(train, "resized", resized)
    figures = tmp_path / "runs.json"
    options = ["--model", "resnet20", "--algorithm", "hitopk-warmup", "--workers", "4", "--batch", "120"]
    options += ["--epochs", "2", "--resolutions", "4:1", "--warm-up", "1"]
    train.main([*options, "--json", str(figures), "--plot", str(tmp_path / "x.png")])
    (run,) = json.loads(figures.read_text())
    steps = run["steps_per_epoch"]
    assert sides == [((480, 8, 8, 1), 4)] * steps
    # HiTopKComm sends less than the torus, which follows after the warm-up.
    sent = run["bytes"]
    assert max(sent[:steps]) < min(sent[steps:])
    assert len(run["test_loss"]) == len(run["accuracy"]) == 2


@pytest.mark.parametrize(
    ("algorithm", "model", "in_turn"),
    [
        ("oktopk", "fnn3", False),
        ("hitopk-warmup", "fnn3", True),
        ("a2sgd", "fnn3", False),
        ("topk_allgather", "resnet20", True),
        ("dense", "lstm-an4-small", False),
    ],
)
@pytest.mark.full
def test_workers_that_share_a_device_do_the_same(algorithm: str, model: str, in_turn: bool, tmp_path, monkeypatch):
    """Simulated, and on the devices of a mesh."""
    files = learnable("an4", tmp_path) if model == "lstm-an4-small" else None
    task = train.make_task(model, "an4" if files else "digits", files, 0)
    few = task._replace(train=[array[:64] for array in task.train], test=[array[:20] for array in task.test])
    if model == "resnet20":
        few = few._replace(model=models.ResNet(1, nnx.Rngs(0), width=4, inputs=1))
    monkeypatch.setattr(train, "make_task", lambda *_: few)
    monkeypatch.setattr(train, "OnOneDevice", lambda *args, **_: workers.OnOneDevice(*args, in_turn=in_turn))
    options = ["--algorithm", algorithm, "--model", model, "--epochs", "2", "--warm-up", "1", "--workers", "4"]
    options += ["--batch", "8", "--learning-rate", "0.01", "--plot", str(tmp_path / "x.png")]
    options += ["--json", str(tmp_path / "x.json")]
    options += ["--resolutions", "4:1"] if model == "resnet20" else []
    runs = []
    for more in ([], ["--simulate"]):
        train.main([*options, *more])
        runs += json.loads((tmp_path / "x.json").read_text())
    mesh, simulated = runs
    for figure in ("bytes", "messages", "selected", "delivered", "updated"):
        assert simulated[figure] == mesh[figure]
    for figure in ("loss", "test_loss", "accuracy"):
        np.testing.assert_allclose(simulated[figure], mesh[figure], rtol=1e-4)
    assert len(mesh["loss"]) == 4
    assert len(set(mesh["loss"])) == 4


def test_where_workers_stand(monkeypatch):
    """On accelerators if there are enough, else on one of them, else on CPU devices."""
    assert not cluster.on_one_device(8, asked=False)
    assert cluster.on_one_device(8, asked=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not cluster.on_one_device(8, asked=False)
    assert cluster.on_one_device(9, asked=False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not cluster.on_one_device(9, asked=False)
    with pytest.raises(ValueError, match="leave it out, or --distributed"):
        cluster.on_one_device(9, asked=True)


@pytest.mark.full
@pytest.mark.parametrize("steps", [2, 40])
def test_densities_fall_in_four_parts_of_the_warm_up(steps: int):
    selected = []
    tx = train.falling_densities(0.01, steps)
    state = jax.vmap(lambda _: tx.init(jnp.zeros(1000)), axis_name="workers")(jnp.arange(2))
    update = jax.jit(jax.vmap(tx.update, axis_name="workers"))
    grads = jax.random.normal(jax.random.key(0), (2, 1000))
    for _ in range(max(steps, 4) + 1):
        _, state = update(grads, state)
        selected.append(int(jsparse.stats(state).selected[0]))
    part = max(1, steps // 4)
    assert selected == [count for k in (250, 72, 15, 10) for count in [k] * part] + [10]


@pytest.mark.parametrize("simulate", [[], ["--simulate"]], ids=["on a mesh", "simulated"])
@pytest.mark.full
def test_the_demo_goes_on_from_its_checkpoint(simulate: list[str], tmp_path, capsys):
    arguments = ["--algorithm", "oktopk", "--batch", "64", *simulate]
    arguments += ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoints")]

    def runs(*more: str):
        train.main([*arguments, *more])
        return [
            {key: value for key, value in run.items() if key != "milliseconds"}
            for run in json.loads((tmp_path / "x.json").read_text())
        ]

    whole = runs("--epochs", "2")
    (first,) = runs("--epochs", "1", *checkpoint)
    assert len(first["loss"]) == first["steps_per_epoch"] == len(whole[0]["loss"]) // 2
    assert runs("--epochs", "2", *checkpoint) == whole
    with pytest.raises(SystemExit):
        runs("--epochs", "3", "--seed", "1", *checkpoint)
    assert "is of another run, with seed 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "depends"),
    [
        (["--schedule", "linear"], True),
        (["--schedule", "steps", "--warm-up", "0"], True),
        (["--algorithm", "gtopk-warmup"], True),
        (["--algorithm", "gtopk-warmup", "--warm-up", "1"], False),
        ([], False),
    ],
)
def test_what_depends_on_the_epochs_goes_on_for_as_many(options: list[str], depends: bool, monkeypatch):
    """Where a run's rate and warm-up do not depend on them, it may go on for more."""
    found = []
    monkeypatch.setattr(train, "make_task", lambda *_: None)
    monkeypatch.setattr(train, "train", lambda name, task, args, _: found.append(train.settings_of(name, args)))
    for function in ("table", "plot"):
        monkeypatch.setattr(train.report, function, lambda *_: None)
    for epochs in ("2", "4"):
        train.main(["--algorithm", "dense", *options, "--epochs", epochs])
    shorter, longer = found[len(found) // 2 - 1 :: len(found) // 2]
    assert (shorter != longer) == depends


def test_damaged_checkpoints_are_told(tmp_path):
    state, run = {"x": jnp.ones(3)}, {"settings": {"epochs": 2}}
    with cluster.Checkpoints.open(tmp_path, "dense") as checkpoints:
        checkpoints.save(1, state, run)
    with cluster.Checkpoints.open(tmp_path, "dense") as checkpoints:
        assert checkpoints.restore(state, run)[0] == 1
        with pytest.raises(ValueError, match=r"is of another run, with epochs 2: name another directory"):
            checkpoints.restore(state, {"settings": {"epochs": 4}})
    folder = tmp_path / "dense" / "1"
    for part in ("state", "run", ""):
        for file in (folder / part).rglob("*"):
            if file.is_file():
                file.write_text("")
        with (
            cluster.Checkpoints.open(tmp_path, "dense") as checkpoints,
            pytest.raises(ValueError, match=re.escape(f"{folder} can't be read") + r".*remove it.*another directory"),
        ):
            checkpoints.restore(state, run)
    (tmp_path / "oktopk").write_text("")
    with pytest.raises(ValueError, match="oktopk is a file, where checkpoints need a folder: name"):
        cluster.Checkpoints.open(tmp_path, "oktopk").__enter__()


def test_the_demo_writes_its_figures_before_it_plots(tmp_path, monkeypatch):
    def plot(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(train, "make_task", lambda *_: None)
    monkeypatch.setattr(train, "train", lambda name, *_: name)
    monkeypatch.setattr(train.report, "table", lambda runs: None)
    monkeypatch.setattr(train.report, "plot", plot)
    options = ["--algorithm", "dense", "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    with pytest.raises(OSError, match="full"):
        train.main(options)
    assert json.loads((tmp_path / "x.json").read_text()) == ["dense"]


def test_the_demo_checks_its_default_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.png").mkdir()
    with pytest.raises(SystemExit):
        train.main(["--algorithm", "dense"])
    assert "argument --plot: train.png can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--distributed", "localhost:1"], "takes --processes and --rank"),
        (["--distributed", "slurm", "--processes", "2", "--rank", "0"], "no other form"),
        (["--distributed", "telepathy"], "neither HOST:PORT nor one of"),
        (["--distributed", "localhost:1", "--processes", "2", "--rank", "2"], "from 0 to 1"),
        (["--rank", "1"], "nothing without --distributed"),
        (["--data", "mnist"], "--data-dir"),
        (["--data", "mnist", "--data-dir", "/nowhere"], "is not a directory"),
        (["--algorithm", "best"], "invalid choice"),
        (["--density", "2"], "density is 2.0"),
        (["--batch", "4000"], "take fewer workers"),
        (["--warm-up", "2", "--epochs", "2"], "less than the 2 epochs"),
        (["--resolutions", "16"], "must be pixels and epochs"),
        (["--resolutions", "8:1 16:2", "--epochs", "2"], "of 2 epochs at most"),
        (["--resolutions", "4:1"], "convnet takes its examples as they are"),
        (["--workers", "0"], "0 workers"),
        (["--workers", "0", "--simulate"], "0 workers"),
        (["--workers", "1000"], "1000 workers need as many devices"),
        (["--epochs", "0"], "argument --epochs: it is 0; give a whole number, at least 1"),
        (["--epochs", "-1"], "argument --epochs: it is -1;"),
        (["--epochs", "some"], "argument --epochs: it is some;"),
        (["--batch", "0"], "argument --batch: it is 0;"),
        (["--seed", "-1"], "argument --seed: it is -1; give a whole number, at least 0"),
        (["--learning-rate", "0"], "argument --learning-rate: it is 0; give a finite number, above 0"),
        (["--learning-rate", "nan"], "argument --learning-rate: it is nan;"),
        (["--json", "/nowhere/x"], "argument --json: /nowhere/x can't be written"),
        (["--plot", "/nowhere/x.png"], "argument --plot: /nowhere/x.png can't be written"),
        (["--plot", "x.foo"], "argument --plot: x.foo is no image file: let its name end with one of"),
        (["--checkpoint", __file__], "test_examples.py can't be a folder for files: name one"),
        (["--checkpoint", f"{__file__}/x"], "x can't be a folder for files: name one"),
    ],
)
def test_wrong_options_of_the_demo(arguments, message: str, capsys):
    with pytest.raises(SystemExit):
        train.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("fill_in", ["--workers", "1"], "argument --workers: it is 1; give a whole number, at least 2"),
        ("fill_in", ["--steps", "0"], "argument --steps: it is 0;"),
        ("fill_in", ["--json", "/nowhere/x"], "can't be written"),
        ("fill_in", ["--plot", "x.foo"], "x.foo is no image file"),
        ("unlike", ["--batch", "-4"], "argument --batch: it is -4;"),
        ("unlike", ["--json", "/nowhere/x"], "can't be written"),
        ("paper_rule", ["--steps", "10"], "argument --steps: it is 10; give a whole number, at least 11"),
        ("paper_rule", ["--json", "/nowhere/x"], "can't be written"),
        ("powersgd", ["--seeds", "0"], "argument --seeds: it is 0;"),
        ("loss_for_a_byte", ["--out", "/nowhere/x"], "can't be written"),
        ("loss_for_a_byte", ["--out", "x", "--plot", "/nowhere/x.png"], "can't be written"),
        ("loss_for_a_byte", ["/nowhere", "--out", "x"], "/nowhere has no train.txt: name a folder with train.txt and"),
        ("1_images", ["--epochs", "0"], "argument --epochs: it is 0;"),
        ("4_data_cache", [__file__], "can't be a folder for files"),
        ("6_sharded_model", ["--steps", "0"], "argument --steps: it is 0; give a whole number, at least 6"),
        ("6_sharded_model", ["--width", "7"], "argument --width: it is 7; give a multiple of 8, at least 8"),
        ("7_metrics", ["/nowhere/x"], "can't be written"),
        ("8_local_steps", ["/nowhere"], "/nowhere has no train.txt"),
        ("8_local_steps", ["--log", "/nowhere/x"], "can't be written"),
    ],
)
def test_wrong_options_of_the_examples(example: str, arguments: list[str], message: str, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    monkeypatch.delitem(sys.modules, f"examples.{example}", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_module(f"examples.{example}", run_name="__main__")
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_fill_in(tmp_path, capsys):
    arguments = ["--workers", "4", "--density", "0.02", "0.01", "--steps", "3", "--batch", "4"]
    fill_in.main([*arguments, "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")])
    out = capsys.readouterr().out
    runs = json.loads((tmp_path / "x.json").read_text())
    assert (tmp_path / "x.png").exists()
    assert [(run["workers"], run["density"]) for run in runs] == [(4, 0.02), (4, 0.01)]
    for run in runs:
        assert f"{100 * run['topk_dsa']:.2f} %" in out
        assert run["density"] < run["topk_dsa"] < run["uniform"]
        if run["density"] == 0.02:
            assert run["oktopk"] == pytest.approx(0.02, rel=0.05)
            assert 1 <= run["balanced"] < run["workers"]
            assert 1 <= run["part"] < run["workers"]
    with pytest.raises(SystemExit):
        fill_in.main(["--density", "2", "--steps", "1"])
    assert "density is 2.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "workers"),
    [
        pytest.param("demo", 8, marks=pytest.mark.full),
        pytest.param("demo", 16, marks=pytest.mark.slow),
        pytest.param("mnist", 16, marks=pytest.mark.slow),
        pytest.param("ptb", 8, marks=pytest.mark.slow),
    ],
)
def test_oktopk_is_near_its_papers_rule(task: str, workers: int, tmp_path):
    """On average over a run: what is sent of what is selected, the distance, and the words."""
    data = []
    if task not in ("demo", "mlp"):
        if not DATA or not (pathlib.Path(DATA) / task).is_dir():
            pytest.skip(f"JSPARSE_DATA names no directory with {task}/ in it")
        data = ["--data-dir", DATA]
    path = tmp_path / "run.json"
    arguments = ["--task", task, "--workers", str(workers), "--steps", "100", "--every", "6", "--batch", "8"]
    paper_rule.main([*arguments, *data, "--json", str(path)])
    (run,) = json.loads(path.read_text())
    share = round(0.01 * run["parameters"]) * (workers - 1) / workers
    assert run["sent"] >= 0.99
    assert run["indices"] >= 0.97
    assert run["error"] < 0.12
    assert run["words"] <= 6.5 + 16 * workers / share
    assert run["most"] <= 8 + (16 * workers + 512) / share


def test_the_papers_rule_and_the_distance_to_it():
    """Worker 0 sends 5 and -4, worker 1 sends 4 and 3; they add up to 5, 0 and 3."""
    accs = np.array([[5.0, -4.0, 1.0], [0.0, 4.0, 3.0]])
    rule = paper_rule.paper_rule(accs, 2)
    np.testing.assert_array_equal(rule, [5, 0, 3])
    assert paper_rule.distance(rule, rule) == (1, 0)
    assert paper_rule.distance(np.array([5.0, 1.0, 0.0]), rule) == (0.5, pytest.approx(np.sqrt(10 / 34)))


@pytest.mark.full
def test_workers_with_unlike_data(tmp_path, capsys):
    """Of two digits each, they learn; what they have not sent is beside the loss."""
    arguments = ["--algorithm", "gtopk", "--algorithm", "gtopk-owner", "--workers", "4", "--density", "0.02"]
    unlike.main([*arguments, "--classes", "2", "--steps", "120", "--seeds", "1", "--json", str(tmp_path / "x.json")])
    out = capsys.readouterr().out
    runs = json.loads((tmp_path / "x.json").read_text())
    assert [run["algorithm"] for run in runs] == ["gtopk", "gtopk-owner"]
    for run in runs:
        assert f"{run['loss']:.3g} ({run['residual']:.2g})" in out
        assert run["loss"] < 1 < run["residual"]
    with pytest.raises(SystemExit):
        unlike.main(["--density", "2"])
    assert "density is 2.0" in capsys.readouterr().err


def test_who_has_which_digits():
    args = argparse.Namespace(workers=6, steps=20, batch=8)
    labels = np.arange(100, dtype=np.int32) % 10
    batches = labels[unlike.draw(labels, 2, 0, args)]
    assert batches.shape == (20, 6, 8)
    assert [sorted(set(batches[:, worker].flat)) for worker in range(6)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [0, 1],
    ]


def test_the_busiest_owner():
    """Region 0-3 receives one element, from worker 1; region 4-9 three, from worker 0."""
    sender, index = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 4, 5, 9, 3, 4])
    assert fill_in.busiest(sender, index, np.array([0, 4])) == 3 / 2


def write_mnist(directory: pathlib.Path, count: int = 3) -> None:
    images = b"\0\0\x08\3" + b"".join(n.to_bytes(4, "big") for n in (count, 2, 2)) + bytes(range(4 * count))
    labels = b"\0\0\x08\1" + count.to_bytes(4, "big") + bytes(range(count))
    (directory / "train-images-idx3-ubyte").write_bytes(images)
    (directory / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    (directory / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (directory / "t10k-labels-idx1-ubyte").write_bytes(labels)


def test_digits_without_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        load_images("digits")


def test_mnist_files(tmp_path):
    write_mnist(tmp_path)
    images = load_images("mnist", tmp_path)
    assert images.train_x.shape == (3, 2, 2, 1)
    np.testing.assert_allclose(images.train_x[2, 1, 1, 0], 11 / 255)
    np.testing.assert_array_equal(images.test_y, [0, 1, 2])
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="neither t10k-labels"):
        load_images("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\1\0\0\0\5\1")
    with pytest.raises(ValueError, match="does not fit its shape"):
        load_images("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="not an idx file"):
        load_images("mnist", tmp_path)


def test_cifar10_files(tmp_path):
    record = bytes([7]) + bytes(1024) + bytes([255] * 1024) + bytes([51] * 1024)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / name).write_bytes(record * 2)
    images = load_images("cifar10", tmp_path)
    assert images.train_x.shape == (10, 32, 32, 3)
    np.testing.assert_allclose(images.train_x[0, 3, 4], [0, 1, 0.2])
    assert (images.test_y == 7).all()
    (tmp_path / "data_batch_3.bin").write_bytes(record[:-1])
    with pytest.raises(ValueError, match="not a multiple"):
        load_images("cifar10", tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_3\.bin"):
        load_images("cifar10", tmp_path)


@pytest.mark.skipif(not DATA, reason="JSPARSE_DATA names no directory with mnist/ in it")
def test_the_real_mnist():
    images = load_images("mnist", pathlib.Path(DATA or "") / "mnist")
    assert images.train_x.shape == (60000, 28, 28, 1)
    assert images.test_y[:5].tolist() == [7, 2, 1, 0, 4]


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="JSPARSE_DATA names no directory with mnist/ in it")
@pytest.mark.parametrize("density", ["0.01", "0.05"])
def test_mnist_ends_within_a_point_of_dense(density: str, tmp_path):
    """The accuracies are means of three seeds."""
    accuracy = {"dense": [], "oktopk": []}
    for seed in range(3):
        arguments = ["--data", "mnist", "--data-dir", f"{DATA}/mnist", "--density", density, "--seed", str(seed)]
        arguments += ["--algorithm", "dense", "--algorithm", "oktopk", "--plot", str(tmp_path / "x.png")]
        train.main([*arguments, "--json", str(tmp_path / "runs.json")])
        for run in json.loads((tmp_path / "runs.json").read_text()):
            accuracy[run["algorithm"]].append(run["accuracy"][-1])
    assert np.mean(accuracy["oktopk"]) >= np.mean(accuracy["dense"]) - 0.01


@pytest.mark.slow
def test_half_the_bytes_train_as_well(tmp_path):
    """Ok-Topk in bfloat16 sends at most half the bytes, and trains as well; three seeds."""
    accuracy: dict[str, list[float]] = {"oktopk": [], "oktopk-bf16": []}
    sent = dict.fromkeys(accuracy, 0.0)
    for seed in range(3):
        arguments = ["--algorithm", "oktopk", "--algorithm", "oktopk-bf16", "--seed", str(seed)]
        train.main([*arguments, "--plot", str(tmp_path / "x.png"), "--json", str(tmp_path / "runs.json")])
        for run in json.loads((tmp_path / "runs.json").read_text()):
            accuracy[run["algorithm"]].append(run["accuracy"][-1])
            sent[run["algorithm"]] += sum(run["bytes"])
    assert sent["oktopk-bf16"] <= sent["oktopk"] / 2
    assert np.mean(accuracy["oktopk-bf16"]) >= np.mean(accuracy["oktopk"]) - 0.01


@pytest.mark.full
def test_bench_select(tmp_path, capsys):
    plot, figures = tmp_path / "x.png", tmp_path / "x.json"
    arguments = ["bench", "select", "--size", "50000", "--density", "0.02", "--repeats", "2"]
    cli.main([*arguments, "--json", str(figures), "--plot", str(plot)])
    out = capsys.readouterr().out
    assert plot.exists()
    forms = {form["name"]: form for form in json.loads(figures.read_text())["forms"]}
    for name in ("lax.top_k", "lax.approx_max_k", "jnp.nonzero(size=k)", "TopK", "MSTopK", "select_above"):
        assert name in out
        assert forms[name]["selected_over_k"] == 1
        assert forms[name]["deviation_from_k"] == 0
        assert forms[name]["of_the_exact_top_k"] == 1
        assert forms[name]["median_ms"] > 0
    cli.main([*arguments, "--json", "-", "--distribution", "layered"])
    assert json.loads(capsys.readouterr().out)["distribution"] == "layered"
    for name in (name for name in jsparse.select.__all__ if hasattr(getattr(jsparse.select, name), "density")):
        assert name in forms
    cli.main([*arguments, "--json", "-", "--distribution", "digits"])
    figures = json.loads(capsys.readouterr().out)
    assert 49_000 < figures["size"] <= 50_000
    forms = {form["name"]: form for form in figures["forms"]}
    assert forms["MSTopK"]["of_the_exact_top_k"] > 0.99
    assert forms["RandomK"]["of_the_exact_top_k"] < 0.1


@pytest.mark.full
def test_bench_pto(tmp_path, capsys, monkeypatch):
    shapes = pto.resnet50(4)[:9]
    monkeypatch.setattr(pto, "resnet50", lambda width: shapes)
    plot, figures = tmp_path / "x.png", tmp_path / "x.json"
    arguments = ["bench", "pto", "--workers", "3", "--repeats", "1"]
    cli.main([*arguments, "--json", str(figures), "--plot", str(plot)])
    out = capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    results = json.loads(figures.read_text())
    assert (results["workers"], results["layers"]) == (3, 9)
    for form in results["forms"]:
        assert form["task"] in out
        assert form["together"]["median_ms"] > 0
        assert form["alone"]["median_ms"] > 0
        assert (form["words"] > 0) == (form["name"] == "in parts")
    state = {form["name"]: form["state_bytes"] for form in results["forms"] if form["task"] == "Adam"}
    assert state["each worker"] == 2 * 4 * results["parameters"] + 4
    assert state["in parts"] == pytest.approx(state["each worker"] / 3, rel=0.05)


# gTop-k's cluster: 3.6e-5 ms an element of 4 bytes.
PLAN = ["plan", "--parameters", "25000000", "--density", "0.001", "--workers", "32"]
PLAN += ["--bandwidth", "0.88889", "--latency", "436"]


@pytest.mark.full
def test_plan(tmp_path, capsys):
    plot, path = tmp_path / "x.png", tmp_path / "x.json"
    cli.main([*PLAN, "--step-time", "100", "--json", str(path), "--plot", str(plot)])
    out = capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    figures = json.loads(path.read_text())
    results = {result["name"]: result for result in figures["algorithms"]}
    assert list(results) == sorted(results, key=lambda name: results[name]["step_ms"])
    assert set(results) == set(cost.ALGORITHMS) - {"hitopk", "torus", "dense_hierarchical"}
    for name, result in results.items():
        assert name in out
        assert result["step_ms"] == pytest.approx(100 + result["communication_ms"]["expected"])
    assert results["dense"]["times_faster_than_dense"] == 1
    assert (results["a2sgd"]["sends_bytes"], results["a2sgd"]["sends_messages"]) == ([16, 16], [10, 10])
    assert results["a2sgd"]["bytes"]["expected"] == 16 * 31 / 32
    assert results["topk_allgather"]["communication_ms"]["expected"] == pytest.approx(57.98, rel=1e-3)
    assert results["topk_allgather"]["sends_bytes"] == [6_200_000 + 16] * 2
    assert results["gtopk_tree"]["sends_bytes"] == [2_000_000 + 16] * 2
    assert all(result["sends_bytes"] for result in results.values())
    assert figures["cheapest"] == "gtopk"
    assert "Sparse wins: a step with gtopk is 16.6" in out
    assert "--selection-time" in out


@pytest.mark.full
def test_plan_of_rounds(capsys):
    """It sends what a step sends. At the bandwidths told, it takes as long as told."""
    rounds = ["--every", "30", "--fragments", "3", "--overlap", "2"]

    def planned(*more: str, bandwidth: str = "1") -> dict[str, dict[str, Any]]:
        arguments = ["--parameters", "1e9", "--workers", "4", "--bandwidth", bandwidth, "--step-time", "1000"]
        cli.main(["plan", *arguments, *more, "--json", "-"])
        return {result["name"]: result for result in json.loads(capsys.readouterr().out)["algorithms"]}

    results, every_step = planned(*rounds), planned()
    for name, result in results.items():
        if name != "a2sgd":  # Which sends two numbers, however long a fragment is.
            assert result["bytes"]["expected"] == pytest.approx(every_step[name]["bytes"]["expected"], rel=0.01)
        one = result["communication_ms"]["expected"] / 3
        assert result["step_ms"] == pytest.approx((30_000 + 3 * max(0, one - 2000)) / 30)
    for part, gbit in results["dense"]["gbit"].items():
        slow = planned(*rounds, bandwidth=repr(gbit))["dense"]
        assert slow["step_ms"] == pytest.approx(1000 / float(part), rel=1e-6)
    assert results["dense"]["gbit"]["0.5"] < every_step["dense"]["gbit"]["0.5"] / 30
    cli.main(["plan", "--parameters", "1e9", "--workers", "4", "--bandwidth", "1", "--step-time", "1000", *rounds])
    out = capsys.readouterr().out
    assert "rounds of 30 steps" in out
    assert "95 %" in out
    assert "Synchronise less often" not in out


@pytest.mark.full
def test_plan_draws_what_it_tells(tmp_path, monkeypatch, capsys):
    """The times of a round with all its fragments."""
    drawn, draw = {}, matplotlib.axes.Axes.plot

    def plot(self, x, y, *args, label, **options):
        drawn[label] = dict(zip(x, y, strict=True))
        return draw(self, x, y, *args, label=label, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", plot)
    rounds = ["--workers", "4", "--every", "30", "--fragments", "10", "--step-time", "10"]
    cli.main([*PLAN, *rounds, "--plot", str(tmp_path / "x.png"), "--json", "-"])
    for result in json.loads(capsys.readouterr().out)["algorithms"]:
        if result["name"] in drawn:
            assert drawn[result["name"]][4] == pytest.approx(result["communication_ms"]["expected"])
    assert {"dense", "oktopk"} <= set(drawn)


@pytest.mark.full
@pytest.mark.parametrize("cluster", [["--workers", "1"], ["--workers", "4", "--bandwidth", "inf", "--latency", "0"]])
def test_plan_where_dense_sums_take_no_time(cluster, capsys):
    cli.main([*PLAN, *cluster, "--selection-time", "3"])
    assert "Dense wins" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("bandwidth", ["0.1", "1", "100"])
def test_plan_advises_rounds_of_the_right_length(bandwidth, capsys):
    """Where most of a step is communication, and so that a fifth of a round's time is."""
    cluster = ["plan", "--parameters", "1e9", "--workers", "4", "--bandwidth", bandwidth, "--step-time", "1000"]
    cli.main([*cluster, "--json", "-"])
    fastest = json.loads(capsys.readouterr().out)["algorithms"]
    cli.main(cluster)
    advice = re.search(r"and (\d+) steps in a round it is at least 80 %", " ".join(capsys.readouterr().out.split()))
    compared = [result["step_ms"] for result in fastest if result["name"] not in cost.DIFFERING + cost.ROUNDING]
    assert bool(advice) == (min(compared) > 2000)
    if advice:
        cli.main([*cluster, "--every", advice[1], "--json", "-"])
        (dense,) = (r for r in json.loads(capsys.readouterr().out)["algorithms"] if r["name"] == "dense")
        assert dense["step_ms"] == pytest.approx(1000 / 0.8, rel=0.01)


@pytest.mark.full
def test_plan_says_when_dense_wins(tmp_path, capsys):
    arguments = ["--bandwidth", "400", "--gpus-per-node", "8", "--step-time", "100", "--selection-time", "50"]
    cli.main([*PLAN, *arguments, "--plot", str(tmp_path / "x.png")])
    out = capsys.readouterr().out
    assert "Dense wins: no sparse algorithm is predicted to be faster than" in out
    assert "hitopk" in out
    cli.main([*PLAN, *arguments, "--json", "-"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["dense_wins"]
    sends = {result["name"]: result["sends_bytes"] for result in figures["algorithms"]}
    assert [name for name, sent in sends.items() if not sent] == ["dense_hierarchical"]
    assert sends["torus"] == sends["dense"]
    (a2sgd,) = (result for result in figures["algorithms"] if result["name"] == "a2sgd")  # It selects nothing.
    assert a2sgd["step_ms"] == pytest.approx(100 + a2sgd["communication_ms"]["expected"])


@pytest.mark.full
def test_plan_of_a_sharded_model(tmp_path, capsys):
    """Each GPU of a worker sends a part of it; with a link each they take a part of the time."""
    plot, path = tmp_path / "x.png", tmp_path / "x.json"
    # More elements than one vector can have, and no multiple of the shards.
    cli.main([*PLAN, "--parameters", "8000000001", "--shards", "8", "--json", str(path), "--plot", str(plot)])
    out = capsys.readouterr().out
    assert "32 workers of 8 GPUs" in out
    assert "MB a worker" in out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    figures = json.loads(path.read_text())
    assert (figures["shards"], figures["node"]["gpus"], figures["node"]["links"]) == (8, 8, 1)
    results = {result["name"]: result for result in figures["algorithms"]}
    own, kept = 1_000_000_001, 1_000_000
    assert results["dense"]["bytes"]["expected"] == 8 * own * 31 / 32
    for result in results.values():
        assert result["worker_bytes"]["expected"] == 8 * result["bytes"]["expected"]
        assert result["sends_bytes"]
        if "oktopk" not in result["name"]:
            assert result["sends_bytes"][0] <= 1.01 * result["bytes"]["worst"] + 64
    assert results["topk_allgather"]["sends_bytes"] == [8 * kept * 31 + 16] * 2

    cli.main([*PLAN, "--parameters", "8e9", "--shards", "8", "--links", "8", "--json", "-"])
    linked = {result["name"]: result for result in json.loads(capsys.readouterr().out)["algorithms"]}
    for name in ("dense", "topk_allgather"):
        times = [plan[name]["communication_ms"]["expected"] for plan in (results, linked)]
        assert times[0] == pytest.approx(8 * times[1], rel=0.01)
    # Nodes of two workers have two levels.
    cli.main([*PLAN, "--shards", "4", "--gpus-per-node", "8", "--json", str(path)])
    assert "32 workers of 4 GPUs in nodes of 8" in capsys.readouterr().out
    names = {result["name"]: result["sends_bytes"] for result in json.loads(path.read_text())["algorithms"]}
    assert names["hitopk"]
    assert names["torus"] == names["dense"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["bench", "select", "--density", "3"], "density is 3.0"),
        (["bench", "select", "--size", "0"], "from 1 to 2147483647"),
        (["bench", "select", "--seed", "-1"], "argument --seed: it is -1; give a whole number, at least 0"),
        (
            ["bench", "select", "--size", "1e15"],
            "argument --size: it is 1e15; give a whole number, from 1 to 2147483647",
        ),
        (["bench", "profile", "dense", "--size", "1e15"], "argument --size: it is 1e15"),
        (["bench", "pto", "--workers", "0"], "at least 1"),
        (["bench", "pto", "--width", "1e6"], "--width is 1,000,000"),
        (["bench", "pto", "--workers", "1000"], "1000 workers need as many devices"),
        (["bench", "select", "--size", "80", "--distribution", "digits"], "87 parameters"),
        (["plan", "--workers", "4"], "--parameters, --bandwidth"),
        ([*PLAN, "--density", "0"], "density is 0.0"),
        ([*PLAN, "--parameters", "0"], "argument --parameters: it is 0; give a whole number, at least 1"),
        ([*PLAN, "--bandwidth", "0"], "argument --bandwidth: it is 0; give a number, above 0"),
        ([*PLAN, "--node-bandwidth", "nan"], "argument --node-bandwidth: it is nan"),
        ([*PLAN, "--workers", "0"], "argument --workers: it is 0; give a whole number, at least 1"),
        ([*PLAN, "--workers", "-3"], "argument --workers: it is -3"),
        ([*PLAN, "--overlap", "-1"], "argument --overlap: it is -1"),
        ([*PLAN, "--every", "0"], "argument --every: it is 0"),
        ([*PLAN, "--gpus-per-node", "5"], "32 workers do not fill nodes of 5"),
        (["bench", "network", "--hosts", "3", "--form", "hitopk"], "needs workers in groups"),
        ([*PLAN, "--gpus-per-node", "0"], "argument --gpus-per-node: it is 0"),
        ([*PLAN, "--shards", "0"], "argument --shards: it is 0"),
        ([*PLAN, "--shards", "3", "--gpus-per-node", "4"], "choose shards that divide 4"),
        ([*PLAN, "--links", "2"], "links is 2"),
        ([*PLAN, "--selection-time", "-1"], "at least 0"),
        ([*PLAN, "--step-time", "nan"], "it is nan; give a finite number, at least 0"),
        ([*PLAN, "--selection-time", "inf"], "finite number, at least 0"),
        ([*PLAN, "--latency", "inf"], "argument --latency: it is inf"),
        ([*PLAN, "--bandwidth", "1e-307"], "takes longer than floats can tell"),
        ([*PLAN, "--parameters", "1e400"], "argument --parameters: it is 1e400; give a whole number"),
        ([*PLAN, "--parameters", "nan"], "argument --parameters: it is nan"),
        ([*PLAN, "--parameters", "1.5"], "argument --parameters: it is 1.5"),
        ([*PLAN, "--workers", "1" + 20 * "0"], "up to 2**53"),
        ([*PLAN, "--plot", "/no/such/folder/x.png"], "argument --plot: /no/such/folder/x.png can't be written"),
        ([*PLAN, "--json", "/no/such/folder/x.json"], "name a file in a folder that you may write to"),
        ([*PLAN, "--json", "."], "argument --json: . can't be written"),
        ([*PLAN, "--json", f"{__file__}/x.json"], "x.json can't be written"),
        ([*PLAN, "--plot", "x.foo"], "x.foo is no image file: let its name end with one of"),
        ([*PLAN, "--plot", "x"], "x is no image file"),
        ([*PLAN, "--plot", "x.svg", "--json", "./x.svg"], "--json and --plot are both x.svg: name two files"),
        (["tune", "--parameters", "9", "--json", "tune.json"], "--out and --json are both tune.json"),
        (["tune", "--parameters", "9", "--out", "/no/such/folder/x.json"], "argument --out: /no/such/folder/x.json"),
        (["network", "--json", "/no/such/folder/x.json", "--", "true"], "argument --json: /no/such/folder/x.json"),
    ],
)
def test_wrong_options_of_the_command_line(arguments, message: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_file_that_fails_ends_the_command_line(monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "x.json")

    monkeypatch.setattr(plan, "output", full)
    with pytest.raises(SystemExit) as ended:
        cli.main(PLAN)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "jsparse: error: [Errno 28] No space left on device: 'x.json'\n"


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_without_rich_the_command_line_names_the_fix():
    """The library works without rich; the command line ends with an error that names the fix."""
    hidden = "import sys; sys.modules['rich'] = None; import jsparse, jsparse.allreduce, jsparse.cost; "
    ended = in_a_new_process(hidden + "print('imported'); from jsparse import cli; cli.main(['plan', '--help'])")
    assert (ended.returncode, ended.stdout) == (1, "imported\n")
    assert ended.stderr == "jsparse: error: the command line needs rich: pip install 'jsparse[cli]'\n"


def test_only_bench_imports_the_benchmarks():
    code = """
import sys
from jsparse import cli
def imported(*arguments):
    try:
        cli.main([*arguments, "--help"])
    except SystemExit as ended:
        assert not ended.code
    return [name for name in ("network", "pto", "select", "train") if f"jsparse.bench.{name}" in sys.modules]
assert imported("plan") == []
assert len(imported("bench")) == 4
assert len(imported("bench", "pto")) == 4
"""
    ended = in_a_new_process(code)
    assert ended.returncode == 0, ended.stderr
    for text in ("such as 25e6", "time the selectors", "channels of the first stage"):
        assert text in ended.stdout


def test_the_module_runs():
    out = subprocess.run([sys.executable, "-m", "jsparse", "--help"], check=True, capture_output=True, text=True)
    assert "bench" in out.stdout
    assert "plan" in out.stdout


POWERSGD = argparse.Namespace(width=40, batch=8, steps=12, learning_rate=0.02)


@pytest.mark.full
def test_powersgd_sums_factors_and_vectors():
    """And the two words that open each step with a residual."""
    images = load_images("digits")
    for rank, summed in ((0, 64 * 40 + 40 * 40 + 40 * 10 + 90), (2, 2 * (64 + 40 + 40 + 40 + 40 + 10) + 90 + 2)):
        layers, found = powersgd.here(images, rank, 0, POWERSGD)
        assert found == summed
        assert powersgd.accuracy(layers, images) > 0.15


def test_powersgd_needs_pytorch(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        powersgd.main([])
    assert "pip install torch" in capsys.readouterr().err


@pytest.mark.full
def test_dense_training_is_that_of_pytorch():
    """With dense sums both end at the same parameters, so that they differ by PowerSGD alone."""
    pytest.importorskip("torch")
    images = load_images("digits")
    (ours, _), (theirs, summed) = (train(images, 0, 0, POWERSGD) for train in (powersgd.here, powersgd.there))
    assert summed == 64 * 40 + 40 * 40 + 40 * 10 + 90
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ours, theirs)
