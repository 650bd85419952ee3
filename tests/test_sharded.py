"""Sharded models: every algorithm on each device's shards; training steps; plain jit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
import oracles
import transports
from algorithms import DENSITY, ROWS, Row
from tiers import full, quick

LEAVES = {"both": (20, 24), "one": (5, 64), "whole": (8, 40), "few": (3,), "scalar": (), "empty": (0, 4)}
SPECS = {"both": P("fsdp", "tensor"), "one": P(None, "fsdp"), "whole": P(), "few": P(), "scalar": P(), "empty": P()}
# How the leaves are cut among four devices of a worker: by the axes that a spec lacks, too. "few"
# and "scalar" can't be cut.
CUT = {"both": P("fsdp", "tensor"), "one": P(None, ("fsdp", "tensor")), "whole": P(("fsdp", "tensor"))}
ALIKE = [row for row in ROWS if row.alike]
QUICK = [row for row in ALIKE if row.name in ("dense", "topk_allgather", "powersgd")]


def auto(sizes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


@functools.cache
def mesh_of(row: Row) -> tuple[Mesh, tuple[str, ...], tuple[str, ...]]:
    """The mesh, the workers' axes and those of the model: one of the latter over two levels."""
    sizes = transports.axis_sizes(row, 2) if row.gpus is None else {"nodes": 2, "gpus": 2}
    model = ("fsdp", "tensor") if row.gpus is None else ("fsdp",)
    return auto(sizes | dict.fromkeys(model, 2)), tuple(sizes), model


def without(spec: P, model: tuple[str, ...]) -> P:
    """A spec on a mesh that may lack an axis."""
    return P(*(tuple(name for name in (entry or ()) if name in model) or None for entry in map(names, spec)))


def names(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def stacked_gradients(workers: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((workers, *shape)).astype(np.float32) for name, shape in LEAVES.items()}


def device_parts(mesh: Mesh, spec: P, x: np.ndarray) -> np.ndarray:
    """The part of each device, in the order of the mesh: an array of objects."""
    indices = NamedSharding(mesh, spec).devices_indices_map(x.shape)
    parts = np.empty(mesh.size, object)
    for i, device in enumerate(mesh.devices.flat):
        parts[i] = x[indices[device]]
    return parts


@pytest.mark.parametrize("row", quick(ALIKE, *QUICK), ids=str)
def test_each_device_synchronises_its_own_shards(row: Row):
    """As in a run over the workers with these shards alone. What can't be cut goes densely.

    In the third step one element of one worker is not finite: all shards skip the step.
    """
    mesh, workers, model = mesh_of(row)
    size, devices = math.prod(mesh.shape[name] for name in workers), math.prod(mesh.shape[name] for name in model)
    specs = {name: without(spec, model) for name, spec in SPECS.items()}
    cut = {name: without(spec, model) for name, spec in CUT.items()}
    axis = transports.axis(row)
    tx = jsparse.over_mesh(row.make(axis, DENSITY), mesh, axis, specs)
    params = jax.device_put(
        {name: np.zeros(shape, np.float32) for name, shape in LEAVES.items()},
        {name: NamedSharding(mesh, spec) for name, spec in specs.items()},
    )
    state, update = tx.init(params), jax.jit(tx.update)

    rest = ("few", "scalar", "empty")
    whole = tuple(i for i, name in enumerate(sorted(LEAVES)) if name in rest)
    alone = jsparse.SparseAllReduce.of(row.make(axis, DENSITY).synchroniser.on_shards((), whole))

    def own(grads, place: int):
        """The shards that the devices at one place of a worker hold, stacked by worker."""
        parts = {name: device_parts(mesh, P(workers, *spec), grads[name]) for name, spec in cut.items()}
        shards = {name: np.concatenate(part.reshape(size, devices)[:, place]) for name, part in parts.items()}
        return shards | {name: grads[name] for name in rest}

    shapes = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), own(stacked_gradients(size, 0), 0))
    levels = (2, 2) if row.gpus else (size,)

    def mapped(fn):
        for name in reversed(workers):
            fn = jax.vmap(fn, axis_name=name)
        fn = jax.jit(fn)

        def run(*args):
            args = jax.tree.map(lambda x: x.reshape(*levels, *x.shape[1:]), args)
            return jax.tree.map(lambda x: np.asarray(x).reshape(size, *x.shape[len(levels) :]), fn(*args))

        return run

    init, step = mapped(lambda _: alone.init(shapes)), mapped(alone.update)
    expected = [init(np.arange(size))] * devices
    close = {"rtol": 1e-4, "atol": 1e-5} if row.mixes else {"rtol": 0, "atol": 0}
    for number in range(4):
        grads, before = stacked_gradients(size, number), state
        spoilt = number == 2
        if spoilt:
            grads["both"][1, 13, 5] = np.nan
        updates, state = update(grads, state)
        if spoilt and jax.tree.leaves(state.buckets):
            assert all(np.isnan(leaf).all() for leaf in updates.values())
            jax.tree.map(np.testing.assert_array_equal, before.buckets, state.buckets)
            np.testing.assert_array_equal(before.step, state.step)
            continue
        for place in range(devices):
            wanted, expected[place] = step(own(grads, place), expected[place])
            for name in LEAVES:
                parts = device_parts(mesh, cut.get(name, P()), np.asarray(updates[name])).reshape(size, devices)
                np.testing.assert_allclose(parts[0, place], wanted[name][0], **close)
        for leaf, shards in ((leaf, leaf.addressable_shards) for leaf in updates.values()):
            alike: dict[str, np.ndarray] = {}
            for shard in shards:
                first = alike.setdefault(str(shard.index), np.asarray(shard.data))
                np.testing.assert_array_equal(shard.data, first)
            assert leaf.sharding.is_equivalent_to(params_sharding(mesh, specs, updates, leaf), leaf.ndim)

    def by_place(x):
        return np.asarray(x).reshape(size, devices, -1)

    # The vector of leaves that every device has: each sends, and remembers, a part. Dion has them
    # beside the others.
    for number, bucket in enumerate(state.buckets):
        have = [by_place(leaf) for leaf in jax.tree.leaves(bucket)]
        want = [[b.reshape(size, -1) for b in jax.tree.leaves(states.buckets[number])] for states in expected]
        if number == len(state.buckets) - 1 and row.name != "scale_by_dion":
            have = [x.reshape(size, -1)[:, : wanted.shape[1]] for x, wanted in zip(have, want[0], strict=True)]
            have, want = [x[:, None] for x in have], want[:1]
        for place, wanted in enumerate(want):
            for x, b in zip(have, wanted, strict=True):
                np.testing.assert_allclose(x[:, place], b, **close)


