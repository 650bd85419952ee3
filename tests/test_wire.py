"""Wire formats: what is read is what was written, in the bytes that they say."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jsparse
from jsparse import quantize
from jsparse.wire import Compact, Full
from tiers import quick

STEP = jnp.int32(0)
LOSSLESS = [Full(), Compact()]
WIRES = [*LOSSLESS, Compact(quantize.BFloat16()), Compact(quantize.Codebook(4)), Compact(quantize.QSGD(7, 64))]
# Bytes of a value and, for Full, an index, for float32; and of scales or codebooks in a message of
# 1,000.
SIZES = {0: (8.0, 0), 1: (4.0, 0), 2: (2.0, 0), 3: (0.5, 32), 4: (0.5, 64)}
# Of its indices, out of 300,000: 8 low bits each, and 1 + 300,000 / 256 / 1,000 upper ones.
INDICES = 1000 + (1000 + 300_000 // 256) / 8


def run(indices, n: int, capacity: int, dtype=np.float32) -> jsparse.SparseVector:
    values = np.zeros(capacity, dtype)
    values[: len(indices)] = np.random.default_rng(len(indices)).standard_t(2, len(indices))
    padded = np.full(capacity, n, np.int32)
    padded[: len(indices)] = indices
    return jsparse.SparseVector(jnp.asarray(values), jnp.asarray(padded), n)


@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("wire", LOSSLESS, ids=str)
def test_lossless(wire, dtype):
    with jax.enable_x64(dtype == np.float64):
        values = jnp.array([[np.pi, -0.0, 1e-30, 3.0], [np.inf, np.nan, 2.0, 0.0]], dtype)
        x = jsparse.SparseVector(values, jnp.array([[0, 2, 7, 8], [1, 2, 3, 9]], jnp.int32), 9)
        message = wire.encode(x, STEP)
        assert message.dtype == jnp.int32
        assert message.shape == (2, wire.words(4, 9, dtype))
        got = wire.decode(message, 4, 9, dtype)
        assert np.asarray(got.values).tobytes() == np.asarray(values).tobytes()
        assert got.indices.dtype == jnp.int32
        np.testing.assert_array_equal(got.indices, x.indices)


EDGES = st.sampled_from([0, 1, 65535, 65536, 65537, 131071, 131072, 299_998, 299_999])


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.sets(st.one_of(EDGES, st.integers(0, 299_999)), max_size=9), st.sampled_from(range(len(WIRES))))
def test_indices_come_back(members, number: int):
    """Empty stretches, no elements, a full buffer, and neighbours of a power of two."""
    wire, x = WIRES[number], run(sorted(members), 300_000, 9)
    got = coded(number, x)
    np.testing.assert_array_equal(got.indices, x.indices)
    assert not np.asarray(got.values)[len(members) :].any()
    if wire.lossless:
        np.testing.assert_array_equal(got.values, x.values)


@jax.jit
def _coded(x):
    return [wire.decode(wire.encode(x, STEP), x.capacity, x.n, x.values.dtype) for wire in WIRES]


def coded(number: int, x: jsparse.SparseVector) -> jsparse.SparseVector:
    return _coded(x)[number]


@pytest.mark.parametrize(
    "indices, capacity, n",
    [
        (np.arange(60_000, 140_000), 80_000, 200_000),
        (np.arange(300), 300, 300),
        ([0], 1, 1),
        ([], 1, 1),
        ([0, 2**30, 2**31 - 2], 4, 2**31 - 1),
        (np.sort(np.random.default_rng(0).choice(10**8, 100_000, replace=False)), 100_001, 10**8),
    ],
    ids=["crowded", "all", "one", "none", "largest", "thin"],
)
def test_any_density(indices, capacity: int, n: int):
    x = run(indices, n, capacity)
    got = jax.jit(lambda x: Compact().decode(Compact().encode(x, STEP), capacity, n, np.float32))(x)
    np.testing.assert_array_equal(got.indices, x.indices)
    np.testing.assert_array_equal(got.values, x.values)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 2**30 - 1000), st.floats(0, 1), st.integers(1, 1000))
def test_the_room_that_indices_take(n: int, density: float, more: int):
    """Within 2.5 bits of log2(n / capacity), and a few words.

    More elements take more room, and so do longer vectors.
    """
    capacity = max(1, int(density * n))
    each = 2.5 + max(0, np.log2(n / capacity))
    words = Compact().words(capacity, n, jnp.float32)
    assert words - capacity <= capacity * each / 32 + 6
    assert words <= Compact().words(min(capacity + more, 2**31 - 1), n, jnp.float32)
    assert words <= Compact().words(capacity, min(n + more, 2**31 - 1), jnp.float32)


@pytest.mark.parametrize("number", quick(range(len(WIRES)), 1, 4))
def test_bytes(number: int):
    each, others = SIZES[number]
    wire = WIRES[number]
    indices = INDICES if number else 0
    assert 0 <= 4 * wire.words(1000, 300_000, np.float32) - 1000 * each - others - indices <= 8
    x = run(np.arange(1000) * 299, 300_000, 1000)
    assert wire.encode(x, STEP).shape == (wire.words(1000, 300_000, np.float32),)


@pytest.mark.full
def test_equal_runs_are_laid_out_alike_and_steps_differ():
    wire, x = Compact(quantize.QSGD(4)), run(np.arange(300), 1000, 300)
    first = wire.at(jnp.int32(1)).encode(x)
    np.testing.assert_array_equal(first, wire.at(jnp.int32(1)).encode(jax.tree.map(lambda a: a + 0, x)))
    assert (first != wire.at(jnp.int32(2)).encode(x)).any()
    assert (first != Compact(quantize.QSGD(4, seed=1)).at(jnp.int32(1)).encode(x)).any()
    rows = wire.at(jnp.int32(1)).encode(x.beside(x))
    np.testing.assert_array_equal(rows, np.stack([first, first]))
