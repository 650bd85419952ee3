"""Training loops of other libraries with the diffs of docs/loops.md, applied as they stand there.

The loops in ``loops`` are ours, in the manner of each library. Flax's own are taken from its
source distribution, which ``make test`` downloads. All that is replaced in them is where their
data come from, and where their results go.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import sys
import tarfile
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jsparse
import patches
from jsparse._engine.state import SparseAllReduceState, states_in
from tiers import quick

OWN = pathlib.Path(__file__).parent / "loops"
SOURCES = pathlib.Path(sys.prefix) / "sdist"
DIFFS = patches.diffs()
# Flax's examples use what Flax will drop.
pytestmark = pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a loop left.

    Attributes:
      losses: those of its steps, or of its epochs.
      params: the parameters.
      opt_state: the optimizer's state.
      compiled: the compiled step.
      mesh: its devices.
    """

    losses: list[float]
    params: Any
    opt_state: Any
    compiled: jax.stages.Compiled
    mesh: Mesh

    def slow(self) -> jsparse.Traffic:
        """What crosses the workers' axis in a step."""
        return jsparse.traffic(self.compiled, mesh=self.mesh).over("data")


# Loops of our own, and the arguments of their steps.

STEPS = {
    "named_sharding.py": "params, opt_state, batch",
    "hyperparameters.py": "params, opt_state, batch",
    "train_state.py": "state, batch",
    "equinox_jit.py": "model, opt_state, batch",
    "haiku_state.py": "params, net_state, opt_state, batch",
    "pmap_replicate.py": "jax_utils.replicate(params), opt_state, batch",
}


def run_own(file: str, text: str) -> Ran:
    ns: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), ns)
    opt_state = ns["state"].opt_state if "state" in ns else ns["opt_state"]
    compiled = ns["step"].lower(*eval(STEPS[file], ns)).compile()
    mesh = ns.get("mesh") or Mesh(np.array(jax.devices()), ("data",))
    return Ran(ns["losses"], ns["params"], opt_state, getattr(compiled, "compiled", compiled), mesh)


# Flax's.


@functools.cache
def flax_examples() -> dict[str, str]:
    """The examples in Flax's source distribution, by path."""
    archives = list(SOURCES.glob("flax-*.tar.gz"))
    if not archives:
        pytest.skip(f"no source distribution of Flax in {SOURCES}: make {sys.prefix}/loops.stamp downloads it")
    with tarfile.open(archives[0]) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive
            if re.match(r"[^/]+/examples/.*\.py$", member.name)
        }


class Config(dict):
    """What these examples use of ml_collections."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


def module(name: str, text: str) -> types.ModuleType:
    """A module of a text, which others can import."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(text, name, "exec"), vars(made))
    return made


@contextlib.contextmanager
def standing_in(*names: str) -> Iterator[None]:
    """Within it, these packages, which the tests do without, can be imported, and do nothing."""
    import flax.training.checkpoints  # noqa: F401  It asks for Tensorflow's place.

    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: mock.MagicMock() for name in names})
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        for name, was in before.items():
            sys.modules.pop(name)
            if was is not None:
                sys.modules[name] = was


class Spy:
    """``jax.jit`` that remembers how ``train_step`` is called."""

    def __init__(self):
        self.jit = jax.jit

    def __call__(self, fn, **options):
        jitted = self.jit(fn, **options)
        if getattr(fn, "__name__", "") != "train_step":
            return jitted

        def call(*args):
            static = options["static_argnums"]
            shapes = [x if i in static else jax.tree.map(shape_of, x) for i, x in enumerate(args)]
            self.lower = lambda: jitted.lower(*shapes)
            return jitted(*args)

        return call


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)


