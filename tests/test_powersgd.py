"""PowerSGD against its formulas, and what its factors must survive."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jsparse
import oracles
import transports
from jsparse._engine.memory import ErrorFeedback
from jsparse._engine.space import Shards
from jsparse._engine.synchroniser import Composition
from jsparse._presets.powersgd import LowRank, _orthonormal
from jsparse._vector import parts
from tiers import full, quick
from transports import AXIS

# Rows and columns of the compressed ones, in the order of jax.tree.leaves.
MATRICES = {"conv": (72, 16), "kernel": (60, 24), "twin": (60, 24)}
SHAPES = {"bias": (40,), "conv": (3, 3, 8, 16), "kernel": (60, 24), "small": (4, 5), "twin": (60, 24)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
RANK = 3
preset = functools.partial(jsparse.powersgd, AXIS, rank=RANK)


def gradients(size: int, steps: int, seed: int = 0, dtype: type = np.float32) -> list[dict[str, np.ndarray]]:
    """Matrices of a few strong directions, which turn slowly, and noise."""
    rng = np.random.default_rng(seed)
    strong = {name: rng.standard_normal((6, sum(shape))) for name, shape in MATRICES.items()}
    run = []
    for step in range(steps):
        now = {name: rng.standard_normal((size, *shape)) for name, shape in SHAPES.items()}
        for name, (rows, _) in MATRICES.items():
            turned = strong[name] + 0.05 * step * rng.standard_normal(strong[name].shape)
            sizes = 4.0 * 2.0 ** -np.arange(6)
            low = np.einsum("k,ki,kj->ij", sizes, turned[:, :rows], turned[:, rows:])
            now[name] = now[name] * 0.3 + low.reshape(SHAPES[name])
        run.append({name: x.astype(dtype) for name, x in now.items()})
    return run


def start(tx, size: int, params=PARAMS):
    state = jax.jit(jax.vmap(lambda _: tx.init(params), axis_name=AXIS))(jnp.arange(size))
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS))


def flat(leaves, size: int) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).reshape(size, -1) for x in jax.tree.leaves(leaves)], axis=1)


@pytest.mark.parametrize("size", quick([1, 2, 3, 8], 3))
@pytest.mark.parametrize("subtract", quick(["local", "mean"], "local"))
@pytest.mark.parametrize("dtype, count, close", [full(np.float32, 16, 1e-4), (np.float64, 20, 1e-12)])
@pytest.mark.parametrize("block", quick([1, 200, parts.BLOCK, None], 200, None))
def test_it_is_the_published_algorithm(
    subtract: str, size: int, dtype: type, count: int, close: float, block: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Vectors and small matrices are averaged; the mean residual is exact.

    With one worker, rounding errors of float32 grow from 1e-5 to 1e-4 from step 16 to step 20, so
    the last steps are compared in float64. Matrices are multiplied in blocks of three rows, in
    blocks of which the last is incomplete, in one, and as on other devices than CPUs.
    """
    monkeypatch.setattr(parts, "BLOCK", block or parts.BLOCK)
    monkeypatch.setattr(parts, "FEW", RANK)
    if block is None:
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    with jax.enable_x64(dtype == np.float64):
        _compare(subtract, size, gradients(size, count, dtype=dtype), close)


