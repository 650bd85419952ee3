"""Rounds of local steps, against the same written out by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
import transports
from tiers import quick
from transports import AXIS

SIZE = 4
EVERY = 5
EXAMPLES = 24  # Of all workers in a step.
INNER = optax.adam(1e-2)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def params() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    layers = rng.standard_normal((3, 6, 6)) / 4
    return jax.tree.map(np.float32, {"in": rng.standard_normal((4, 6)), "layers": layers, "out": np.ones(6)})


def loss_fn(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["in"])
    for layer in params["layers"]:
        h = h + jnp.tanh(h @ layer)
    return jnp.mean((h @ params["out"] - y) ** 2)


def batches(seed: int = 0, every: int = EVERY):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((every, EXAMPLES, 4)).astype(np.float32)
    return x, np.sin(x.sum(-1))


def local_steps(mesh: Mesh | None = None, loss_fn=loss_fn, **options) -> jsparse.LocalSteps:
    options = {"inner": INNER, "every": EVERY} | options
    return jsparse.local_steps(loss_fn, mesh=mesh or transports.mesh(SIZE), axis=AXIS, **options)


def train(step: jsparse.LocalSteps, rounds: int = 3, data=batches, **more):
    state, told = step.init(params()), []
    for seed in range(rounds):
        state, report = step(state, data(seed), **more)
        told.append(jax.tree.map(np.asarray, report))
    return state, told


gradient = jax.jit(jax.value_and_grad(loss_fn))


class ByHand:
    """The algorithms as their papers write them, one step and one worker after another.

    Streaming DiLoCo is Algorithm 2 of its paper: fragment p of F is sent H (p + 1) / F - τ steps
    after the beginning of a round, and arrives τ steps later. DiLoCo is the case F = 1, τ = 0.
    """

    def __init__(
        self, *, steps=(EVERY,) * SIZE, weights="workers", which=None, overlap=0, merge=0.0, eager=False, poison=()
    ):
        self.which = which or jax.tree.map(lambda _: 0, params())
        self.count = 1 + max(int(np.max(f)) for f in jax.tree.leaves(self.which))
        self.steps, self.weights, self.overlap, self.merge, self.eager = steps, weights, overlap, merge, eager
        self.poison = poison  # The (round, step, worker) whose gradients are not finite.
        self.anchors = [params() for _ in range(SIZE)]  # They differ only with eager updates.
        self.own = [params() for _ in range(SIZE)]
        self.inner = [INNER.init(params()) for _ in range(SIZE)]
        self.outer = [[OUTER.init(params()) for _ in range(self.count)] for _ in range(SIZE)]
        self.since = np.zeros((SIZE, self.count))
        self.taken, self.number = np.zeros(SIZE, int), 0
        zeros = jax.tree.map(np.zeros_like, params())
        self.last = [[zeros] * SIZE for _ in range(self.count)]

    def only(self, f: int, tree: Any, rest: Any) -> Any:
        """A tree whose fragment f is that of ``tree``, and the rest that of another."""

        def leaf(which, x, other):
            mask = np.reshape(np.asarray(which) == f, np.shape(which) + (1,) * (np.ndim(x) - np.ndim(which)))
            return np.where(mask, x, other)

        return jax.tree.map(leaf, self.which, tree, rest)

    def outer_gradients(self, f: int) -> list[Any]:
        zeros = jax.tree.map(np.zeros_like, params())
        moved = [jax.tree.map(np.subtract, a, b) for a, b in zip(self.anchors, self.own, strict=True)]
        return [self.only(f, jax.tree.map(np.asarray, tree), zeros) for tree in moved]

    def shares(self, f: int, moved: list[Any]) -> list[Any]:
        """Each worker's share of the weighted mean; None if there is no weight."""
        weights = np.minimum(self.since[:, f], 1) if self.weights == "workers" else self.since[:, f]
        if not weights.sum():
            return [None] * SIZE
        parts = zip(weights / weights.sum(), moved, strict=True)
        return [jax.tree.map(lambda x, w=w: np.float32(w * x), tree) for w, tree in parts]

    def arrive(self, f: int, means: list[Any]) -> None:
        """Each worker's outer step, and what it makes of its own parameters."""
        for i, mean in enumerate(means):
            if mean is None:
                continue
            updates, self.outer[i][f] = OUTER.update(mean, self.outer[i][f], self.anchors[i])
            new = optax.apply_updates(self.anchors[i], updates)
            self.anchors[i] = self.only(f, jax.tree.map(np.asarray, new), self.anchors[i])
        for i in range(SIZE):
            merged = jax.tree.map(lambda a, b: self.merge * a + (1 - self.merge) * b, self.own[i], self.anchors[i])
            self.own[i] = self.only(f, jax.tree.map(np.asarray, merged), self.own[i])

    def step(self, i: int, number: int, batch: Any, losses: np.ndarray) -> None:
        share = EXAMPLES // SIZE
        loss, grads = gradient(self.own[i], jax.tree.map(lambda x: x[number, i * share : (i + 1) * share], batch))
        if (self.number, number, i) in self.poison:
            return
        updates, self.inner[i] = INNER.update(grads, self.inner[i], self.own[i])
        self.own[i] = jax.tree.map(np.asarray, optax.apply_updates(self.own[i], updates))
        self.since[i] += 1
        self.taken[i] += 1
        losses[number, i] = loss

    def round(self, batch: Any) -> np.ndarray:
        losses, self.taken = np.full((EVERY, SIZE), np.nan), np.zeros(SIZE, int)
        for f in range(self.count):
            begin, end = EVERY * f // self.count, EVERY * (f + 1) // self.count
            own = [s * (f + 1) // self.count - s * f // self.count for s in self.steps]
            late = [min(n, self.overlap) for n in own]
            for i in range(SIZE):
                for number in range(begin, begin + own[i] - late[i]):
                    self.step(i, number, batch, losses)
            moved = self.outer_gradients(f)
            if self.eager:
                # The mean of the round before, in which a worker's own share is replaced.
                others = [[self.last[f][j] for j in range(SIZE) if j != i] for i in range(SIZE)]
                means = [jax.tree.map(lambda x, *y: x / SIZE + sum(y), moved[i], *others[i]) for i in range(SIZE)]
                self.last[f] = self.shares(f, moved)
            else:
                shares = self.shares(f, moved)
                means = [None if shares[0] is None else jax.tree.map(lambda *x: sum(x), *shares)] * SIZE
            self.since[:, f] = 0
            for i in range(SIZE):
                for number in range(end - self.overlap, end - self.overlap + late[i]):
                    self.step(i, number, batch, losses)
            self.arrive(f, means)
        self.number += 1
        return losses


def by_layers(params):
    return {"in": 0, "layers": np.array([0, 1, 0]), "out": 1}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diloco": ({}, {}),
    "unlike": ({"steps": (5, 3, 1, 0)}, {"steps": (5, 3, 1, 0)}),
    "weighted": ({"steps": (5, 3, 1, 0), "weights": "steps"}, {"steps": (5, 3, 1, 0), "weights": "steps"}),
    "fragments": ({"fragments": 2}, {"which": {"in": 0, "layers": 1, "out": 1}}),
    "layers": ({"fragments": by_layers}, {"which": by_layers(None)}),
    "streaming": (
        {"fragments": by_layers, "overlap": 1, "merge": 0.5},
        {"which": by_layers(None), "overlap": 1, "merge": 0.5},
    ),
    "streaming-unlike": (
        {"fragments": by_layers, "overlap": 1, "merge": 0.25, "steps": (5, 4, 2, 1), "weights": "steps"},
        {"which": by_layers(None), "overlap": 1, "merge": 0.25, "steps": (5, 4, 2, 1), "weights": "steps"},
    ),
    "overlap": ({"overlap": 2}, {"overlap": 2}),
    "eager": ({"eager": True}, {"eager": True}),
    "eager-layers": ({"eager": True, "fragments": by_layers}, {"eager": True, "which": by_layers(None)}),
}


