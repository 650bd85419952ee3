"""``jsparse tune``, and the files that it writes."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
import transports
from jsparse import cost, quantize, select, wire
from jsparse._presets import files
from jsparse.cli import links, main, tune
from jsparse.cli.links import Fit, Sample, fit
from jsparse.cli.plan import preset_of


def sample(what: str, payload: int, size: int, alpha: float, beta: float, noise: float = 1.0) -> Sample:
    sent = links.collective_cost(what, 4 * payload, size)
    taken = noise * (alpha * sent.messages + beta * sent.bytes / 4)
    return Sample(what, payload, sent.messages, sent.bytes / 4, taken)


def samples(alpha: float, beta: float, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    kinds = ("ppermute", "psum", "all_gather", "all_to_all")
    sizes = (8, 256, 4096, 65536, 2**20)
    return [sample(w, s, 8, alpha, beta, float(np.exp(noise * rng.standard_normal()))) for w in kinds for s in sizes]


@pytest.mark.parametrize("network", [(1e-6, 1e-10), (2e-4, 3e-8), (0.5, 1e-6)])
def test_a_line_through_times(network: tuple[float, float]):
    exact = fit(samples(*network))
    assert exact[:2] == pytest.approx(network, rel=1e-5)
    assert exact.error == 0
    # Errors are relative, so that long and short messages count equally.
    noisy = fit(samples(*network, noise=0.1))
    assert noisy[:2] == pytest.approx(network, rel=0.15)
    assert 0.05 < noisy.error < 0.15


@pytest.mark.parametrize("delay", [4.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_delayed_messages_do_not_move_the_line(seed: int, delay: float):
    """Any third of the short messages is delayed, as where processes wait for shared cores."""
    network = (1e-4, 3e-8)
    measured = samples(*network, noise=0.03)
    short = [number for number, sample in enumerate(measured) if sample.payload <= 4096]
    late = np.random.default_rng(seed).choice(short, len(short) // 3, replace=False)
    for number in late:
        measured[number] = measured[number]._replace(seconds=delay * measured[number].seconds)
    line = fit(measured)
    assert line[:2] == pytest.approx(network, rel=0.1)
    # It still tells how far off the samples are.
    assert line.error == pytest.approx(len(late) / len(measured) * np.log(delay), abs=0.05)


def test_alpha_and_beta_are_not_negative():
    words = [Sample("psum", w, 1, w, 1e-6 * w) for w in (100, 1000, 10000)]
    assert fit([*words, Sample("psum", 1, 5, 1, 1e-7)]).alpha >= 0
    assert fit([Sample("psum", w, 1, w, 1e-3 / (1 + w / 1e5)) for w in (1, 1000, 10000)]).beta == 0
    for same in ([Sample("psum", 4, 2, 8, 1e-3)], [Sample("psum", 4, 2, 8, 1e-3)] * 3):
        line = fit(same)
        assert 2 * line.alpha + 8 * line.beta == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="no times"):
        fit([])


def test_samples_of_a_network():
    """All collectives are measured, in whole rows, and their words counted as in the model."""
    mesh = transports.mesh(4)
    found = list(links.measure(mesh, transports.AXIS, [1, 100], 1, sharing=2))
    assert [(s.what, s.payload) for s in found] == [
        (what, size) for what in ("ppermute", "psum", "all_gather", "all_to_all") for size in (4, 100)
    ]
    assert all(s.seconds > 0 for s in found)
    assert found[3].words == 2 * 2 * 100 * 3 / 4
    assert (found[0].messages, found[0].words) == (2, 2 * 2 * 4)
    assert fit(found).alpha > 0


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch):
    """Replaces the measurements by those of a network that behaves as the model predicts."""

    def use(link: Fit, selection: float = 1e-3):
        def measure(mesh, axis, payloads, repeats, sharing):
            return iter(samples(link.alpha, link.beta))

        def times(mesh, candidate, acc, repeats, compiler):
            n, k = acc.shape[0] // mesh.size, round(0.01 * acc.shape[0] / mesh.size)
            name = "gtopk_tree" if candidate.options.get("topology") else candidate.preset
            node = cost.Node(mesh.shape.get(tune.INSIDE, 1), link.alpha, link.beta)
            seconds = cost.predict(name, n, k, mesh.size, link.alpha, link.beta, node=node).expected.seconds
            seconds *= {0: 1, 6: 0.75, 4: 0.5}[width(candidate.options.get("wire"))]
            return [1e3 * (seconds + selection * (name not in cost.DENSE))] * repeats

        monkeypatch.setattr(tune, "measure", measure)
        monkeypatch.setattr(tune, "synchronisation_times", times)
        monkeypatch.setattr(tune, "selection_time", lambda *args: selection)

    return use


def width(layout: jsparse.wire.Wire | None) -> int:
    """Bytes an element of a compact wire; 0 for the default wire."""
    return 0 if layout is None else 4 if isinstance(layout.values, quantize.BFloat16) else 6


@pytest.mark.full
@pytest.mark.parametrize("gpus", [1, 4])
def test_a_slow_network(network, tmp_path, gpus: int, capsys):
    network(Fit(5e-5, 3.2e-8, 0.0))
    path = tmp_path / "tune.json"
    options = ["--parameters", "1e6", "--gpus-per-node", str(gpus), "--out", str(path), "--json", "-", "--repeats", "2"]
    main(["tune", *options])
    figures = json.loads(capsys.readouterr().out)
    assert figures["workers"] == 8
    assert figures["links"]["nodes"]["alpha"] == pytest.approx(5e-5)
    assert not figures["dense_wins"]
    assert figures["times_faster_than_dense"] > 3
    assert figures["measured"] == sorted(figures["measured"], key=lambda result: result["step_ms"])
    plain = [result["step_ms"] for result in figures["measured"] if result["predicted_step_ms"] is not None]
    plain = sorted(plain)[: tune.CANDIDATES]  # Without the dense ones, which are slower.
    near = sum(ms <= tune.NEAR * plain[0] for ms in plain)
    assert len(figures["measured"]) == (1 if gpus == 1 else 2) + tune.CANDIDATES + 2 * near + 1
    # The measured times are the predicted ones on this network.
    for result in figures["measured"]:
        if result["predicted_step_ms"] is not None:
            assert result["step_ms"] == pytest.approx(result["predicted_step_ms"], rel=1e-3)
    content = json.loads(path.read_text())
    best = figures["measured"][0]
    assert {key: content[key] for key in best["file"]} == best["file"]
    assert content["options"]["wire"] == {"wire.Compact": {"values": {"quantize.BFloat16": {}}}}
    tx = jsparse.from_file(path, ("nodes", "gpus"))
    assert tx.synchroniser.reducer.wire == wire.Compact(quantize.BFloat16())


def test_wires_are_measured_with_all_that_are_nearly_the_fastest(tmp_path, monkeypatch, capsys):
    """One that is a little slower by itself may be the fastest with a wire."""
    plain = {"dense": 99.0, "oktopk": 10.0, "gtopk": 12.0, "topk_allgather": 13.0}

    def times(mesh, candidate, acc, repeats, compiler):
        name, *rest = candidate.name.split(", ")
        factor = {"gtopk": 0.5, "oktopk": 0.9}.get(name, 1.0) if "compact bf16" in rest else 1.0
        return [plain.get(name, 50.0) * factor * (0.95 if "sampled" in rest else 1.0)]

    monkeypatch.setattr(tune, "synchronisation_times", times)
    monkeypatch.setattr(tune, "measure_links", lambda *args: ({"nodes": Fit(1e-4, 1e-8, 0.0)}, {}))
    monkeypatch.setattr(tune, "selection_time", lambda *args: 0.0)
    options = ["--candidates", "99", "--out", str(tmp_path / "tune.json"), "--json", "-"]
    main(["tune", "--parameters", "1000", *options])
    figures = json.loads(capsys.readouterr().out)
    assert figures["recommended"] == "gtopk, compact bf16, sampled"
    found = {result["name"]: result["step_ms"] for result in figures["measured"]}
    assert {name for name in found if ", " in name} == {
        *("oktopk, compact", "oktopk, compact bf16", "gtopk, compact", "gtopk, compact bf16"),
        "gtopk, compact bf16, sampled",
    }


@pytest.mark.full
def test_a_fast_network(network, tmp_path, capsys):
    network(Fit(1e-7, 1e-11, 0.0))
    path, plot = tmp_path / "tune.json", tmp_path / "tune.png"
    main(["tune", "--parameters", "1e6", "--step-time", "50", "--out", str(path), "--plot", str(plot)])
    shown = capsys.readouterr().out
    assert "Dense wins: take dense." in " ".join(shown.split())
    assert plot.stat().st_size > 10_000
    assert jsparse.from_file(path, "data").synchroniser == jsparse.dense("data").synchroniser
    # A gain below the margin is not enough for a sparse algorithm.
    results = [
        {"preset": "oktopk", "times_faster_than_dense": 1.04},
        {"preset": "dense", "times_faster_than_dense": 1.0},
    ]
    assert tune.recommended(results)["preset"] == "dense"
    results[0]["times_faster_than_dense"] = 1.06
    assert tune.recommended(results)["preset"] == "oktopk"


def without_loss():
    return 1, 2.0, 3.0


def of_ints():
    return lambda params, batch: jnp.float32(params.sum()), np.ones(3, np.int32), 1.0


def vector_loss():
    return lambda params, batch: params * batch, np.ones(3), 1.0


def other_loss():
    return lambda params: params.sum(), np.ones(3), 1.0


def model():
    return lambda params, batch: ((batch @ params["w"]) ** 2).mean(), {"w": np.ones((500, 2))}, np.ones((4, 500))


@pytest.mark.full
def test_on_devices(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The whole command, on real devices in two nodes; its file makes a transformation."""
    monkeypatch.setattr(links, "BUDGET", 1e-3)
    monkeypatch.setattr(tune, "PAYLOADS", (1, 1000))
    path, figures = tmp_path / "tune.json", tmp_path / "figures.json"
    options = ["--workers", "4", "--gpus-per-node", "2", "--candidates", "1", "--repeats", "1", "--json", str(figures)]
    main(["tune", "--model", "test_tune:model", *options, "--out", str(path)])
    assert "inside a node" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["predicted"]["parameters"] == 1000
    assert found["predicted"]["step_time_ms"] > 0
    assert {result["name"] for result in found["measured"]} >= {"dense", "torus"}
    assert all(result["synchronisation_ms"]["median"] > 0 for result in found["measured"])
    assert sorted(found["links"]) == ["gpus", "nodes"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("nodes", "gpus"))
    state = jsparse.init(
        jsparse.from_file(path, ("nodes", "gpus")), np.zeros(1000, np.float32), mesh, ("nodes", "gpus")
    )
    assert jsparse.stats(state).step.shape == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parameters", "0"], "from 1 to 2147483647"),
        (["--parameters", "1e15"], "argument --parameters: it is 1e15; give a whole number, from 1 to 2147483647"),
        (["--parameters", "10", "--distributed", "x:y", "--processes", "2", "--rank", "0"], "--distributed is x:y; in"),
        (["--parameters", "10", "--density", "2"], "density is 2"),
        (["--parameters", "10", "--step-time", "-1"], "argument --step-time: it is -1"),
        (["--model", "test_tune:model", "--step-time", "nan"], "argument --step-time: it is nan"),
        (["--parameters", "10", "--step-time", "inf"], "argument --step-time: it is inf; give a finite number"),
        (["--parameters", "10", "--gpus-per-node", "-2"], "argument --gpus-per-node: it is -2"),
        (["--parameters", "10", "--workers", "0"], "argument --workers: it is 0; give a whole number, at least 1"),
        (["--parameters", "10", "--workers", "-1"], "argument --workers: it is -1"),
        (["--parameters", "10", "--distributed", "localhost:1"], "takes --processes and --rank"),
        (["--parameters", "10", "--rank", "1"], "nothing without --distributed"),
        (["--parameters", "10", "--distributed", "localhost:1", "--processes", "2", "--rank", "2"], "from 0 to 1"),
        (["--parameters", "10", "--distributed", "telepathy"], "nor one of auto, slurm"),
        (["--parameters", "10", "--workers", "1"], "nothing to tune"),
        (["--parameters", "10", "--workers", "99"], "8 devices"),
        (["--parameters", "10", "--workers", "6", "--gpus-per-node", "4"], "do not fill nodes"),
        (["--model", "nowhere:model"], "MODULE:FUNCTION"),
        (["--model", "test_tune"], "--model is 'test_tune'; it is MODULE:FUNCTION"),
        (["--model", ":model"], "--model is ':model'; it is MODULE:FUNCTION"),
        (["--model", "os:getcwd"], "--model is 'os:getcwd', which returns str; it is MODULE:FUNCTION"),
        (["--model", "test_tune:without_loss"], "which returns (int, float, float); it is MODULE:FUNCTION"),
        (["--model", "test_tune:of_ints"], "whose params are int32; return arrays of floats"),
        (["--model", "test_tune:vector_loss"], "whose loss_fn returns ShapeDtypeStruct(shape=(3,), dtype=float32)"),
        (["--model", "test_tune:other_loss"], "its loss_fn(params, batch) fails"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys, tmp_path):
    assert jax.device_count() == 8  # JAX has been used, so that the number cannot change.
    with pytest.raises(SystemExit):
        main(["tune", *options, "--out", str(tmp_path / "tune.json")])
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