def _compare(subtract: str, size: int, steps: list[dict[str, np.ndarray]], close: float) -> None:
    dtype = steps[0]["conv"].dtype
    state, update = start(preset(subtract=subtract), size, {name: jnp.zeros(SHAPES[name], dtype) for name in SHAPES})
    q = dict(zip(MATRICES, (np.asarray(q)[0] for q in state.buckets[0].reducer.q), strict=True))
    want = {
        name: oracles.powersgd([g[name].reshape(size, *MATRICES[name]) for g in steps], q[name], subtract) for name in q
    }
    before = np.zeros((size, sum(x.size for x in jax.tree.leaves(PARAMS))))
    for number, given in enumerate(steps):
        updates, state = update(given, state)
        residual = np.asarray(state.buckets[0].residual, np.float64)
        offsets = np.cumsum([0, *(x.size for x in jax.tree.leaves(PARAMS))])
        kept = {name: residual[:, a:b] for name, a, b in zip(sorted(SHAPES), offsets, offsets[1:], strict=False)}
        for name, expected in want.items():
            got = np.asarray(updates[name])
            assert (got == got[:1]).all()
            scale = np.abs(given[name]).max()
            np.testing.assert_allclose(got[0].reshape(MATRICES[name]), expected[number].update, atol=close * scale)
            np.testing.assert_allclose(
                kept[name], expected[number].residual.reshape(size, -1), atol=close * scale * (number + 1)
            )
        for name in ("bias", "small"):
            np.testing.assert_allclose(updates[name][0], given[name].mean(0), rtol=1e-5, atol=1e-6)
            assert subtract == "mean" or not kept[name].any()
        acc = flat(given, size) + before
        left = flat(updates, size)[0] + residual.mean(0) - acc.mean(0)
        assert np.abs(left).max() <= 1e-6 * np.abs(acc).max()
        before = residual


