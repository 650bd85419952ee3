"""Compares the selection operations with numpy, on inputs that are easy to get wrong."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kernels_pallas
import oracles
from jsparse.bench import select as bench_select
from kernels_pallas import bitmap
from kernels_pallas.kth_magnitude import xla as kth_xla
from tiers import quick

LONG = 300_000  # More than 262,144: a vector of this length is sampled first, and may be marked.


def ramp(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


INPUTS = {
    "gaussian": lambda n: bench_select.draw("gaussian", n, 0),
    "heavy": lambda n: bench_select.draw("heavy", n, 0),
    "layered": lambda n: bench_select.draw("layered", n, 0),
    "periodic": lambda n: bench_select.draw("periodic", n, 0),
    "ties": lambda n: bench_select.draw("ties", n, 0),
    "zeros": np.zeros,
    "negative zeros": lambda n: -np.zeros(n),
    "constant": np.ones,
    "one element": lambda n: np.eye(1, n, n // 3)[0] * -5,
    "few elements": lambda n: np.where(np.arange(n) % 1009 == 0, 3.0, 0.0),
    "ramp": ramp,
    "ramp down": lambda n: -ramp(n)[::-1],
    "one layer": lambda n: np.where(np.arange(n) // 4096 == 17, 1e6, 1.0) * bench_select.draw("gaussian", n, 1),
    "extremes": lambda n: np.where(np.arange(n) % 7 == 0, 3.4e38, 1.2e-38) * np.where(np.arange(n) % 2, 1, -1),
}


def make(name: str, n: int) -> np.ndarray:
    return INPUTS[name](n).astype(np.float32)


def top_k(x: np.ndarray, k: int) -> np.ndarray:
    return oracles.top_k(np.nan_to_num(x, nan=0, posinf=np.inf, neginf=-np.inf), k)


def assert_run(x: np.ndarray, got, expected: np.ndarray) -> None:
    values, indices, count = got
    m = len(expected)
    np.testing.assert_array_equal(indices[:m], expected)
    np.testing.assert_array_equal(values[:m], x[expected])
    assert (np.asarray(indices[m:]) == len(x)).all()
    assert (np.asarray(values[m:]) == 0).all()
    assert count == m


SEGMENTS = [(31,), (2, 3, 1), (1000, 24, 1024, 1, 7), (40_000, 10, 30_000, 3, 2000)]


@pytest.mark.parametrize("share", quick([0.01, 0.3, 1.0], 0.01))
@pytest.mark.parametrize("lengths", quick(SEGMENTS, SEGMENTS[3]), ids=str)
def test_top_k_of_segments_is_exact(lengths: tuple[int, ...], share: float):
    n, quota = sum(lengths), tuple(max(1, round(share * length)) for length in lengths)
    select = jax.jit(functools.partial(kernels_pallas.select_segment_top_k, lengths=lengths, quota=quota))
    begins = np.cumsum([0, *lengths])
    inputs = {name: make(name, n) for name in INPUTS}
    scale = 10.0 ** np.linspace(-30, 30, len(lengths))
    inputs["unlike segments"] = (make("gaussian", n) * np.repeat(scale, lengths)).astype(np.float32)
    inputs["NaN"] = np.where(np.arange(n) % 3 == 0, np.nan, make("ties", n))
    inputs["infinite"] = np.where(np.arange(n) % 5 == 0, -np.inf, make("gaussian", n))
    for x in inputs.values():
        parts = zip(begins, lengths, quota, strict=False)
        chosen = [begin + top_k(x[begin : begin + length], k) for begin, length, k in parts]
        values, indices, counts, smallest = select(x)
        assert_run(x, (values, indices, counts.sum()), np.concatenate(chosen))
        np.testing.assert_array_equal(counts, [len(of_segment) for of_segment in chosen])
        least = [np.abs(x[of_segment]).min(initial=np.inf) for of_segment in chosen]
        np.testing.assert_array_equal(smallest, np.array(least, np.float32))


def test_segments_of_float64():
    x = np.random.default_rng(0).standard_normal(70_000)
    lengths, quota = (30_000, 10, 39_990), (300, 1, 400)
    parts = zip(np.cumsum([0, *lengths]), lengths, quota, strict=False)
    chosen = np.concatenate([begin + top_k(x[begin : begin + length], k) for begin, length, k in parts])
    with jax.enable_x64(True):
        values, indices, *_ = kernels_pallas.select_segment_top_k(jnp.asarray(x), lengths=lengths, quota=quota)
    np.testing.assert_array_equal(indices, chosen)
    np.testing.assert_array_equal(values, x[chosen])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": (4, 5)}, "the lengths add up to 9, and x has 10 elements"),
        ({"lengths": (10, 0)}, "lengths is 0; it must be at least 1"),
        ({"quota": (1, 0)}, "quota is 0"),
        ({"quota": (1.0, 1)}, "quota is 1.0; it must be a whole number"),
        ({"x": jnp.zeros(0), "lengths": (), "quota": ()}, "there is no segment"),
        ({"quota": (1,)}, "lengths are of 2 segments, and quota is of 1"),
        ({"x": jnp.zeros((2, 5))}, "it must be one vector"),
        ({"x": jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32), "lengths": (1, 2**31 - 2)}, "2147484672 places"),
    ],
)
def test_segments_that_do_not_fit_are_refused(change, message: str):
    given = {"x": jnp.zeros(10), "lengths": (5, 5), "quota": (1, 1)} | change
    x = given.pop("x")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(kernels_pallas.select_segment_top_k, **given), x)


@pytest.mark.parametrize("bounds", ["that hold", "too high", "too low"])
def test_top_k_of_segments_does_without_bounds_that_do_not_hold(bounds: str):
    lengths, quota = (20_000, 5, 40_000), (200, 1, 400)
    x = jnp.asarray(make("layered", sum(lengths)))
    sizes = kernels_pallas.segment_top_k_samples(lengths, quota)
    begins = np.cumsum([0, *lengths])
    places = [
        begin + kernels_pallas.sample_places(np.arange(size, dtype=np.uint32), n, size)
        for begin, n, size in zip(begins, lengths, sizes, strict=False)
        if size
    ]
    thresholds = kernels_pallas.segment_top_k_bounds(x[np.concatenate(places).astype(np.int32)], lengths, quota)
    thresholds = {"that hold": thresholds, "too high": thresholds.at[2].mul(10), "too low": 0 * thresholds}[bounds]
    reached = kernels_pallas.reaches(x, jnp.repeat(thresholds, np.array(lengths)))
    counts = [int(part.sum()) for part in np.split(reached, begins[1:-1])]
    enough = all(count >= k for count, k in zip(counts, quota, strict=True))
    assert (enough, sum(counts) > sum(lengths) // 4) == {
        "that hold": (True, False),
        "too high": (False, False),
        "too low": (True, True),
    }[bounds]
    marked = kernels_pallas.Marked(thresholds, bitmap.pack(reached))
    select = jax.jit(functools.partial(kernels_pallas.select_segment_top_k, lengths=lengths, quota=quota))
    jax.tree.map(np.testing.assert_array_equal, select(x, marked=marked), select(x))


@functools.partial(jax.jit, static_argnums=1)
def jitted_top_k(x, k):
    return kernels_pallas.select_top_k(x, k), kernels_pallas.kth_magnitude(x, k)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "n, k",
    [
        (31, 3),
        (2048, 20),
        *(
            pytest.param(n, k, marks=pytest.mark.full)
            for n, k in [(1, 1), (5000, 5000), (1000, 2000), (LONG, 3000), (LONG, 200_000), (70_000, 700)]
        ),
    ],
)
def test_top_k_is_exact(name: str, n: int, k: int):
    x = make(name, n)
    expected = top_k(x, k)
    found, threshold = jitted_top_k(x, k)
    assert_run(x, found, expected)
    want = np.sort(np.abs(x))[-k] if k < n else 0
    assert threshold == (want if want >= np.finfo(np.float32).tiny else 0)


@pytest.mark.parametrize("density", quick([1e-4, 1e-3, 0.01, 0.05], 0.01))
@pytest.mark.parametrize("n", quick([70_000, LONG, 1_200_000, 5_000_000], 70_000))
def test_a_superset_holds_the_largest(n: int, density: float):
    """If it did not, the results would be the same, and all of the vector would be searched."""
    k = round(density * n)
    capacity = kth_xla.superset_capacity(n, k, kth_xla.sample_size(n))
    found = kth_xla.superset(jnp.asarray(make("gaussian", n)), k, capacity, kth_xla.PLAIN)
    assert found.holds
    assert np.count_nonzero(found.values) >= k


# Magnitudes and how many of 300,000 elements have them; all others are 1. The 3,000th largest is,
# of the magnitudes in the sample, the bound or one of the next, one too far above it, or none.
QUANTIZED = {
    "the bound": {},
    "the next": {2: 2900, 1.5: 200},
    "three above": {10: 2850, 7: 160, 6: 100, 5: 100},
    "too far above": {10: 2900, 8: 150, 7: 50, 6: 50, 5: 50},
    "infinite": {np.inf: 100_000},
    "subnormal": {1e-40: 290_000},
    "between zeros": {0: 298_000},
    "not sampled": {10: 2990, 5: 20},
}


@functools.partial(jax.jit, static_argnums=1)
def jitted_marked(x, k: int):
    n = len(x)
    size = kernels_pallas.top_k_sample(n, k).size
    places = kernels_pallas.sample_places(jnp.arange(size, dtype=jnp.uint32), n, size)
    bound = kernels_pallas.top_k_bound(x[places.astype(jnp.int32)], n, k)
    words = bitmap.pack(kernels_pallas.reaches(x, bound))
    return kernels_pallas.select_top_k(x, k, marked=kernels_pallas.Marked(bound, words))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str):
    rng = np.random.default_rng(0)
    x = np.ones(LONG, np.float32)
    size = kernels_pallas.top_k_sample(LONG, 3000).size
    sampled = kernels_pallas.sample_places(np.arange(size, dtype=np.uint32), LONG, size)
    places = np.setdiff1d(np.arange(LONG), sampled) if name == "not sampled" else np.arange(LONG)
    places, last = rng.permutation(places), 0
    for magnitude, count in QUANTIZED[name].items():
        x[places[last : last + count]] = magnitude
        last += count
    x *= rng.choice([-1, 1], LONG)
    found, threshold = jitted_top_k(x, 3000)
    expected = top_k(np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x), 3000)
    assert_run(x, found, expected)
    assert_run(x, jitted_marked(x, 3000), expected)
    assert threshold == (np.abs(x[expected]).min() if len(expected) == 3000 else 0)


@pytest.mark.parametrize("n", quick([100, LONG], 100))
def test_nan_is_never_selected(n: int):
    x = make("gaussian", n)
    x[::3] = np.nan
    x[1] = np.inf
    found, _ = jitted_top_k(x, n // 100)
    assert_run(x, found, top_k(x, n // 100))
    for searches in (1, 32):
        found = jitted_ms_top_k(x, n // 100, searches)
        assert np.isfinite(found[0][found[1] != 1]).all()
        assert found[2] == n // 100
        assert 1 in found[1]
    everything, _ = jitted_top_k(x, n)
    assert_run(x, everything, np.flatnonzero(~np.isnan(x)))


@functools.partial(jax.jit, static_argnums=2)
def jitted_above(x, threshold, capacity):
    return kernels_pallas.select_above(x, threshold, capacity), kernels_pallas.count_above(x, threshold)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("n", quick([1, 33, 2049, 70_000], 1, 2049))
def test_select_above(name: str, n: int):
    x = make(name, n)
    for threshold in (0.0, 1.0, float(np.median(np.abs(x)))):
        expected = np.flatnonzero((np.abs(x) >= threshold) & (x != 0))
        found, count = jitted_above(x, threshold, n + 3)
        assert_run(x, found, expected)
        assert count == len(expected)


@functools.partial(jax.jit, static_argnums=(1, 2))
def jitted_ms_top_k(x, k, searches, turn=0):
    return kernels_pallas.select_ms_top_k(x, k, searches=searches, turn=turn)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "n, k",
    [
        (31, 3),
        (2048, 20),
        *(
            pytest.param(n, k, marks=pytest.mark.full)
            for n, k in [(1, 1), (5000, 5000), (1000, 2000), (LONG, 3000), (LONG, 200_000), (70_000, 700)]
        ),
    ],
)
def test_ms_top_k_finds_the_largest_magnitudes(name: str, n: int, k: int):
    """With as many searches as a magnitude has bits, MSTopK is exact, except for ties."""
    x = make(name, n)
    values, indices, count = (np.asarray(part) for part in jitted_ms_top_k(x, k, 32))
    expected = top_k(x, k)
    assert_run(x, (values, indices, count), indices[: len(expected)])
    assert (np.diff(indices[:count]) > 0).all()
    np.testing.assert_array_equal(np.sort(np.abs(x[indices[:count]])), np.sort(np.abs(x[expected])))


@pytest.mark.parametrize("searches", quick([2, 6, 12, 30], 12))
@pytest.mark.parametrize("name", ["gaussian", "heavy", "ties", "constant", "few elements", "one layer"])
def test_ms_top_k_follows_the_paper(name: str, searches: int):
    x = make(name, 20_000)
    for turn in (0, 1, 7):
        found = jitted_ms_top_k(x, 200, searches, turn)
        assert_run(x, found, oracles.ms_top_k(x, 200, searches, turn))


@pytest.mark.full
def test_ms_top_k_on_gaussian_values():
    """The paper's figure: with 30 searches more than 99 % of them are in the exact top-k."""
    x = make("gaussian", LONG)
    for k, searches, least in ((300, 30, 0.99), (3000, 30, 0.99), (3000, 8, 0.9)):
        found = np.intersect1d(jitted_ms_top_k(x, k, searches)[1], top_k(x, k)).size / k
        assert found > least
        assert searches == 30 or found < 1