SPARSE = {
    "select": select.SampledThreshold(0.02),
    "wire": wire.Compact(quantize.Codebook(2)),
    "scope": "leaf",
    "dense_below": 7,
}
OTHERS = {
    "dense": {"bucket_bytes": 1000},
    "parameter_server": {"staleness": 2},
    "qsgd": {"levels": 8, "bucket": 64, "error_feedback": True},
    "quantized": {"quantize": quantize.QSGD(7, 64, "max", contract=True), "split": False, "error_feedback": True},
    "torus": {},
    "powersgd": {"rank": 2, "min_rate": 1.5, "subtract": "mean", "seed": 3},
    "a2sgd": {"per_leaf": True},
    "scale_by_dion": {"rank_fraction": 0.5, "momentum": 0.8, "seed": 3},
    "demo": {"k": 5, "chunk": 16, "decay": 0.9, "mean": "workers", "wire": wire.Compact(quantize.Sign(None))},
    "vote": {"zeros": False},
    "onebit_momentum": {"freeze_step": 7, "momentum": 0.5, "quantize": quantize.Rotated(quantize.Int4(), 64)},
    "dgc": {"momentum": 0.5, "nesterov": True, "clip_norm": 2.0, "allreduce": jsparse.allreduce.GTopk(topology="tree")},
    "sparse_allreduce": {
        "select": select.RandomK(0.1, shared=False),
        "allreduce": jsparse.allreduce.DsarSplitAllGather(2, quantize=quantize.Block8()),
        "error_feedback": jsparse.ErrorFeedback(decay=0.9),
        "tiles": 8,
    },
    "scalecom": {"density": 0.02, **SPARSE, "wire": wire.Full()},
    "hitopk": {"density": 0.02, "allreduce": jsparse.allreduce.OkTopk(split="rotate"), "wire": wire.Full()},
}