def test_what_it_sends():
    """Two all-reduces, whatever the number of matrices, and the exchange that opens each step."""
    state, update = start(preset(), 8)
    _, state = update(gradients(8, 1)[0], state)
    alone = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    traffic = jsparse.traffic(preset().update, PARAMS, alone, axis_sizes={AXIS: 8})
    rows, columns = (sum(shape[side] for shape in MATRICES.values()) for side in (0, 1))
    payloads = [2, RANK * rows + 40 + 20, RANK * columns]
    assert [part.name for part in traffic.parts] == ["pmax", "psum", "psum"]
    assert [part.cost.bytes for part in traffic.parts] == [4 * payload * 2 * 7 // 8 for payload in payloads]
    assert traffic.messages == 3 * 2 * 3
    # Each message is rounded up to words.
    assert int(state.report.words[0, 0]) == sum(-(-part.cost.bytes // 4) for part in traffic.parts)
    small = {"w": jnp.zeros((4, 5)), "b": jnp.zeros(3)}
    vectors = jsparse.traffic(lambda g: preset().update(g, preset().init(g)), small, axis_sizes={AXIS: 8})
    assert [part.name for part in vectors.parts] == ["pmax", "psum"]


@pytest.mark.parametrize("rank", quick([24, 100], 24))
def test_at_full_rank_it_is_the_dense_mean(rank: int):
    """The residuals have a mean of zero: workers differ outside the mean's columns."""
    state, update = start(preset(rank=rank, min_rate=0), 3)
    for given in gradients(3, 4):
        updates, state = update(given, state)
        for name, got in updates.items():
            np.testing.assert_allclose(got[0], given[name].mean(0), atol=2e-5 * np.abs(given[name]).max())
        assert np.abs(np.mean(state.buckets[0].residual, axis=0)).max() < 1e-4


def rank_one(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    given = {name: np.zeros((size, *shape), np.float32) for name, shape in SHAPES.items()}
    given["kernel"][:] = np.outer(rng.standard_normal(60), rng.standard_normal(24))
    given["twin"][:, 3, 5] = 1  # One element.
    return given


def test_zeros_and_low_ranks_stay_finite_and_forget_no_direction():
    """After steps of zeros and of rank one, all of the rank is sent as before."""
    size = 3
    zeros = {name: np.zeros((size, *shape), np.float32) for name, shape in SHAPES.items()}
    state, update = start(preset(), size)
    first = state.buckets[0].reducer
    for given in (zeros, zeros, rank_one(size), rank_one(size)):
        updates, state = update(given, state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
        for name, got in updates.items():
            np.testing.assert_allclose(got[0], given[name][0], atol=1e-5)
        assert np.abs(state.buckets[0].residual).max() < 1e-5
        if not given["twin"].any():
            jax.tree.map(np.testing.assert_array_equal, state.buckets[0].reducer, first)
    for q in state.buckets[0].reducer.q:
        assert np.linalg.matrix_rank(np.asarray(q)[0], tol=1e-3) == RANK
    for given in gradients(size, 12):
        updates, state = update(given, state)
    low = {name: np.asarray(updates[name])[0].reshape(shape) for name, shape in MATRICES.items()}
    assert all(np.linalg.matrix_rank(x, tol=1e-3 * np.abs(x).max()) == RANK for x in low.values())


@pytest.mark.parametrize("scale", quick([1e-30, 1e-12, 1e30, 3e38], 1e-30, 3e38))
def test_magnitudes_neither_overflow_nor_vanish(scale: float):
    state, update = start(preset(), 2)
    for _ in range(3):
        given = jax.tree.map(lambda x: np.float32(scale) * np.sign(x), rank_one(2))
        updates, state = update(given, state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
        if scale < 3e38:
            np.testing.assert_allclose(updates["kernel"][0], given["kernel"][0], atol=1e-5 * scale)


def test_bases_are_orthonormal():
    """Of ordinary columns, of nearly dependent ones, and of zeros."""
    rng = np.random.default_rng(0)
    ordinary = rng.standard_normal((50, 6))
    near = ordinary[:, :1] + 1e-6 * rng.standard_normal((50, 6))
    twice = np.concatenate([ordinary[:, :3], ordinary[:, :3]], axis=1)
    steep = ordinary * 10.0 ** -np.arange(0, 24, 4)
    for x in (ordinary, near, twice, steep):
        basis = np.asarray(_orthonormal(jnp.asarray(x[None], jnp.float32)))[0].astype(np.float64)
        gram = basis.T @ basis
        lengths = np.diag(gram)
        assert set(np.round(lengths, 5)) <= {0.0, 1.0}
        np.testing.assert_allclose(gram, np.diag(lengths), atol=1e-5)
        np.testing.assert_allclose(basis @ (basis.T @ x), x, atol=1e-5 * np.abs(x).max())
    assert not np.asarray(_orthonormal(jnp.zeros((2, 5, 3)))).any()


@pytest.mark.parametrize("subtract", quick(["local", "mean"], "local"))
def test_a_bad_step_changes_no_bit(subtract: str):
    size = 3
    state, update = start(preset(subtract=subtract), size)
    before, given = gradients(size, 2)
    _, state = update(before, state)
    for value in (np.nan, np.inf):
        spoilt = {name: x.copy() for name, x in given.items()}
        spoilt["kernel"][1, 3, 4] = value
        updates, after = update(spoilt, state)
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
        jax.tree.map(np.testing.assert_array_equal, after.buckets, state.buckets)
        np.testing.assert_array_equal(after.step, state.step)


@pytest.mark.full
def test_narrow_leaves():
    """Factors are float32; updates have the leaves' types."""
    size = 2
    narrow = PARAMS | {"kernel": PARAMS["kernel"].astype(jnp.bfloat16), "bias": PARAMS["bias"].astype(jnp.float16)}
    state, update = start(preset(), size, narrow)
    wide, update_wide = start(preset(), size)
    assert {q.dtype for q in state.buckets[0].reducer.q} == {jnp.dtype(jnp.float32)}
    for given in gradients(size, 3):
        given = {name: np.asarray(jnp.asarray(x, narrow[name].dtype)) for name, x in given.items()}
        updates, state = update(given, state)
        wider, wide = update_wide({name: x.astype(np.float32) for name, x in given.items()}, wide)
        for name, got in updates.items():
            assert got.dtype == narrow[name].dtype
            np.testing.assert_array_equal(got.astype(jnp.float32), wider[name].astype(got.dtype).astype(jnp.float32))
    np.testing.assert_array_equal(state.buckets[0].residual, wide.buckets[0].residual)


@pytest.mark.full
def test_double_precision():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float64), PARAMS)
        state, update = start(preset(), 3, params)
        before = 0
        for given in gradients(3, 3):
            given = jax.tree.map(lambda x: x.astype(np.float64), given)
            updates, state = update(given, state)
            residual = np.asarray(state.buckets[0].residual)
            acc = flat(given, 3) + before
            assert np.abs(flat(updates, 3)[0] + residual.mean(0) - acc.mean(0)).max() <= 1e-14 * np.abs(acc).max()
            before = residual


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((60, 24), (60, 24)),
        ((3, 3, 8, 16), (72, 16)),  # A convolution in JAX's order, and in PyTorch's.
        ((16, 8, 3, 3), (16, 72)),
        ((64, 8, 8), (64, 64)),  # Attention: to heads, and from heads.
        ((8, 8, 64), (64, 64)),
        ((1, 40, 30), (40, 30)),
        ((4, 5), None),
        ((500,), None),
        ((1, 500), None),
        ((), None),
    ],
)
def test_which_leaves_are_matrices(shape: tuple[int, ...], matrix: tuple[int, int] | None):
    found = LowRank(rank=3)._matrix(shape)
    assert (found and found[:2]) == matrix
    assert found is None or found.rank == 3


def test_what_is_refused():
    for wrong, message in (
        ({"rank": 0}, "rank is 0"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"min_rate": -1}, "min_rate is -1"),
        ({"min_rate": float("nan")}, "min_rate is nan"),
        ({"subtract": "all"}, "subtract is 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            jsparse.powersgd(AXIS, **wrong)
    with pytest.raises(ValueError, match="not raveled"):
        jax.vmap(lambda _: preset().init(jnp.zeros(600)), axis_name=AXIS)(jnp.arange(2))
    levels = Composition(
        jsparse.AxisComm("nodes"), LowRank(), ErrorFeedback(), space=Shards(intra=jsparse.AxisComm("gpus"))
    )
    twice = jax.vmap(jax.vmap(lambda _: levels.init(PARAMS), axis_name="gpus"), axis_name="nodes")
    with pytest.raises(ValueError, match="name both axes as one"):
        twice(jnp.zeros((2, 2)))


def test_a_phase_beside_one_that_goes_by_leaves():
    """What is no matrix is a vector by itself then, and goes densely."""
    sparse = jsparse.topk_allgather(AXIS, density=0.1, scope="leaf")
    tx = jsparse.phases(((2, jsparse.powersgd(AXIS, rank=1, min_rate=0)), sparse))
    grads = {"w": jnp.outer(jnp.arange(1.0, 9), jnp.arange(1.0, 13)), "b": jnp.arange(12.0)}
    every = jax.tree.map(lambda x: jnp.stack([x, x]), grads)
    state = jax.vmap(lambda _: tx.init(grads), axis_name=AXIS)(jnp.arange(2))
    updates, _ = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(every, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, every)


@pytest.mark.parametrize("sizes", quick([(8, 3), (3, 8), (2, 4), (4, 2), (1, 7)], (8, 3)))
def test_with_another_number_of_workers_the_factors_stay(sizes: tuple[int, int]):
    old, new = sizes
    state, update = start(preset(), old)
    for given in gradients(old, 2):
        _, state = update(given, state)
    whole = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), state)
    moved = jsparse.reshard(preset(), whole, PARAMS, transports.mesh(new), AXIS)
    for before, after in zip(state.buckets[0].reducer.q, moved.buckets[0].reducer.q, strict=True):
        rows = np.asarray(after).reshape(new, *before.shape[1:])
        np.testing.assert_array_equal(rows, np.broadcast_to(before[:1], rows.shape))


def test_it_pickles_and_compares():
    tx = preset(seed=3, subtract="mean")
    again = pickle.loads(pickle.dumps(tx))
    assert again.synchroniser == tx.synchroniser
    assert again.synchroniser != preset(seed=4, subtract="mean").synchroniser
    hash(tx.synchroniser)


@pytest.mark.full
def test_dense_steps_first():
    """As PyTorch's ``start_powerSGD_iter``: the residual begins with the first low-rank step."""
    size = 3
    state, update = start(jsparse.phases(((2, jsparse.dense(AXIS)), preset())), size)
    alone, update_alone = start(preset(), size)
    for number, given in enumerate(gradients(size, 4)):
        updates, state = update(given, state)
        if number < 2:
            np.testing.assert_allclose(flat(updates, size)[0], flat(given, size).mean(0), rtol=1e-5, atol=1e-5)
            assert not state.buckets[0].residual.any()
        else:
            expected, alone = update_alone(given, alone)
            np.testing.assert_allclose(flat(updates, size), flat(expected, size), atol=1e-4)


@functools.cache
def digits():
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:1600]
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def loss_fn(params, batch):
    x, y = batch
    hidden = jax.nn.relu(x @ params["in"] + params["b"][None])
    logits = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