def test_the_window_of_ms_top_k_turns():
    x = np.where(np.arange(100) % 3 == 0, 1.0, 0.0)  # 34 elements qualify.
    members = np.flatnonzero(x)
    for turn in range(8):
        expected = np.sort(np.roll(members, -(10 * turn % 34))[:10])
        np.testing.assert_array_equal(jitted_ms_top_k(jnp.asarray(x, jnp.float32), 10, 30, turn)[1], expected)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("n", quick([1, 33, 70_000], 33))
def test_counts_and_norms(name: str, n: int):
    x = make(name, n)
    thresholds = np.array([0.0, 1.0, np.median(np.abs(x)), 2.5, 1e30], np.float32)
    counts, (largest, total) = jitted_statistics(x, thresholds)
    np.testing.assert_array_equal(counts, [np.count_nonzero((np.abs(x) >= t) & (x != 0)) for t in thresholds])
    assert largest == np.abs(x).max()
    assert total == pytest.approx((np.abs(x) / max(np.abs(x).max(), 1e-30)).sum(dtype=np.float64), rel=1e-5)


@jax.jit
def jitted_statistics(x, thresholds):
    return kernels_pallas.count_above_many(x, thresholds), kernels_pallas.norms(x)


def test_what_overflows_is_taken_in_turn():
    x = jnp.where(jnp.arange(100) % 3 == 0, 1.0, 0.0)  # 34 elements qualify.
    members = np.flatnonzero(x)
    select = jax.jit(functools.partial(kernels_pallas.select_above, threshold=1.0, capacity=10))
    for start in range(0, 80, 10):
        values, indices, count = select(x, start=start)
        expected = np.sort(np.roll(members, -(start % 34))[:10])
        np.testing.assert_array_equal(indices, expected)
        assert (values == 1).all()
        assert count == 34


