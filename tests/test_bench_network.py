"""``jsparse bench network``: a small benchmark over real links, and its parts without links."""

import argparse
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_network import needs_network

import jsparse
import kernels_pallas
from jsparse import cli
from jsparse._presets.files import write
from jsparse.bench import gradients, network, profile, torch_worker
from jsparse.bench.alone import Alone
from jsparse.bench.forms import FORMS
from jsparse.bench.job import NetworkJob
from jsparse.bench.network_worker import Selecting, synchroniser
from jsparse.bench.reports import WorkerFailedError, run_workers
from jsparse.bench.timing import time_steps

N = 20_000
JOB = NetworkJob(3, 0.01, ["1gbit", "100mbit"], ["dense", "oktopk"], size=N, repeats=2)


@needs_network
def test_a_small_benchmark(tmp_path, capsys):
    plot, path = tmp_path / "x.png", tmp_path / "x.json"
    arguments = ["--hosts", "2", "--size", str(N), "--repeats", "3", "--rate", "100mbit", "20mbit"]
    arguments += ["--form", "topk_allgather"]
    cli.main(["bench", "network", *arguments, "--json", str(path), "--plot", str(plot)])
    out = capsys.readouterr().out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    figures = json.loads(path.read_text())
    assert (figures["hosts"], figures["k"], figures["rates"]) == (2, 200, ["100mbit", "20mbit"])
    results = {(form["name"], form["rate"]): form for form in figures["forms"]}
    assert list(results) == [(name, rate) for name in ("dense", "topk_allgather") for rate in figures["rates"]]
    for (name, rate), form in results.items():
        assert name in out
        assert rate in out
        assert form["least_bytes"] <= form["stated_bytes"] <= form["most_bytes"]
        assert form["steps"] == 3
        assert 0 < form["min_ms"] <= form["median_ms"] <= form["max_ms"]
        # The less is sent, the larger the part of acknowledgements and headers.
        assert form["stated_bytes"] < form["bytes"] < 1.1 * form["stated_bytes"] + 2000
        # It is the difference of two times, and can be 0 on a busy machine.
        assert form["communication_ms"] >= 0
        assert form["floor_ms"] == pytest.approx(8e3 * form["bytes"] / {"100mbit": 1e8, "20mbit": 2e7}[rate], rel=0.1)
    assert results["dense", "20mbit"]["stated_bytes"] == 4 * N
    assert results["dense", "20mbit"]["median_ms"] > results["dense", "20mbit"]["floor_ms"] / 2
    assert results["topk_allgather", "20mbit"]["bytes"] < 0.2 * results["dense", "20mbit"]["bytes"]
    assert results["topk_allgather", "20mbit"]["selection_ms"] > 0
    assert not results["topk_allgather", "20mbit"]["dense_update"]


@pytest.mark.full
@needs_network
def test_a_small_benchmark_of_several_devices(tmp_path):
    """What a host's devices send to each other is not on its link."""
    path, names = tmp_path / "x.json", ["dense", "torus", "powersgd, rank 4", "topk_allgather", "hitopk"]
    chosen = [option for name in names for option in ("--form", name)]
    shape = ["--hosts", "2", "--devices", "2", "--size", str(N), "--repeats", "2"]
    cli.main(["bench", "network", *shape, *chosen, "--json", str(path)])
    figures = json.loads(path.read_text())
    forms = {form["name"]: form for form in figures["forms"]}
    assert list(forms) == names
    # Each of a host's two devices sends half of the gradient to the other host.
    assert 4 * N < forms["torus"]["bytes"] < 4.6 * N
    # Each sends k / 2 elements, of 8 bytes.
    assert 8 * 200 < forms["hitopk"]["bytes"] < 0.2 * forms["torus"]["bytes"]
    assert "stated_bytes" not in forms["torus"]


@pytest.mark.full
@needs_network
def test_forms_in_several_processes(tmp_path, monkeypatch):
    """Programs of the first do not reach the second."""
    monkeypatch.setattr(network, "TOGETHER", 1)
    path = tmp_path / "x.json"
    options = ["--hosts", "2", "--size", str(N), "--repeats", "2", "--form", "oktopk", "--form", "vote"]
    cli.main(["bench", "network", *options, "--rate", "1gbit", "100mbit", "--json", str(path)])
    forms = json.loads(path.read_text())["forms"]
    assert [form["name"] for form in forms] == [name for name in ("dense", "vote", "oktopk") for _ in range(2)]
    assert [form["rate"] for form in forms] == 3 * ["1gbit", "100mbit"]