def params_sharding(mesh, specs, updates, leaf) -> NamedSharding:
    (name,) = (name for name, other in updates.items() if other is leaf)
    return NamedSharding(mesh, specs[name])


# Training: a Transformer of one block, its table cut along the vocabulary.

WIDTH, HEADS, LENGTH, WORDS = 32, 4, 8, 64
TRANSFORMER = {
    "table": ((WORDS, WIDTH), P("fsdp")),
    "place": ((LENGTH, WIDTH), P(None, "fsdp")),
    "norm": ((WIDTH,), P()),
    "qkv": ((WIDTH, 3 * WIDTH), P("fsdp", "tensor")),
    "out": ((WIDTH, WIDTH), P("tensor", "fsdp")),
    "up": ((WIDTH, 4 * WIDTH), P("fsdp", "tensor")),
    "down": ((4 * WIDTH, WIDTH), P("tensor", "fsdp")),
    "bias": ((3,), P()),
    "head": ((WIDTH, WORDS), P("fsdp", "tensor")),
}
TWO, THREE = {"replica": 2, "fsdp": 4}, {"replica": 2, "fsdp": 2, "tensor": 2}


def transformer_specs(sizes: dict[str, int]) -> dict[str, P]:
    return {name: without(spec, tuple(sizes)[1:]) for name, (_, spec) in TRANSFORMER.items()}


def transformer() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        for name, (shape, _) in TRANSFORMER.items()
    }


def words(step: int, examples: int = 16) -> np.ndarray:
    return np.random.default_rng(step).integers(0, WORDS, (examples, LENGTH)).astype(np.int32)


def normal(x, scale):
    return (
        (x - x.mean(-1, keepdims=True))
        * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        * jnp.broadcast_to(scale, x.shape)
    )


def predict(params, x):
    x = jax.nn.one_hot(x, WORDS) @ params["table"] + jnp.broadcast_to(params["place"], (*x.shape, WIDTH))
    q, k, v = jnp.split((normal(x, params["norm"]) @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH / HEADS)
    scores = jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool))[None, None], scores, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ params["out"]
    x = x + jax.nn.gelu(normal(x, params["norm"]) @ params["up"]) @ params["down"]
    return x @ params["head"] * (1 + params["bias"].sum())


def transformer_loss(params, batch):
    return optax.softmax_cross_entropy(predict(params, batch), jax.nn.one_hot((3 * batch + 1) % WORDS, WORDS)).mean()


def reference(steps: int, tx: optax.GradientTransformation, loss_fn=transformer_loss):
    """Losses and parameters of a training on one device."""
    params, losses = transformer(), []
    state, step = tx.init(params), jax.jit(jax.value_and_grad(loss_fn))
    for number in range(steps):
        loss, grads = step(params, words(number))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


def make_step(preset, sizes=TWO, inner=None, loss_fn=transformer_loss, **options) -> jsparse.TrainStep:
    along = tuple(sizes)[: 2 if len(sizes) == 2 else 1]
    options = {"batch_spec": P(along)} | options
    return jsparse.train_step(
        loss_fn,
        optax.chain(preset, inner or optax.adam(1e-2)),
        auto(sizes),
        "replica",
        param_specs=transformer_specs(sizes),
        **options,
    )


