"""Tests the GPU forms of the statistics and of the k-th magnitude.

Compares them with numpy and with the plain form, and lowers them for CUDA.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
from gpus import lowered
from jsparse.bench import select as bench_select
from kernels_pallas import _implementation
from kernels_pallas._triton import call
from kernels_pallas.count_above_many import triton as counts_triton
from kernels_pallas.kth_magnitude import triton as kth_triton
from kernels_pallas.kth_magnitude import xla as kth_xla
from kernels_pallas.magnitude_statistics import triton, xla
from tiers import quick

BLOCK = 128
TINY = np.finfo(np.float32).tiny
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, np.nan, 1e-40, -1e-40, TINY, -TINY, 3.4e38, -3.4e38, 1e-30, 2.0**127]
THRESHOLDS = np.array([0.0, TINY, 1e-40, 1.0, 2.5, 1e30, np.inf, np.nan], np.float32)
# The length n, the type of x, whether a vector is added to x, and the number of thresholds.
CASES = [
    (1, jnp.float32, False, 8),
    (127, jnp.float32, True, 3),
    (128, jnp.bfloat16, True, 8),
    (129, jnp.float32, False, 0),
    (640, jnp.float16, False, 8),
    (1001, jnp.bfloat16, True, 8),
]
INPUTS = {
    "gaussian": lambda n: bench_select.draw("gaussian", n, 0),
    "layered": lambda n: bench_select.draw("layered", n, 0),
    "periodic": lambda n: bench_select.draw("periodic", n, 0),
    "ties": lambda n: bench_select.draw("ties", n, 0),
    "zeros": np.zeros,
    "constant": np.ones,
    "one element": lambda n: np.eye(1, n, n // 3)[0] * -5,
    "ramp": np.arange,
    "subnormals": lambda n: np.where(np.arange(n) % 3, 1e-40, TINY),
    "infinities": lambda n: np.where(np.arange(n) % 50, bench_select.draw("gaussian", n, 1), -np.inf),
    "nan": lambda n: np.where(np.arange(n) % 3, bench_select.draw("gaussian", n, 2), np.nan),
    "nan alone": lambda n: np.full(n, np.nan),
    "extremes": lambda n: np.where(np.arange(n) % 7, 1.2e-38, -3.4e38),
}


def make(name: str, n: int) -> np.ndarray:
    return INPUTS[name](n).astype(np.float32)


def assert_describes(got: kernels_pallas.MagnitudeStatistics, x: np.ndarray, thresholds: np.ndarray) -> None:
    """Compares statistics with sums in float64.

    The tolerance of a mean is a few units in the last place of the mean magnitude. If there are
    infinities, the means only have to be infinite, or NaN.
    """
    x = np.where(np.abs(x) >= TINY, x, 0).astype(np.float64)
    a, n = np.abs(x), max(len(x), 1)
    np.testing.assert_array_equal(got.counts, [np.count_nonzero((a >= t) & (a > 0)) for t in thresholds])
    assert got.counts.dtype == jnp.int32
    assert {leaf.dtype for leaf in got[:4]} == {jnp.dtype(jnp.float32)}
    assert got.largest == a.max(initial=0)
    if np.isinf(a).any():
        assert np.isinf(got.mean_magnitude)
        assert np.isinf(got.mean_square)
        assert not np.isfinite(got.mean)
        return
    for found, mean, summands in ((got.mean, x.sum() / n, a), (got.mean_magnitude, a.sum() / n, a)):
        np.testing.assert_allclose(found, mean, rtol=0, atol=2e-6 * summands.sum() / n + TINY)
    square = (x * x).sum() / n
    if square < 3.4e38:
        np.testing.assert_allclose(got.mean_square, square, rtol=2e-6, atol=TINY)
    else:
        assert np.isinf(got.mean_square)


@functools.cache
def statistics(name: str, block: int):
    if name == "interpret":
        return jax.jit(functools.partial(triton.magnitude_statistics, block=block, interpret=True))
    return jax.jit(xla.magnitude_statistics)


floats = st.floats(width=32, allow_subnormal=False, allow_infinity=False) | st.sampled_from(SPECIAL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{jnp.dtype(case[1])}-{case[2:]}")
def test_statistics_of_anything(case):
    n, dtype, added, m = case

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @hypothesis.given(*[hnp.arrays(np.float32, n, elements=floats, fill=st.sampled_from(SPECIAL))] * 2)
    def check(x, add):
        with np.errstate(all="ignore"):
            x = x.astype(dtype)
            total = x.astype(np.float32)
            if added:
                # XLA on a CPU flushes the numbers that it reads in the same way.
                total, add = (np.where(np.abs(part) < TINY, np.float32(0), part) for part in (total, add))
                total = total + add
        args = x, THRESHOLDS[:m], add if added else None
        for name in ("xla", "interpret"):
            assert_describes(statistics(name, BLOCK)(*args), total, THRESHOLDS[:m])

    check()


@pytest.mark.parametrize("name", INPUTS)
def test_statistics_norms_and_counts(name: str, monkeypatch):
    """On a vector that is longer than a block of the size that GPUs use."""
    monkeypatch.setattr(counts_triton, "SHORT", 1000)
    x = make(name, triton.BLOCK + 905)
    thresholds = np.append(THRESHOLDS, np.float32(np.median(np.abs(x))))
    for form in ("xla", "interpret"):
        found, counts, (largest, total) = describe_all(x, thresholds, form)
        assert_describes(found, x, thresholds)
        np.testing.assert_array_equal(counts, found.counts)
        normal = np.where(np.abs(x) >= TINY, np.abs(x), 0).astype(np.float64)
        if np.isfinite(x).all():
            assert largest == normal.max()
            assert total == pytest.approx((normal / max(normal.max(), TINY)).sum(), rel=1e-5)


@functools.partial(jax.jit, static_argnums=2)
def describe_all(x, thresholds, form: str):
    return (
        kernels_pallas.magnitude_statistics(x, thresholds, implementation=form),
        kernels_pallas.count_above_many(x, thresholds, implementation=form),
        kernels_pallas.norms(x, implementation=form),
    )


@pytest.mark.parametrize("form", ["xla", "interpret", "mosaic"])
def test_statistics_of_nothing(form: str):
    """An empty vector runs no kernel, in any form."""
    found = kernels_pallas.magnitude_statistics(jnp.zeros(0), THRESHOLDS, implementation=form)
    assert_describes(found, np.zeros(0, np.float32), THRESHOLDS)
    if form != "mosaic":
        assert tuple(map(float, kernels_pallas.norms(jnp.zeros(0), implementation=form))) == (0, 0)
        assert not kernels_pallas.count_above_many(jnp.zeros(0), THRESHOLDS, implementation=form).any()


def test_counts_above_nothing(monkeypatch):
    monkeypatch.setattr(counts_triton, "SHORT", 10)
    for form in FORMS:
        assert kernels_pallas.count_above_many(jnp.ones(20), jnp.zeros(0), implementation=form).shape == (0,)


def test_means_of_many_elements():
    """With a running sum in float32 the third digit would be wrong."""
    x = jnp.full(2**22 + 1, 0.1, jnp.float32)
    found = statistics("xla", BLOCK)(x, jnp.zeros(0), None)
    parts = xla.Part(*[jnp.full(64, leaf) for leaf in xla.describe(x[: 2**16])])
    for got in (found, xla.combine(parts, jnp.zeros(0, jnp.int32), 2**22)):
        np.testing.assert_allclose(got[:4], [0.1, 0.1, 0.1, 0.01], rtol=3e-6)


def test_blocks_of_unlike_size_combine():
    """Values that would overflow or vanish in the unit of one block are in range in another's."""
    x = np.repeat(np.array([1e-37, 3e38, 0, -3e38, 1e-20, 2e18], np.float32), BLOCK)
    got = statistics("interpret", BLOCK)(x, THRESHOLDS, None)
    assert_describes(got, x, THRESHOLDS)
    assert abs(got.mean) < 1e18
    assert_describes(statistics("interpret", BLOCK)(x[-2 * BLOCK :], THRESHOLDS, None), x[-2 * BLOCK :], THRESHOLDS)