@needs_network
def test_an_error_of_a_worker_is_shown():
    with pytest.raises(ValueError, match=r"a worker failed:\n(.|\n)*No module named"):
        run_workers([("jsparse.bench.nothing", JOB)])


def test_a_worker_that_fails_ends_at_once():
    """JAX waits at the end of a process for others, which wait for this one."""
    program = """
import atexit, time
from jsparse.bench.reports import work
atexit.register(time.sleep, 60)
work(lambda text: 1 // len(text[1:]))
"""
    done = subprocess.run([sys.executable, "-c", program, "x"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch, capsys):
    """One host had told of a form, the others had not yet."""
    told = reports(JOB)
    told[1].pop()

    def fail(job, keep):
        raise WorkerFailedError("a worker failed:\nno memory", told)

    monkeypatch.setattr(network, "measure", fail)
    path = tmp_path / "x.json"
    options = ["--hosts", "3", "--rate", "1gbit", "100mbit", "--size", str(N), "--json", str(path)]
    with pytest.raises(SystemExit):
        cli.main(["bench", "network", *options])
    assert "no memory" in capsys.readouterr().err
    names = [form["name"] for form in json.loads(path.read_text())["forms"]]
    assert names == 2 * ["dense"] + 2 * ["oktopk"] + ["torch all_reduce"]


def test_forms_of_pytorch_without_it_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["bench", "network", "--hosts", "2", "--size", str(N), "--form", "torch all_reduce"])
    assert "PyTorch is not installed: pip install torch" in capsys.readouterr().err


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    """A form that lacks a rate is measured again, others are not; the file of another job is
    refused.
    """
    path, asked, told = tmp_path / "x.json", [], reports(JOB)
    options = ["--hosts", "3", "--rate", "1gbit", "100mbit", "--size", str(N), "--repeats", "2", "--json", str(path)]
    options = ["bench", "network", *options, "--form", "oktopk", "--form", "torch all_reduce"]

    def stop(job, keep):
        asked.append(job.forms)
        keep([one[:1] for one in told])
        keep([one[:3] for one in told])
        raise KeyboardInterrupt

    def go_on(job, keep):
        asked.append(job.forms)
        return [[report for report in one if report["name"] in job.forms] for one in told]

    monkeypatch.setattr(network, "measure", stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        cli.main(options)
    assert [form["name"] for form in json.loads(path.read_text())["forms"]] == ["dense", "dense", "oktopk"]
    monkeypatch.setattr(network, "measure", go_on)
    cli.main([*options, "--resume"])
    cli.main([*options, "--resume"])
    assert asked == [["dense", "oktopk", "torch all_reduce"], ["oktopk", "torch all_reduce"]]
    figures = json.loads(path.read_text())
    expected = network.describe(JOB, network.combine(told))
    assert figures["forms"] == json.loads(json.dumps(expected["forms"]))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SystemExit):
        cli.main([*options, "--resume", "--density", "0.1"])
    assert "density is 0.01 there and 0.1 here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "network", "--resume"])
    assert "name one" in capsys.readouterr().err
    # What is not measured again stays, also of a form that lacks a rate.
    figures["forms"] = [form for form in figures["forms"] if form["name"] == "oktopk"][:1]
    path.write_text(json.dumps(figures))
    cli.main([*options[:-4], "--form", "torch all_reduce", "--resume"])
    assert {form["name"] for form in json.loads(path.read_text())["forms"]} == {"oktopk", "dense", "torch all_reduce"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"{}", b'{"forms": [1]}'])