def check_by_hand(step: jsparse.LocalSteps, hand: ByHand, data=batches, rounds: int = 3) -> Any:
    state, told = train(step, rounds, data)
    for seed in range(rounds):
        losses = hand.round(batches(seed))
        with np.errstate(invalid="ignore"):
            wanted = np.nansum(losses, 1) / np.sum(~np.isnan(losses), 1)
        np.testing.assert_allclose(told[seed], wanted, rtol=2e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    if hand.eager:
        jax.tree.map(lambda a, *b: close(a, np.stack(b)), state.params, *hand.anchors)
    else:
        jax.tree.map(close, state.params, hand.anchors[0])
    if state.opt_state.workers is not None:
        flat = jax.tree.map(lambda *x: np.concatenate(x), *hand.own)
        jax.tree.map(close, state.opt_state.workers.inner, flat)
    np.testing.assert_array_equal(state.opt_state.counts.inner.taken, hand.taken)
    return state


@pytest.mark.parametrize("form", quick(FORMS, "diloco", "streaming-unlike", "eager-layers"))
@pytest.mark.parametrize("checked", quick([True, False], True))
def test_a_round_is_its_papers(form: str, checked: bool):
    options, settings = FORMS[form]
    state = check_by_hand(local_steps(check_vma=checked, **options), ByHand(**settings))
    if "eager" not in form:
        for leaf in jax.tree.leaves(state.params):
            assert leaf.sharding.is_fully_replicated
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)