def trained(tx, epochs: int = 6) -> float:
    rng = np.random.default_rng(1)
    params = {
        "in": jnp.asarray(rng.standard_normal((64, 96)) / 8, jnp.float32),
        "b": jnp.zeros(96),
        "out": jnp.asarray(rng.standard_normal((96, 10)) / 10, jnp.float32),
    }
    step = jsparse.train_step(loss_fn, optax.chain(tx, optax.sgd(0.1, momentum=0.9)), transports.mesh(4), AXIS)
    state, (x, y) = step.init(params), digits()
    for _ in range(epochs):
        for part in np.split(rng.permutation(len(y)), 20):
            state, _ = step(state, (x[part], y[part]))
    return float(loss_fn(state.params, digits()))


@pytest.mark.full
@pytest.mark.parametrize(("subtract", "piled_up", "lost"), [("local", (0, 10), 1e-3), ("mean", (5000, 7000), 0.5)])
def test_10_000_steps_of_constant_gradients(subtract: str, piled_up: tuple[float, float], lost: float):
    """Of four workers whose gradients differ by as much as they have in common.

    With ``"mean"`` the residuals pile up, and rounding loses part of one mean gradient; the
    updates still come to the mean gradient.
    """
    size, steps, rng = 4, 10_000, np.random.default_rng(0)
    given = (rng.standard_normal((6, 8)) + rng.standard_normal((size, 6, 8))).astype(np.float32)
    tx = jsparse.powersgd(AXIS, rank=2, min_rate=0, subtract=subtract)

    def run(gradient):
        def step(state, _):
            update, state = tx.update([gradient], state)
            return state, update[0]

        return jax.lax.scan(step, tx.init([gradient]), None, length=steps)

    state, updates = jax.jit(jax.vmap(run, axis_name=AXIS))(given)
    residual = np.asarray(state.buckets[0].residual, np.float64).reshape(given.shape)
    updates, mean = np.asarray(updates[0], np.float64), given.mean(0, dtype=np.float64)
    norm, norms = np.linalg.norm(mean), np.linalg.norm(given, axis=(1, 2))
    low, high = piled_up
    assert low < np.mean(np.linalg.norm(residual, axis=(1, 2)) / norms) < high
    assert np.linalg.norm(residual.mean(0)) < 5 * norm
    assert np.linalg.norm(steps * mean - updates.sum(0) - residual.mean(0)) < lost * norm
    assert np.linalg.norm(updates[-1000:].mean(0) - mean) < 0.01 * norm