# The search in a superset needs more than 4 * SAMPLE elements. Vectors of more than HELD elements
# are searched by passes, and of more than SHORT by passes of the kernel.
FORMS = ("interpret", "xla")
N, SAMPLE, SHORT = 3001, 256, 1500
RANKS = (30, 2000)


@pytest.fixture(params=quick([0, 2**22], 2**22), ids=["passes", "held"])
def held(monkeypatch, request):
    """Lowers the limits, so that vectors short enough for the interpreter count as long."""
    monkeypatch.setattr(kth_xla, "SMALLEST_SAMPLE", SAMPLE)
    monkeypatch.setattr(kth_xla, "LARGEST_SAMPLE", SAMPLE)
    monkeypatch.setattr(counts_triton, "SHORT", SHORT)
    monkeypatch.setattr(kth_triton, "SHORT", SHORT)
    monkeypatch.setattr(kth_triton, "HELD", request.param)
    return request.param


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def select_all(x, k: int, form: str, held: int):
    del held  # The function is traced again where the limit is another.
    return {
        "kth_magnitude": kernels_pallas.kth_magnitude(x, k, implementation=form),
        "top_k": kernels_pallas.select_top_k(x, k, implementation=form),
        "ms_top_k": kernels_pallas.select_ms_top_k(x, k, turn=3, implementation=form),
        "few searches": kernels_pallas.select_ms_top_k(x, k, searches=7, turn=3, implementation=form),
    }


