"""Deep Gradient Compression, against the paper's algorithm and against momentum SGD."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jsparse
import oracles
import scenarios
import transports
from algorithms import Row
from tiers import full, quick
from transports import AXIS, N

SIZE = 3
DENSITY = 0.05


@functools.cache
def dgc(**kwargs) -> Row:
    select = jsparse.select.TopK(kwargs.get("density", DENSITY))
    return Row("dgc", lambda comm, density: jsparse.dgc(comm, **({"density": DENSITY, "select": select} | kwargs)))


def normal(steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_t(3, (SIZE, N)).astype(np.float32) for _ in range(steps)]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "clip_norm": 10.0},
        {"momentum": 0.5, "factor_masking": False},
    ],
    ids=str,
)
def test_it_is_the_papers_algorithm(options):
    state, update = transports.workers(dgc(**options), SIZE)
    gradients = normal(12)
    for gradient, want in zip(gradients, oracles.dgc(gradients, density=DENSITY, **options), strict=True):
        updates, state = update(transports.tree(gradient), state)
        np.testing.assert_allclose(SIZE * transports.flat(updates, SIZE)[0], want.total, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state.buckets[0].memory.velocity, want.velocity, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state.buckets[0].residual, want.residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nesterov, dense_below", [(False, 0), (True, 50), (False, 2000)])
def test_density_1_is_momentum_sgd(nesterov: bool, dense_below: int):
    """And the leaves that go densely at any density."""
    density = 1.0 if dense_below < 2000 else DENSITY
    state, update = transports.workers(dgc(density=density, nesterov=nesterov, dense_below=dense_below), SIZE)
    momentum = optax.trace(0.9, nesterov)
    expected = momentum.init(transports.zeros())
    for gradient in normal(6):
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), transports.tree(gradient))
        want, expected = momentum.update(mean, expected)
        updates, state = update(transports.tree(gradient), state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-5), updates, want)


def test_what_waited_is_not_pushed_further():
    """Factor masking: an element arrives with what it gathered since its last delivery only.

    Its gradient is constant.
    """
    for masking, arrives in ((True, 1.0), (False, 1.5)):
        state, update = transports.workers(dgc(density=1 / N, momentum=0.5, factor_masking=masking), SIZE)
        gradient = np.zeros((SIZE, N), np.float32)
        gradient[:, 700] = 1
        for _ in range(2):
            updates, state = update(transports.tree(gradient), state)
        assert transports.flat(updates, SIZE)[0, 700] == arrives


@pytest.mark.parametrize("power", quick([1, 1e25, 1e-30], 1))
def test_a_worker_clips_its_own_gradient(power: float):
    """To ``clip_norm / sqrt(P)``, all leaves together, even if their squares overflow.

    Smaller gradients pass.
    """
    state, update = transports.workers(dgc(density=1.0, momentum=0.0, clip_norm=2.0 * power), SIZE)
    gradient = np.zeros((SIZE, N), np.float32)
    gradient[0, :400] = 3 * power
    gradient[1, 500] = power
    updates, _ = update(transports.tree(gradient), state)
    want = np.zeros(N)
    want[:400] = 2 / np.sqrt(SIZE) / np.sqrt(400)
    want[500] = 1
    np.testing.assert_allclose(SIZE * transports.flat(updates, SIZE)[0] / power, want, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", quick([1.0, 1e-3], 1.0))
@pytest.mark.parametrize(
    ("dtype", "size", "magnitudes"),
    [
        (np.float32, 4, (1e-37, 1e37, 8e37, 8.6e37, 3.4e38)),
        full(np.float32, 323, (1e-37, 3e37, 2e38)),
        full(jnp.bfloat16, 4, (8.6e37, 3e38)),
        full(np.float16, 100_000, (0.01, 60_000)),
    ],
)
def test_huge_gradients_are_clipped_too(dtype, size: int, magnitudes, clip_norm: float):
    """Their norm may be above the largest float, and the reciprocal of it below the smallest."""
    tx = jsparse.dgc(AXIS, density=1.0, momentum=0.0, clip_norm=clip_norm)
    update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))
    for magnitude in magnitudes:
        updates = np.asarray(update(jnp.full((2, size), magnitude, dtype)), np.float64)
        wanted = min(magnitude, clip_norm / np.sqrt(2 * size))
        kind = jnp.finfo(dtype)
        np.testing.assert_allclose(updates, wanted, rtol=4 * float(kind.eps), atol=float(kind.smallest_subnormal))


NARROW = {"wire": jsparse.wire.Compact(jsparse.quantize.BFloat16())}
ALL_REDUCES = {
    "topk_allgather": {"allreduce": jsparse.allreduce.TopkAllGather(), **NARROW},
    "dsar": {"allreduce": jsparse.allreduce.DsarSplitAllGather(quantize=jsparse.quantize.Block8())},
    "ssar": {"allreduce": jsparse.allreduce.SsarSplitAllGather(), **NARROW},
    "ssar, doubling": {"allreduce": jsparse.allreduce.SsarRecursiveDoubling(), **NARROW},
    "gtopk": {"allreduce": jsparse.allreduce.GTopk(), **NARROW},
    "gtopk, tree": {"allreduce": jsparse.allreduce.GTopk("tree")},
    "gtopk, owner": {"allreduce": jsparse.allreduce.GTopk(put_back="owner")},
    "oktopk": {"allreduce": jsparse.allreduce.OkTopk(), **NARROW},
    "oktopk, owner": {"allreduce": jsparse.allreduce.OkTopk(put_back="owner")},
    "oktopk, server": {"allreduce": jsparse.allreduce.OkTopk(put_back="server"), **NARROW},
}


@pytest.mark.parametrize("name", quick([*ALL_REDUCES], "gtopk, owner"))
def test_factors_are_masked_where_a_workers_elements_were_delivered(name: str):
    """Not where it rounded, or took over, sums of others' elements."""
    state, update = transports.workers(dgc(**ALL_REDUCES[name]), SIZE)
    (gradient,) = normal(1)
    updates, state = update(transports.tree(gradient), state)
    selected = np.zeros((SIZE, N), bool)
    largest = np.argsort(-np.abs(gradient), axis=1, kind="stable")[:, : max(1, round(DENSITY * N))]
    np.put_along_axis(selected, largest, True, axis=1)
    applied = transports.flat(updates, SIZE)[:1] != 0
    velocity = np.asarray(state.buckets[0].memory.velocity).reshape(SIZE, N)
    np.testing.assert_array_equal(velocity == 0, selected & applied)


