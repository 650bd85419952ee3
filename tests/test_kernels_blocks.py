"""Tests the selections in blocks: their kernels in Pallas's interpreter, bit for bit.

Compares with the plain forms and with numpy, and lowers the kernels for CUDA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
import oracles
from gpus import abstract, lowered
from jsparse._vector.random import key_of, uniform, words_of
from jsparse.bench import select as bench_select
from jsparse.select.bucketed import most_of, quotas
from kernels_pallas._triton import call
from kernels_pallas.select_above.triton import ints
from kernels_pallas.select_block_top_k import LONGEST, fits_kernel
from kernels_pallas.select_block_top_k.triton import BlocksPlan, _stage
from tiers import quick

TINY = np.finfo(np.float32).tiny
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, np.nan, np.inf, -np.inf, 1e-40, -1e-40, TINY, -TINY, 3.4e38, -3.4e38]
INPUTS = {
    "gaussian": lambda n, rng: rng.standard_normal(n),
    "layered": lambda n, rng: bench_select.draw("layered", n, 0),
    "ties": lambda n, rng: rng.integers(-3, 4, n),
    "constant": lambda n, rng: np.full(n, -2.0),
    "zeros": lambda n, rng: np.zeros(n),
    "few": lambda n, rng: np.where(np.arange(n) % 37 == 0, 3.0, 0.0),
    "scales": lambda n, rng: rng.standard_normal(n) * rng.choice([0, 1e-30, 1, 1e30], n),
    "special": lambda n, rng: rng.choice(SPECIAL, n),
    "NaN": lambda n, rng: np.where(np.arange(n) % 3, rng.standard_normal(n), np.nan),
}
# The length n, the length of a block, and the largest quota.
CASES = [
    (1, 1, 1),
    (1, 4096, 3),
    (7, 2, 1),
    (300, 60, 6),
    (1003, 64, 64),
    (4 * 4096, 512, 20),
    (4 * 4096 + 1100, 512, 5),
    (9001, 4096, 64),
    (20_000, 8000, 100),
]


def make(name: str, n: int) -> np.ndarray:
    return INPUTS[name](n, np.random.default_rng(n)).astype(np.float32)


def shares(n: int, block: int, most: int) -> np.ndarray:
    """Quotas from 0 to ``most``, and at most the lengths of the blocks."""
    begins = np.arange(0, n, block)
    drawn = np.random.default_rng(1).integers(0, most + 1, len(begins))
    drawn[0] = most
    return np.minimum(drawn, n - begins).astype(np.int32)


def expected_run(x: np.ndarray, chosen: np.ndarray, capacity: int):
    unused = (0, capacity - len(chosen))
    return np.pad(x[chosen], unused), np.pad(chosen, unused, constant_values=len(x)).astype(np.int32)


def assert_same_bits(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def forms(function, **static):
    return [jax.jit(functools.partial(function, **static, implementation=name)) for name in ("interpret", "xla")]


@pytest.mark.parametrize("case", quick(CASES, (300, 60, 6)), ids=lambda case: "-".join(map(str, case)))
def test_block_top_k(case):
    n, block, most = case
    quota = shares(n, block, most)
    capacity = max(int(quota.sum()), 1)
    kernel, plain = forms(kernels_pallas.select_block_top_k, block=block, most=most, capacity=capacity)
    for name in INPUTS:
        x = make(name, n)
        normal = np.where(np.abs(x) >= TINY, x, 0)
        parts = [normal[begin : begin + block] for begin in range(0, n, block)]
        chosen = [i * block + oracles.top_k(part, k) for i, (part, k) in enumerate(zip(parts, quota, strict=True))]
        chosen = np.concatenate(chosen)
        want = *expected_run(x, chosen, capacity), np.int32(len(chosen))
        assert_same_bits(kernel(x, quota), want)
        assert_same_bits(plain(x, quota), want)


# The length n, the length of a bucket, and k.
RANDOM = [(1, 32, 1), (1003, 64, 300), (1003, 96, 50), (4 * 4096 + 700, 512, 170), (9001, 4096, 90), (1003, 32, 900)]


@pytest.mark.parametrize("rule", quick(["exact", "capped"], "exact"))
@pytest.mark.parametrize("case", quick(RANDOM, (1003, 96, 50)), ids=lambda case: "-".join(map(str, case)))
def test_stochastic(case, rule: str):
    n, block, k = case
    static = {"block": block, "most": most_of(n, k, block), "capacity": k, "exact": rule == "exact"}
    kernel, plain = forms(kernels_pallas.select_stochastic, **static)
    for step, name in enumerate(INPUTS):
        x, key = make(name, n), key_of(0, step)
        args = x, quotas(n, k, block, jnp.int32(step)), words_of(key)
        got = kernel(*args)
        assert_same_bits(got, plain(*args))
        taken = np.count_nonzero(got[1] < n)
        assert taken <= min(k, int(got[2]))
        if name not in ("special", "NaN"):
            numbers = np.asarray(uniform(key, n))
            chosen = oracles.stochastic_in_buckets(x, k, numbers, bucket=block, step=step, rule=rule)
            assert_same_bits(got[:2], expected_run(x, chosen, k))


def test_a_nan_changes_no_other_draw():
    """It counts as zero. An infinity has its block draw nothing."""
    x = make("gaussian", 128)
    static = {"block": 32, "most": 4, "capacity": 16, "exact": True}
    select = forms(kernels_pallas.select_stochastic, **static)[1]

    def chosen(value: float) -> np.ndarray:
        changed = np.where(np.arange(128) == 40, np.float32(value), x)
        indices = np.asarray(select(changed, np.full(4, 4, np.int32), words_of(key_of(0)))[1])
        return indices[indices < 128]

    zero = chosen(0)
    np.testing.assert_array_equal(chosen(np.nan), zero)
    np.testing.assert_array_equal(chosen(np.inf), zero[zero // 32 != 1])


def test_a_block_keeps_to_its_slots():
    """A block must not write to the slots of the next one, which another program may hold."""
    plan = BlocksPlan.of_blocks(n=256, capacity=16, length=128, most=8)
    x = jnp.asarray(np.pad(np.ones(128, np.float32), (0, 128)))
    (values, indices), counts, found = call(
        functools.partial(_stage, find=lambda held: [column != 0 for column in held.columns], plan=plan),
        x,
        jnp.array([5, 8]),
        (),
        name="stage",
        out=(plan.buffers, ints(2), ints(2)),
        grid=1,
        warps=1,
        interpret=True,
    )
    np.testing.assert_array_equal(counts, [5, 0])
    np.testing.assert_array_equal(found, [128, 0])
    np.testing.assert_array_equal(indices[:5], np.arange(5))
    assert (values[:5] == 1).all()
    assert not (values[5:] == 1).any()


# Both operations, and their arguments for four workers.
def both(name: str, n: int = 200):
    rng = np.random.default_rng(0)
    x, quota = (jnp.asarray(rng.standard_normal((4, n)), jnp.float32), jnp.array(shares(n, 64, 4)))
    words = jnp.asarray(rng.integers(0, 2**32, 2, np.uint32))
    static = {"block": 64, "most": 4, "capacity": 16}
    if name == "top_k":
        return functools.partial(kernels_pallas.select_block_top_k, **static), x, (quota,)
    return functools.partial(kernels_pallas.select_stochastic, exact=True, **static), x, (quota, words)


@pytest.mark.parametrize("name", ["top_k", "stochastic"])
@pytest.mark.full
def test_under_vmap(name: str):
    select, x, (quota, *others) = both(name)
    quotas = jnp.stack([quota, quota // 2, 0 * quota, quota])
    for axes, args in (((0, None), (x, quota)), ((None, 0), (x[0], quotas)), ((0, 0), (x, quotas))):
        got, expected = (
            jax.jit(jax.vmap(lambda *args, form=form: select(*args, *others, implementation=form), axes))(*args)
            for form in ("interpret", "xla")
        )
        assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["top_k", "stochastic"])
@pytest.mark.full
def test_under_shard_map(name: str):
    """Pallas's interpreter cannot track variance in loops, so with tracking it is only lowered."""
    select, x, others = both(name)
    split = PartitionSpec("data")

    def on_each_worker(form: str, mesh, check_vma: bool):
        def local(x, *others):
            values, indices, count = select(x, *others, implementation=form)
            return values, indices, count[None]

        specs = {"in_specs": (split, *(PartitionSpec() for _ in others)), "out_specs": (split,) * 3}
        return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))

    args, mesh = (x.reshape(-1), *others), Mesh(np.array(jax.devices()[:4]), ("data",))
    got, expected = (on_each_worker(form, mesh, False)(*args) for form in ("interpret", "xla"))
    assert_same_bits(got, expected)
    assert_same_bits(expected, on_each_worker("xla", mesh, True)(*args))
    for check_vma in (True, False):
        form = on_each_worker("triton", abstract((4,), ("data",)), check_vma)
        assert lowered(form, *(jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args)).count("xla.gpu.triton") == 3


