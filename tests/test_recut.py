"""The state of a sharded model that goes on with other replicas, and in other shards."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
from jsparse._engine.reducer import Selecting
from jsparse._engine.space import Flat
from jsparse._engine.synchroniser import Composition
from tiers import quick

# "few" is cut by no number of shards, and in shards all of it goes densely.
SHAPES = {"w": (16, 24), "v": (12, 8), "bias": (32,), "few": (3,), "empty": (0, 4)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


class Site(NamedTuple):
    """A mesh, the axes along which its workers stand, and the specs of the parameters."""

    sizes: dict[str, int]
    axis: tuple[str, ...]
    specs: dict[str, P] | None

    @property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: math.prod(self.sizes.values())])
        return Mesh(devices.reshape(tuple(self.sizes.values())), tuple(self.sizes))

    @property
    def workers(self) -> int:
        return math.prod(self.sizes[name] for name in self.axis)

    @property
    def model(self) -> list[tuple[str, int]]:
        return [(name, size) for name, size in self.sizes.items() if name not in self.axis]

    @property
    def before(self) -> tuple[dict[str, int], Any]:
        return self.sizes, self.specs

    @property
    def params(self) -> dict[str, jax.Array]:
        specs = self.specs or dict.fromkeys(SHAPES, P())
        return jax.device_put(PARAMS, {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()})

    def over(self, preset: jsparse.SparseAllReduce) -> jsparse.SparseAllReduce:
        return jsparse.over_mesh(preset, self.mesh, self.axis, self.specs)


def specs(**others: P) -> dict[str, P]:
    return dict.fromkeys(SHAPES, P()) | others


ROWS = specs(w=P("fsdp"), v=P("fsdp"))
COLUMNS = specs(w=P(None, "fsdp"), v=P(None, "fsdp"), bias=P("fsdp"))
GRID = specs(w=P("tensor", "fsdp"), v=P(("fsdp", "tensor")))


def on(specs: dict[str, P] | None, **sizes: int) -> Site:
    return Site(sizes, ("nodes", "gpus") if "nodes" in sizes else ("replica",), specs)


MOVES = {
    "2x4-4x2": (on(ROWS, replica=2, fsdp=4), on(ROWS, replica=4, fsdp=2)),
    "2x4-4x2-columns": (on(ROWS, replica=2, fsdp=4), on(COLUMNS, replica=4, fsdp=2)),
    "2x4-columns": (on(ROWS, replica=2, fsdp=4), on(COLUMNS, replica=2, fsdp=4)),
    "2x2x2-2x4": (on(GRID, replica=2, fsdp=2, tensor=2), on(ROWS, replica=2, fsdp=4)),
    "2x2x2-tensor-first": (
        on(GRID, replica=2, fsdp=2, tensor=2),
        on(GRID, tensor=2, replica=2, fsdp=2),
    ),
    "2-1": (on(ROWS, replica=2, fsdp=4), on(ROWS, replica=1, fsdp=4)),
    "1-2": (on(COLUMNS, replica=1, fsdp=4), on(COLUMNS, replica=2, fsdp=4)),
    "whole-shards": (on(None, replica=4), on(ROWS, replica=2, fsdp=4)),
    "shards-whole": (on(COLUMNS, replica=2, fsdp=4), on(None, replica=2)),
}
PRESETS = {
    "oktopk": lambda: jsparse.oktopk("replica", density=0.05),
    "leaves": lambda: jsparse.topk_allgather("replica", density=0.05, scope="leaf", dense_below=5),
    "tiles": lambda: jsparse.sparse_allreduce(
        "replica", select=jsparse.select.BlockTopK(1, 20), allreduce=jsparse.allreduce.TopkAllGather(), tiles=5
    ),
    "dgc": lambda: jsparse.dgc("replica", density=0.05, momentum=0.5, dense_below=5),
    "powersgd": lambda: jsparse.powersgd("replica", rank=1),
    "phases": lambda: jsparse.phases(
        ((1, jsparse.dense("replica")), (5, jsparse.topk_allgather("replica", density=0.05)), jsparse.dense("replica"))
    ),
}
LEVELS = {
    "2x2x2-2x1x4": (on(ROWS, nodes=2, gpus=2, fsdp=2), on(COLUMNS, nodes=2, gpus=1, fsdp=4)),
    "2x2x2-1x4x2": (on(ROWS, nodes=2, gpus=2, fsdp=2), on(ROWS, nodes=1, gpus=4, fsdp=2)),
    "2x3-2x2x2": (on(None, nodes=2, gpus=3), on(ROWS, nodes=2, gpus=2, fsdp=2)),
    "2x2x2-4x2": (on(ROWS, nodes=2, gpus=2, fsdp=2), on(None, nodes=4, gpus=2)),
}


def gradients(workers: int, seed: int) -> dict[str, np.ndarray]:
    """Whole numbers, of which halves and quarters stay representable for a while."""
    rng = np.random.default_rng(seed)
    return {name: (rng.integers(-50, 51, (workers, *shape)) * 48).astype(np.float32) for name, shape in SHAPES.items()}


def run(preset: jsparse.SparseAllReduce, site: Site, state: Any = None, steps: int = 3) -> Any:
    """The state after some steps of a plain jit."""
    tx = site.over(preset)
    state = tx.init(site.params) if state is None else state
    update = jax.jit(tx.update)
    for number in range(steps):
        updates, state = update(gradients(site.workers, number), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    return state


def pending(preset: jsparse.SparseAllReduce, site: Site, state: Any) -> list[dict[str, np.ndarray]]:
    """The updates of two steps without a gradient that deliver everything.

    They have what the residuals hold back; with momentum, what the velocities do too.
    """
    shared = getattr(preset.synchroniser, "shared", preset.synchroniser)
    assert isinstance(shared, Composition)
    reducer = Selecting(jsparse.select.TopK(1.0), jsparse.allreduce.TopkAllGather())
    tx = site.over(jsparse.SparseAllReduce.of(dataclasses.replace(shared, reducer=reducer)))
    fresh = tx.init(site.params)
    buckets = [new._replace(memory=old.memory) for new, old in zip(fresh.buckets, state.buckets, strict=True)]
    state, told, update = fresh._replace(buckets=tuple(buckets)), [], jax.jit(tx.update)
    zeros = {name: np.zeros((site.workers, *shape), np.float32) for name, shape in SHAPES.items()}
    for _ in range(2):
        updates, state = update(zeros, state)
        told.append(jax.tree.map(np.asarray, updates))
    return told


def check_moved(
    preset: jsparse.SparseAllReduce, old: Site, new: Site, held: tuple[str, ...] = ("w", "v"), **close: float
):
    state = run(preset, old)
    before = None if (old.model, old.specs) == (new.model, new.specs) else old.before
    moved = jsparse.reshard(preset, state, PARAMS, new.mesh, new.axis, param_specs=new.specs, before=before)
    wanted, got = pending(preset, old, state), pending(preset, new, moved)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), got, wanted)
    for name in held:
        assert wanted[0][name].any(), name
    fresh = new.over(preset).init(new.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(fresh):
        (here,) = (x for where, x in jax.tree_util.tree_leaves_with_path(moved) if where == path)
        assert (here.shape, here.dtype) == (leaf.shape, leaf.dtype), path
        assert here.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path
    for name in ("sizes", "shards", "elements", "dense_words"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(fresh, name))
    assert set(np.asarray(moved.step).tolist()) == {3}
    run(preset, new, moved, steps=1)


FEW = [("leaves", "2x4-4x2-columns")]
MANY = [(preset, move) for preset in PRESETS for move in MOVES]


@pytest.mark.parametrize("case", quick(MANY, *FEW), ids="-".join)
def test_what_is_pending_stays_so(case: tuple[str, str]):
    """Leaf by leaf, to the bit; low rank leaves fractions, of which halves of sums are rounded."""
    preset, move = case
    # Low rank sums narrow shards densely, and leaves fractions of the others.
    given = {"held": ("w",), "rtol": 1e-5, "atol": 1e-3} if preset == "powersgd" else {"rtol": 0}
    check_moved(PRESETS[preset](), *MOVES[move], **given)


# A whole training step.

LINEAR = {"in": (16, 32), "out": (32, 8), "bias": (8,), "scale": ()}


def loss_fn(params, batch):
    x, y = batch
    out = jax.nn.relu(x @ params["in"]) @ params["out"] + jnp.broadcast_to(params["bias"], y.shape)
    return jnp.mean((out * params["scale"] - y) ** 2)


def begin() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape) / 4, np.float32) for name, shape in LINEAR.items()}


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).standard_normal((24, 16)).astype(np.float32)
    return x, np.tanh(x[:, :8])


def linear(**cut: P) -> dict[str, P]:
    return dict.fromkeys(LINEAR, P()) | cut


BY_ROWS = linear(**{"in": P("fsdp"), "out": P("fsdp")})
BY_COLUMNS = linear(**{"in": P(None, "fsdp"), "bias": P("fsdp")})


def chain(preset: Any = None) -> optax.GradientTransformation:
    preset = preset or jsparse.oktopk("replica", density=0.1)
    return optax.chain(jsparse.per_worker(optax.trace(0.5)), preset, optax.adam(1e-2))


def step_on(site: Site, tx: optax.GradientTransformation, **options: Any) -> jsparse.TrainStep:
    options |= {} if site.specs is None else {"param_specs": site.specs}
    return jsparse.train_step(loss_fn, tx, site.mesh, "replica", **options)


def train(step: jsparse.TrainStep, state: Any, numbers: range) -> tuple[Any, list[float]]:
    losses = []
    for number in numbers:
        state, loss = step(state, batch(number))
        losses.append(float(loss))
    return state, losses


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def placed_as(state: Any, like: Any) -> None:
    for (path, here), there in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(like), strict=True):
        assert (here.shape, here.dtype) == (there.shape, there.dtype), path
        assert here.sharding == there.sharding, path


@pytest.mark.full
def test_the_same_shards_are_the_same_bits():
    """So is the run that follows, also if ``before`` says what has not changed."""
    site, tx = on(BY_ROWS, replica=2, fsdp=4), chain()
    step = step_on(site, tx)
    state, _ = train(step, step.init(begin()), range(3))
    # Cut alike, by the axes that a spec lacks: the same shards.
    alike = {**BY_ROWS, "out": P()}
    for before in (None, site.before, (site.sizes, alike)):
        moved = jsparse.reshard(
            tx, state.opt_state, begin(), site.mesh, "replica", param_specs=site.specs, before=before
        )
        equal(moved, state.opt_state)
        placed_as(moved, state.opt_state)
    kept = jax.tree.map(np.asarray, state.params)
    after, losses = train(step, state, range(3, 6))
    again = step.init(kept)._replace(opt_state=moved)
    again, others = train(step, again, range(3, 6))
    equal(again, after)
    assert losses == others
    assert step._run._cache_size() == 1


STEPS = {
    "2x4-4x2": (on(BY_ROWS, replica=2, fsdp=4), on(BY_COLUMNS, replica=4, fsdp=2)),
    "whole-shards": (on(None, replica=4), on(BY_ROWS, replica=2, fsdp=4)),
    "shards-whole": (on(BY_COLUMNS, replica=2, fsdp=4), on(None, replica=3)),
}


@pytest.mark.full
@pytest.mark.parametrize("move", STEPS)
def test_a_chain_goes_on_elsewhere(move: str):
    """Adam's moments are the same, momentum keeps its mean, and the step compiles once."""
    old, new = STEPS[move]
    tx = chain()
    step, other = step_on(old, tx), step_on(new, tx)
    state, losses = train(step, step.init(begin()), range(4))
    had = jax.tree.map(np.asarray, state)
    moved = jsparse.reshard(tx, state.opt_state, begin(), new.mesh, "replica", param_specs=new.specs, before=old.before)
    equal(moved[2], had.opt_state[2])
    for name, leaf in moved[0].inner.trace.items():
        there = had.opt_state[0].inner.trace[name].reshape(old.workers, -1).mean(0)
        np.testing.assert_allclose(np.asarray(leaf).reshape(new.workers, -1).mean(0), there, atol=1e-7)
    again = other.init(had.params)
    placed_as(moved, again.opt_state)
    _, more = train(other, again._replace(opt_state=moved), range(4, 8))
    assert more[-1] < losses[0]
    assert other._run._cache_size() == 1


