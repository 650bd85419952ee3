"""Tests the compaction kernels in Pallas's interpreter, and lowers them for CUDA.

Compares their results bit for bit with those of the plain form and of numpy.
"""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import kernels_pallas
from gpus import abstract, lowered
from kernels_pallas._implementation import using
from kernels_pallas._triton import call
from kernels_pallas.accumulate_and_select import triton, xla
from kernels_pallas.select_above import triton as select_triton
from kernels_pallas.select_above.triton import Plan, _stage, compact
from tiers import quick

TINY = np.finfo(np.float32).tiny
# The length n, block, slots, capacity, limit, clear, and the type of the gradient.
CASES = [
    (1, 128, 16, 3, math.inf, True, jnp.float32),
    (127, 128, 8, 20, 100.0, True, jnp.float32),
    (128, 128, 0, 40, math.inf, True, jnp.float32),
    (129, 128, 16, 64, 1e38, False, jnp.float32),
    (1000, 128, 32, 90, math.inf, True, jnp.bfloat16),
    (1024, 128, 32, 300, 100.0, True, jnp.float32),
    (301, 128, 128, 500, math.inf, False, jnp.bfloat16),
    (515, 256, 0, 50, 1e38, True, jnp.float16),
]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, np.nan, np.inf, -np.inf, 1e-40, -1e-40, TINY, -TINY, 3.4e38, -3.4e38]


def flush(x: np.ndarray) -> np.ndarray:
    """Flushes subnormal numbers to zero, as XLA on a CPU does with inputs and results."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def oracle(grad, residual, threshold, start, keep, *, capacity, limit, clear):
    with np.errstate(all="ignore"):
        acc = flush(flush(residual) + flush(np.where(keep, grad.astype(np.float32), np.float32(0))))
        acc = np.clip(acc, -limit, limit, dtype=np.float32)
        members = np.flatnonzero(keep & (np.abs(acc) >= max(threshold, TINY)))
    count = len(members)
    if count > capacity:
        members = np.sort(np.roll(members, -(start % count))[:capacity])
    unused = (0, capacity - len(members))
    values = np.pad(acc[members], unused)
    indices = np.pad(members, unused, constant_values=len(acc)).astype(np.int32)
    if clear:
        acc[members] = 0
    return values, indices, np.int32(count), acc


def assert_same_bits(got, expected) -> None:
    """Compares bit for bit, except for the bits of NaN."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
        if a.dtype == np.float32:
            np.testing.assert_array_equal(np.signbit(a) & ~np.isnan(a), np.signbit(b) & ~np.isnan(b))


@functools.cache
def forms(block: int, slots: int, capacity: int, limit: float, clear: bool):
    static = {"capacity": capacity, "limit": limit, "clear": clear}
    kernel = functools.partial(triton.accumulate_and_select, block=block, slots=slots, interpret=True, **static)
    plain = functools.partial(xla.accumulate_and_select, **static)
    return jax.jit(kernel), jax.jit(plain), functools.partial(oracle, **static)


floats = st.floats(width=32, allow_subnormal=False) | st.sampled_from(SPECIAL)


@st.composite
def vectors(draw, n: int):
    """Draws vectors with a run of equal values, so that some blocks have many hits and ties."""
    x = draw(hnp.arrays(np.float32, n, elements=floats, fill=st.sampled_from(SPECIAL)))
    begin = draw(st.integers(0, n))
    x[begin : begin + draw(st.integers(0, 200))] = draw(st.sampled_from(SPECIAL))
    return x


@pytest.mark.parametrize("case", quick(CASES, CASES[0], CASES[-1]), ids=lambda case: "-".join(map(str, case[:6])))
def test_accumulate_and_select(case):
    n, *sizes, dtype = case
    kernel, plain, expected = forms(*sizes)

    @hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        vectors(n),
        vectors(n),
        st.sampled_from([0.0, TINY, 1.0, 2.5, math.inf]),
        st.integers(0, 2 * n),
        st.sampled_from([True, True, True, False]),
    )
    def check(grad, residual, threshold, start, keep):
        with np.errstate(all="ignore"):
            grad = grad.astype(dtype)
        args = grad, residual, np.float32(threshold), np.int32(start), np.bool(keep)
        got = kernel(*args)
        assert_same_bits(got, plain(*args))
        assert_same_bits(got, expected(*args))

    check()


