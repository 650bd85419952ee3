"""The figures of the papers: every row can be run, at a tiny size, and goes on where it was."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from examples import train
from examples.papers import __main__ as papers
from examples.papers import records, times
from examples.papers.alone import Bench, Computing, Summing
from examples.papers.convergence import Convergence, task_of
from examples.papers.figure import make
from examples.papers.model import Model
from examples.papers.records import Record
from examples.papers.times import MODELLED, PingPong, Synchronised, TimeToAccuracy, Tuned
from examples.tasks import MODELS
from jsparse import cost
from jsparse.bench.forms import FORMS
from processes import free_port
from tiers import quick

ROOT = pathlib.Path(__file__).parent.parent
DATA = os.environ.get("JSPARSE_DATA")
TINY: dict[type, dict[str, Any]] = {
    Convergence: {
        "model": "convnet",
        "data": "digits",
        "workers": 2,
        "batch": 16,
        "epochs": 1,
        "examples": 200,
        "rates": (0.05,),
        "seeds": 2,
        "optimizer": "momentum",
        "warm_up": None,
        "resolutions": "",
        "vary": None,
        "density": 0.01,
    },
    Record: {
        "model": "fnn3",
        "data": "digits",
        "workers": 4,
        "batch": 8,
        "steps": 100,
        "every": 25,
        "densities": (0.01,),
        "rate": 0.05,
    },
    Computing: {"sizes": (5_000,), "repeats": 1},
    Summing: {"sizes": (5_000,), "densities": (0.01, 0.1), "repeats": 1},
}


@pytest.fixture(autouse=True)
def devices() -> None:
    """JAX has been used, so that no figure changes how many virtual devices there are."""
    assert len(jax.devices()) == 8


def kind(figure: Any) -> type:
    return next(
        kind
        for kind in (*TINY, Model, Bench, PingPong, Synchronised, TimeToAccuracy, Tuned)
        if isinstance(figure, kind)
    )


@pytest.mark.parametrize("name", papers.FIGURES)
def test_a_row_names_what_there_is(name):
    figure = papers.FIGURES[name]
    for sized in figure, figure.sized(full=False):
        if isinstance(sized, Convergence):
            assert set(sized.algorithms) <= {*train.ALGORITHMS, *train.WARM_UPS}
            assert sized.data in MODELS[sized.model].data
        if isinstance(sized, Record):
            assert set(sized.algorithms) <= set(records.ALGORITHMS)
            assert sized.data in MODELS[sized.model].data
        if isinstance(sized, TimeToAccuracy):
            assert set(sized.forms) <= {form.name for form in FORMS}
        if isinstance(sized, Synchronised):
            assert set(sized.forms) <= {form.name for form in FORMS}
            assert sized.over in ("hosts", "size", "density")
        if isinstance(sized, Model):
            assert set(sized.algorithms) <= set(cost.ALGORITHMS)
    assert set(MODELLED) <= {form.name for form in FORMS}
    assert set(MODELLED.values()) <= set(cost.ALGORITHMS)


# One figure of each kind that needs no network.
QUICK = ["thesis 5.6", "thesis 3.4 and 3.5"]
OTHERS = [*(name for name, figure in papers.FIGURES.items() if isinstance(figure, Record)), "a2sgd 3", "commlib 7"]
EACH = [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS if name not in QUICK)]


@pytest.mark.parametrize("name", EACH)
def test_a_figure_is_made_and_goes_on(tmp_path, monkeypatch, name):
    figure = papers.FIGURES[name]
    if not isinstance(figure, Model):
        figure = dataclasses.replace(figure, small=TINY[kind(figure)])
    monkeypatch.setitem(papers.FIGURES, name, figure)
    papers.main([name, "--out", str(tmp_path)])
    (lines,) = tmp_path.glob("*.jsonl")
    (plot,) = tmp_path.glob("*.png")
    assert plot.stat().st_size > 5_000
    text = lines.read_text()
    for line in map(json.loads, text.splitlines()):
        assert line["full"] is False
        assert line["took"] > 0

    def measure(*args):
        raise AssertionError("a run that is in the file is made again")

    monkeypatch.setattr(type(figure), "measure", measure)
    plot.unlink()
    papers.main([name, "--out", str(tmp_path)])
    assert lines.read_text() == text
    (plot,) = tmp_path.glob("*.png")


def test_showing_runs_changes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(Convergence, "table", lambda *_: "")
    monkeypatch.setattr(Convergence, "draw", lambda *_: None)
    path = tmp_path / "gtopk_1.jsonl"
    text = json.dumps(next(iter(papers.FIGURES["gtopk 1"].settings(False, []))) | {"accuracy": [1.0], "loss": [1.0]})
    path.write_text(text)  # Without a newline.
    papers.main(["gtopk 1", "--show", "--out", str(tmp_path)])
    assert path.read_text() == text


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "gtopk_1.jsonl"
    path.write_text("{\n}\n")
    with pytest.raises(SystemExit):
        papers.main(["gtopk 1", "--show", "--out", str(tmp_path)])
    assert f"not run: {path}, line 1: it is no JSON object; name another file, or" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        papers.main(["gtopk 1", "--out", str(path)])
    assert "gtopk_1.jsonl can't be a folder for files: name one" in capsys.readouterr().err


@pytest.mark.full
def test_a_model_with_running_averages_is_recorded():
    options = {"workers": 2, "batch": 4, "steps": 2, "every": 1, "rate": 0.1, "momentum": 0.9, "schedule": "constant"}
    setting = {"algorithm": "dense", "density": 0.01, **options}
    task = records.task_of("resnet20", "digits", None, 0, 40)
    first, second = records.trained(task, setting)
    assert first.grads.shape[0] == 2
    np.testing.assert_allclose(first.update, first.grads.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert np.abs(second.grads - first.grads).max() > 0


# One row at a tiny size.
PROGRAM = """
import dataclasses, sys
from examples.papers import __main__ as papers
tiny = dict({tiny!r}, seeds=1)
papers.FIGURES = {{"gtopk 1": dataclasses.replace(papers.FIGURES["gtopk 1"], small=tiny)}}
papers.main([*sys.argv[1:], "gtopk 1"])
"""


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_training_in_several_processes(count, tmp_path):
    """Both processes make each run together, and the file has it once, as of one process."""
    text = PROGRAM.format(tiny=TINY[Convergence])
    options = ["--out", str(tmp_path), "--distributed", f"localhost:{free_port()}", "--processes", str(count), "--rank"]
    started = [
        subprocess.Popen([sys.executable, "-c", text, *options, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    try:
        out = [process.communicate(timeout=480)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count
    assert "accuracy" in out[0]
    assert not any("accuracy" in text for text in out[1:])
    lines = [json.loads(line) for line in (tmp_path / "gtopk_1.jsonl").read_text().splitlines()]
    assert [line["algorithm"] for line in lines] == ["dense", "topk_allgather", "gtopk-warmup"]
    assert {line["workers"] for line in lines} == {2}
    assert {line["steps"] for line in lines} == {200 // 32}
    # By one process, without this option.
    figure = dataclasses.replace(papers.FIGURES["gtopk 1"], small={**TINY[Convergence], "seeds": 1})
    alone = make(figure, tmp_path / "alone.jsonl", full=False, files=None)
    for line, other in zip(lines, alone, strict=True):
        np.testing.assert_allclose(line["loss"], other["loss"], rtol=1e-4)
        assert line["bytes"] == other["bytes"]


def test_files_have_names_of_their_own():
    assert len({papers.file_of(name, ".png") for name in papers.FIGURES}) == len(papers.FIGURES)


SPREAD = {"median_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0}
PARTS = {"selection_ms": 0.5, "rest_ms": 0.5, "communication_ms": 1.0, "floor_ms": 0.5, "bytes": 8.0, "memory": 0.25}


def let_commands_print(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of jsparse print what a function says of their arguments. No process is started."""

    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, printed(*command[3:]), "")

    monkeypatch.setattr(times, "subprocess", types.SimpleNamespace(run=run))