@pytest.mark.full
def test_workers_with_parameters_of_their_own():
    """All of the chain is each worker's: here the state of the all-reduce is inside another."""
    old, new = STEPS["2x4-4x2"]
    tx = optax.chain(jsparse.topk_allgather("replica", density=0.1), optax.sgd(0.1, momentum=0.5))
    step, other = (step_on(site, tx, params="per_worker") for site in (old, new))
    state, _ = train(step, step.init(begin()), range(3))
    mean = jax.tree.map(lambda x: np.asarray(x).mean(0), state.params)
    had = jax.tree.map(np.asarray, state.opt_state)
    moved = jsparse.reshard(tx, state.opt_state, begin(), new.mesh, "replica", param_specs=new.specs, before=old.before)
    for name, leaf in moved.inner[1][0].trace.items():
        there = had.inner[1][0].trace[name].reshape(old.workers, -1).mean(0)
        np.testing.assert_allclose(np.asarray(leaf).reshape(new.workers, -1).mean(0), there, atol=1e-7)
    sums = [np.asarray(jsparse.residual(x), np.float64).sum() / site.workers for x, site in ((had, old), (moved, new))]
    np.testing.assert_allclose(*sums, rtol=1e-5)
    again = other.init(mean)
    placed_as(moved, again.opt_state)
    _, losses = train(other, again._replace(opt_state=moved), range(3, 5))
    assert np.isfinite(losses).all()