def ours_alone(compiled, mesh: Mesh) -> jsparse.Traffic:
    """What crosses the slow axis; all of it must be ours."""
    slow = jsparse.traffic(compiled, mesh=mesh).over("replica")
    assert all(collective.ours for collective in slow.collectives), str(slow)
    return slow


@pytest.mark.full
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("sizes", [TWO, THREE], ids=["fsdp", "fsdp-tensor"])
@pytest.mark.parametrize("density", [1.0, 0.02])
def test_a_transformer_trains_in_shards(sizes, density: float, checked: bool):
    """At density 1 as on one device, to rounding; else the loss falls. Nothing becomes whole."""
    preset = jsparse.oktopk("replica", density=density)
    step = make_step(preset, sizes, check_vma=checked)
    state = step.init(transformer())
    where = {path: leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    losses = []
    for number in range(6):
        state, loss = step(state, words(number))
        losses.append(float(loss))
    wanted, params = reference(6, optax.adam(1e-2))
    if density == 1:
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), state.params, params)
    else:
        assert losses[-1] < losses[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        assert leaf.sharding == where[path], path
    mesh, model = auto(sizes), tuple(sizes)[1:]
    for name, leaf in state.params.items():
        wanted = NamedSharding(mesh, transformer_specs(sizes)[name])
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        for moment in (state.opt_state[1][0].mu, state.opt_state[1][0].nu):
            assert moment[name].sharding.is_equivalent_to(wanted, leaf.ndim)
    for leaf in jax.tree.leaves(state.opt_state[0]):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(("replica", *model))), leaf.ndim)
    n = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    # Of the three elements that every device has, each keeps a part.
    assert jsparse.residual(state.opt_state).shape[1] == (n - 3) // (mesh.size // 2) + 1
    ours_alone(step.lower(state, words(0)).compile(), mesh)


@pytest.mark.full
def test_the_messages_are_those_of_a_shard():
    """Over the slow axis: what a worker with one shard alone would send, and the dense rest."""
    step = make_step(jsparse.oktopk("replica", density=0.02), THREE)
    state = step.init(transformer())
    slow = jsparse.traffic(step, state, words(0)).over("replica")
    alone, shard = (
        jsparse.oktopk("workers", density=0.02),
        {"w": jnp.zeros((sum(np.prod(s) for s, _ in TRANSFORMER.values()) - 3) // 4)},
    )
    own = jax.eval_shape(jax.vmap(lambda _: alone.init(shard), axis_name="workers"), jnp.arange(2))
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own)
    alone = jsparse.traffic(alone.update, shard, own, axis_sizes={"workers": 2})
    # One element of the rest, and the mean of the losses.
    assert slow.bytes == alone.bytes + 4 + 4
    state, _ = step(state, words(0))
    sent = 4 * np.asarray(jsparse.stats(state.opt_state).words)
    assert sent.shape == (8,)
    # What devices of a worker send each other, to agree and to join leaves, is not counted.
    assert (sent <= slow.bytes - 4).all()


ONE = {"replica": 4, "fsdp": 1, "tensor": 2}  # An axis that cuts nothing.


@pytest.mark.parametrize("algorithm", quick(["oktopk", "topk_allgather"], "topk_allgather"))
@pytest.mark.parametrize("sizes", quick([{"replica": 8}, TWO, THREE, ONE], TWO), ids=lambda sizes: "-".join(sizes))
def test_plain_jit_is_the_training_step(sizes, algorithm: str):
    """The two lines of a plain jit, with specs and without, take the steps of ``train_step``."""
    mesh, specs = auto(sizes), transformer_specs(sizes) if len(sizes) > 1 else None
    preset = getattr(jsparse, algorithm)("replica", density=0.02)
    grad_fn = jsparse.worker_value_and_grad(transformer_loss, mesh, "replica")
    tx = optax.chain(jsparse.over_mesh(preset, mesh, "replica", specs), optax.adam(1e-2))
    where = {name: NamedSharding(mesh, specs[name] if specs else P()) for name in TRANSFORMER}
    params = jax.device_put(transformer(), where)
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    whole = (
        make_step(preset, sizes)
        if specs
        else jsparse.train_step(transformer_loss, optax.chain(preset, optax.adam(1e-2)), mesh, "replica")
    )
    state = whole.init(transformer())
    there = NamedSharding(mesh, P(tuple(sizes)[:2]))
    compiled = step.lower(params, opt_state, jax.device_put(words(0), there)).compile()
    for number in range(3):
        params, opt_state, loss = compiled(params, opt_state, jax.device_put(words(number), there))
        state, wanted = whole(state, words(number))
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, state.params)
    for name, leaf in params.items():
        assert leaf.sharding.is_equivalent_to(where[name], leaf.ndim)
    for a, b in zip(jax.tree.leaves(opt_state[0]), jax.tree.leaves(state.opt_state[0]), strict=True):
        assert a.shape == b.shape
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    slow = ours_alone(compiled, mesh)
    assert slow.bytes == ours_alone(whole.lower(state, words(0)).compile(), mesh).bytes


def mlp(params, x):
    return jax.nn.relu(x @ params["in"] + jnp.broadcast_to(params["bias"], (len(x), 32))) @ params["out"]