def printed(*arguments: str) -> str:
    """What commands of jsparse print, as far as figures read it."""
    if arguments[0] == "network":
        (path,) = (a.removeprefix("--out=") for a in arguments if a.startswith("--out="))
        samples = [{"what": "ping-pong", "words": words, "seconds": 1e-4 * words} for words in (1, 256)]
        figures = {"links": {"between": {"alpha": 1e-4, "beta": 1e-8}}, "samples": {"between": samples}}
        # The more candidates, the more forms, each faster than the one before.
        forms = ["dense", "oktopk", "gtopk"][: 2 + ("--candidates=99" in arguments)]
        figures["measured"] = [
            {"name": name, "synchronisation_ms": {"median": 9.0 / 3**i}} for i, name in enumerate(forms)
        ]
        figures["recommended"] = forms[-1]
        pathlib.Path(path).write_text(json.dumps({"tune": figures}))
        return ""
    match arguments[1]:
        case "network":
            names = [a.removeprefix("--form=") for a in arguments if a.startswith("--form=")]
            return json.dumps({"forms": [{"name": name, **SPREAD, **PARTS} for name in names]})
        case "data":
            forms = [{"name": "cache", "epochs": [SPREAD, SPREAD]}]
        case "pto":
            forms = [{"task": "LARS", "name": "in parts", "together": SPREAD, "alone": SPREAD}]
        case _:
            forms = [{"name": "TopK", **SPREAD}]
    return json.dumps({"forms": forms})