@pytest.mark.parametrize("name", ["gaussian", "heavy", "layered", "periodic", "ramp"])
def test_the_estimate_is_close(name: str):
    x = make(name, 1_000_000)
    for k in (10_000, 1_000):
        threshold = float(kernels_pallas.estimate_kth_magnitude(x, k))
        # Within five standard deviations of a sample of 65,536 elements.
        assert abs(np.count_nonzero(np.abs(x) >= threshold) / k - 1) < 5 * (k * 65536 / 1e6) ** -0.5


@pytest.mark.parametrize("n", quick([1000, 100_000], 1000))
def test_the_estimate_of_a_short_vector_is_exact(n: int):
    x = make("gaussian", n)
    expected = np.append(np.sort(np.abs(x))[::-1], 0)
    ranks = [1, 10, n, n + 1]
    got = kernels_pallas.estimate_kth_magnitude(x, jnp.array(ranks))
    known = [kernels_pallas.estimate_kth_magnitude(x, k) for k in ranks]
    for found in (got, known):
        np.testing.assert_array_equal(found, expected[[k - 1 for k in ranks]])


@pytest.mark.parametrize("n", quick([100, LONG], 100))
def test_float64(n: int):
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal(n)
        # Neighbours differ by less than float32 can represent.
        x[: n // 2] = 1 + np.arange(n // 2) * 1e-14
        found, threshold = jitted_top_k(jnp.asarray(x), n // 50)
        assert found[0].dtype == threshold.dtype == jnp.float64
        assert_run(x, found, top_k(x, n // 50))
        assert_run(x, jitted_ms_top_k(jnp.asarray(x), n // 50, 64), top_k(x, n // 50))


floats = st.floats(width=32, allow_nan=False, allow_subnormal=False)
vectors = hnp.arrays(np.float32, st.integers(1, 130), elements=floats | st.sampled_from([0.0, 1.0, -1.0]))


@pytest.mark.full
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(vectors, st.sampled_from([1, 2, 7, 40, 130]))
def test_top_k_of_anything(x: np.ndarray, k: int):
    padded = np.pad(x, (0, 130 - len(x)))  # One length, so that each k needs one executable.
    assert_run(padded, jitted_top_k(padded, k)[0], top_k(padded, k))


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1024, 2047, 2048, 2049, 3 * 2048, 5 * 2048 + 1055])
def test_packing_keeps_every_bit_in_its_place(n: int):
    mask = np.random.default_rng(n).random(n) < 0.5
    padded = np.pad(mask, (0, -n % 32))
    np.testing.assert_array_equal(bitmap.pack(jnp.asarray(mask)), np.packbits(padded, bitorder="little").view("<u4"))
    assert bitmap.count_mask(jnp.asarray(mask)) == mask.sum()


@jax.jit
def set_operations(a, b, quota):
    words = bitmap.pack(a)
    indices = jnp.arange(130)
    return {
        "count": bitmap.count(words),
        "contains": bitmap.contains(words, indices),
        "rank": bitmap.rank(words, indices[:100]),
        "members": bitmap.members(words, 100, 100)[0],
        "mark": bitmap.members(bitmap.mark(words, jnp.where(b < 100, b, 2**30)), 100, 100)[0],
        "take_first": bitmap.members(bitmap.take_first(words, quota), 100, 100)[0],
        "take_circle": bitmap.members(bitmap.take_circle(words, quota, 3 * quota), 100, 100)[0],
        "limit": bitmap.members(words, 100, 100, 3 * quota, jnp.minimum(quota, 100))[0],
    }


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.integers(0, 120))
def test_bitmaps_are_sets(a: set[int], b: set[int], quota: int):
    def mask(members):
        return np.isin(np.arange(100), list(members))

    def padded(members):
        return np.array((sorted(members) + [100] * 100)[:100], np.int32)

    circle = padded(np.roll(sorted(a), -(3 * quota % max(len(a), 1)))[:quota])
    expected = {
        "count": len(a),
        "contains": [i in a for i in range(130)],
        "rank": [sum(m < i for m in a) for i in range(100)],
        "members": padded(a),
        "mark": padded(a | b),
        "take_first": padded(sorted(a)[:quota]),
        "take_circle": circle,
        "limit": circle,
    }
    jax.tree.map(
        np.testing.assert_array_equal,
        set_operations(mask(a), padded(b), quota),
        {name: np.asarray(value) for name, value in expected.items()},
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kernels_pallas.select_top_k(jnp.ones((2, 2)), 1), "ravel"),
        (lambda: kernels_pallas.select_top_k(jnp.ones(4, jnp.bfloat16), 1), "cast"),
        (lambda: kernels_pallas.select_top_k(jnp.ones(4), 0), "at least 1"),
        (lambda: kernels_pallas.select_above(jnp.ones(4), 1.0, 0), "capacity is 0"),
        (lambda: kernels_pallas.select_ms_top_k(jnp.ones(4), 1, searches=0), "searches is 0"),
        (lambda: kernels_pallas.count_above_many(jnp.ones(4), 1.0), "one vector of them"),
        (lambda: kernels_pallas.estimate_kth_magnitude(jnp.ones(4), 1, sample=0), "sample is 0"),
        (
            lambda: jax.eval_shape(
                lambda x: kernels_pallas.kth_magnitude(x, 1), jax.ShapeDtypeStruct((2**31,), jnp.float32)
            ),
            "below 2\\*\\*31",
        ),
    ],
)
def test_bad_input_is_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