def test_only_a_file_of_this_command_is_resumed(content: bytes, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        cli.main(["bench", "network", "--json", str(path), "--resume"])
    assert f"{path} ends, but that has no figures of this command" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_failure_at_the_first_rate_is_drawn(tmp_path):
    figures = network.describe(JOB, network.combine([one[:1] for one in reports(JOB)]))
    network.draw_times(figures, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_figures_are_written_where_they_can_be(tmp_path, monkeypatch):
    """Over a file, through a link, into a pipe, and where no other file can take its place."""
    path, link, pipe = tmp_path / "x.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(path)
    for number, name in enumerate((path, path, link)):
        write(name, {"number": number})
        assert json.loads(path.read_text()) == {"number": number}
    assert link.is_symlink()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write(pipe, {"number": 3})
        assert json.loads(reader.communicate(timeout=20)[0]) == {"number": 3}

    def refuse(*_):
        raise OSError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", refuse)
        write(path, {"number": 4})
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        patch.setattr(tempfile, "TemporaryDirectory", refuse)
        write(path, {"number": 5})
    assert json.loads(path.read_text()) == {"number": 5}
    monkeypatch.setattr(os, "fsync", refuse)  # As on a full disk.
    with pytest.raises(OSError, match="refused"):
        write(path, {"number": 6})
    assert json.loads(path.read_text()) == {"number": 5}
    assert set(tmp_path.iterdir()) == {path, link, pipe}


@pytest.mark.parametrize(
    ("hosts", "devices", "left_out"),
    [
        (4, 1, set()),
        (3, 1, {"torus", "hitopk", "dsar_split_allgather, pairs"}),
        (3, 2, set()),
        (3, 3, {"dsar_split_allgather, pairs"}),
    ],
)
def test_forms_whose_workers_form_groups(hosts: int, devices: int, left_out: set[str]):
    job = NetworkJob(hosts, 0.01, ["1gbit"], ["dense"], size=N, repeats=1, devices=devices)
    assert {form.name for form in FORMS if not job.fits(form)} == left_out


def reports(job: NetworkJob) -> list[list[dict]]:
    """Invented reports of the hosts: times and bytes differ by form, rate and host."""
    told: list[list[dict]] = [[] for _ in range(job.hosts)]
    for number, name in enumerate(("dense", "oktopk", "torch all_reduce")):
        for rate in job.rates:
            for rank in range(job.hosts):
                report = {
                    "name": name,
                    "rate": rate,
                    "dense_update": name != "oktopk",
                    "ms": [100.0 - 30 * number + rank, 90.0 - 30 * number - rank],
                    "sent_bytes": 1e6 + rank,
                    "received_bytes": 1e6 + 5,
                }
                if number < 2:
                    ours = {"stated_bytes": 9e5, "least_bytes": 8e5, "most_bytes": 1e6, "memory": 0.3}
                    report |= ours | {"computing_ms": [10.0, 12.0 + rank], "pass_ms": [4.0 + rank + number, 4.0]}
                if name == "oktopk":
                    report["selection_ms"] = [5.0 + rank, 3.0]
                told[rank].append(report)
    return told


def test_reports_are_combined(tmp_path, capsys):
    figures = network.describe(JOB, network.combine(reports(JOB)))
    assert len(figures["forms"]) == 6
    dense, sparse, peer = (form for form in figures["forms"] if form["rate"] == "100mbit")
    # The slowest hosts took 102 ms and 90 ms for the two steps.
    assert (dense["median_ms"], dense["min_ms"], dense["max_ms"]) == (96, 90, 102)
    assert dense["floor_ms"] == pytest.approx(8e3 * (1e6 + 5) / 1e8)
    assert dense["bytes"] == 1e6 + 1
    assert (dense["selection_ms"], dense["rest_ms"], dense["communication_ms"]) == (0, 12, 84)
    assert (sparse["selection_ms"], sparse["rest_ms"], sparse["communication_ms"]) == (5, 7, 54)
    # The slowest hosts computed for 10 and 14 ms. In a pass, for 6 and 4 ms after dense, and for 7
    # and 4 after oktopk.
    assert (dense["pass_ms"], sparse["pass_ms"]) == (5, 5.5)
    assert (dense["passes"], sparse["passes"]) == (12 / 5.25, 12 / 5.25)
    assert sparse["times_faster_than_dense"] == 96 / 66
    assert "communication_ms" not in peer
    network.show(figures)
    out = capsys.readouterr().out
    for text in ("3 hosts at 1gbit", "3 hosts at 100mbit", "oktopk", "torch all_reduce", "1.45 x", " 2.3 ", "0.900"):
        assert text in out
    network.draw_times(figures, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_job_is_written_and_read():
    assert NetworkJob.read(JOB.written()) == JOB
    options = {"hosts": 3, "density": 0.01, "rates": ["1gbit"], "size": N, "repeats": 2, "devices": 1}
    given = argparse.Namespace(**options, forms=None, json=None)
    names = ["dense", "oktopk", "gtopk"]
    assert NetworkJob.chosen(given, names, ["oktopk"]) == dataclasses.replace(JOB, rates=["1gbit"])
    given.forms = ["gtopk", "dense", "gtopk"]
    assert NetworkJob.chosen(given, names, names).forms == ["dense", "gtopk"]


def test_gradients():
    first, second = gradients.worker_gradients(N, 0), gradients.worker_gradients(N, 1)
    assert [g.dtype for g in first] == [np.float32] * 3
    np.testing.assert_array_equal(first[1], gradients.worker_gradients(N, 0)[1])
    for one, other in ((first[0], second[0]), (first[0], first[1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
        # Their magnitudes are correlated.
        assert np.corrcoef(np.abs(one), np.abs(other))[0, 1] > 0.15
    assert np.mean(first[0] ** 4) > 6 * np.mean(first[0] ** 2) ** 2


def test_all_workers_take_the_same_number_of_steps():
    heard = []

    def agree(number):
        heard.append(number)
        return 1e9  # Another worker is slow.

    assert len(time_steps(lambda: None, agree, 10)) == 3
    assert len(time_steps(lambda: None, lambda number: number, 10)) == 10
    assert len(heard) == 4


def test_every_preset_is_a_form():
    presets = {
        name
        for name in jsparse.__all__
        if inspect.isfunction(preset := getattr(jsparse, name))
        and inspect.signature(preset).return_annotation is jsparse.SparseAllReduce
    }
    names = {form.name.split(",")[0] for form in FORMS}
    # The first takes what the others make, and so do the last two.
    assert presets - {"phases", "sparse_allreduce", "from_file", "over_mesh"} <= names
    assert {"oktopk, dense update", "oktopk, compact", "oktopk, compact bf16", "oktopk, compact 4 bits"} <= {
        form.name for form in FORMS
    }


ALONE = ["dense", "oktopk, dense update", "gtopk, tree", "ssar_recursive_doubling", "dsar_split_allgather", "hitopk"]
ALONE += ["torus", "a2sgd", "qsgd", "parameter_server", "powersgd, rank 4", "topk_allgather, leaf"]


@pytest.mark.parametrize("form", [form for form in FORMS if form.name in ALONE], ids=lambda form: form.name)
def test_computation_alone_sends_nothing(form):
    """A form runs without a network, with the same shapes as among other workers."""
    comms = (Alone(2), Alone(2)) if form.levels else (Alone(4),)
    tx = form.make(*comms, density=0.01)
    step = synchroniser(tx, form.dense_update)
    grads = jax.eval_shape(lambda: gradients.in_leaves(np.zeros(N, np.float32)) if form.leaves else jnp.zeros(N))
    state = jax.eval_shape(tx.init, grads)
    after, mean = jax.eval_shape(step, grads, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    sparse = isinstance(mean, jsparse.SparseVector)
    assert mean.n == N if sparse else sum(leaf.size for leaf in jax.tree.leaves(mean)) == N
    sums = ("dense", "dsar", "torus", "a2sgd", "qsgd", "parameter_server", "powersgd")
    assert sparse != (form.dense_update or form.name.startswith(sums))
    assert jsparse.traffic(step, grads, state).bytes == 0


def test_selection_alone():
    """Selection alone accumulates and selects, but delivers nothing."""
    tx = jsparse.topk_allgather(Alone(4), density=0.01)
    mesh = Mesh(np.array(jax.devices()[:1]), ("workers",))
    selecting = Selecting(tx.synchroniser, mesh, [jnp.asarray(grad) for grad in gradients.worker_gradients(N, 0)])
    selecting.run = selecting.lowered.compile()
    for _ in range(2):
        selecting()
    np.testing.assert_allclose(selecting._state[0], sum(gradients.worker_gradients(N, 0)[:2]), rtol=1e-5, atol=1e-6)


def test_a_profile_in_steps_or_of_their_mean():
    """Operations on a GPU do not say of which step they are."""

    def event(name: str, ms: float, **told):
        return types.SimpleNamespace(stats=[("hlo_op", name), *told.items()], duration_ns=ms * 1e6)

    def of(*events):
        line = types.SimpleNamespace(events=[*events, types.SimpleNamespace(stats=[], duration_ns=9)])
        return types.SimpleNamespace(planes=[types.SimpleNamespace(lines=[line])])

    steps = profile.operations(of(event("add", 1, run_id=1), event("add", 3, run_id=2)), 2)
    assert steps == [{"add": 1}, {"add": 3}]
    assert profile.operations(of(event("add", 1), event("sort", 4), event("add", 3)), 2) == [{"add": 2, "sort": 2}]


@pytest.mark.full
def test_a_profile_names_functions(tmp_path):
    """Most of the computing is told by function, and no operation is counted twice."""
    path = tmp_path / "profile.json"
    options = ["--size=300000", "--repeats=2", f"--json={path}", f"--plot={tmp_path / 'profile.png'}"]
    cli.main(["bench", "profile", "oktopk", *options])
    figures = json.loads(path.read_text())
    assert figures["median_ms"] > 0
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    files = {name.partition(": ")[0] for name in figures["functions"]}
    assert {"jsparse/_vector/layout.py", "jsparse/allreduce/oktopk.py", "kernels_pallas/bitmap.py"} <= files
    named = sum(ms for name, ms in figures["functions"].items() if not name.startswith("("))
    assert named > 0.5 * sum(figures["functions"].values())


def test_operations_of_a_program_have_sources():
    """Also those that got no line of their own from XLA: they have that of what is inside them."""
    count = jax.jit(lambda x: kernels_pallas.count_above(x, 1.0) + 1).lower(jnp.zeros(4096)).compile()
    sources = profile.Sources(count.as_text() or "")
    told = {sources.function(name) for name, opcode in sources.opcodes.items() if opcode == "fusion"}
    assert told
    assert told <= {
        "kernels_pallas/bitmap.py: count",
        "kernels_pallas/bitmap.py: count_mask",
        "kernels_pallas/bitmap.py: _of_columns",
        "(add)",
    }
    assert sources.function("unknown") == "(unknown)"


def test_gradients_for_pytorch():
    assert sum(map(math.prod, gradients.vgg16())) == 14_728_266
    assert gradients.leaves_of(14_728_266) == gradients.vgg16()
    assert gradients.leaves_of(10) == [(3, 3), (1,)]
    assert gradients.leaves_of(9) == [(3, 3)]

    class Buffer(np.ndarray):
        def split(self, sizes):
            return np.split(self, np.cumsum(sizes)[:-1])

        def view(self, shape):
            return self.reshape(shape)

    bucket = torch_worker.Bucket(np.arange(10).view(Buffer), [(3, 3), (1,)])
    assert [part.shape for part in bucket.gradients()] == [(3, 3), (1,)]
    assert bucket.gradients()[1][0] == 9
    assert (bucket.index(), bucket.is_last(), len(bucket.buffer())) == (0, True, 10)
    assert bucket.parameters() == bucket.gradients()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "3"], "density is 3.0"),
        (["--hosts", "1"], "argument --hosts: it is 1; give a whole number, from 2 to 250"),
        (["--size", "1e9", "--devices", "1000"], "--size is 1,000,000,000, for 4000 workers"),
        (["--devices", "nan"], "argument --devices: it is nan"),
        (["--rate", "1gbit", "1bit"], "the rate is '1bit'; give one from 8bit"),
        (["--hosts", "300"], "argument --hosts: it is 300; give a whole number, from 2 to 250"),
        (["--repeats", "0"], "at least 1"),
        (["--rate", "1gbit", "fast"], "the rate is 'fast'"),
        (["--form", "best"], "--form is 'best'; choose from dense; "),
    ],
)
def test_wrong_options(arguments, message: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "network", *arguments])
    assert message in capsys.readouterr().err