MEASURED = [
    name for name, figure in papers.FIGURES.items() if isinstance(figure, Bench | PingPong | Synchronised | Tuned)
]
# One of each kind.
FEW = "gtopk 10", "commlib 9", "scale tune"


@pytest.mark.parametrize("name", quick(MEASURED, *FEW))
def test_what_commands_measure_is_shown(tmp_path, monkeypatch, name):
    let_commands_print(printed, monkeypatch)
    times.ping_pong.cache_clear()
    lines = make(papers.FIGURES[name], tmp_path / "lines.jsonl", full=False, files=None)
    times.ping_pong.cache_clear()
    papers.FIGURES[name].draw(lines, tmp_path / "x.png")
    assert papers.FIGURES[name].table(lines).row_count
    assert (tmp_path / "x.png").stat().st_size > 5_000


@pytest.mark.full
def test_what_tune_recommends_is_beside_what_is_fastest(tmp_path, monkeypatch):
    let_commands_print(printed, monkeypatch)
    figure: Any = papers.FIGURES["scale tune"]
    table = figure.table(make(figure, tmp_path / "lines.jsonl", full=False, files=None))
    assert table.row_count == len(figure.cases) == 4
    row = [next(iter(column.cells)) for column in table.columns]
    assert row == ["4", "1gbit", "14,728,266", "1 %", "oktopk", "3.0", "gtopk", "1.0", "3.00", "9.0"]


def test_runs_of_other_settings_are_left_out(tmp_path, monkeypatch):
    """A row that was changed does not show the runs of before."""
    monkeypatch.setattr(Model, "measure", lambda self, setting, files: {self.what: {"dense": 1.0}})
    figure: Any = papers.FIGURES["gtopk 9, left"]
    for changed in figure, dataclasses.replace(figure, link=(1.0, 1.0)):
        assert len(make(changed, tmp_path / "lines.jsonl", full=False, files=None)) == len(figure.workers)
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 2 * len(figure.workers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("best", "lowest", "rates"),
    [
        (2.0, 2.0, [1.0, 2.0, 4.0]),
        (8.0, 8.0, [1.0, 2.0, 4.0, 8.0, 16.0]),
        (1.0, 1.0, [1.0, 2.0, 4.0, 0.5]),
        (2.0, 0.5, [1.0, 2.0, 4.0, 0.5, 0.25]),
        (2.0, math.nan, [1.0, 2.0, 4.0]),
    ],
)
def test_the_best_rate_is_run_with_all_seeds(best: float, lowest: float, rates: list[float], tmp_path, monkeypatch):
    """Where its accuracy or its loss is the best at an end, others beyond it are tried first."""
    figure: Any = dataclasses.replace(papers.FIGURES["gtopk 1"], small={"rates": (1.0, 2.0, 4.0), "seeds": 3})
    monkeypatch.setattr(
        Convergence,
        "measure",
        lambda self, setting, files: {
            "parameters": 10,
            "steps": 2,
            "accuracy": [0.1, 1 - abs(setting["rate"] - best) / 40 + setting["seed"] / 100],
            "loss": [2.0, abs(setting["rate"] - lowest) if setting["rate"] < 4 else math.nan],
            "bytes": [8, 16],
        },
    )
    lines = make(figure, tmp_path / "lines.jsonl", full=False, files=None)
    for algorithm in figure.algorithms:
        runs = [(line["rate"], line["seed"]) for line in lines if line["algorithm"] == algorithm]
        assert runs == [*((rate, 0) for rate in rates), (best, 1), (best, 2)]
    rows = list(figure.best(lines))
    assert [(case, len(runs)) for case, _, runs in rows] == [(None, 3)] * len(figure.algorithms)