@pytest.mark.full
def test_all_reduces_of_several_parts_of_a_model():
    """Each has the leaves of its label, whatever the order of the labels."""
    old, new = STEPS["2x4-4x2"]
    presets = {"second": jsparse.dense("replica"), "first": jsparse.topk_allgather("replica", density=0.1)}
    labels = {"in": "first", "out": "second", "bias": "first", "scale": "second"}
    tx = optax.chain(optax.partition(presets, labels), optax.sgd(0.1))
    step = step_on(old, tx)
    state, _ = train(step, step.init(begin()), range(3))
    had = jax.tree.map(np.asarray, state.opt_state)
    moved = jsparse.reshard(tx, state.opt_state, begin(), new.mesh, "replica", param_specs=new.specs, before=old.before)
    shards = np.asarray(jsparse.residual(had)).reshape(2, 4, -1)
    # The leaves are in the order of their names; the bias is cut as the specs say, or lack.
    bias = shards[:, :, :2].reshape(2, 8)
    there = shards[:, :, 2:].reshape(2, 16, 32)
    now = np.asarray(jsparse.residual(moved)).reshape(4, 2, -1)
    np.testing.assert_array_equal(now[:, :, :4].reshape(4, 8), np.repeat(bias, 2, axis=0))
    here = now[:, :, 4:].reshape(4, 2, 16, 16).swapaxes(1, 2).reshape(4, 16, 32)
    np.testing.assert_array_equal(here, np.repeat(there, 2, axis=0))
    assert there.any()
    other = step_on(new, tx)
    train(other, other.init(begin())._replace(opt_state=moved), range(3, 4))