MLP = {"in": P("fsdp"), "bias": P(), "out": P(None, "fsdp")}


def mlp_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"in": (16, 32), "bias": (32,), "out": (32, 8)}
    return {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def examples(step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((16, 16)).astype(np.float32)
    return x, np.tanh(x[:, :8])


def mlp_loss(params, batch):
    x, y = batch
    return jnp.mean((mlp(params, x) - y) ** 2)


def mlp_step(tx, loss_fn=mlp_loss, **options) -> jsparse.TrainStep:
    options = {"param_specs": MLP, "batch_spec": P(("replica", "fsdp"))} | options
    return jsparse.train_step(loss_fn, tx, auto(TWO), "replica", **options)


def whole_step(tx, loss_fn=mlp_loss, **options) -> jsparse.TrainStep:
    """The same with whole parameters on two devices."""
    return jsparse.train_step(loss_fn, tx, auto({"replica": 2}), "replica", **options)


def train(step: jsparse.TrainStep, *more, steps: int = 4, **extra):
    state, told = step.init(mlp_params(), *more), []
    for number in range(steps):
        state, report = step(state, examples(number), **extra)
        told.append(jax.tree.map(np.asarray, report))
    return state, told


@pytest.mark.full
def test_all_that_a_step_takes():
    """Micro-batches, metrics, a model state, keys, further inputs: as with whole parameters."""

    def loss_fn(params, batch, *, model_state, key, extra):
        x, y = batch
        kept = jax.random.bernoulli(key, 0.9, (1, x.shape[1]))
        out = mlp(params, x * kept)
        mean = 0.9 * model_state["mean"] + 0.1 * out.mean(0)
        taught = jnp.mean((out - mlp(extra["teacher"], x)) ** 2) * extra["weight"]
        # Of a parameter's name and shape, and whole nevertheless.
        average = 0.9 * model_state["in"] + 0.1 * jax.lax.stop_gradient(params["in"])
        kept = {"mean": mean, "in": average}
        return jnp.mean((out - y) ** 2) + taught, (kept, {"largest": jnp.max(jnp.abs(out))})

    options = {"has_aux": True, "micro_batches": 2, "model_state": "mean", "with_key": True, "with_extra": True}
    tx = optax.chain(jsparse.topk_allgather("replica", density=1.0), optax.adam(1e-2))
    extra = {"teacher": mlp_params(), "weight": np.float32(0.5)}
    runs = []
    for step in (mlp_step(tx, loss_fn, **options), whole_step(tx, loss_fn, **options)):
        kept = {"mean": np.zeros(8, np.float32), "in": np.zeros((16, 32), np.float32)}
        runs.append(train(step, kept, key=jax.random.key(3), extra=extra))
    (sharded, told), (whole, wanted) = runs
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(sharded.model_state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), told, wanted)
    for part in ("params", "model_state"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), getattr(sharded, part), getattr(whole, part)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: jsparse.a2sgd("replica"),
        full(lambda: jsparse.a2sgd("replica", per_leaf=True)),
        # Nothing is selected, so velocity and clipping are those of the whole gradient.
        full(lambda: jsparse.dgc("replica", density=1.0, momentum=0.9, clip_norm=0.01)),
    ],
    ids=["a2sgd", "a2sgd-leaf", "dgc-clipped"],
)
def test_what_is_of_a_whole_gradient_is_so_in_shards(make):
    """Means and norms are over all shards of a worker, each leaf counted once."""
    options = {"params": "per_worker"} if not make().synchroniser.alike else {}
    tx = optax.chain(make(), optax.sgd(0.3))
    (sharded, told), (whole, wanted) = (train(step(tx, **options)) for step in (mlp_step, whole_step))
    np.testing.assert_allclose(told, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), sharded.params, whole.params)
    if options:
        step, other = mlp_step(tx, **options), whole_step(tx, **options)
        assert sharded.params["in"].sharding.is_equivalent_to(NamedSharding(auto(TWO), P("replica", "fsdp")), 3)
        means = [s.sync_params(state).params for s, state in ((step, sharded), (other, whole))]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *means)


@pytest.mark.full
def test_a_non_finite_gradient_in_one_shard_skips_the_step():
    tx = optax.chain(jsparse.oktopk("replica", density=0.1), optax.apply_if_finite(optax.sgd(0.1), 5))

    def loss_fn(params, batch):
        x, y, poison = batch
        # Its gradient is not finite in one row of one worker's matrix.
        return mlp_loss(params, (x, y)) + jnp.sqrt(poison.sum() * jnp.abs(params["in"][13, 2]))

    step = mlp_step(tx, loss_fn)
    state, _ = step(step.init(mlp_params()), (*examples(0), np.ones(16, np.float32)))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state[0].buckets))
    poison = np.ones(16, np.float32)
    poison[8:] = 0
    state, _ = step(state, (*examples(1), poison))
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state[0].buckets))
    np.testing.assert_array_equal(jsparse.stats(state.opt_state).skipped, [1] * 8)
    state, loss = step(state, (*examples(2), np.ones(16, np.float32)))
    assert np.isfinite(loss)
    assert not np.array_equal(state.params["in"], before[0]["in"])


