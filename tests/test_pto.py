"""Replicated computation in parts: it has the same results, for less work of each worker."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

import jsparse
import transports
from jsparse._share.elementwise import mixing_primitive
from jsparse._share.parts import share_out
from jsparse._share.trust_ratio import cut
from jsparse.bench.pto import resnet50
from tiers import full, quick
from transports import AXIS

WHOLE, ALONG = PartitionSpec(), PartitionSpec(AXIS)
TRANSPORTS = ["vmap", "shard_map", "shard_map unchecked", "pmap"]


def on_workers(fn, size: int, transport: str = "vmap"):
    """``fn`` of replicated arguments; its results have a leading axis for the workers."""
    if transport == "vmap":
        return jax.jit(jax.vmap(fn, in_axes=None, axis_name=AXIS, axis_size=size))
    if transport == "pmap":
        mapped = jax.pmap(lambda _, args: fn(*args), in_axes=(0, None), axis_name=AXIS, devices=jax.devices()[:size])
        return lambda *args: mapped(np.arange(size), args)
    # With check_vma=True these out_specs accept only results that are typed as replicated.
    checked = transport == "shard_map"
    shared = jax.shard_map(fn, mesh=transports.mesh(size), in_specs=WHOLE, out_specs=WHOLE, check_vma=checked)
    return jax.jit(lambda *args: jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), shared(*args)))


def assert_all_have(stacked, expected, size: int):
    """Asserts that every worker has the expected result, in all bits and in its type."""
    assert jax.tree.structure(stacked) == jax.tree.structure(expected)
    for mine, whole in zip(jax.tree.leaves(stacked), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == whole.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.broadcast_to(np.asarray(whole), (size, *whole.shape)))


def mixed(x, scale=2):
    """Results of several types and shapes, without rounding in any program."""
    return {
        "float": x * scale,
        "wide": x[:, None] + jnp.arange(3.0)[None],
        "narrow": x.astype(jnp.bfloat16),
        "flag": x > 3,
        "count": -x.astype(jnp.int8),
        "none": jnp.zeros((x.shape[0], 0)),
    }


@pytest.mark.parametrize(
    ("rows", "size", "transport"),
    [
        *[(rows, size, "vmap") for rows in (0, 2, 5, 16) for size in (1, 3, 8)],
        *[
            full(rows, size, "vmap")
            for rows in (0, 1, 2, 5, 9, 16)
            for size in (1, 2, 3, 8)
            if rows in (1, 9) or size == 2
        ],
        *[(9, 4, transport) for transport in TRANSPORTS[1:]],
        (3, 8, "shard_map"),
        (0, 2, "shard_map"),
        (5, 1, "shard_map"),
    ],
)
def test_in_parts(rows: int, size: int, transport: str):
    x = jnp.arange(float(rows)) - 2
    assert_all_have(on_workers(lambda x: jsparse.in_parts(mixed, AXIS, x), size, transport)(x), mixed(x), size)


def test_in_parts_of_several_arrays():
    x, y = jnp.arange(10.0), jnp.arange(30).reshape(10, 3)
    fn = lambda pair, y: (pair["x"][:, None] * y, pair["x"].astype(jnp.int32))  # noqa: E731
    run = on_workers(lambda x, y: jsparse.in_parts(fn, AXIS, {"x": x}, y), 4)
    assert_all_have(run(x, y), fn({"x": x}, y), 4)


def lists(count: int):
    rng = np.random.default_rng(count)
    return [jnp.asarray(rng.integers(-9, 9, rng.integers(1, 50)), jnp.float32) for _ in range(count)]


def summary(x):
    """Results whose shapes depend on the task."""
    return {"sum": jnp.sum(x), "first": x[: x.size // 9].astype(jnp.bfloat16), "odd": x.size % 2 == jnp.int32(1)}


@pytest.mark.parametrize(
    ("count", "size", "transport"),
    [
        *[(count, size, "vmap") for count in (0, 1, 2, 7) for size in (1, 3, 8)],
        *[(7, 4, transport) for transport in TRANSPORTS[1:]],
        (3, 8, "shard_map"),
        (0, 2, "shard_map"),
    ],
)
def test_map_in_parts(count: int, size: int, transport: str):
    tasks = lists(count)
    run = on_workers(lambda *tasks: jsparse.map_in_parts(summary, AXIS, tasks), size, transport)
    assert_all_have(run(*tasks), [jax.tree.map(jnp.asarray, summary(task)) for task in tasks], size)


def test_results_without_elements():
    run = on_workers(lambda x: jsparse.map_in_parts(lambda x: x[:0], AXIS, [x, x]), 2, "shard_map")
    assert_all_have(run(jnp.ones(3)), [jnp.ones(0)] * 2, 2)


def test_over_one_of_two_axes():
    """Under check_vma=True, with results that differ along the other axis and that do not."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("nodes", AXIS))
    x = jnp.arange(14.0).reshape(2, 7)

    def run(mine, shared):
        tasks = [shared, mine[0]]
        return (
            jsparse.map_in_parts(jnp.sum, AXIS, tasks)[1][None],
            jsparse.map_in_parts(jnp.sum, AXIS, [shared])[0],
            jsparse.in_parts(lambda x: 2 * x, AXIS, mine[0])[None],
        )

    nodes = PartitionSpec("nodes")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(nodes, WHOLE), out_specs=(nodes, WHOLE, nodes))
    sums, total, doubled = jax.jit(mapped)(x, jnp.ones(5))
    np.testing.assert_array_equal(sums, x.sum(axis=1))
    assert total == 5
    np.testing.assert_array_equal(doubled, 2 * x)