@pytest.mark.full
def test_explicit_axes():
    """The axes that ``jax.make_mesh`` makes."""
    old = on(BY_ROWS, replica=2, fsdp=4)
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), (AxisType.Explicit,) * 2)
    tx = chain(jsparse.topk_allgather("replica", density=0.1))
    step = step_on(old, tx)
    state, _ = train(step, step.init(begin()), range(2))
    options = {"param_specs": BY_COLUMNS, "before": old.before}
    wanted = jsparse.reshard(tx, state.opt_state, begin(), on(None, replica=4, fsdp=2).mesh, "replica", **options)
    moved = jsparse.reshard(tx, state.opt_state, begin(), mesh, "replica", **options)
    equal(moved, wanted)
    assert moved[2][0].mu["in"].sharding == NamedSharding(mesh, P(None, "fsdp"))


@pytest.mark.full
def test_a_checkpoint_resumes_to_the_same_bits_and_elsewhere(tmp_path):
    """orbax saves and restores the state in shards; another mesh takes it through ``reshard``."""
    old, new = STEPS["2x4-4x2"]
    tx = chain()
    step, other = step_on(old, tx), step_on(new, tx)
    state, _ = train(step, step.init(begin()), range(3))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(3, args=ocp.args.StandardSave(state))
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(3, args=ocp.args.StandardRestore(placed))
        placed_as(restored, state)
        equal(restored, state)
        arrays = jax.tree.map(np.asarray, state.opt_state)
        wanted, losses = train(step, state, range(3, 6))
        resumed, others = train(step, restored, range(3, 6))
        equal(resumed, wanted)
        assert losses == others
        # Without the old mesh: whole arrays on the new one.
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(new.mesh, P())), placed
        )
        restored = checkpoints.restore(3, args=ocp.args.StandardRestore(whole))
    options = {"param_specs": new.specs, "before": old.before}
    moved = jsparse.reshard(tx, restored.opt_state, begin(), new.mesh, "replica", **options)
    equal(moved, jsparse.reshard(tx, arrays, begin(), new.mesh, "replica", **options))
    state = other.init(restored.params)._replace(opt_state=moved)
    _, losses = train(other, state, range(3, 6))
    assert np.isfinite(losses).all()