@pytest.mark.parametrize("k", quick(RANKS, RANKS[-1]))
def test_selection_is_the_same_to_the_bit(k: int, held: int):
    assert (kth_xla.superset_capacity(N, k, SAMPLE) is None) == (k == RANKS[-1])
    for name in INPUTS:
        x = make(name, N)
        got, expected = (select_all(x, k, form, held) for form in ("interpret", "xla"))
        if np.isnan(x).any():
            # With few searches the result depends on the norms, which are undefined with NaN.
            del got["few searches"], expected["few searches"]
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), got, expected)
        magnitudes = np.sort(np.where(np.abs(x) >= TINY, np.abs(x), 0))
        assert got["kth_magnitude"] == magnitudes[-k]


@functools.partial(jax.jit, static_argnums=(1, 2))
def jitted_top_k(x, k: int, form: str):
    found = kernels_pallas.select_top_k(x, k, implementation=form)
    return *found, kernels_pallas.kth_magnitude(x, k, implementation=form)


@pytest.mark.full
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(hnp.arrays(np.float32, 130, elements=floats | st.just(np.inf)), st.sampled_from([7, 130]))
def test_top_k_of_anything(x: np.ndarray, k: int):
    jax.tree.map(np.testing.assert_array_equal, *(jitted_top_k(x, k, form) for form in FORMS))


def test_estimates_are_the_same():
    ranks = jnp.array([1, 5, 600, N + 1])
    estimates = [
        jax.jit(functools.partial(kernels_pallas.estimate_kth_magnitude, sample=200, implementation=form))
        for form in FORMS
    ]
    for name in INPUTS:
        np.testing.assert_array_equal(*(estimate(make(name, N), ranks) for estimate in estimates))


@pytest.mark.parametrize("given", quick([(1, 1), (512, 40), (70_001, 60_000), (150_000, 700)], (512, 40)))
def test_the_largest_of_a_vector_that_programs_hold(given: tuple[int, int]):
    """Of several blocks, with ties in all of them, and of fewer elements than are asked for."""
    n, k = given
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    for x in (normal, np.round(normal), np.where(normal > 2, normal, 0)):
        got = jax.jit(functools.partial(kth_triton.largest, k=k, interpret=True))(x)
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(functools.partial(kth_xla.largest, k=k))(x))


def test_no_more_of_equal_elements_are_placed():
    """An element too many would be in the place of the next block's first one, or past the end."""
    count = jnp.int32(3)
    values, indices = call(
        functools.partial(kth_triton._place, blocks=1),
        *(jnp.full(8, 2.0), jnp.float32(2), jnp.zeros(1, jnp.int32), jnp.array([3]), count),
        name="place",
        out=(kth_triton.floats(8), kth_triton.ints(8)),
        grid=1,
        warps=1,
        interpret=True,
    )
    np.testing.assert_array_equal(indices[:3], [0, 1, 2])
    assert (values[:3] == 2).all()
    assert not (values[3:] == 2).any()


def test_passes_share_the_bits():
    for n in (1, counts_triton.SHORT, counts_triton.SHORT + 1):
        for bits in (1, 2, 30, 31):
            found = kth_triton.passes(n, bits)
            assert sum(found) == bits
            assert max(found) <= (6 if n <= counts_triton.SHORT else 3)
            assert max(found) - min(found) <= 1


def run(form: str | None, x, thresholds, search: str | None = None):
    """The results of several operations in one vector, also of a search by kernel passes.

    ``search`` is the form of the search, if it is another.
    """
    found = kernels_pallas.magnitude_statistics(x, thresholds, add=x, implementation=form)
    counts = kernels_pallas.count_above_many(x, thresholds, implementation=form)
    largest, _ = kernels_pallas.norms(x, implementation=form)
    scalars = [found.largest, largest, kernels_pallas.kth_magnitude(x, 20, implementation=search or form)]
    return jnp.concatenate([jnp.stack(scalars), found.counts.astype(jnp.float32), counts.astype(jnp.float32)])