def poisoned(*spoilt: tuple[int, int, int]):
    """Batches in which steps of some workers have gradients that are not finite."""

    def data(seed: int):
        x, y = batches(seed)
        for number, step, worker in spoilt:
            if number == seed:
                share = EXAMPLES // SIZE
                y[step, worker * share] = np.inf
        return x, y

    return data


@pytest.mark.parametrize("form", quick(["diloco", "weighted", "streaming", "eager"], "streaming"))
def test_steps_that_are_not_finite_are_skipped_on_their_worker(form: str):
    """One step of one worker; all steps of another, which then contributes nothing."""
    spoilt = [(1, 2, 0), *((1, step, 2) for step in range(EVERY))]
    options, settings = FORMS[form]
    state = check_by_hand(local_steps(**options), ByHand(poison=spoilt, **settings), poisoned(*spoilt))
    skipped = np.array([1, 0, EVERY, 0])
    if form == "weighted":  # The third worker takes one step a round.
        skipped = np.array([1, 0, 1, 0])
    np.testing.assert_array_equal(state.opt_state.counts.inner.skipped, skipped)
    figures = jsparse.metrics(state)
    assert figures["jsparse/skipped_local_steps"] == skipped.sum()
    assert figures["jsparse/local_steps"] == np.mean(state.opt_state.counts.inner.taken)


def test_a_round_without_a_finite_step_is_none():
    """Parameters, outer momentum and residual stay, bit for bit; the next round goes on."""
    step = local_steps(sync=jsparse.topk_allgather(AXIS, density=0.2))
    state, _ = train(step, 2)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state.outer, state.opt_state.sync[0].buckets))
    spoilt = poisoned(*((7, step, worker) for step in range(EVERY) for worker in range(SIZE)))
    state, losses = step(state, spoilt(7))
    after = (state.params, state.opt_state.outer, state.opt_state.sync[0].buckets)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert np.isnan(losses).all()
    np.testing.assert_array_equal(jsparse.stats(state.opt_state).skipped, 1)
    state, losses = step(state, batches(8))
    assert np.isfinite(losses).all()
    assert not np.array_equal(state.params["in"], before[0]["in"])


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


@pytest.mark.parametrize("form", quick(["diloco", "streaming-unlike", "eager"], "streaming-unlike"))
def test_simulated_workers_do_the_same(form: str):
    """Under ``vmap``, and on the devices of a mesh."""
    options, _ = FORMS[form]
    state, told = train(local_steps(**options))
    simulated = jsparse.local_steps(loss_fn, INNER, None, AXIS, every=EVERY, **options)
    many = jax.vmap(lambda _: simulated.init(params()), axis_name=AXIS)(jnp.arange(SIZE))
    run = jax.vmap(simulated, axis_name=AXIS)
    for seed in range(3):
        parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, SIZE, axis=1)), batches(seed))
        many, losses = run(many, parts)
        np.testing.assert_allclose(losses[0], told[seed], rtol=1e-5)
    own = jax.tree.map(lambda x: x[:, 0], many.params) if form == "eager" else many.params
    stacked = (lambda x, y: np.broadcast_to(y, x.shape)) if form != "eager" else (lambda x, y: y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, stacked(a, b), rtol=1e-5, atol=1e-6), own, state.params)


SHARDED = {"in": P(None, "fsdp"), "layers": P(None, "fsdp", "tensor"), "out": P("fsdp")}


@pytest.mark.parametrize("form", quick(["diloco", "streaming-unlike", "eager-layers"], "streaming-unlike"))
@pytest.mark.parametrize("checked", quick([True, False], True))
def test_models_in_shards(form: str, checked: bool):
    """The rounds of whole parameters. Everything stays in shards; we alone use the slow axis."""
    options, _ = FORMS[form]
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