@pytest.mark.full
def test_phases_and_momentum_before_the_all_reduce():
    phases = jsparse.phases(((2, jsparse.dense("replica")), jsparse.oktopk("replica", density=0.1)))
    tx = optax.chain(jsparse.per_worker(optax.trace(0.9)), phases, optax.sgd(0.1))
    step = mlp_step(tx)
    state, told = train(step, steps=5)
    assert told[-1] < told[0]
    momentum = state.opt_state[0].inner.trace
    assert momentum["in"].shape == (32, 32)
    assert momentum["in"].sharding.is_equivalent_to(NamedSharding(auto(TWO), P(("replica", "fsdp"))), 2)
    assert momentum["out"].sharding.is_equivalent_to(NamedSharding(auto(TWO), P("replica", "fsdp")), 2)
    (whole, _) = train(whole_step(tx), steps=2)
    (dense, _) = train(step, steps=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), dense.params, whole.params)


@pytest.mark.parametrize("kind", quick([AxisType.Auto, AxisType.Explicit], AxisType.Auto))
def test_outputs_are_those_of_the_whole_batch(kind):
    """A loop gets what ``jax.value_and_grad`` of the whole batch returns. Our messages do it."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), (kind,) * 2)

    def loss_fn(params, x, y, *, shift, key):
        params = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params) if kind == AxisType.Explicit else params
        noise = jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index("replica")), ())
        out = mlp(params, x) + shift
        errors = jnp.abs(out - y)
        kept = {"mean": x.mean(0), "steps": jnp.int32(3), "half": out.mean().astype(jnp.bfloat16)}
        return jnp.mean(errors**2), (out, errors.T, kept, {"noise": noise, "none": None})

    grad_fn = jsparse.worker_value_and_grad(loss_fn, None, "replica", has_aux=True)
    params = jax.device_put(mlp_params(), {name: NamedSharding(mesh, spec) for name, spec in MLP.items()})
    batch = jax.device_put(examples(), NamedSharding(mesh, P(("replica", "fsdp"))))
    step = jax.jit(lambda params, x, y, key: grad_fn(params, x, y, shift=jnp.arange(8.0)[None], key=key))
    compiled = step.lower(params, *batch, jax.random.key(0)).compile()
    (loss, (out, errors, kept, more)), grads = compiled(params, *batch, jax.random.key(0))

    x, y = examples()
    expected = np.asarray(mlp(mlp_params(), x)) + np.arange(8)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    np.testing.assert_allclose(errors, np.abs(expected - y).T, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(loss, np.mean((expected - y) ** 2), rtol=1e-5)
    np.testing.assert_allclose(kept["mean"], x.mean(0), atol=1e-6)
    np.testing.assert_allclose(np.float32(kept["half"]), expected.mean(), rtol=1e-2)
    assert (kept["half"].dtype, int(kept["steps"]), more["none"]) == (jnp.bfloat16, 3, None)
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    np.testing.assert_allclose(more["noise"], np.mean([jax.random.normal(key, ()) for key in keys]), rtol=1e-5)
    for name, shape in jax.tree.map(np.shape, mlp_params(), is_leaf=lambda x: isinstance(x, np.ndarray)).items():
        assert grads[name].shape == (2, *shape)
    slow = ours_alone(compiled, mesh)
    # The loss, 16 + 1 + 1 averaged elements; and the largest of an integer.
    assert slow.bytes == 4 * (1 + 16 + 1 + 1) + 4


@pytest.mark.full
def test_explicit_axes():
    """The axes that ``jax.make_mesh`` makes, in the step and in a plain jit."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), (AxisType.Explicit,) * 2)

    def loss_fn(params, batch):
        return mlp_loss(jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params), batch)

    preset = jsparse.topk_allgather("replica", density=1.0)
    tx = optax.chain(preset, optax.adam(1e-2))
    state, told = train(jsparse.train_step(loss_fn, tx, mesh, "replica", param_specs=MLP))
    whole, wanted = train(whole_step(tx))
    np.testing.assert_allclose(told, wanted, rtol=1e-5)
    assert jax.typeof(state.params["in"]).sharding.spec[0] == "fsdp"
    grad_fn = jsparse.worker_value_and_grad(loss_fn, mesh, "replica", MLP)
    tx = optax.chain(jsparse.over_mesh(preset, mesh, "replica", MLP), optax.adam(1e-2))
    params = jax.device_put(mlp_params(), {name: NamedSharding(mesh, spec) for name, spec in MLP.items()})

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    for number in range(4):
        params, opt_state, loss = step(params, opt_state, examples(number))
        np.testing.assert_allclose(loss, wanted[number], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, whole.params)


