"""``jsparse bench train``: training over slow links."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from test_network import needs_network

from jsparse import cli
from jsparse.bench import train, train_worker
from jsparse.bench.nets import NETS


@pytest.mark.parametrize(
    ("name", "shape", "size", "labels"),
    [
        ("dense", (28, 28, 1), 20_037_642, (10,)),
        ("vgg16", (32, 32, 3), 14_719_818, (10,)),
        ("resnet20", (32, 32, 3), 269_722, (10,)),
        ("lstm", (35,), 66_022_000, (35, 10_000)),
    ],
)
def test_nets(name: str, shape: tuple[int, ...], size: int, labels: tuple[int, ...]):
    """The nets have the papers' numbers of parameters.

    The thesis's net for MNIST has 784, 4,096, 4,096 and 10 units; VGG-16 has thirteen convolutions
    and a dense layer. The LSTM has one vector of biases a layer, where cuDNN's has two.
    """
    net = nnx.eval_shape(lambda: NETS[name](shape, 4096, nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(net, nnx.Param))
    assert sum(int(np.prod(leaf.shape)) for leaf in params) == size
    given = jax.ShapeDtypeStruct((2, *shape), np.int32 if name == "lstm" else np.float32)
    assert nnx.eval_shape(lambda net, x: net(x), net, given).shape == (2, *labels)
    assert tuple(NETS) == train.NETS


def told(name: str, step: list[float], accuracy: list[float], **parts: list[float]) -> dict:
    return {
        "name": name,
        "rate": "1gbit",
        "parameters": 100,
        "step_ms": step,
        "accuracy": accuracy,
        "loss": [1.0] * len(step),
        "sent_bytes": 5.0,
        "stated_bytes": 4.0,
        **{f"{part}_ms": times for part, times in parts.items()},
    }


def test_figures(tmp_path, capsys):
    """A step takes as long as on the slowest host.

    Communication is what is neither computation nor selection.
    """
    [dense] = train.combine(
        [
            [told("dense", [10.0, 30.0, 20.0], [0.5, 0.9], computation=[4.0])],
            [told("dense", [20.0, 20.0, 20.0], [0.5, 0.9], computation=[5.0])],
        ]
    )
    assert dense["step_ms"] == [20.0, 30.0, 20.0]
    assert (dense["median_ms"], dense["seconds"]) == (20.0, 0.07)
    assert (dense["computation_ms"], dense["selection_ms"], dense["communication_ms"]) == (5.0, 0.0, 15.0)
    [sparse] = train.combine([[told("oktopk", [5.0] * 4, [0.5, 0.7], computation=[4.0], selection=[3.0])]])
    assert (sparse["selection_ms"], sparse["communication_ms"]) == (3.0, 0.0)
    assert train.reached(dense, 0.9)
    assert not train.reached(sparse, 0.9)
    assert not train.reached(dense, None)
    figures = {"target": 0.9, "net": "dense", "data": "digits", "hosts": 2, "density": 0.01, "every": 2}
    figures |= {"rates": ["1gbit", "100mbit"], "runs": [dense, sparse]}  # Not yet at the second rate.
    train.show(figures)
    assert "4.00 x" in capsys.readouterr().out
    train.draw(figures, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_training_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    """Trainings that ended are written at once, and not run again."""
    path, asked = tmp_path / "x.json", []
    times = {"dense": [9.0], "oktopk": [3.0]}
    options = ["bench", "train", "--hosts", "2", "--form", "oktopk", "--target", "0.5", "--json", str(path)]

    def measure(job, keep):
        asked.append(job.forms)
        reports = [[], []]
        for name in job.forms:
            for one in reports:
                one.append(told(name, times[name], [0.6], computation=[1.0]))
            keep(reports)
            if len(asked) == 1:
                raise KeyboardInterrupt
        return reports

    monkeypatch.setattr(train, "measure", measure)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        cli.main(options)
    assert [run["name"] for run in json.loads(path.read_text())["runs"]] == ["dense"]
    for _ in range(2):
        cli.main([*options, "--resume"])
    assert asked == [["dense", "oktopk"], ["oktopk"]]
    runs = json.loads(path.read_text())["runs"]
    assert [(run["name"], run["median_ms"]) for run in runs] == [("dense", 9.0), ("oktopk", 3.0)]
    with pytest.raises(SystemExit):
        cli.main([*options, "--resume", "--seed", "1"])
    assert "seed is 0 there and 1 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "1"], "argument --hosts: it is 1"),
        (["--steps", "0"], "argument --steps: it is 0"),
        (["--seed", "-1"], "argument --seed: it is -1; give a whole number, from 0 to 4294967295"),
        (["--learning-rate", "nan"], "argument --learning-rate: it is nan; give a finite number, above 0"),
        (["--target", "nan"], "argument --target: it is nan; give a finite number"),
        (["--target", "inf"], "argument --target: it is inf"),
        (["--form", "magic"], "--form is 'magic'; choose from dense"),
        (["--rate", "fast"], "write it like 100mbit"),
        (["--net", "vgg16"], "--data cifar10 or random"),
        (["--net", "lstm"], "--data random"),
        (["--data", "mnist"], "--data-dir"),
        (["--batch", "1000"], "more than the 1440 training examples"),
        (["--density", "2"], "density is 2"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "train", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("count", "hosts"), [(7, 3), (2, 4), (2000, 2), (2001, 2), (1, 2)])
def test_each_image_is_tested_once(count: int, hosts: int):
    x, y = np.arange(1, count + 1, dtype=np.float32).reshape(count, 1, 1, 1), np.arange(count, dtype=np.int32) % 10
    told = [list(train_worker.shares_of(x, y, rank, hosts)) for rank in range(hosts)]
    # All hosts run the same programs, as often.
    assert len({tuple(len(labels) for _, labels in shares) for shares in told}) == 1
    assert len({len(labels) for _, labels in told[0]}) == 1
    assert len(told[0][0][1]) <= train_worker.TESTED
    images = np.concatenate([images for shares in told for images, _ in shares]).reshape(-1)
    labels = np.concatenate([labels for shares in told for _, labels in shares])
    np.testing.assert_array_equal(np.sort(images[images > 0]), x.reshape(-1))
    np.testing.assert_array_equal(labels[images > 0], (images[images > 0] - 1) % 10)
    np.testing.assert_array_equal(labels[images == 0], -1)


@needs_network
@pytest.mark.full
def test_it_trains(tmp_path, capsys, monkeypatch):
    """Both forms learn, over two hosts.

    The interface counts the bytes that the step reports as sent, and their headers.
    """
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--hosts", "2", "--rate", "100mbit", "--width", "100", "--steps", "40"]
    options += ["--target", "0.8", "--form", "oktopk", "--density", "0.05"]
    cli.main(["bench", "train", *options, "--json", str(tmp_path / "x.json")])
    assert "oktopk" in capsys.readouterr().out
    dense, sparse = json.loads((tmp_path / "x.json").read_text())["runs"]
    for run in (dense, sparse):
        assert run["loss"][-1] < 0.5 * run["loss"][0]
        assert run["accuracy"][-1] > run["accuracy"][0]
        assert run["parameters"] == 64 * 100 + 100 * 100 + 100 * 10 + 210
        assert run["stated_bytes"] < run["sent_bytes"] < 1.1 * run["stated_bytes"] + 5_000
    assert dense["accuracy"][-1] >= 0.8
    assert sparse["sent_bytes"] < dense["sent_bytes"] / 5
    assert sparse["loss"][0] == pytest.approx(dense["loss"][0], rel=1e-5)  # The same parameters and batches.