def test_float64_and_long_blocks_are_plain():
    def kernels(dtype, n: int, block: int) -> int:
        quota = jnp.ones(-(-n // block), jnp.int32)
        select = functools.partial(
            kernels_pallas.select_block_top_k, block=block, most=1, capacity=9, implementation="interpret"
        )
        traced = jax.make_jaxpr(select)(jnp.zeros(n, dtype), quota)
        assert [out.dtype for out in traced.out_avals] == [dtype, jnp.int32, jnp.int32]
        return str(traced).count("pallas_call[")

    assert kernels(jnp.float32, 100, 60) == 3
    assert kernels(jnp.float32, 20_000, LONGEST + 1) == 0
    assert kernels(jnp.float32, 0, 60) == 0
    with jax.enable_x64(True):
        assert kernels(jnp.float64, 100, 60) == 0
    # 64 slots for each of 36 million blocks: their places are no int32.
    assert not fits_kernel(2**31 - 1, 60, 59)
    assert fits_kernel(2**31 - 1, 60, 6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": jnp.ones((2, 2))}, "ravel"),
        ({"quota": [1, 2, 3]}, "one number for each block of 32 elements: shape \\(2,\\)"),
        ({"block": 0}, "block is 0"),
        ({"most": 0}, "most is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"implementation": "mosaic"}, "must be one of 'xla', 'triton', 'interpret'"),
    ],
)
def test_bad_input_is_refused(change: dict, message: str):
    given = {"x": jnp.ones(40), "quota": [1, 1], "block": 32, "most": 1, "capacity": 2}
    with pytest.raises(ValueError, match=message):
        kernels_pallas.select_block_top_k(**(given | change))
    with pytest.raises(ValueError, match=message):
        kernels_pallas.select_stochastic(**(given | {"words": jnp.zeros(2, jnp.uint32), "exact": True} | change))


def test_stochastic_takes_blocks_of_whole_words():
    with pytest.raises(ValueError, match="block is 60; it must be a multiple of 32"):
        kernels_pallas.select_stochastic(
            jnp.ones(60), [1], jnp.zeros(2, jnp.uint32), block=60, most=1, capacity=1, exact=True
        )