@pytest.mark.full
@pytest.mark.parametrize("move", LEVELS)
def test_nodes_workers_in_them_and_shards_may_all_change(move: str):
    select, allreduce = jsparse.select.TopK(0.05), jsparse.allreduce.TopkAllGather()
    check_moved(jsparse.hitopk("nodes", "gpus", select=select, density=0.05, allreduce=allreduce), *LEVELS[move])


@pytest.mark.full
def test_a_leaf_that_cannot_be_cut_delivers_what_was_pending():
    """Such leaves go densely; what they held back as whole ones goes in the next step."""
    old, new = MOVES["whole-shards"]
    preset = jsparse.topk_allgather("replica", density=0.05)
    state = run(preset, old)
    moved = jsparse.reshard(preset, state, PARAMS, new.mesh, new.axis, param_specs=new.specs, before=old.before)
    wanted = pending(preset, old, state)[0]["few"]
    assert wanted.any()
    given = gradients(new.workers, 9)
    updates, moved = jax.jit(new.over(preset).update)(given, moved)
    np.testing.assert_array_equal(updates["few"], given["few"].mean(0) + wanted)
    updates, _ = jax.jit(new.over(preset).update)(given, moved)
    np.testing.assert_array_equal(updates["few"], given["few"].mean(0))


def test_a_server_that_is_late_loses_no_gradient():
    """The vectors that wait for their step go along to other shards."""
    old, new = MOVES["2x4-columns"]
    preset = jsparse.parameter_server("replica", staleness=2)
    given = [gradients(2, seed) for seed in range(4)]

    def steps(site, state, given):
        told, update = [], jax.jit(site.over(preset).update)
        for gradient in given:
            updates, state = update(gradient, state)
            told.append(jax.tree.map(np.asarray, updates))
        return told, state

    _, state = steps(old, old.over(preset).init(old.params), given[:2])
    wanted, _ = steps(old, state, given[2:])
    moved = jsparse.reshard(preset, state, PARAMS, new.mesh, new.axis, param_specs=new.specs, before=old.before)
    got, _ = steps(new, moved, given[2:])
    cut = ("w", "v", "bias")
    assert all(wanted[0][name].any() for name in cut)
    for a, b in zip(got, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, {n: a[n] for n in cut}, {n: b[n] for n in cut})


def test_what_dion_has_whole_on_each_device_moves_to_the_bit():
    """Of a matrix that no axis cuts, each device has the momentum."""
    params = {"few": np.zeros((5, 7), np.float32), "w": np.zeros((8, 4), np.float32)}
    preset, old, new = jsparse.scale_by_dion("replica"), on(P(), replica=2, fsdp=2), on(P(), replica=2, fsdp=4)
    state = old.over(preset).init(params)
    few, w = np.split(np.random.default_rng(0).standard_normal((2, 67)).astype(np.float32), [35], axis=1)
    held = np.concatenate([np.repeat(few[:, None], 2, axis=1), w.reshape(2, 2, 16)], axis=2).reshape(-1)
    bucket = state.buckets[0]
    state = state._replace(buckets=(bucket._replace(memory=bucket.memory._replace(residual=held)),))
    moved = jsparse.reshard(preset, state, params, new.mesh, "replica", param_specs=new.specs, before=old.before)
    wanted = np.concatenate([np.repeat(few[:, None], 4, axis=1), w.reshape(2, 4, 8)], axis=2)
    np.testing.assert_array_equal(moved.buckets[0].residual, wanted.reshape(-1))


# What is refused.


@dataclasses.dataclass(frozen=True)
class Backwards(Flat):
    """A vector whose elements are in another order than those of its leaves."""

    as_leaves: ClassVar[bool] = False

    def enter(self, comms, bucket, leaves, keep, limit):
        return [bucket.layout.ravel(leaves)[::-1]]

    def leave(self, comms, bucket, total):
        return total.to_dense()[::-1]