def test_a_batch_that_is_placed_stays_so():
    """Without ``batch_spec`` XLA sees how a batch lies, and gathers nothing of it."""
    step = mlp_step(optax.chain(jsparse.dense("replica"), optax.sgd(0.1)), batch_spec=None)
    state, mesh = step.init(mlp_params()), auto(TWO)
    batch = jax.device_put(examples(), NamedSharding(mesh, P(("replica", "fsdp"))))
    placed = jsparse.traffic(step.lower(state, batch).compile(), mesh=mesh)
    told = mlp_step(optax.chain(jsparse.dense("replica"), optax.sgd(0.1)))
    assert placed.bytes == jsparse.traffic(told.lower(state, examples()).compile(), mesh=mesh).bytes


def test_micro_batches_move_no_examples():
    """Each device has a share of every micro-batch: the loop sends what one pass sends."""
    tx, mesh, bytes_sent = optax.chain(jsparse.dense("replica"), optax.sgd(0.1)), auto(TWO), []
    for parts in (1, 2):
        step = mlp_step(tx, micro_batches=parts)
        compiled = step.lower(step.init(mlp_params()), examples()).compile()
        bytes_sent.append(jsparse.traffic(compiled, mesh=mesh).over("fsdp").bytes)
    assert bytes_sent[1] <= 2 * bytes_sent[0]


@pytest.mark.full
@pytest.mark.parametrize("name", ["oktopk", "gtopk", "topk_dsa", "dgc", "ssar_recursive_doubling"])
def test_a_region_of_ones_own_over_the_workers_alone(name: str):
    """In ``shard_map(axis_names=...)`` over whole parameters presets work as they stand."""
    mesh = auto(TWO)
    tx = optax.chain(
        getattr(jsparse, name)("replica", density=1.0, **({"momentum": 0.0} if name == "dgc" else {})), optax.sgd(0.1)
    )
    specs = jsparse.state_specs(jsparse.init(tx, mlp_params(), mesh, "replica"), "replica")

    def local(params, state, batch):
        loss, grads = jsparse.local_value_and_grad(mlp_loss, "replica")(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "replica")

    over_workers = functools.partial(jax.shard_map, mesh=mesh, axis_names={"replica"})
    state = jax.jit(over_workers(tx.init, in_specs=P(), out_specs=specs))(mlp_params())
    step = jax.jit(over_workers(local, in_specs=(P(), specs, P("replica")), out_specs=(P(), specs, P())))
    params, (_, wanted) = mlp_params(), train(whole_step(tx))
    for number in range(4):
        params, state, loss = step(params, state, examples(number))
        np.testing.assert_allclose(loss, wanted[number], rtol=1e-5)