def run_lm1b(text: str) -> Ran:
    """Eight sequences a step, in which each word is the one before it plus 3."""
    examples, data = flax_examples(), []
    for start in np.random.default_rng(0).integers(0, 63, (8, 8, 1)):
        data.append(((start + 3 * np.arange(16)) % 63 + 1).astype(np.int32))
    encoder, saved = mock.MagicMock(), {}
    encoder.vocab_size = lambda: 64
    encoder.tokenize.return_value.numpy.return_value = np.ones(5, np.int32)
    evaluated = mock.MagicMock(_numpy=lambda: data[0])
    with standing_in(
        "tensorflow",
        "clu",
        "clu.metric_writers",
        "clu.periodic_actions",
        "ml_collections",
        "input_pipeline",
        "temperature_sampler",
        "models",
        "utils",
        "configs",
        "train",
    ):
        sys.modules["ml_collections"].ConfigDict = Config
        sys.modules["input_pipeline"].get_datasets = lambda **_: (
            [{"inputs": x} for x in data],
            [{"inputs": evaluated}],
            None,
            encoder,
        )
        writer = sys.modules["clu"].metric_writers.create_default_writer.return_value
        for name in ("temperature_sampler", "models", "utils"):
            module(name, examples[f"examples/lm1b/{name}.py"])
        config = module("configs", examples["examples/lm1b/configs/default.py"]).get_config()
        config.update(emb_dim=32, num_heads=2, num_layers=1, qkv_dim=32, mlp_dim=64)
        config.update(max_target_length=16, max_eval_target_length=16, max_predict_length=6, vocab_path="vocabulary")
        config.update(ici_data_parallelism=2, ici_fsdp_parallelism=2, ici_tensor_parallelism=2, dcn_data_parallelism=1)
        config.update(per_device_batch_size=4, num_train_steps=8, warmup_steps=2, learning_rate=0.01)
        config.update(eval_every_steps=1, restore_checkpoints=False, use_bfloat16=False)
        if jax.__version_info__ >= (0, 11):  # XLA ends the process at a table that is cut along both.
            config.logical_axis_rules = [rule for rule in config.logical_axis_rules if rule[0] != "vocab"]
        # Masks of dropout differ between the two loops.
        config.update(dropout_rate=0.0, attention_dropout_rate=0.0)
        train, spy = module("train", text), Spy()
        with (
            mock.patch.object(jax, "jit", spy),
            mock.patch.object(train, "generate_prediction"),
            mock.patch.object(
                train.checkpoints, "save_checkpoint_multiprocess", lambda _, state, number: saved.update(state=state)
            ),
        ):
            train.train_and_evaluate(config, "nowhere")
    told = [sums["train_loss"] for (_, sums), _ in writer.write_scalars.call_args_list if "train_loss" in sums]
    state, compiled = saved["state"], spy.lower().compile()
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    return Ran([float(x) for x in told], state.params, state.opt_state, compiled, mesh)


def run_nnx(text: str) -> Ran:
    """As it stands, but for its plots, and with 300 of its 1,000 steps."""
    np.random.seed(0)  # noqa: NPY002  Its own data are random.
    losses = []
    # At its end it takes all arrays from the devices, where the tests look for them.
    with standing_in("matplotlib", "matplotlib.pyplot"), mock.patch.object(jax, "device_get", lambda tree: tree):
        ns: dict[str, Any] = {"__name__": "nnx_jit", "print": losses.append, "range": lambda n: range(min(n, 300))}
        exec(compile(text, "nnx_jit", "exec"), ns)
    told = [float(line.partition("loss=")[2]) for line in losses if "loss=" in line]
    model, optimizer = ns["model"], ns["optimizer"]
    batch = jax.device_put((ns["x"], ns["y"]), ns["data_sharding"])
    return ran_nnx(told, model, optimizer, ns["train_step"], (model, optimizer, *batch), ns["mesh"])