@pytest.mark.parametrize("hits", quick(["none", "all", "one block", "each block's slots", "the ragged end"], "all"))
def test_crowded_blocks_and_a_full_result(hits: str):
    """With eight slots in a block of 128, and a result of 20 elements."""
    i = np.arange(127 + 3 * 128)
    marked = {
        "none": i < 0,
        "all": i >= 0,
        "one block": i // 128 == 1,
        "each block's slots": i % 128 < 8,
        "the ragged end": i >= 3 * 128,
    }[hits]
    residual = np.where(marked, i + 1, 0).astype(np.float32)
    for slots in (8, 0):
        kernel, plain, expected = forms(128, slots, 20, math.inf, True)
        for start in (0, 5, 500, 2**31 - 1):
            args = np.zeros_like(residual), residual, np.float32(0), np.int32(start), np.bool(True)
            got = kernel(*args)
            assert_same_bits(got, plain(*args))
            assert_same_bits(got, expected(*args))
            written = np.zeros(len(i) + 1)
            np.add.at(written, got[1], got[0])
            np.testing.assert_array_equal(written[:-1] + got[3], residual)


def test_a_crowded_block_keeps_to_its_slots():
    """A block with too many hits must not write to the slots of the next block.

    On a GPU the next block may have written them already. The interpreter runs one block after
    the other, so it would not show such an error in the result.
    """
    x = np.pad(np.arange(1, 129, dtype=np.float32), (0, 128))
    plan = Plan(n=256, capacity=20, block=128, slots=8)
    values, counts = jax.ShapeDtypeStruct((16,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    indices = jax.ShapeDtypeStruct((16,), jnp.int32)
    kernel = functools.partial(_stage, plan=plan, limit=math.inf, clear=False)
    _, (staged, _), counts = call(
        kernel,
        x,
        None,
        jnp.float32(0),
        name="stage",
        out=(None, (values, indices), counts),
        grid=2,
        warps=1,
        interpret=True,
    )
    np.testing.assert_array_equal(counts, [128, 0])
    np.testing.assert_array_equal(staged[:8], x[:8])
    assert not np.isin(staged[8:], x[:128]).any()


@pytest.mark.parametrize("n", quick([0, 1, 600, 5000], 0, 5000))
def test_select_above(n: int):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    kernel, plain = (
        jax.jit(functools.partial(kernels_pallas.select_above, capacity=50, implementation=name))
        for name in ("interpret", "xla")
    )
    for threshold in (0.0, 1.0, 3.0):
        for start in (0, 17):
            args = x, np.float32(threshold)
            assert_same_bits(kernel(*args, start=np.int32(start)), plain(*args, start=np.int32(start)))


def test_a_context_chooses_and_float64_is_plain():
    grad, residual = (jnp.zeros(200, dtype) for dtype in (jnp.bfloat16, jnp.float32))

    def kernels(residual, implementation=None):
        form = functools.partial(run, implementation)
        traced = jax.make_jaxpr(form)(grad, residual, jnp.float32(1))
        assert traced.out_avals[0].dtype == traced.out_avals[3].dtype == residual.dtype
        assert traced.out_avals[1].dtype == traced.out_avals[2].dtype == jnp.int32
        return str(traced).count("pallas_call[")

    assert kernels(residual) == 0
    with using("interpret"):
        assert kernels(residual) == 3
        assert kernels(residual, "xla") == 0
    with jax.enable_x64(True):
        assert kernels(residual, "interpret") == 3
        assert kernels(residual.astype(jnp.float64), "interpret") == 0


def run(name: str, grad, residual, threshold, keep=True, start=0):
    return kernels_pallas.accumulate_and_select(
        grad, residual, threshold, 20, keep=keep, start=start, implementation=name
    )


def batch(n: int = 200):
    grad, residual = (jnp.asarray(np.random.default_rng(i).standard_normal((4, n)), jnp.float32) for i in range(2))
    return grad, residual, jnp.array([0.0, 1.0, 2.0, 9.0])


@pytest.mark.full
def test_under_vmap():
    grad, residual, threshold = batch()
    keep = jnp.array([True, False, True, True])
    for axes in ((0, 0, 0, 0), (None, 0, None, 0), (None, None, 0, None)):
        args = [a if axis == 0 else a[0] for a, axis in zip((grad, residual, threshold, keep), axes, strict=True)]
        got, expected = (jax.jit(jax.vmap(functools.partial(run, name), axes))(*args) for name in ("interpret", "xla"))
        assert_same_bits(got, expected)


def on_each_worker(name: str, mesh: Mesh | AbstractMesh, threshold_spec: PartitionSpec, check_vma: bool):
    def local(grad, residual, threshold):
        values, indices, count, left = run(name, grad, residual, threshold[0])
        return values, indices, count[None], left

    split = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(split, split, threshold_spec),
            out_specs=(split,) * 4,
            check_vma=check_vma,
        )
    )