def test_dion_orthonormalises_what_cannot_be_cut_and_cuts_no_single_rows():
    """Whole, on three devices of a worker alike. The rows of "few" stay together."""
    shapes = {"few": (3, 12), "scale": (5,), "square": (16, 8)}
    rng = np.random.default_rng(0)
    grads = {name: 1000 * rng.standard_normal((2, *shape)).astype(np.float32) for name, shape in shapes.items()}
    preset = jsparse.scale_by_dion("replica", momentum=0.9)
    tx = jsparse.over_mesh(preset, auto({"replica": 2, "fsdp": 3}), "replica", P())
    state = tx.init({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    q = np.asarray(state.buckets[0].reducer.q[1])[:8].astype(np.float64)
    updates, state = jax.jit(tx.update)(grads, state)
    wanted, taken = oracles.dion(grads["square"].astype(np.float64), q, 0.9)
    np.testing.assert_allclose(updates["square"], wanted, atol=1e-4)
    np.testing.assert_allclose(updates["scale"], grads["scale"].mean(0), rtol=1e-5)
    for shard in (*updates["square"].addressable_shards, *updates["scale"].addressable_shards):
        np.testing.assert_array_equal(shard.data, updates["square" if shard.data.ndim > 1 else "scale"])
    for shard in np.split(np.asarray(updates["few"]), 3, axis=1):
        np.testing.assert_allclose(np.linalg.norm(shard), np.sqrt(4 / 3), rtol=1e-3)
    momenta = np.asarray(jsparse.residual(state)).reshape(2, 3, -1)[:, :, 17:].reshape(2, 3, 16, 8)
    np.testing.assert_array_equal(momenta, np.repeat(momenta[:, :1], 3, axis=1))
    np.testing.assert_allclose(momenta[:, 0], grads["square"] - taken, atol=0.05)


def test_much_that_goes_densely_for_want_of_a_cut_warns():
    """A dense sum loses nothing so; nor does a short leaf count, or a model of one device."""

    def begin(preset, shapes, fsdp: int = 3):
        params = {f"leaf {i}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
        return jsparse.over_mesh(preset, auto({"replica": 2, "fsdp": fsdp}), "replica", P()).init(params)

    sparse = functools.partial(jsparse.topk_allgather, "replica", density=0.1)
    for preset in (sparse(), jsparse.phases(((1, jsparse.dense("replica")), sparse()))):
        with pytest.warns(UserWarning, match=r"32 of 128 elements .* 'fsdp' of size 3 can't cut. Choose a size"):
            begin(preset, [(8, 4), (32, 3)])
    begin(jsparse.dense("replica"), [(8, 4)])
    begin(sparse(dense_below=33), [(8, 4), (33, 3)])
    begin(sparse(), [(8, 4), (96, 3)])
    begin(sparse(), [(), (8, 4)], fsdp=1)


def test_specs_in_variables():
    """As of nnx, whose optimizer passes the arrays of its variables."""
    mesh, grads = auto(TWO), {name: np.ones((2, *x.shape), np.float32) for name, x in mlp_params().items()}
    boxed = {name: {"value": spec} for name, spec in MLP.items()}
    tx = jsparse.over_mesh(jsparse.dense("replica"), mesh, "replica", boxed)
    updates, _ = jax.jit(tx.update)(grads, tx.init(mlp_params()))
    for name, leaf in updates.items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, MLP[name]), leaf.ndim)


# What is refused.


def spec_of(**specs: P):
    return lambda: jsparse.train_step(
        mlp_loss, optax.sgd(0.1), auto(TWO), "replica", param_specs={**MLP, **specs}
    ).init(mlp_params())


def placed_otherwise():
    tx = jsparse.over_mesh(jsparse.oktopk("replica", density=0.1), auto(TWO), "replica", MLP)
    return tx.init(jax.device_put(mlp_params(), NamedSharding(auto(TWO), P())))


def unnamed(make):
    """Parameters in shards, given to what knows nothing of it."""
    params = jax.device_put(mlp_params(), {name: NamedSharding(auto(TWO), spec) for name, spec in MLP.items()})
    return make(optax.chain(jsparse.oktopk("replica", density=0.1), optax.sgd(0.1)), params)


def unstacked():
    tx = jsparse.over_mesh(jsparse.oktopk("replica", density=0.1), auto(TWO), "replica", MLP)
    return tx.update(mlp_params(), tx.init(mlp_params()))


def around():
    return optax.MultiSteps(jsparse.over_mesh(jsparse.oktopk("replica", density=0.1), auto(TWO), "replica", MLP), 2)


def unstacked_by_chance():
    params = {"w": jnp.ones((2, 4))}
    tx = jsparse.over_mesh(jsparse.dense("replica"), auto(TWO), "replica", P(None, "fsdp"))
    return tx.update(params, tx.init(params), params)


def by_hand(check_vma: bool, whole: bool):
    """A region of one's own in which all axes are manual."""
    preset, mesh = jsparse.oktopk("replica", density=0.1), auto(TWO)
    specs = {"in": P("fsdp"), "out": P() if whole else P("fsdp")}

    def local(grads):
        grads = jax.tree.map(lambda x: jax.lax.pcast(x, "replica", to="varying"), grads) if check_vma else grads
        return preset.update(grads, preset.init(grads))[0]

    grads = {name: jnp.ones((8, 4)) for name in specs}
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma))(grads)