def primitives(jaxpr, name: str) -> list:
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == name else []
        for sub in core.jaxprs_in_params(eqn.params):
            found += primitives(getattr(sub, "jaxpr", sub), name)
    return found


def test_each_task_is_computed_by_one_worker():
    tasks = lists(7)
    program = jax.make_jaxpr(lambda: jsparse.map_in_parts(jnp.sum, AXIS, tasks), axis_env=[(AXIS, 3)])()
    (switch,) = primitives(program.jaxpr, "cond")
    sums = [len(primitives(branch.jaxpr, "reduce_sum")) for branch in switch.params["branches"]]
    assert len(sums) == 3
    assert sum(sums) == len(primitives(program.jaxpr, "reduce_sum")) == 7


def test_resnet_50():
    sizes = [int(np.prod(shape)) for shape in resnet50()]
    assert len(sizes) == 161
    assert sum(sizes) == 25_557_032


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 128, 1000])
def test_work_is_balanced(size: int):
    """No worker has much more than its part of ResNet-50's layers.

    The largest layer alone is 9 % of all.
    """
    sizes = [int(np.prod(shape)) for shape in resnet50()]
    pieces = cut(sizes, size)
    assert [sum(p.end - p.begin for p in pieces if p.leaf == leaf) for leaf in range(161)] == sizes
    start = sum(sizes) / (4 * 161)
    weights = [piece.end - piece.begin + start for piece in pieces]
    shares = share_out(weights, size)
    assert sorted(i for share in shares for i in share) == list(range(len(pieces)))
    loads = [sum(weights[i] for i in share) for share in shares]
    elements = [sum(pieces[i].end - pieces[i].begin for i in share) for share in shares]
    assert max(loads) <= sum(weights) / size + max(weights)
    assert size > 128 or max(elements) <= 1.35 * sum(sizes) / size


# Trust ratios.


def parameters(dtype):
    rng = np.random.default_rng(3)
    shapes = {"b": (7,), "empty": (0, 4), "scalar": (), "w": (20, 30), "x": (3, 3, 5, 8), "zero": (11,)}
    drawn = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    return drawn | {"zero": jnp.zeros(11, dtype)}


def gradients(params, step: int):
    rng = np.random.default_rng(step)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params)
    return grads | {"b": jnp.zeros_like(grads["b"])}