@pytest.mark.full
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec()], ids=["own threshold", "same threshold"])
def test_under_shard_map(spec: PartitionSpec):
    """Compares values without tracking of variance, and lowers with and without it.

    Pallas's interpreter cannot track variance in loops.
    """
    grad, residual, threshold = batch()
    args = grad.reshape(-1), residual.reshape(-1), threshold if spec else threshold[:1]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    got, expected = (on_each_worker(name, mesh, spec, check_vma=False)(*args) for name in ("interpret", "xla"))
    assert_same_bits(got, expected)
    assert_same_bits(expected, on_each_worker("xla", mesh, spec, check_vma=True)(*args))
    for check_vma in (True, False):
        form = on_each_worker("triton", abstract((4,), ("data",)), spec, check_vma)
        assert lowered(form, *(jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args)).count("xla.gpu.triton") == 3


@pytest.mark.full
def test_inside_control_flow():
    """Three steps that carry the residual on. Each step takes one of two branches."""
    grad, residual, threshold = batch()

    def steps(name):
        def step(i, carry):
            values, count, left = carry
            branches = [functools.partial(run, name, keep=keep) for keep in (True, False)]
            got = lax.cond(i % 2 == 0, *branches, grad[i], left, threshold[1])
            return values + got[0], count + got[2], got[3]

        return lax.fori_loop(0, 3, step, (jnp.zeros(20), jnp.int32(0), residual[0]))

    got, expected = (jax.jit(steps, static_argnums=0)(name) for name in ("interpret", "xla"))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("blocks", quick([1, 63, 64, 65, 5000], 5000))
def test_ranks_of_more_blocks_than_a_program_ranks(monkeypatch, blocks: int):
    """5,000 blocks take 79 programs, and these two more."""
    monkeypatch.setattr(select_triton, "CHUNK", 64)
    counts = np.random.default_rng(blocks).integers(0, 100, blocks, np.int32)
    before, total = jax.jit(functools.partial(select_triton.rank, interpret=True))(counts)
    np.testing.assert_array_equal(before, np.cumsum(counts) - counts)
    assert total == counts.sum()


@pytest.mark.parametrize("n", quick([4096 * 3, 14_728_266], 14_728_266))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slots", quick([None, 0], None))
def test_lowers_for_cuda(n: int, dtype, slots: int | None):
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool)]
    vectors = [jax.ShapeDtypeStruct((n,), dtype) for dtype in (dtype, jnp.float32)]
    form = functools.partial(triton.accumulate_and_select, capacity=n // 100, limit=1e38, clear=True, slots=slots)
    text = lowered(form, *vectors, *scalars)
    assert text.count("xla.gpu.triton") == 3
    assert text.count("output_operand_alias<") == 2
    select = functools.partial(compact, plan=Plan.of(n, n // 100, slots=slots))
    text = lowered(select, vectors[1], *scalars[:2])
    assert text.count("xla.gpu.triton") == 3
    assert "output_operand_alias<" not in text


def test_lowers_for_cuda_under_vmap():
    form = functools.partial(triton.accumulate_and_select, capacity=50, limit=math.inf, clear=True)
    shapes = [
        jax.ShapeDtypeStruct((4, *shape), dtype)
        for shape, dtype in [((5000,), jnp.float32)] * 2 + [((), jnp.float32), ((), jnp.int32), ((), jnp.bool)]
    ]
    assert lowered(jax.vmap(form), *shapes).count("xla.gpu.triton") == 3


def test_slots_follow_the_density():
    assert Plan.of(10**8, 10**5).slots == 64
    assert Plan.of(10**8, 2 * 10**6).slots == 128
    assert Plan.of(10**8, 8 * 10**6).slots == 256
    assert Plan.of(10**8, 2 * 10**7).slots == 0
    assert Plan.of(1, 1, block=128).slots == 0
    assert Plan.of(10**6, 10**5, block=128, slots=4096).slots == 128


@pytest.mark.parametrize(
    "change, message",
    [
        ({"grad": jnp.ones(5)}, "one element for each"),
        ({"grad": jnp.ones(4, jnp.int32)}, "cast it to float32"),
        ({"residual": jnp.ones((4, 1))}, "ravel"),
        ({"capacity": 0}, "capacity is 0"),
        ({"limit": 0.0}, "limit is 0.0"),
        ({"implementation": "cuda"}, "must be one of 'xla', 'triton', 'interpret'"),
    ],
)
def test_bad_input_is_refused(change: dict, message: str):
    given = {"grad": jnp.ones(4), "residual": jnp.ones(4), "threshold": 1.0, "capacity": 2}
    with pytest.raises(ValueError, match=message):
        kernels_pallas.accumulate_and_select(**(given | change))