REFUSED: dict[str, tuple[Any, str]] = {
    "no steps": ({"every": 0}, "at least one step"),
    "fewer steps than fragments": ({"fragments": 6}, "at least one step for each fragment"),
    "no fragments": ({"fragments": 0}, "at least 1"),
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        train(local_steps(**options), 1)


# Every synchronisation of this library may stand in a round. Its own contract is tested in the
# table of algorithms; here, that a round gives it what workers moved and uses what it returns.
SYNCS: dict[str, Any] = {
    "dense": lambda: None,
    "topk_allgather": lambda: jsparse.topk_allgather(AXIS, density=0.1),
    "oktopk": lambda: jsparse.oktopk(AXIS, density=0.1),
    "sparseloco": lambda: jsparse.sparse_allreduce(
        AXIS,
        select=jsparse.select.BlockTopK(2, block=16),
        tiles=4,
        allreduce=jsparse.allreduce.TopkAllGather(),
        wire=jsparse.wire.Compact(jsparse.quantize.Codebook(2)),
        error_feedback=jsparse.ErrorFeedback(decay=0.95),
    ),
    "quantized": lambda: jsparse.quantized(AXIS, quantize=jsparse.quantize.Float4(bucket=32)),
    "powersgd": lambda: jsparse.powersgd(AXIS, rank=2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), jsparse.gtopk(AXIS, density=0.1)),
    "phases": lambda: jsparse.phases(((1, jsparse.dense(AXIS)), jsparse.oktopk(AXIS, density=0.1))),
}
SOME = ("topk_allgather",)


def integer_loss(params, batch):
    """Linear, so that gradients are the batch: integers."""
    return jnp.mean(batch[0] @ params["w"])


def integers(seed: int):
    rng = np.random.default_rng(seed)
    return (rng.integers(-8, 9, (EVERY, SIZE, 40)).astype(np.float32),)


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("name", quick(["topk_allgather", "oktopk", "gtopk", "ssar_recursive_doubling"], "oktopk"))
def test_nothing_that_workers_moved_is_lost(name: str, density: float):
    """Parameters have moved by the mean of all that workers moved, but for what residuals hold."""
    sync = getattr(jsparse, name)(AXIS, density=density)
    step = jsparse.local_steps(
        integer_loss,
        optax.sgd(1.0),
        transports.mesh(SIZE),
        AXIS,
        every=EVERY,
        outer=optax.sgd(1.0),
        sync=sync,
    )
    state, moved = step.init({"w": np.zeros(40, np.float32)}), np.zeros(40)
    for seed in range(6):
        batch = integers(seed)
        moved += batch[0].sum((0, 1))
        state, _ = step(state, batch)
        waiting = np.asarray(jsparse.residual(state.opt_state)).sum(0)
        np.testing.assert_array_equal(-SIZE * np.asarray(state.params["w"]) + waiting, moved)
    assert (density < 1) == waiting.any()


@pytest.mark.parametrize("name", quick(SYNCS, *SOME))
def test_rounds_go_on_from_a_checkpoint(name: str):
    """To the same bits, from NumPy arrays, with fragments; compiled once."""
    step = local_steps(sync=SYNCS[name](), fragments=2, overlap=1)
    state, _ = train(step, 2)
    saved = jax.tree.map(np.asarray, state)
    where = jax.tree.map(lambda x: x.sharding, state)
    (straight, _), (resumed, _) = (step(start, batches(2)) for start in (state, jax.device_put(saved, where)))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert step._run._cache_size() == 1


@pytest.mark.parametrize("name", quick(SYNCS, *SOME))
def test_rounds_go_on_with_other_workers(name: str):
    """The pending mean, the outer momentum and the parameters stay; training goes on."""
    size = 2 if len(name) % 2 else 8
    state, told = train(local_steps(sync=SYNCS[name]()), 3)
    step = local_steps(transports.mesh(size), sync=SYNCS[name]())
    moved = jsparse.reshard(step.tx, state.opt_state, state.params, transports.mesh(size), AXIS)
    for a, b in zip(jax.tree.leaves(moved.outer), jax.tree.leaves(state.opt_state.outer), strict=True):
        np.testing.assert_array_equal(a, b)
    if jsparse.residual(state.opt_state).size:
        pending = [np.asarray(jsparse.residual(x)).mean(0) for x in (state.opt_state, moved)]
        np.testing.assert_allclose(*pending, rtol=1e-5, atol=1e-7)
    after = step.init(params())._replace(opt_state=moved, params=jax.device_put(state.params, jax.devices()[0]))
    after = after._replace(params=jax.device_put(after.params, NamedSharding(transports.mesh(size), P())))
    for seed in range(3, 5):
        after, losses = step(after, batches(seed))
    assert losses.mean() < told[0].mean()


@pytest.mark.parametrize("name", quick(SYNCS, *SOME))
def test_the_bytes_of_a_round(name: str):
    """What the program can send is what ``stats`` says, and two short messages."""
    step = local_steps(sync=SYNCS[name]())
    state, _ = train(step, 2)
    traffic, told = jsparse.traffic(step, state, batches(2)), jsparse.stats(state.opt_state)
    short = 2 * 3 * (2 + 2 * EVERY)  # Of a weight and a loss; of losses, and who took part. In bytes.
    assert traffic.least.bytes - short <= 4 * int(np.max(told.words)) <= traffic.bytes - short
    np.testing.assert_array_equal(told.step, 2)