def test_time_to_accuracy_is_that_of_each_forms_best_rate(tmp_path, monkeypatch):
    """Dense is fastest at the middle rate, the other form at the largest; beyond, it fails."""
    asked: list[tuple[list[str], float, int]] = []

    def train(*arguments: str) -> str:
        options = dict(a.removeprefix("--").split("=") for a in arguments if a.startswith("--") and "form" not in a)
        forms = [a.removeprefix("--form=") for a in arguments if a.startswith("--form=")]
        rate, seed = float(options["learning-rate"]), int(options["seed"])
        asked.append((forms, rate, seed))
        best = {"dense": 0.05, "oktopk": 0.1}
        run = {"steps": 7, "sent_bytes": 8e6, "median_ms": 4.0}
        run |= {"computation_ms": 1.0, "selection_ms": 1.0, "communication_ms": 2.0}
        runs = [
            run
            | {
                "name": form,
                "seconds": 9 + seed + abs(rate / best[form] - 1),
                "accuracy": [0.96 if rate < 0.2 else 0.9],
            }
            for form in dict.fromkeys(["dense", *forms])
        ]
        return json.dumps({"runs": runs})

    let_commands_print(train, monkeypatch)
    figure: Any = papers.FIGURES["scale time to accuracy"]
    figure = dataclasses.replace(figure, forms=("dense", "oktopk"), small={})
    lines = make(figure, tmp_path / "lines.jsonl", full=False, files=pathlib.Path("data"))
    both = ["dense", "oktopk"]
    assert asked == [
        *((both, rate, 0) for rate in (0.025, 0.05, 0.1)),
        (["oktopk"], 0.2, 0),
        *((form, rate, seed) for seed in (1, 2) for form, rate in ((["dense"], 0.05), (["oktopk"], 0.1))),
    ]
    table = figure.table(lines)
    assert [list(column.cells) for column in table.columns][:6] == [
        ["dense", "oktopk"],
        ["0.05", "0.1"],
        ["3 of 3", "3 of 3"],
        ["10.0", "10.0"],
        ["9.0 - 11.0", "9.0 - 11.0"],
        ["1.00", "1.00"],
    ]
    figure.draw(lines, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5_000


def test_time_is_kept_and_files_are_named(tmp_path, capsys):
    papers.main(["gtopk 13", "--out", str(tmp_path), "--minutes", "-1"])
    assert not list(tmp_path.glob("*.jsonl"))
    with pytest.raises(SystemExit):
        papers.main(["a2sgd 2", "--out", str(tmp_path)])
    assert "--data-dir" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        papers.main(["gtopk 99", "--out", str(tmp_path)])
    assert "there is no figure gtopk 99" in capsys.readouterr().err
    papers.main([])
    out = capsys.readouterr().out
    assert all(name in out for name in papers.FIGURES)


def test_xi_of_the_rule_is_as_defined():
    """By hand: two workers, four elements, k = 1."""
    figure: Any = papers.FIGURES["oktopk 5"]
    accs = np.array([[4.0, 0.0, 3.0, 0.0], [0.0, 1.0, 3.0, 0.0]])
    update = np.array([2.0, 0.0, 0.0, 0.0])
    step = records.Step(0, accs, accs, update, None)
    # The largest of the mean is at 2; the workers' largest are 4 at 0 and 3 at 2.
    norm = math.sqrt(2**2 + 0.5**2 + 3**2)
    found = figure.record(step, 1)
    assert found["xi"] == pytest.approx(math.sqrt(2**2 + 3**2) / norm)
    assert found["xi of the rule"] == pytest.approx(math.sqrt(2**2 + 3**2) / norm)
    assert figure.record(step._replace(update=np.array([0.0, 0.0, 3.0, 0.0])), 1)["xi"] == 0


@pytest.mark.full
@pytest.mark.skipif(not DATA, reason="needs JSPARSE_DATA")
@pytest.mark.parametrize("name", [name for name, figure in papers.FIGURES.items() if isinstance(figure, Convergence)])
def test_tasks_are_found(name):
    sized: Any = papers.FIGURES[name].sized(full=False)
    task = task_of(sized.model, sized.data, pathlib.Path(DATA or ""), 0, 100)
    assert len(task.train[0]) == 100
    assert len(task.test[0]) == 20