def masked_by_rank(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


PAIRS = {
    "ratio": (jsparse.scale_by_trust_ratio(AXIS), optax.scale_by_trust_ratio()),
    "ratio, options": (
        jsparse.scale_by_trust_ratio(AXIS, min_norm=3.0, trust_coefficient=0.5, eps=0.1),
        optax.scale_by_trust_ratio(min_norm=3.0, trust_coefficient=0.5, eps=0.1),
    ),
    "lars": (jsparse.lars(AXIS, 0.1), optax.lars(0.1)),
    "lars, options": (
        jsparse.lars(
            AXIS,
            optax.linear_schedule(0.1, 0.2, 5),
            weight_decay=0.1,
            weight_decay_mask=masked_by_rank,
            trust_coefficient=0.01,
            eps=0.1,
            trust_ratio_mask=masked_by_rank,
            momentum=0.8,
            nesterov=True,
        ),
        optax.lars(
            optax.linear_schedule(0.1, 0.2, 5),
            weight_decay=0.1,
            weight_decay_mask=masked_by_rank,
            trust_coefficient=0.01,
            eps=0.1,
            trust_ratio_mask=masked_by_rank,
            momentum=0.8,
            nesterov=True,
        ),
    ),
    "lamb": (jsparse.lamb(AXIS, 0.1), optax.lamb(0.1)),
    "lamb, options": (
        jsparse.lamb(AXIS, 0.1, b1=0.8, b2=0.99, eps=1e-3, eps_root=1e-4, weight_decay=0.1, mask=masked_by_rank),
        optax.lamb(0.1, b1=0.8, b2=0.99, eps=1e-3, eps_root=1e-4, weight_decay=0.1, mask=masked_by_rank),
    ),
}


def compare(tx, reference, params, size: int, transport: str, steps: int = 3, tolerance: float = 2e-6):
    """Compares several steps of both: updates are equal to rounding, the same bits everywhere."""
    run = on_workers(lambda grads, state, params: tx.update(grads, state, params), size, transport)
    state, expected = tx.init(params), reference.init(params)
    expected_run = jax.jit(reference.update)
    for step in range(steps):
        grads = gradients(params, step)
        stacked, states = run(grads, state, params)
        updates, expected = expected_run(grads, expected, params)
        for name, whole in updates.items():
            mine, whole = np.asarray(stacked[name]), np.asarray(whole)
            assert mine.dtype == whole.dtype
            np.testing.assert_array_equal(mine, np.broadcast_to(mine[:1], mine.shape))
            scale = np.abs(whole.astype(np.float64)).max(initial=0)
            np.testing.assert_allclose(
                mine[0].astype(np.float64), whole.astype(np.float64), rtol=tolerance, atol=tolerance * scale
            )
        state = jax.tree.map(lambda x: x[0], states)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("pair", quick(PAIRS, "ratio", "lars"))
def test_equal_to_optax(pair: str):
    compare(*PAIRS[pair], parameters(jnp.float32), 3, "shard_map")


@pytest.mark.parametrize(("size", "transport"), [(1, "vmap"), (5, "vmap"), (8, "pmap"), (4, "shard_map unchecked")])
@pytest.mark.full
def test_equal_to_optax_everywhere(size: int, transport: str):
    compare(*PAIRS["lars, options"], parameters(jnp.float32), size, transport)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-6), (jnp.float16, 2**-9)])
def test_equal_to_optax_in_narrow_types(dtype, tolerance: float):
    compare(*PAIRS["ratio"], parameters(dtype), 3, "shard_map", steps=1, tolerance=tolerance)


def test_equal_to_optax_in_mixed_types():
    """One leaf is bfloat16, and some updates have another type than their parameters."""
    params = parameters(jnp.float32)
    params["b"] = params["b"].astype(jnp.bfloat16)
    grads = gradients(params, 0)
    grads["w"] = grads["w"].astype(jnp.bfloat16)
    ours, reference = PAIRS["ratio"]
    stacked = on_workers(lambda g, p: ours.update(g, ours.init(p), p)[0], 3)(grads, params)
    expected, _ = jax.jit(reference.update)(grads, reference.init(params), params)
    for name, whole in expected.items():
        assert stacked[name].dtype == whole.dtype
        np.testing.assert_allclose(
            np.asarray(stacked[name][0], np.float64), np.asarray(whole, np.float64), rtol=2**-7, atol=1e-6
        )


def test_a_norm_beyond_float16():
    """Squares are summed in float32; optax's norm is infinite, and its update zero."""
    params = {"w": jnp.full(64, 100, jnp.float16)}
    grads = {"w": jnp.ones(64, jnp.float16)}
    ours, reference = PAIRS["ratio"]
    stacked = on_workers(lambda g, p: ours.update(g, ours.init(p), p)[0], 2)(grads, params)
    np.testing.assert_array_equal(np.asarray(stacked["w"]), 100)
    assert not np.isfinite(reference.update(grads, reference.init(params), params)[0]["w"]).any()


def test_a_gradient_that_is_not_finite():
    params = parameters(jnp.float32)
    grads = gradients(params, 0)
    grads["w"] = grads["w"].at[3, 4].set(jnp.nan)
    ours, _ = PAIRS["lars"]
    stacked = on_workers(lambda g, p: ours.update(g, ours.init(p), p)[0], 3)(grads, params)
    assert np.isnan(stacked["w"]).all()
    assert np.isfinite(stacked["x"]).all()


# Sharded optimizers.

OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.linear_schedule(0.1, 0.2, 5)),
    "adamw": optax.adamw(0.1, weight_decay=0.1, mask=masked_by_rank),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, lambda params: {name: "ab"[name < "s"] for name in params}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
}