@pytest.mark.parametrize(
    "options",
    quick(
        [{"scope": "leaf", "dense_below": 10}, {"clip_norm": 1.0}, ALL_REDUCES["dsar"]],
        {"clip_norm": 1.0},
        ALL_REDUCES["dsar"],
    ),
    ids=["leaf", "clipped", "dsar"],
)
def test_a_bad_step_leaves_the_velocity(options):
    state, update = transports.workers(dgc(**options), SIZE)
    for gradient in scenarios.take("ordinary", SIZE, 2):
        _, state = update(transports.tree(gradient), state)
    gradient[1, 600] = np.inf
    updates, after = update(transports.tree(gradient), state)
    assert np.isnan(transports.flat(updates, SIZE)).all()
    jax.tree.map(np.testing.assert_array_equal, state.buckets, after.buckets)
    assert any(np.any(bucket.memory.velocity) for bucket in after.buckets)


@pytest.mark.full
def test_the_velocity_is_placed_with_its_worker():
    mesh = transports.mesh(SIZE)
    tx = optax.chain(jsparse.dgc(AXIS, density=DENSITY), optax.sgd(0.1))
    state = jsparse.init(tx, transports.zeros(), mesh, AXIS)
    assert state[0].buckets[0].memory.velocity.shape == (SIZE * N,)
    assert jsparse.residual(state).shape == (SIZE, N)
    ordinary = jsparse.init(jsparse.oktopk(AXIS, density=DENSITY), transports.zeros(), mesh, AXIS)
    assert not hasattr(ordinary.buckets[0].memory, "velocity")


@pytest.mark.full
def test_no_more_is_copied_than_without_a_velocity():
    """Residual and velocity are updated in place."""
    n, mesh, along = 1_000_000, transports.mesh(SIZE), PartitionSpec(AXIS)

    def memory(tx):
        leaves = [jax.ShapeDtypeStruct((n // 4,), jnp.float32)] * 4
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=along)
        grads = [jax.ShapeDtypeStruct((SIZE, n // 4), jnp.float32)] * 4
        update = jax.shard_map(
            lambda g, s: jsparse.sync(tx, [leaf[0] for leaf in g], s),
            mesh=mesh,
            in_specs=(along, along),
            out_specs=(PartitionSpec(), along),
        )
        step = jax.jit(update, donate_argnums=1)
        return step.lower(grads, jax.eval_shape(init, leaves)).compile().memory_analysis()

    select = jsparse.select.SampledThreshold(0.01)
    without, with_it = (
        memory(jsparse.topk_allgather(AXIS, density=0.01, select=select)),
        memory(jsparse.dgc(AXIS, density=0.01, select=select)),
    )
    assert with_it.temp_size_in_bytes <= without.temp_size_in_bytes + 0.1 * 4 * n
    assert with_it.alias_size_in_bytes >= without.alias_size_in_bytes + 4 * n