@pytest.mark.full
def test_it_trains():
    dense = trained(jsparse.dense(AXIS))
    assert dense < 0.15
    for subtract in ("local", "mean"):
        assert trained(jsparse.powersgd(AXIS, rank=2, subtract=subtract)) < dense + 0.05


@pytest.mark.parametrize("subtract", quick(["local", "mean"], "local"))
def test_memory(subtract: str):
    """A step updates the residual in place, and makes no array as long as a matrix beside it."""
    shapes = [(512, 512)] * 4 + [(256, 1024)] * 2 + [(512,)]
    n = sum(int(np.prod(shape)) for shape in shapes)
    mesh, along, tx = transports.mesh(2), PartitionSpec(AXIS), jsparse.powersgd(AXIS, subtract=subtract)
    state = jax.eval_shape(lambda: jsparse.init(tx, [jnp.zeros(shape) for shape in shapes], mesh, AXIS))
    step = jax.shard_map(
        lambda grads, state: tx.update([x[0] for x in grads], state),
        mesh=mesh,
        in_specs=(along, along),
        out_specs=(PartitionSpec(), along),
    )
    given = [jax.ShapeDtypeStruct((2, *shape), jnp.float32, sharding=NamedSharding(mesh, along)) for shape in shapes]
    memory = jax.jit(step, donate_argnums=1).lower(given, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * n
    assert memory.temp_size_in_bytes < 4 * 512 * 512