def loss_fn(params, batch):
    return sum(jnp.sum((p.astype(jnp.float32) - 0.5) ** 2) for p in jax.tree.leaves(params)) * jnp.mean(batch)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("adam", 3),
        pytest.param("adam", 1, marks=pytest.mark.full),
        *[pytest.param(name, 3, marks=pytest.mark.full) for name in OPTIMIZERS if name != "adam"],
    ],
)
def test_sharded_optimizers(name: str, size: int):
    """In ``train_step``, typed, after a preset: equal to the optimizer itself in its place."""
    params, mesh = parameters(jnp.float32), transports.mesh(size)
    params["half"] = jnp.linspace(-1, 1, 13).astype(jnp.bfloat16)
    tx = OPTIMIZERS[name]
    batch = jnp.linspace(0.5, 1.5, 2 * size)
    ends = []
    for optimizer in (tx, jsparse.sharded(tx, AXIS)):
        chain = optax.chain(jsparse.dense(AXIS), optimizer)
        step = jsparse.train_step(loss_fn, chain, mesh, AXIS)
        state = step.init(params)
        for _ in range(4):
            state, _ = step(state, batch)
        ends.append(state)
    for whole, parts in zip(*(jax.tree.leaves(end.params) for end in ends), strict=True):
        assert whole.dtype == parts.dtype
        rounding = 2**-7 if whole.dtype == jnp.bfloat16 else 2e-6
        np.testing.assert_allclose(
            np.asarray(parts, np.float64), np.asarray(whole, np.float64), rtol=rounding, atol=rounding
        )
    # Each worker has a P-th of the state. Joined, it is the leaf's, raveled and padded with zeros.
    whole, parts = (jax.tree.leaves(end.opt_state[1]) for end in ends)
    for had, have in zip(whole, parts, strict=True):
        if had.ndim == 0:
            assert have.shape == (size,)
        else:
            width = -(-had.size // size)
            assert {shard.data.size for shard in have.addressable_shards} == {width}
            joined = np.asarray(have, np.float64).reshape(-1)
            np.testing.assert_allclose(joined[: had.size], np.asarray(had, np.float64).reshape(-1), 2**-7, 1e-6)


@pytest.mark.parametrize(("size", "transport"), [(1, "vmap"), (5, "vmap"), (8, "pmap"), (4, "shard_map unchecked")])
@pytest.mark.full
def test_sharded_everywhere(size: int, transport: str):
    """Two updates in one program, which also makes the state."""
    params, tx = parameters(jnp.float32), jsparse.sharded(optax.adam(0.1), AXIS)

    def twice(optimizer, params):
        state = optimizer.init(params)
        for step in range(2):
            updates, state = optimizer.update(gradients(params, step), state, params)
        return updates

    stacked = on_workers(functools.partial(twice, tx), size, transport)(params)
    expected = jax.jit(functools.partial(twice, optax.adam(0.1)))(params)
    for name, whole in expected.items():
        mine = np.asarray(stacked[name])
        np.testing.assert_array_equal(mine, np.broadcast_to(mine[:1], mine.shape))
        np.testing.assert_allclose(mine[0], np.asarray(whole), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("along", quick([("nodes", "gpus"), "gpus"], ("nodes", "gpus")), ids=str)
def test_over_two_levels(along):
    """After a preset of two levels: parts are shared out among all workers or inside each node."""
    params, axes = {"b": jnp.ones(7), "w": jnp.linspace(-1, 1, 600).reshape(20, 30)}, ("nodes", "gpus")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), axes)
    ends = []
    for optimizers in (
        [optax.lars(0.1), optax.adam(0.1)],
        [jsparse.lars(along, 0.1), jsparse.sharded(optax.adam(0.1), along)],
    ):
        step = jsparse.train_step(loss_fn, optax.chain(jsparse.torus(*axes), *optimizers), mesh, axes)
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, jnp.ones(6))
        ends.append(state)
    for name in params:
        np.testing.assert_allclose(ends[1].params[name], ends[0].params[name], 2e-6, 2e-6)
    parts = 6 if along == axes else 3
    (moment,) = {leaf.shape for leaf in jax.tree.leaves(ends[1].opt_state[2]) if leaf.ndim == 2}
    assert moment == (600, 1)
    assert {
        shard.data.shape for leaf in jax.tree.leaves(ends[1].opt_state[2]) for shard in leaf.addressable_shards
    } == {
        (1,),
        (-(-7 // parts),),
        (600 // parts, 1),
    }


@pytest.mark.full
def test_a_sharded_state_in_a_checkpoint(tmp_path):
    """A run that orbax saved and restored goes on with the same bits, and compiles once."""
    chain = optax.chain(jsparse.oktopk(AXIS, density=0.1), jsparse.sharded(optax.adamw(0.1), AXIS))
    step = jsparse.train_step(loss_fn, chain, transports.mesh(3), AXIS)
    batch = jnp.linspace(0.5, 1.5, 3)
    state, _ = step(step.init({"b": jnp.ones(7), "w": jnp.ones((3, 4))}), batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step1", state)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpointer.restore(tmp_path / "step1", target)
    jax.tree.map(np.testing.assert_array_equal, state, restored)
    jax.tree.map(np.testing.assert_array_equal, step(state, batch), step(restored, batch))
    assert step._run._cache_size() == 1


ELEMENTWISE = {
    "adabelief": optax.adabelief(0.1),
    "adagrad": optax.adagrad(0.1),
    "clip": optax.clip(1.0),
    "injected": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.piecewise_interpolate_schedule("linear", 0.1, {3: 0.1})
    ),
    "lion": optax.lion(0.1),
    "nadam": optax.nadam(0.1),
    "plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "radam": optax.radam(0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9, centered=True),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
}
MIXING = {
    "adafactor": optax.adafactor(0.1),
    # In their parts of leaves nothing is factored.
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "lbfgs": optax.scale_by_lbfgs(),
    "muon": optax.contrib.muon(0.1),
    "novograd": optax.novograd(0.1),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "ours": jsparse.lars(AXIS, 0.1),
    "preset": optax.chain(jsparse.topk_allgather(AXIS, density=0.1), optax.sgd(0.1)),
}


def updated_once(tx, size: int = 2):
    params = {"b": jnp.ones(7), "w": jnp.ones((3, 4))}

    def run(_):
        return tx.update(params, tx.init(params), params, value=jnp.float32(1))[0]

    return jax.eval_shape(jax.vmap(run, axis_name=AXIS), jnp.arange(size))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name: str):
    assert updated_once(jsparse.sharded(ELEMENTWISE[name], AXIS))["w"].shape == (2, 3, 4)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_optimizers_are_refused(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"mixes elements, by '.*Put what takes norms"):
            updated_once(jsparse.sharded(MIXING[name], AXIS))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.linalg.inv(x),
        lambda x: jnp.linalg.qr(x)[0],
        lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
        lambda x: lax.top_k(x, 4)[0],
        lambda x: x[::-1],
    ],
    ids=["inv", "qr", "pad", "window", "top_k", "reversed"],
)
def test_what_keeps_a_shape_may_mix(fn):
    assert mixing_primitive(fn, jnp.ones((4, 4)))


