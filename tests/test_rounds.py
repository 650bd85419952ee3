"""Rounds of local steps, against the same written out by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
import oracles
import transports
from jsparse._train.fragments import Fragments
from recipes import DENSITY, EVERY, FORMS, RECIPES, SIZE, ByHand, Recipe, batches, loss_fn, params, poisoned
from tiers import quick
from transports import AXIS

INNER = optax.adam(1e-2)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def local_steps(mesh: Mesh | None = None, loss_fn=loss_fn, **options) -> jsparse.LocalSteps:
    options = {"inner": INNER, "every": EVERY} | options
    return jsparse.local_steps(loss_fn, mesh=mesh or transports.mesh(SIZE), axis=AXIS, **options)


def train(step: jsparse.LocalSteps, rounds: int = 3, data=batches, **more):
    state, told = step.init(params()), []
    for seed in range(rounds):
        state, report = step(state, data(seed), **more)
        told.append(jax.tree.map(np.asarray, report))
    return state, told


def check_by_hand(options: dict[str, Any], recipe: Recipe, poison=(), rounds: int = 3) -> Any:
    """Runs rounds and the same by hand; the state after them."""
    step, hand = local_steps(**recipe.options, **options), ByHand(**recipe.hand, poison=poison)
    close = functools.partial(np.testing.assert_allclose, rtol=recipe.close, atol=recipe.close)
    data, state = poisoned(*poison), step.init(params())
    for seed in range(rounds):
        state, told = step(state, data(seed))
        losses = hand.round(batches(seed), state.opt_state)
        with np.errstate(invalid="ignore"):
            wanted = np.nansum(losses, 1) / np.sum(~np.isnan(losses), 1)
        close(told, wanted)
    if hand.eager:
        jax.tree.map(lambda a, *b: close(a, np.stack(b)), state.params, *hand.anchors)
    else:
        jax.tree.map(close, state.params, hand.anchors[0])
        for leaf in jax.tree.leaves(state.params):
            assert leaf.sharding.is_fully_replicated
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)
    if state.opt_state.workers is not None:
        flat = jax.tree.map(lambda *x: np.concatenate(x), *hand.own)
        jax.tree.map(close, state.opt_state.workers.inner, flat)
    np.testing.assert_array_equal(state.opt_state.counts.inner.taken, hand.taken)
    return state


@pytest.mark.parametrize("form", quick(FORMS | RECIPES, "merged-unlike", "sparseloco"))
@pytest.mark.parametrize("checked", quick([True, False], True))
def test_a_round_is_its_papers(form: str, checked: bool):
    check_by_hand({"check_vma": checked}, (FORMS | RECIPES)[form])


@pytest.mark.parametrize("form", quick(FORMS | RECIPES, "streaming"))
def test_steps_that_are_not_finite_are_skipped_on_their_worker(form: str):
    """One step of one worker; all steps of another, which then contributes nothing."""
    recipe = (FORMS | RECIPES)[form]
    spoilt = [(1, 2, 0), *((1, step, 2) for step in range(EVERY))]
    state = check_by_hand({}, recipe, spoilt)
    taken = recipe.hand.get("steps", (EVERY,) * SIZE)
    skipped = 1 + taken[2]
    figures = jsparse.metrics(state)
    assert figures["jsparse/skipped_local_steps"] == skipped
    assert figures["jsparse/local_steps"] == np.mean(state.opt_state.counts.inner.taken)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"sync": jsparse.topk_allgather(AXIS, density=0.2)},
        pytest.param({"sync": optax.chain(jsparse.dense(AXIS), optax.trace(0.9))}, marks=pytest.mark.full),
        pytest.param(
            {"sync": optax.chain(jsparse.per_worker(optax.trace(0.9)), jsparse.oktopk(AXIS, density=0.2))},
            marks=pytest.mark.full,
        ),
        pytest.param({"overlap": 2}, marks=pytest.mark.full),
    ],
    ids=["topk_allgather", "trace after", "trace before", "overlap"],
)
def test_a_round_without_a_finite_step_is_none(options: dict[str, Any]):
    """Parameters, momentum and residual stay, bit for bit; the next round goes on."""

    def what_stays(state):
        kept = state.opt_state.sync, state.opt_state.outer
        ours = jsparse.SparseAllReduceState
        kept = jax.tree.map(
            lambda x: x.buckets if isinstance(x, ours) else x, kept, is_leaf=lambda x: isinstance(x, ours)
        )
        return jax.tree.map(np.asarray, (state.params, kept))

    step = local_steps(**options)
    state, _ = train(step, 2)
    before = what_stays(state)
    spoilt = poisoned(*((7, step, worker) for step in range(EVERY) for worker in range(SIZE)))
    state, losses = step(state, spoilt(7))
    jax.tree.map(np.testing.assert_array_equal, before, what_stays(state))
    assert np.isnan(losses).all()
    assert not jsparse.residual(state.opt_state).size or (jsparse.stats(state.opt_state).skipped == 1).all()
    state, losses = step(state, batches(8))
    assert np.isfinite(losses).all()
    assert not np.array_equal(state.params["in"], before[0]["in"])


@pytest.mark.full
@pytest.mark.parametrize("weights", ["workers", "steps"])
def test_eager_workers_stay_together(weights: str):
    """They differ by the share of one round, however many rounds there were, and what is left
    out of one round is not left out for ever.
    """
    options = {"inner": optax.sgd(1.0), "outer": optax.sgd(1.0), "eager": True, "weights": weights}
    step = local_steps(loss_fn=integer_loss, steps=(5, 3, 1, 0), **options)
    spreads, state = [], step.init({"w": np.zeros((5, 8), np.float32)})
    for seed in range(12):
        state, _ = step(state, integers(0 if seed % 4 else 1))
        spreads.append(np.ptp(np.asarray(state.params["w"]), axis=0).max())
    assert spreads[-1] == pytest.approx(spreads[3], rel=1e-5)
    assert spreads[-1] > 0


@pytest.mark.full
def test_every_worker_takes_its_steps():
    """However they fall on fragments, and on the time of a message."""
    steps = np.array([8, 7, 5, 1])

    def in_jax(params):
        return jax.tree.map(jnp.asarray, each_alone(params))

    for options in (
        {"fragments": in_jax},
        {"fragments": 2, "overlap": 3},
        {"fragments": 3, "overlap": 2, "merge": 0.5},
    ):
        step = local_steps(every=8, steps=steps, **options)
        state, _ = step(step.init(params()), batches(0, 8))
        np.testing.assert_array_equal(state.opt_state.counts.inner.taken, steps)


def test_fragments_are_of_like_size():
    """None is empty, wherever the large leaves are."""
    for sizes in ((16, 16, 16, 400), (400, 16, 16, 4), (1, 1, 1), (0, 9, 0), (5,) * 12):
        for count in (1, 2, 3):
            dealt = Fragments.of(count)._dealt(list(sizes))
            assert sorted(set(dealt)) == list(range(count))
            assert list(dealt) == sorted(dealt)
    np.testing.assert_array_equal(Fragments.of(3)._dealt([5] * 12), np.repeat([0, 1, 2], 4))
    np.testing.assert_array_equal(Fragments.of(2)._dealt([38, *[1] * 85]), [0] + [0] * 23 + [1] * 62)


@pytest.mark.full
def test_a_step_that_overflows_is_skipped():
    """Its gradient is finite, and so is its update, but not the parameters after it."""
    options = {"inner": optax.sgd(1.0), "outer": optax.sgd(1e-30), "merge": 0.5, "overlap": 1}
    step = local_steps(loss_fn=integer_loss, **options)
    state = step.init({"w": np.zeros((5, 8), np.float32)})
    batch = integers(0)[0]
    batch[:2, 0] = 3e38
    state, _ = step(state, (batch,))
    assert jsparse.metrics(state)["jsparse/skipped_local_steps"] == 1
    for seed in range(2):
        before = np.asarray(state.params["w"])
        state, _ = step(state, integers(seed))
        assert np.isfinite(state.params["w"]).all()
        assert not np.array_equal(state.params["w"], before)


def test_infinities_from_the_start_stay():
    """Such as those of an attention mask in the model state. In the parameters there are none."""

    def loss(params, batch, *, model_state):
        x, y = batch
        weights = jax.nn.softmax(model_state["mask"])
        return loss_fn(params, (x * weights[None], y)), {"mask": model_state["mask"], "steps": model_state["steps"] + 1}

    kept = {"mask": np.float32([0, 0, 0, -np.inf]), "steps": np.float32(0)}
    step = local_steps(loss_fn=loss, model_state="mean")
    state = step.init(params(), kept)
    for seed in range(2):
        state, losses = step(state, batches(seed))
        assert np.isfinite(losses).all()
    assert jsparse.metrics(state)["jsparse/skipped_local_steps"] == 0
    np.testing.assert_array_equal(state.model_state["mask"], kept["mask"])
    assert state.model_state["steps"] == 2 * EVERY
    bad = params() | {"in": np.float32([[np.inf]])}
    with pytest.raises(ValueError, match=r"parameter \['in'\] is not finite"):
        step.init(bad, kept)
    jax.jit(lambda: step.init(bad, kept))()  # In a trace nothing is known of parameters, not even of constants.


@pytest.mark.full
def test_optimizers_that_branch():
    """Inside and outside: their types are alike in all branches."""
    plateau = optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    twice = optax.MultiSteps(INNER, 2).gradient_transformation()
    _, told = train(local_steps(inner=twice, outer=optax.chain(OUTER, plateau)), 4)
    assert np.mean(told[-1]) < np.mean(told[0])


def examples(seed: int = 0):
    return jax.tree.map(lambda x: x[0], batches(seed))


def test_one_step_a_round_is_a_training_step():
    """With SGD inside, and steps of 1 outside. Parts, metrics, model state, keys, extra."""

    def loss(params, batch, *, model_state, key, extra):
        x, y = batch
        kept = jax.random.bernoulli(key, 0.8, (1, x.shape[1]))
        value = loss_fn(params, (x * kept, y)) * extra["weight"]
        return value, ({"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0)}, {"largest": jnp.max(x)})

    options = {"has_aux": True, "micro_batches": 2, "model_state": "mean", "with_key": True, "with_extra": True}
    rounds = local_steps(loss_fn=loss, inner=optax.sgd(0.1), every=1, outer=optax.sgd(1.0), **options)
    tx = optax.chain(jsparse.dense(AXIS), optax.sgd(0.1))
    step = jsparse.train_step(loss, tx, transports.mesh(SIZE), AXIS, **options)
    kept, extra = {"mean": np.zeros(4, np.float32)}, {"weight": np.float32(0.5)}
    state, whole = rounds.init(params(), kept), step.init(params(), kept)
    for seed in range(3):
        key = jax.random.key(seed)
        state, told = rounds(state, batches(seed, 1), key, extra=extra)
        whole, wanted = step(whole, examples(seed), jax.random.fold_in(key, 0), extra=extra)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5), told, wanted)
    for part in ("params", "model_state"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            getattr(state, part),
            getattr(whole, part),
        )


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_simulated_workers_do_the_same(form: str):
    """Under ``vmap``, and on the devices of a mesh."""
    options = FORMS[form].options
    state, told = train(local_steps(**options))
    simulated = jsparse.local_steps(loss_fn, INNER, None, AXIS, every=EVERY, **options)
    many = jax.vmap(lambda _: simulated.init(params()), axis_name=AXIS)(jnp.arange(SIZE))
    run = jax.vmap(simulated, axis_name=AXIS)
    for seed in range(3):
        parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, SIZE, axis=1)), batches(seed))
        many, losses = run(many, parts)
        np.testing.assert_allclose(losses[0], told[seed], rtol=1e-5)
    own = jax.tree.map(lambda x: x[:, 0], many.params) if "eager" in form else many.params
    stacked = (lambda x, y: np.broadcast_to(y, x.shape)) if "eager" not in form else (lambda x, y: y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, stacked(a, b), rtol=1e-5, atol=1e-6), own, state.params)


SHARDED = {"in": P(None, "fsdp"), "layers": P(None, "fsdp", "tensor"), "out": P("fsdp")}


@pytest.mark.full
@pytest.mark.parametrize("form", ["weighted", "merged-unlike", "eager-layers"])
@pytest.mark.parametrize("checked", [True, False])
def test_models_in_shards(form: str, checked: bool):
    """The rounds of whole parameters. Everything stays in shards; we alone use the slow axis."""
    options = FORMS[form].options
    options = options | ({"steps": (4, 5)} if "steps" in options else {})
    devices = np.array(jax.devices()[:8])
    mesh = Mesh(devices.reshape(2, 2, 2), (AXIS, "fsdp", "tensor"))
    state, told = train(local_steps(transports.mesh(2), **options))
    step = local_steps(mesh, param_specs=SHARDED, batch_spec=P((AXIS, "fsdp")), check_vma=checked, **options)
    sharded, losses = train(step)
    np.testing.assert_allclose(losses, told, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, sharded.params, state.params)
    alike = {name: NamedSharding(mesh, P(*([AXIS] if "eager" in form else []), *SHARDED[name])) for name in SHARDED}
    for name, leaf in sharded.params.items():
        assert leaf.sharding.is_equivalent_to(alike[name], leaf.ndim)
    moments = sharded.opt_state.inner.inner[0].mu
    for name, leaf in moments.items():
        first, *rest = (*SHARDED[name], *[None] * (leaf.ndim - len(SHARDED[name])))
        placed = NamedSharding(mesh, P((AXIS, *([first] if first else [])), *rest))
        assert leaf.sharding.is_equivalent_to(placed, leaf.ndim), name
    compiled = step.lower(sharded, batches(0)).compile()
    slow = jsparse.traffic(compiled, mesh=mesh).over(AXIS)
    assert all(collective.ours for collective in slow.collectives), str(slow)
    n = sum(leaf.size for leaf in jax.tree.leaves(params()))
    # A quarter of the parameters, the weights, and the losses; half a sum's words go either way.
    assert slow.bytes <= 4 * (n / 4 + 2 * 2 + 2 * EVERY) + 8


CONTRIBUTORS = RECIPES["sparseloco-contributors"].options["sync"]


def each_alone(params):
    return {"in": 0, "layers": np.array([1, 2, 3]), "out": 4}


REFUSED: dict[str, tuple[Any, str]] = {
    "no steps": ({"every": 0}, "at least one step"),
    "fewer steps than fragments": ({"fragments": 6}, "at least one step for each fragment"),
    "no fragments": ({"fragments": 0}, "at least 1"),
    "fragments of another form": ({"fragments": lambda tree: {"in": 0, "layers": 0}}, "fragments returns a tree"),
    "an empty fragment": ({"fragments": lambda tree: {"in": 0, "layers": 2, "out": 2}}, "fragment 1 has no"),
    "a fragment of no number": ({"fragments": lambda tree: {"in": 0, "layers": -1, "out": 0}}, "numbers from 0"),
    "fragments of too few layers": (
        {"fragments": lambda tree: {"in": 0, "layers": np.array([0, 1]), "out": 0}},
        "one for each index",
    ),
    "negative overlap": ({"overlap": -1}, "at least 0"),
    "too much overlap": ({"overlap": 4, "fragments": 2}, "overlap is 4"),
    "nothing new": ({"merge": 1.0}, "below 1"),
    "eager and overlapped": ({"eager": True, "overlap": 1}, "leave overlap"),
    "too few numbers of steps": ({"steps": (5, 5)}, "give a number for each"),
    "too many steps": ({"steps": (5, 5, 5, 6)}, "from 0 to 5"),
    "another weight": ({"weights": "tokens"}, 'choose "workers"'),
    "an all-reduce inside": ({"inner": optax.chain(jsparse.dense(AXIS), optax.sgd(0.1))}, "pass it as sync"),
    "nothing that averages": ({"sync": optax.identity()}, "does not communicate"),
    "no model state": ({"model_state": "sum"}, 'choose "mean"'),
    "no part of a batch": ({"micro_batches": 0}, "at least 1"),
    "batches of another number": ({"every": 4}, "a round has 4 steps"),
    "examples that can't be divided": ({"micro_batches": 5}, "second axis"),
    "no key": ({"with_key": True}, "if and only if"),
    "one number of steps": ({"steps": 4}, "for each worker"),
    "nothing but overlap": ({"overlap": 5}, "merge above 0"),
    "more fragments than leaves": ({"fragments": 4}, "there are 3 leaves"),
    "eager without a common mean": ({"eager": True, "sync": jsparse.a2sgd(AXIS)}, "different means"),
    "eager contributors": ({"eager": True, "sync": CONTRIBUTORS}, "take mean="),
    "weighted contributors": ({"weights": "steps", "sync": CONTRIBUTORS}, "take mean="),
    "weighted contributors in a chain": (
        {"weights": "steps", "sync": optax.chain(optax.identity(), CONTRIBUTORS)},
        "take mean=",
    ),
    "eager contributors in a phase": (
        {"eager": True, "sync": jsparse.phases(((1, jsparse.dense(AXIS)), CONTRIBUTORS))},
        "take mean=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        train(local_steps(**options), 1)


COMPOSED: dict[str, Any] = {
    "chain": lambda sync: optax.chain(optax.identity(), sync),
    "phases": lambda sync: jsparse.phases(((1, sync), sync)),
    "partition": lambda sync: optax.partition({"all": sync}, "all"),
    "masked": lambda sync: optax.masked(sync, True),
}


@pytest.mark.parametrize("name", quick(COMPOSED, "chain"))
@pytest.mark.parametrize(
    "sync",
    [
        pytest.param(CONTRIBUTORS, id="sparseloco", marks=pytest.mark.full),
        pytest.param(jsparse.demo(AXIS, k=2, chunk=4), id="demo"),
    ],
)
def test_a_composed_mean_is_over_the_workers_that_sent(sync: Any, name: str):
    """Beside a worker that contributes nothing, too."""
    data = poisoned(*((1, step, 2) for step in range(EVERY)))
    (alone, _), (composed, _) = (train(local_steps(sync=own), data=data) for own in (sync, COMPOSED[name](sync)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, composed.params, alone.params)


def integer_loss(params, batch):
    """Linear, so that gradients are the batch: integers."""
    return jnp.mean(batch[0] @ params["w"].reshape(-1))


def integers(seed: int):
    rng = np.random.default_rng(seed)
    return (rng.integers(-8, 9, (EVERY, SIZE, 40)).astype(np.float32),)


def sparse(name: str, density: float = DENSITY):
    return getattr(jsparse, name)(AXIS, density=density)


def in_order(waiting: np.ndarray, sync: Any) -> np.ndarray:
    """Residuals of the workers, shape ``(P, 40)``, in the order of the matrix."""
    order = oracles.tile_order((5, 8), getattr(sync.synchroniser.space, "tiles", None))
    return waiting[:, np.argsort(order)]


# What a synchronisation may lose of an element in a round, over the workers' magnitudes.
LOSES: dict[str, Any] = {
    "dense": (None, 0.0),
    "oktopk": (sparse("oktopk"), 0.0),
    "oktopk-all": (sparse("oktopk", 1.0), 0.0),
    "topk_allgather": (sparse("topk_allgather"), 0.0),
    "gtopk": (sparse("gtopk"), 0.0),
    "ssar_recursive_doubling": (sparse("ssar_recursive_doubling"), 0.0),
    "sparseloco": (RECIPES["sparseloco"].options["sync"], 1e-6),
    # A third of each, and then a third of the sum, which may be 4/3 of what it was.
    "float4": (RECIPES["streaming"].options["sync"], 1 / 3 + 4 / 9),
    "float4-feedback": (jsparse.quantized(AXIS, quantize=jsparse.quantize.Float4(bucket=32)), 1e-6),
}


@pytest.mark.parametrize("name", quick(LOSES, "sparseloco"))
def test_nothing_that_workers_moved_is_lost(name: str):
    """Parameters have moved by the mean of all that workers moved, but for what residuals hold."""
    sync, loses = LOSES[name]
    decay = 0.95 if name == "sparseloco" else 1.0  # Of what waits, after the round.
    one = {"inner": optax.sgd(1.0), "outer": optax.sgd(1.0), "sync": sync}
    step = local_steps(loss_fn=integer_loss, **one)
    state, kept = step.init({"w": np.zeros((5, 8), np.float32)}), np.zeros((SIZE, 40))
    for seed in range(6):
        batch = integers(seed)
        acc = kept + batch[0].sum(0)
        before = np.asarray(state.params["w"]).reshape(-1)
        state, _ = step(state, batch)
        waiting = np.asarray(jsparse.residual(state.opt_state))
        kept = in_order(waiting.reshape(SIZE, -1), sync) if waiting.size else np.zeros((SIZE, 40))
        told = SIZE * (before - np.asarray(state.params["w"]).reshape(-1))
        lost = np.abs(told + kept.sum(0) / decay - acc.sum(0))
        # In four bits, values below 1/128 of the largest may become zero, and so may their sums.
        assert (lost <= loses * (np.abs(acc).sum(0) + np.abs(acc).max() / 12)).all()
    assert kept.any() == (name not in ("dense", "float4", "oktopk-all"))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [optax.sgd, functools.partial(optax.sgd, momentum=0.5, nesterov=True)])
def test_an_outer_rate_that_acts_twice_is_its_square(optimizer: Any):
    """As in codes that put the outer gradient into the residual times the rate."""
    sync = jsparse.topk_allgather(AXIS, density=DENSITY)
    twice, squared, once = (
        train(local_steps(sync=sync, outer=outer))[0].params
        for sync, outer in (
            (optax.chain(optax.scale(0.5), sync), optimizer(0.5)),
            (sync, optimizer(0.25)),
            (sync, optimizer(0.5)),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, twice, squared)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (squared, once)), strict=True))


def test_a_state_of_another_form_is_refused():
    state = local_steps().init(params())
    for options in ({"fragments": 2}, {"overlap": 1}):
        with pytest.raises(ValueError, match="begin a new state"):
            local_steps(**options)(state, batches())
    step = local_steps(every=4, fragments=each_alone)
    with pytest.raises(ValueError, match="each of 5 fragments"):
        step(step.init(params()), batches(0, 4))


# Every synchronisation of this library may stand in a round. Its own contract is tested in the
# table of algorithms; here, that a round gives it what workers moved and uses what it returns.
ROWS: dict[str, dict[str, Any]] = {name: recipe.options for name, recipe in RECIPES.items()} | {
    "topk_allgather": {"sync": sparse("topk_allgather")},
    "powersgd": {"sync": jsparse.powersgd(AXIS, rank=2)},
    "chain": {"sync": optax.chain(optax.clip_by_global_norm(1.0), sparse("gtopk"))},
    "phases": {"sync": jsparse.phases(((1, jsparse.dense(AXIS)), sparse("oktopk")))},
}


@pytest.mark.parametrize("name", quick(ROWS, "streaming"))
def test_rounds_go_on_from_a_checkpoint(name: str, tmp_path):
    """Saved and restored by orbax, to the same bits, in fragments; compiled once."""
    fragments = {} if name == "eager" else {"fragments": 2, "overlap": 1}
    step = local_steps(**fragments | ROWS[name])
    state, _ = train(step, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "round2", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpointer.restore(tmp_path / "round2", target)
    (straight, _), (resumed, _) = (step(start, batches(2)) for start in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert step._run._cache_size() == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_rounds_go_on_with_other_workers(name: str):
    """The pending mean, the outer momentum and the parameters stay; training goes on."""
    size = 2 if len(name) % 2 else 8
    state, told = train(local_steps(**ROWS[name]), 3)
    step, mesh = local_steps(transports.mesh(size), **ROWS[name]), transports.mesh(size)
    like = jax.tree.map(lambda x: x[0], state.params) if name == "eager" else state.params
    moved = jsparse.reshard(step.tx, state.opt_state, like, mesh, AXIS)
    if name != "eager":  # There each worker has an outer optimizer.
        jax.tree.map(np.testing.assert_array_equal, moved.outer, state.opt_state.outer)
    if jsparse.residual(state.opt_state).size:
        pending = [np.asarray(jsparse.residual(x)).mean(0) for x in (state.opt_state, moved)]
        np.testing.assert_allclose(*pending, rtol=1e-5, atol=1e-7)
    mean = jax.tree.map(lambda x: x.mean(0), state.params) if name == "eager" else state.params
    after = step.init(jax.device_get(mean))._replace(opt_state=moved)
    for seed in range(3, 5):
        after, losses = step(after, batches(seed))
    assert losses.mean() < told[0].mean()


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_the_bytes_of_a_round(name: str):
    """The program sends what ``cost.exact`` says of its fragments, and two short messages.

    What was sent, as ``stats`` has it, is within that.
    """
    step = local_steps(**ROWS[name], check_vma=False)
    state, _ = train(step, 2)
    traffic, told = jsparse.traffic(step, state, batches(2)), jsparse.stats(state.opt_state)
    hand = ByHand(**RECIPES[name].hand if name in RECIPES else {})
    parts = [hand.take(params(), f) for f in range(hand.count)]
    # Of a weight and a loss, for each fragment; of losses, and who took part. A sum's words go
    # both ways, all but one worker's share of them.
    short = 2 * 4 * (2 * len(parts) + 2 * EVERY) * (SIZE - 1) // SIZE
    sync = ROWS[name].get("sync", jsparse.dense(AXIS))
    if isinstance(sync, jsparse.SparseAllReduce):
        exact = [jsparse.cost.exact(sync, part, SIZE) for part in parts]
        assert traffic.least.bytes == short + sum(least.bytes for least, _ in exact)
        assert traffic.bytes == short + sum(most.bytes for _, most in exact)
    # ``stats`` rounds half a word of a sum up.
    rounded = 2 * sum(1 for _ in traffic.collectives)
    assert traffic.least.bytes - short <= 4 * int(np.max(told.words)) <= traffic.bytes - short + rounded
    np.testing.assert_array_equal(told.step, 2)