def copying(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation that makes new arrays of another one's state."""
    return optax.GradientTransformation(lambda params: jax.tree.map(lambda x: x + 0, tx.init(params)), tx.update)


SMALL = {"w": np.zeros((8, 4), np.float32), "b": np.zeros(8, np.float32)}
FOUR, TWO, ROW = on(None, replica=2, fsdp=4), on(None, replica=4, fsdp=2), P("fsdp")
BEFORE = FOUR.sizes, ROW
TOPK = jsparse.topk_allgather("replica", density=0.1)


def moving(tx: Any = TOPK, before: Any = BEFORE, param_specs: Any = ROW, like: Any = None, site: Site = TWO):
    """Moves a state of 2 workers with 4 devices each to 4 workers with 2 each, or fails."""
    state = make_state(like or tx)
    return jsparse.reshard(tx, state, SMALL, site.mesh, "replica", param_specs=param_specs, before=before)


def make_state(tx: Any) -> Any:
    step = jsparse.train_step(lambda params, batch: 0.0, tx, FOUR.mesh, "replica", param_specs=P("fsdp"))
    state = step.init(SMALL).opt_state
    return jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, state)


def reordered() -> jsparse.SparseAllReduce:
    return jsparse.SparseAllReduce.of(dataclasses.replace(TOPK.synchroniser, space=Backwards()))


def over_a_mesh() -> jsparse.SparseAllReduce:
    return jsparse.over_mesh(TOPK, TWO.mesh, "replica", P("fsdp"))


REFUSED = {
    "no before": (lambda: moving(before=None), "each worker has 4 devices, and here 2: pass before"),
    "no specs": (lambda: moving(before=None, param_specs=None), "each worker has 4 devices, and here 1: pass before"),
    "before of other shards": (
        lambda: moving(before=({"replica": 2, "fsdp": 8}, P("fsdp"))),
        "each worker has 4 devices, and here 8",
    ),
    "before of other workers": (
        lambda: moving(before=({"replica": 4, "fsdp": 4}, P("fsdp"))),
        "there were 4 workers, and the state is of 2: give the sizes",
    ),
    "before without the workers": (
        lambda: moving(before=({"data": 2, "fsdp": 4}, P("fsdp"))),
        "the sizes of the old mesh's axes by name",
    ),
    "before without specs": (lambda: moving(before=FOUR.sizes), "pass .sizes, specs."),
    "before that cuts otherwise": (
        lambda: moving(before=({"replica": 2, "fsdp": 4}, {"w": P(None, None, "fsdp"), "b": P()})),
        "is for 3 axes",
    ),
    "a leaf that has no residual in new shards": (
        lambda: moving(
            jsparse.topk_allgather("replica", density=0.1, dense_below=2),
            param_specs=P(("fsdp", "more")),
            site=on(None, replica=1, fsdp=4, more=2),
        ),
        "leaf .'b'. .* has a residual, .* fewer elements than dense_below",
    ),
    "over a mesh": (lambda: moving(over_a_mesh(), like=TOPK), "pass a chain with the preset itself"),
    "over a mesh, whole": (
        lambda: jsparse.reshard(over_a_mesh(), make_state(TOPK), SMALL, TWO.mesh, "replica"),
        "pass a chain with the preset itself",
    ),
    "another order": (lambda: moving(reordered()), "not leaves one after another"),
    "frequencies": (lambda: moving(jsparse.demo("replica")), "the number of workers alone; or begin with the state"),
    "a state that is copied": (lambda: moving(copying(TOPK)), "makes new arrays"),
    "an optimizer that is cut among workers": (
        lambda: moving(optax.chain(TOPK, jsparse.sharded(optax.adam(0.1), "replica")), like=TOPK),
        "leave jsparse.sharded out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_space_of_ones_own_and_a_copied_state_move_in_the_same_shards():
    """Only to cut them anew asks where each leaf is."""
    site = on(None, replica=1, fsdp=4)
    for tx in (reordered(), copying(TOPK)):
        moved = moving(tx, before=None, site=site)
        np.testing.assert_array_equal(jsparse.residual(moved), np.ones((4, 10)))