@pytest.mark.parametrize("name", sorted(files.presets()))
def test_every_preset_goes_through_a_file(name: str, tmp_path):
    preset, path = getattr(jsparse, name), tmp_path / "file.json"
    options = OTHERS.get(name) or ({} if name in OTHERS else {"density": 0.02, **SPARSE})
    if name == "dgc":
        options = {"density": 0.02, **options}
    axes = ("nodes", "gpus") if "inter" in inspect.signature(preset).parameters else ("data",)
    files.write(path, files.describe(name, **options))
    tx = jsparse.from_file(path, axes if len(axes) > 1 else "data")
    assert type(tx) is type(preset(*axes, **options))
    assert tx.synchroniser == preset(*axes, **options).synchroniser


def test_what_cannot_be_recommended():
    assert [name for name in cost.ALGORITHMS if preset_of(name, 0.01) is None] == ["dense_hierarchical"]


@pytest.mark.parametrize("name", [name for name in cost.ALGORITHMS if name != "dense_hierarchical"])
def test_every_recommendation_goes_through_a_file(name: str, tmp_path):
    found, path = preset_of(name, 0.01), tmp_path / "file.json"
    layouts = (
        [{}]
        if "density" not in found[1]
        else [{}, *({"wire": w} for w in (wire.Compact(), wire.Compact(quantize.BFloat16())))]
    )
    for layout in layouts:
        candidate = tune.Candidate(name, found[0], found[1] | layout)
        files.write(path, candidate.content() | {"tune": {"anything": 1}})
        tx = jsparse.from_file(path, ("nodes", "gpus"))
        reducer = getattr(tx.synchroniser, "reducer", None)  # a2sgd has none.
        assert getattr(reducer, "wire", wire.Full()) == layout.get("wire", wire.Full())
        assert tx.synchroniser == files.build(candidate.content(), ("nodes", "gpus")).synchroniser


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'no "jsparse"'),
        ('{"preset": "oktopk"}', 'no "jsparse"'),
        ('{"jsparse": 2, "preset": "oktopk"}', "version is 2, and this jsparse reads 1"),
        ('{"jsparse": 1}', "no preset"),
        ('{"jsparse": 1, "preset": "oktop"}', "'oktopk' is meant"),
        ('{"jsparse": 1, "preset": "oktopk", "options": []}', '"options" is'),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"densty": 1}}', "'density' is meant"),
        ('{"jsparse": 1, "preset": "oktopk"}', "density is missing"),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"density": 2}}', "density is 2"),
        (
            '{"jsparse": 1, "preset": "oktopk", "options": {"density": "much"}}',
            "density is 'much'; it must be a number",
        ),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": "Full"}}', "wire is 'Full'"),
        (
            '{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": {"Full": {}}}}',
            "choose one of wire.Com",
        ),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"density": {"wire.Full": {}}}}', "a number, a text"),
        ('{"jsparse": 1, "preset": "hitopk", "options": {"density": 1}}', r"a tuple of two, \(inter, intra\)"),
        (
            '{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": {"wire.Compact": {"values": '
            '{"quantize.Codebook": {"bits": 3}}}}}}',
            "bits is 3",
        ),
        (
            '{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": {"wire.Compact": {"key": 3}}}}',
            "no option of wire.Compact 'key'",
        ),
        ("[" * 100_000, "too many brackets"),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"density": true}}', "density is True; it must be a number"),
        ('{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": null}}', "wire is None"),
        ('{"jsparse": 1, "preset": "qsgd", "options": {"levels": 2.5}}', "levels is 2.5; it must be a whole number"),
        ('{"jsparse": 1, "preset": "parameter_server", "options": {"staleness": 1e9}}', "staleness is 1000000000.0"),
        ('{"jsparse": 1, "preset": "a2sgd", "options": {"per_leaf": "no"}}', "per_leaf is 'no'; it must be True or F"),
        ('{"jsparse": 1, "preset": "quantized", "options": {"quantize": null}}', "quantize is None"),
        (
            '{"jsparse": 1, "preset": "sparse_allreduce", "options": {"select": null, "allreduce": null}}',
            "allreduce is",
        ),
        (
            '{"jsparse": 1, "preset": "oktopk", "options": {"density": 1, "wire": {"wire.Compact": {"values": null}}}}',
            "values is None",
        ),
    ],
)
def test_a_wrong_file_is_refused(content: str, message: str, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        jsparse.from_file(path, "data")
    assert str(path) in str(error.value)


def test_a_users_own_part_is_not_written():
    class Mine(select.TopK):
        pass

    with pytest.raises(ValueError, match="none of jsparse's own parts"):
        files.describe("oktopk", density=0.1, select=Mine(0.1))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.json"
    files.write(path, {"jsparse": 1})
    with pytest.raises(TypeError):
        files.write(path, {"jsparse": {1, 2}})
    assert json.loads(path.read_text()) == {"jsparse": 1}
    assert list(tmp_path.iterdir()) == [path]