REFUSED = {
    "an axis of the workers": (spec_of(bias=P("replica")), "the workers stand along 'replica'"),
    "an axis that is missing": (spec_of(bias=P("tensor")), "the mesh has axes"),
    "an axis that XLA cuts": (spec_of(bias=P(P.UNCONSTRAINED)), "in place of UNCONSTRAINED"),
    "a sharding of another mesh": (
        spec_of(bias=NamedSharding(auto({"replica": 4, "fsdp": 2}), P("fsdp"))),
        r"of another mesh, whose axes have the sizes .'replica': 4, 'fsdp': 2., .* pass a NamedSharding of this",
    ),
    "a row of a matrix for Dion": (
        lambda: jsparse.over_mesh(jsparse.scale_by_dion("replica"), auto(TWO), "replica", P("fsdp")).init(
            {"types": jnp.zeros((4, 64))}
        ),
        r"leaf .'types'. has shape \(4, 64\), .* shard of \(1, 64\): a single row .* Cut the leaf otherwise",
    ),
    "no spec": (spec_of(bias=0), "pass a jax.sharding.PartitionSpec"),
    "a length that can't be cut": (
        lambda: jsparse.train_step(
            mlp_loss, jsparse.dense("replica"), auto(TWO), "replica", param_specs=P("fsdp")
        ).init({"w": np.zeros((6, 2), np.float32)}),
        "axis of 6 elements in 4",
    ),
    "too many axes": (spec_of(bias=P(None, "fsdp")), "its spec .* is for 2 axes"),
    "a leaf without a spec": (
        lambda: jsparse.train_step(
            mlp_loss, jsparse.dense("replica"), auto(TWO), "replica", param_specs={"in": P()}
        ).init(mlp_params()),
        "leaf .*bias.* has no spec",
    ),
    "a batch that is not cut among workers": (
        lambda: mlp_step(jsparse.dense("replica"), batch_spec=P("fsdp")),
        "first among the workers",
    ),
    "a batch that can't be divided among devices": (
        lambda: mlp_step(jsparse.dense("replica"))(None, np.ones((4, 16))),
        "devices of workers .* multiple of 8",
    ),
    "a batch with a leaf of fewer axes": (
        lambda: mlp_step(jsparse.dense("replica"), batch_spec=P("replica", "fsdp"))(None, np.ones(16)),
        "every leaf is placed so",
    ),
    "a batch spec alone": (
        lambda: jsparse.train_step(mlp_loss, jsparse.dense("replica"), auto(TWO), "replica", batch_spec=P("replica")),
        "batch_spec is for sharded models",
    ),
    "specs without a mesh": (
        lambda: jsparse.train_step(mlp_loss, optax.sgd(0.1), None, jsparse.AxisComm("replica"), param_specs=MLP),
        "pass the mesh",
    ),
    "another axis in the preset": (
        lambda: mlp_step(jsparse.oktopk("fsdp", density=0.1)).init(mlp_params()),
        "the same axes",
    ),
    "an optimizer that is cut among workers": (
        lambda: mlp_step(optax.chain(jsparse.dense("replica"), jsparse.sharded(optax.adam(0.1), "replica"))).init(
            mlp_params()
        ),
        "leave jsparse.sharded out",
    ),
    "momentum that differs": (
        lambda: mlp_step(optax.chain(optax.trace(0.9), jsparse.oktopk("replica", density=0.1))).init(mlp_params()),
        "jsparse.per_worker",
    ),
    "no all-reduce": (lambda: mlp_step(optax.sgd(0.1)).init(mlp_params()), "differs between workers"),
    "shards unknown to init": (
        lambda: unnamed(lambda tx, params: jsparse.init(tx, params, auto(TWO), "replica")),
        "param_specs",
    ),
    "shards unknown to a step": (
        lambda: unnamed(lambda tx, params: jsparse.train_step(mlp_loss, tx, auto(TWO), "replica").init(params)),
        "param_specs",
    ),
    "shards that lie otherwise": (placed_otherwise, "is placed as"),
    "a mesh without specs": (
        lambda: jsparse.over_mesh(jsparse.oktopk("replica", density=0.1), auto(TWO), "replica"),
        "pass specs",
    ),
    "gradients without a mesh": (
        lambda: jsparse.worker_value_and_grad(mlp_loss, None, "replica")(mlp_params(), examples()),
        "placed on no mesh",
    ),
    "products of examples": (
        lambda: jsparse.worker_value_and_grad(
            lambda params, batch: (jnp.mean(batch), batch @ batch.T), auto(TWO), "replica", has_aux=True
        )(mlp_params(), np.ones((4, 3), np.float32)),
        r"output \[1\] of loss_fn has shape \(2, 2\) .* and \(4, 4\) for the whole",
    ),
    "a key for the workers": (
        lambda: jsparse.worker_value_and_grad(mlp_loss, auto(TWO), "replica")(
            mlp_params(), examples(), jax.random.key(0)
        ),
        "by keyword",
    ),
    "a chain over a mesh": (
        lambda: jsparse.over_mesh(optax.chain(jsparse.dense("replica")), auto(TWO), "replica", MLP),
        "pass a preset",
    ),
    "twice over a mesh": (
        lambda: jsparse.over_mesh(
            jsparse.over_mesh(jsparse.dense("replica"), auto(TWO), "replica", MLP), auto(TWO), "replica", MLP
        ),
        "over a mesh already",
    ),
    "updates that differ": (
        lambda: jsparse.over_mesh(jsparse.a2sgd("replica"), auto(TWO), "replica", MLP),
        "per_worker",
    ),
    "gradients of no worker whose first axis is as long": (unstacked_by_chance, "a leading axis for the 2 workers"),
    "gradients of no worker": (unstacked, "a leading axis for the 2 workers"),
    "accumulation around": (
        lambda: jax.jit(around().update)(
            {name: np.ones((2, *x.shape), np.float32) for name, x in mlp_params().items()}, around().init(mlp_params())
        ),
        "optax.MultiSteps",
    ),
    "a batch that can't be divided": (
        lambda: jsparse.worker_value_and_grad(mlp_loss, auto(TWO), "replica", MLP)(mlp_params(), np.ones((3, 16))),
        "positive multiple of 2",
    ),
    "a mesh in a step": (
        lambda: mlp_step(jsparse.over_mesh(jsparse.dense("replica"), auto(TWO), "replica", MLP)).init(mlp_params()),
        "the preset itself",
    ),
    "a mesh in shard_map": (
        lambda: jax.shard_map(
            jsparse.over_mesh(jsparse.dense("replica"), auto(TWO), "replica", MLP).init,
            mesh=auto(TWO),
            in_specs=P(),
            out_specs=P(("replica", "fsdp")),
        )(mlp_params()),
        "for a plain jax.jit",
    ),
    "shards by hand, unchecked": (lambda: by_hand(False, False), "check_vma=False"),
    "shards beside whole leaves": (lambda: by_hand(True, True), "unlike axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.full
def test_shards_by_hand_with_types():
    """Leaves that are all in shards go through, each device's for itself."""
    updates = by_hand(True, False)
    assert set(np.unique(updates["in"])) <= {0.0, 1.0}