# Traffic.


def sent(fn, *args, size: int):
    traffic = jsparse.traffic(fn, *args, axis_sizes={AXIS: size})
    assert all(part.name == "all_gather" for part in traffic.parts)
    assert len(traffic.parts) <= 1
    return traffic.bytes, traffic.messages


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (3, 2), (8, 3), (64, 6)])
def test_traffic_is_as_stated(size: int, messages: int):
    rows = jax.ShapeDtypeStruct((50, 5), jnp.float32)
    # Each row has 5 float32 and 5 bools.
    stated = (size - 1) * -(-50 // size) * 5 * (4 + 1), messages
    assert sent(lambda x: jsparse.in_parts(lambda x: (x, x > 0), AXIS, x), rows, size=size) == stated

    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(9, 7), (130,), (), (5,), (0, 3)]]
    adam = jsparse.sharded(optax.adam(0.1), AXIS)
    stated = 4 * (size - 1) * sum(-(-int(np.prod(leaf.shape)) // size) for leaf in leaves), messages
    assert sent(lambda u: adam.update(u, adam.init(u)), leaves, size=size) == stated


@pytest.mark.parametrize(("size", "pieces"), [(8, 21), (128, 3)])
def test_traffic_of_trust_ratios(size: int, pieces: int):
    """Two words are sent for each piece of the worker that has most of ResNet-50's pieces."""
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in resnet50()]
    ratio = jsparse.scale_by_trust_ratio(AXIS)
    messages = (size - 1).bit_length()
    stated = 4 * 2 * (size - 1) * pieces, messages
    assert sent(lambda u, p: ratio.update(u, ratio.init(p), p), leaves, leaves, size=size) == stated
    assert pieces <= 161 / size + 3


def test_traffic_of_tasks_is_that_of_the_longest_share():
    tasks = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (10, 6, 5, 1)]
    # One worker has the tasks of 10 and 1, the other those of 6 and 5.
    for fn, words in [(jnp.sum, 2), (lambda x: x, 11)]:
        program = lambda *tasks, fn=fn: jsparse.map_in_parts(fn, AXIS, tasks)  # noqa: E731
        assert sent(program, *tasks, size=2) == (4 * words, 1)