@pytest.mark.parametrize("form", quick(["interpret", None], None))
def test_under_every_transformation(form: str | None, monkeypatch):
    """In Pallas's interpreter, and in a process that sees a GPU but compiles this for its CPU."""
    monkeypatch.setattr(counts_triton, "SHORT", 500)
    monkeypatch.setattr(kth_triton, "SHORT", 500)
    if form is None:
        monkeypatch.setattr(_implementation, "sees_cuda", lambda: True)
    batch = np.stack([make(name, 600) for name in ("gaussian", "ties", "layered", "zeros")])
    thresholds = jnp.tile(jnp.array([0.0, 1.0]), (4, 1))
    expected = jax.jit(jax.vmap(functools.partial(run, "xla"), (0, None)))(batch, thresholds[0])
    local = functools.partial(run, form)
    np.testing.assert_array_equal(jax.jit(jax.vmap(local, (0, None)))(batch, thresholds[0]), expected)
    split, same = PartitionSpec("data"), PartitionSpec()
    for check_vma, spec in ((True, split), (True, same), (False, same)):
        # Pallas's interpreter cannot track what varies in the kernels of the search.
        search = "xla" if form and check_vma else None
        workers = jax.shard_map(
            lambda x, thresholds, search=search: local(x[0], thresholds[0], search)[None],
            mesh=Mesh(np.array(jax.devices()[:4]), ("data",)),
            in_specs=(split, spec),
            out_specs=split,
            check_vma=check_vma,
        )
        np.testing.assert_array_equal(
            jax.jit(workers)(batch, thresholds if spec == split else thresholds[:1]), expected
        )

    def branch(take, x):
        return lax.cond(take, lambda: local(x, thresholds[0]), lambda: -local(x, thresholds[0]))

    np.testing.assert_array_equal(jax.jit(branch)(False, batch[2]), -expected[2])


@pytest.mark.parametrize("form, custom_call", [("triton", "xla.gpu.triton"), ("mosaic", "@mosaic_gpu_v2")])
@pytest.mark.parametrize("n", [3 * triton.BLOCK, 14_728_266])
@pytest.mark.parametrize("dtype, added, m", [(jnp.float32, False, 7), (jnp.bfloat16, True, 7), (jnp.bfloat16, True, 0)])
def test_statistics_lower_for_cuda(form: str, custom_call: str, n: int, dtype, added: bool, m: int):
    def f(x, add, thresholds):
        return kernels_pallas.magnitude_statistics(x, thresholds, add=add, implementation=form)

    x, add = (jax.ShapeDtypeStruct((n,), kind) for kind in (dtype, jnp.float32))
    text = lowered(f, x, add if added else None, jax.ShapeDtypeStruct((m,), jnp.float32))
    assert text.count(custom_call) == 1
    # No other array of the length of the vector is made.
    assert f"tensor<{n}xf32> loc" not in text
    assert "stablehlo.slice" not in text or form == "mosaic"


def test_selection_lowers_for_cuda(monkeypatch):
    """If no implementation is named, the kernels are chosen."""
    monkeypatch.setattr(_implementation, "sees_cuda", lambda: True)
    x = jax.ShapeDtypeStruct((14_728_266,), jnp.float32)
    for f in (kernels_pallas.kth_magnitude, kernels_pallas.select_ms_top_k):
        assert "xla.gpu.triton" in lowered(functools.partial(f, k=147_283), x)
    assert lowered(kernels_pallas.norms, x).count("xla.gpu.triton") == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kernels_pallas.magnitude_statistics(jnp.ones((2, 2))), "ravel"),
        (lambda: kernels_pallas.magnitude_statistics(jnp.ones(4, jnp.int32)), "float32 or float64"),
        (lambda: kernels_pallas.magnitude_statistics(jnp.ones(4), add=jnp.ones(5)), "element by element"),
        (lambda: kernels_pallas.magnitude_statistics(jnp.ones(4), 1.0), "one vector of them"),
        (lambda: kernels_pallas.magnitude_statistics(jnp.ones(4), implementation="gpu"), "'xla', 'triton', 'mosaic'"),
        (lambda: kernels_pallas.kth_magnitude(jnp.ones(4), 1, implementation="mosaic"), "'xla', 'triton', 'interpret'"),
    ],
)
def test_bad_input_is_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_float64_is_described_in_float64():
    with jax.enable_x64(True):
        x = 1 + np.arange(1000) * 1e-14
        found = kernels_pallas.magnitude_statistics(jnp.asarray(x), [x[500]], implementation="interpret")
        assert found.largest == x[-1]
        assert found.counts.tolist() == [500]
        assert found.mean == pytest.approx(x.mean(), rel=1e-15)