def ran_nnx(told, model, optimizer, step, args, mesh) -> Ran:
    from flax import nnx

    compiled = step.lower(*args).compile()
    params, opt_state = (
        jax.tree.map(lambda x: x[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for tree in (nnx.state(model, nnx.Param), optimizer.opt_state)
    )
    return Ran(told, params, opt_state, getattr(compiled, "compiled", compiled), mesh)


def run_mnist(text: str) -> Ran:
    """Ten images with noise: 64 a step, 3 steps an epoch, 2 epochs."""
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((10, 28, 28, 1)), rng.integers(0, 10, (3, 64)).astype(np.int32)
    batches = [
        {"image": np.float32(images[label] + 0.3 * rng.standard_normal((64, 28, 28, 1))), "label": label}
        for label in labels
    ]
    data = mock.MagicMock(as_numpy_iterator=lambda: iter(batches))
    names = ("tensorflow", "tensorflow_datasets", "flax.metrics.tensorboard", "ml_collections", "orbax.export")
    with standing_in(*names):
        import flax.metrics

        board = sys.modules["flax.metrics.tensorboard"]
        with mock.patch.object(flax.metrics, "tensorboard", board, create=True):
            train = module("mnist_train", text)
        train.get_datasets, seen = lambda _: (data, data), []
        step = train.train_step
        train.train_step = lambda *args: (seen.append(args), step(*args))
        train.train_and_evaluate(Config(learning_rate=0.02, momentum=0.9, num_epochs=2, batch_size=64), "nowhere")
        told = [
            float(value)
            for (name, value, _), _ in board.SummaryWriter.return_value.scalar.call_args_list
            if name == "train_loss"
        ]
    model, optimizer, *_ = args = seen[-1]
    model.train()
    return ran_nnx(told, model, optimizer, step, args, vars(train).get("mesh", Mesh(jax.devices()[:1], ("data",))))


RUNS = {
    "examples/lm1b/train.py": run_lm1b,
    "examples/nnx_toy_examples/04_data_parallel_with_jit.py": run_nnx,
    "examples/mnist/train.py": run_mnist,
}


# The tests.

# Statistics of a worker's share are not those of the batch, and masks of dropout differ.
OF_A_SHARE = {"haiku_state.py", "examples/mnist/train.py"}


def original(file: str) -> str:
    return flax_examples()[file] if file in RUNS else (OWN / file).read_text()


@functools.cache
def ran(file: str, density: str | None) -> Ran:
    """A loop as it is, or with its diff and a density."""
    if file in ("equinox_jit.py", "haiku_state.py"):
        pytest.importorskip({"equinox_jit.py": "equinox", "haiku_state.py": "haiku"}[file])
    text = original(file)
    if density is not None:
        text = patches.apply(DIFFS[file].replace("density=0.01", f"density={density}"), text)
    return RUNS[file](text) if file in RUNS else run_own(file, text)


@pytest.mark.parametrize("file", DIFFS)
def test_a_diff_is_short(file: str):
    """At most six lines, nine for ``nnx.Optimizer``, as the table says. It fits its file."""
    lines = patches.written(DIFFS[file])
    assert len(lines) <= (9 if "nnx.Optimizer" in "".join(lines) else 6)
    assert patches.row(file)[0] == str(len(lines))
    assert patches.apply(DIFFS[file], original(file)) != original(file)


@pytest.mark.parametrize("file", quick(DIFFS, "train_state.py"))
def test_a_loop_with_its_diff(file: str):
    """The loss falls. Our messages cross the slow axis, and what the loop sums for its log."""
    before, after = ran(file, None), ran(file, "0.01")
    assert after.losses[-1] < 0.99 * after.losses[0]
    if file not in OF_A_SHARE:
        np.testing.assert_allclose(after.losses[0], before.losses[0], rtol=1e-4)
    slow = after.slow()
    assert sum(part.cost.bytes for part in slow.collectives if not part.ours) <= 12, str(slow)
    workers = after.mesh.shape["data"]
    elements = sum(leaf.size for leaf in jax.tree.leaves(after.params))
    devices = after.mesh.size // workers
    # An all-reduce sends each element twice, but for one worker's part.
    dense = 8 * elements / devices * (workers - 1) / workers
    assert slow.bytes < dense / 4
    if jax.__version_info__ < (0, 11):  # The table is of these versions.
        told = [int(cell.replace(",", "")) for cell in patches.row(file)[1:] if cell != "none"]
        assert told == [pytest.approx(run.slow().bytes, rel=0.05) for run in (before, after) if run.slow().bytes]
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        if len(old.sharding.device_set) > 1:
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    (state,) = states_in(after.opt_state, SparseAllReduceState)
    for leaf in jax.tree.leaves(state):
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 8}


@pytest.mark.parametrize(
    "file",
    quick([file for file in DIFFS if file != "examples/mnist/train.py"], "train_state.py")
    + [pytest.param("examples/mnist/train.py", marks=pytest.mark.slow)],
)
def test_at_density_1_a_loop_is_what_it_was(file: str):
    """To rounding, or to what a worker's own statistics change."""
    before, after = ran(file, None), ran(file, "1.0")
    if file in OF_A_SHARE:
        np.testing.assert_allclose(after.losses[-1], before.losses[-1], atol=0.05)
        return
    np.testing.assert_allclose(after.losses, before.losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), after.params, before.params)


def test_a_whole_equinox_model():
    """Its functions are leaves: refused, wherever a model comes in."""
    eqx = pytest.importorskip("equinox")
    mesh, model = Mesh(jax.devices(), ("data",)), eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    tx = jsparse.oktopk("data", density=0.1)
    for init in (
        lambda: jsparse.init(tx, model, mesh, "data"),
        lambda: jsparse.over_mesh(tx, mesh, "data").init(model),
        lambda: jsparse.train_step(lambda model, batch: model(batch), tx, mesh, "data").init(model),
        lambda: tx.init(model),
    ):
        with pytest.raises(ValueError, match=r"leaf \.activation is .*, which is no array: .*eqx\.partition"):
            init()
