"""Compares quantizers with numpy: decoded values, expectations, and unusual values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jsparse
import oracles
from jsparse.quantize import (
    QSGD,
    BFloat16,
    Block8,
    Codebook,
    DeviationCodebook,
    Exact,
    Float4,
    Float16,
    Int4,
    Rotated,
    Sign,
    TernGrad,
    _base,
)
from jsparse.quantize._base import Scaled
from jsparse.quantize._coded import Coded
from tiers import full, quick

M = 1003
QUANTIZERS = [
    Exact(),
    QSGD(),
    QSGD(1, 64),
    QSGD(7, None, "max"),
    QSGD(2**15 - 1, None, "max"),
    QSGD(16, 512, contract=True),
    TernGrad(),
    Sign(),
    Sign(64, zeros=False),
    Block8(),
    Int4(),
    Float4(),
    Float4(None),
    BFloat16(),
    Float16(),
    Codebook(2),
    Codebook(4),
    DeviationCodebook(4),
    Sign(norm="rms"),
    VOTE := Sign(None, norm="one"),
    Rotated(Int4(64), 64),
]
SCALED = [quantizer for quantizer in QUANTIZERS if isinstance(quantizer, Scaled)]
# What the quantizers of four bits can make of a bucket, relative to its largest magnitude.
E3M0 = np.array([0, *(2.0**-i for i in range(7))])
SEVENTHS = np.arange(8) / 7
ZERO_STAYS = [q for q in QUANTIZERS if not isinstance(q, Codebook | Rotated) and getattr(q, "zeros", True)]


def vector(dtype=np.float32, seed: int = 0, m: int = M) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, m).astype(dtype)


@functools.cache
def compiled(quantizer):
    def code(values, key):
        m = len(values)
        message = quantizer.encode(values, key)
        assert message.dtype == jnp.int32
        assert message.shape == (quantizer.words(m, values.dtype),)
        decoded = quantizer.decode(message, m, values.dtype)
        assert decoded.shape == (m,)
        assert decoded.dtype == values.dtype
        return decoded

    return jax.jit(code)


def coded(quantizer, values: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.asarray(compiled(quantizer)(jnp.asarray(values), jax.random.key(seed)))


def in_buckets(values: np.ndarray, bucket: int | None):
    return [values] if bucket is None else np.split(values, range(bucket, len(values), bucket))


def levels_of(quantizer, values: np.ndarray) -> np.ndarray:
    """Each value divided by the scale of its bucket, in numpy, without rounding."""
    steps = []
    for part in in_buckets(values.astype(np.float64), quantizer.bucket):
        scale = np.abs(part).max() if getattr(quantizer, "scale", "max") == "max" else np.linalg.norm(part)
        steps.append(part / scale)
    return np.concatenate(steps)


def scales_of(quantizer, values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64) / levels_of(quantizer, values)


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if isinstance(q, QSGD)], ids=str)
def test_stochastic_levels(quantizer):
    """Every value is rounded to one of the two levels next to it."""
    values = vector()
    got = coded(quantizer, values).astype(np.float64)
    if quantizer.contract:
        m = M if quantizer.bucket is None else quantizer.bucket
        got *= 1 + min(m / quantizer.levels**2, math.sqrt(m) / quantizer.levels)
    exact = quantizer.levels * levels_of(quantizer, values)
    level = quantizer.levels * got / scales_of(quantizer, values)
    np.testing.assert_allclose(level, np.round(level), atol=1e-4)
    assert (np.abs(np.round(level) - exact) < 1 + 1e-4).all()
    assert (np.abs(np.round(level)) <= quantizer.levels).all()


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if q.unbiased], ids=str)
def test_unbiased(quantizer):
    """The mean of 4,000 roundings is within 5 standard errors of each of the 1,003 values.

    By chance, 1 of 1,700 such tests would fail.
    """
    values, draws = jnp.asarray(vector()), 4000
    decode = jax.jit(jax.vmap(lambda key: quantizer.decode(quantizer.encode(values, key), M, jnp.float32)))
    got = np.asarray(decode(jax.random.split(jax.random.key(3), draws)), np.float64)
    error = np.abs(got.mean(0) - values)
    step = np.abs(scales_of(quantizer, np.asarray(values))) / quantizer.levels
    assert (error <= 5 * got.std(0) / math.sqrt(draws) + 1e-3 * step + 1e-6).all()
    # The standard deviation is that of a Bernoulli variable of the two levels.
    part = np.abs(quantizer.levels * levels_of(quantizer, np.asarray(values))) % 1
    np.testing.assert_allclose(got.std(0), step * np.sqrt(part * (1 - part)), atol=0.05 * step.max())


def test_deterministic_ones_in_numpy():
    values = vector()
    parts = in_buckets(values, 512)
    expected = np.concatenate([np.sign(part) * np.abs(part).mean() for part in parts])
    np.testing.assert_allclose(coded(Sign(), values), expected, rtol=1e-5)
    parts = in_buckets(values, 256)
    steps = np.concatenate([np.full(len(part), np.abs(part).max() / 127) for part in parts])
    np.testing.assert_allclose(coded(Block8(), values), np.round(values / steps) * steps, atol=1e-4 * steps.max())
    np.testing.assert_array_equal(coded(Float16(), values), values.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(
        coded(BFloat16(), values), np.asarray(jnp.asarray(values).astype(jnp.bfloat16), np.float32)
    )
    np.testing.assert_array_equal(coded(Exact(), values), values)


@pytest.mark.parametrize("bucket", quick([256, 1, 1003, None], 256))
@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
def test_four_bits_in_numpy(bucket: int | None, dtype: type):
    """The nearest of the few values that a bucket can have, to the bit."""
    with jax.enable_x64(dtype == np.float64):
        values = vector(dtype)
        values[::7] = 0
        values[:256] *= 1e-30
        np.testing.assert_array_equal(coded(Float4(bucket), values), oracles.nearest(values, E3M0, bucket))
        expected = oracles.nearest(values, SEVENTHS, bucket)
        np.testing.assert_allclose(coded(Int4(bucket), values), expected, rtol=4 * np.finfo(dtype).eps)


def test_four_bits_hold_all_their_values():
    """What a bucket can have stays as it is, and halfway goes to either side."""
    values = np.concatenate([E3M0, -E3M0]).astype(np.float32) * np.float32(3.7e-5)
    np.testing.assert_array_equal(coded(Float4(), values), values)
    np.testing.assert_array_equal(coded(Float4(), np.float32([1, 0.7501, -0.7499])), np.float32([1, 1, -0.5]))
    np.testing.assert_array_equal(coded(Float4(), np.float32([-1, 0.0079, -0.0077])), np.float32([-1, 2**-6, 0]))
    values = np.arange(-7, 8).astype(np.float32)
    np.testing.assert_allclose(coded(Int4(), values), values, rtol=1e-6)


def test_four_bits_on_heavy_tails():
    """Growing steps are nearer on heavy tails, equal steps on Gaussian values."""
    n, rng = 100_000, np.random.default_rng(0)
    gaussian = rng.standard_normal(n).astype(np.float32)
    heavy = gaussian * np.tile([0.1, 1], n // 2).astype(np.float32) * np.exp(rng.normal(0, 1, n)).astype(np.float32)

    def errors(values: np.ndarray) -> list[float]:
        return [np.linalg.norm(coded(q, values) - values) / np.linalg.norm(values) for q in (Float4(), Int4())]

    np.testing.assert_allclose(errors(heavy), [0.15, 0.23], atol=0.01)
    np.testing.assert_allclose(errors(gaussian), [0.19, 0.13], atol=0.01)
    zeros = [np.mean(coded(q, heavy) == 0) for q in (Float4(), Int4())]
    np.testing.assert_allclose(zeros, [0.41, 0.82], atol=0.02)


@pytest.mark.parametrize("quantizer", [Float4(64), Int4(64)], ids=str)
@pytest.mark.parametrize("dtype", quick([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_four_bits_of_narrow_gradients(quantizer, dtype):
    """Narrow gradients are summed in float32, and nothing of them is lost."""
    gradients = jnp.asarray(np.stack([vector(seed=worker) for worker in range(3)]), dtype)
    tx = jsparse.quantized("workers", quantize=quantizer)

    def step(gradient):
        update, state = tx.update(gradient, tx.init(gradient))
        return update, state.buckets[0].residual

    updates, residuals = jax.jit(jax.vmap(step, axis_name="workers"))(gradients)
    assert updates.dtype == dtype
    assert residuals.dtype == jnp.float32
    total, given = 3 * np.asarray(updates[0], np.float64), np.asarray(gradients, np.float64).sum(0)
    step_of_type = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(total + np.asarray(residuals, np.float64).sum(0), given, atol=step_of_type * 30)
    assert np.abs(total - given).max() > 0.05


@pytest.mark.parametrize("bits, limit", [(2, 0.35), (4, 0.12)])
def test_codebook(bits: int, limit: float):
    """Signs stay, magnitudes are few, their sum stays, and top-k values have small errors."""
    values = vector()
    values = values[np.abs(values) > np.quantile(np.abs(values), 0.9)]
    got = coded(Codebook(bits), values)
    np.testing.assert_array_equal(np.sign(got), np.sign(values))
    assert len(np.unique(np.abs(got))) <= 2 ** (bits - 1)
    np.testing.assert_allclose(got, oracles.codebook(values, bits), rtol=1e-5)
    np.testing.assert_allclose(np.abs(got).sum(), np.abs(values).sum(), rtol=1e-5)
    assert np.linalg.norm(got - values) < limit * np.linalg.norm(values)
    one = np.full(5, -3.0, np.float32)
    np.testing.assert_allclose(coded(Codebook(bits), one), one)


def largest(tiles: np.ndarray, k: int = 64) -> np.ndarray:
    """The k values of the largest magnitude of each row."""
    return np.take_along_axis(tiles, np.argsort(-np.abs(tiles), axis=1)[:, :k], 1).reshape(-1).astype(np.float32)


def relative_error(quantizer, values: np.ndarray) -> float:
    return np.linalg.norm(coded(quantizer, values) - values) / np.linalg.norm(values)


def test_what_the_published_codebook_does():
    """The figures of docs/algorithms.md. With 2 bits it is signs for Gaussian values, and loses
    most of values with heavy tails.
    """
    with pytest.warns(UserWarning, match=r"take Codebook\(2\)"):
        published = DeviationCodebook(2)
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal((64, 4096))
    scales = {
        "gaussian": (1.0, 0.111, 0.084),
        "elements": (np.exp(rng.standard_normal(gaussian.shape)), 0.567, 0.323),
        "tiles": (np.exp(rng.standard_normal((64, 1))), 0.496, 0.542),
        "more unlike": (np.exp(1.5 * rng.standard_normal((64, 1))), 0.604, 0.788),
    }
    for name, (scale, *errors) in scales.items():
        values = largest(gaussian * scale)
        np.testing.assert_allclose(
            [relative_error(quantizer, values) for quantizer in (published, Codebook(2))],
            errors,
            atol=0.002,
            err_msg=name,
        )
        got = coded(published, values)
        if name == "gaussian":
            assert len(np.unique(got)) == 2
            for quantizer, bits in ((published, 2), (DeviationCodebook(4), 4)):
                wanted = oracles.deviation_codebook(values, bits)
                np.testing.assert_allclose(coded(quantizer, values), wanted, rtol=1e-4)
        if name == "elements":
            assert (np.abs(got) < 0.1 * np.abs(values)).mean() > 0.5


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if not q.unbiased and q != VOTE], ids=str)
@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
def test_contraction(quantizer, dtype):
    """Error feedback needs errors smaller than the vector: on average, if they are random."""
    with jax.enable_x64(dtype == np.float64):
        for scale in (1e-30, 1.0, 1e30):
            values = vector(dtype) * dtype(scale)
            error = np.mean([np.sum(((coded(quantizer, values, s) - values) / scale) ** 2) for s in range(8)])
            if isinstance(quantizer, Float16) and scale != 1.0:
                continue  # Out of the range of float16.
            assert error <= 0.97 * np.sum((values / scale) ** 2)


@pytest.mark.parametrize("quantizer", ZERO_STAYS, ids=str)
def test_zeros_stay_zeros(quantizer):
    assert not coded(quantizer, np.zeros(M, np.float32)).any()
    values = vector()
    values[::7] = 0
    assert not coded(quantizer, values)[::7].any()
    tiny = np.full(M, 1e-42, np.float32)
    assert (np.abs(coded(quantizer, tiny)) <= 1e-41).all()


@pytest.mark.parametrize("quantizer", [QSGD(), QSGD(4, scale="max"), TernGrad()], ids=repr)
def test_levels_stay_levels_whatever_is_drawn(quantizer):
    """A number that is drawn may be 1."""
    values = jnp.arange(-quantizer.levels, quantizer.levels + 1.0)[None]
    scales = jnp.array([[float(quantizer.levels)]])
    for draw in (0.0, 0.5, 1.0):
        digits = quantizer._digits(values, scales, jnp.full(values.shape, draw))
        np.testing.assert_array_equal(digits, values + quantizer.levels)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(quantizer, bad: float):
    values = vector()
    values[700] = bad
    assert not np.isfinite(coded(quantizer, values)[700])


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_large_values_stay_finite(quantizer):
    largest = np.finfo(np.float32).max
    values = np.tile(np.array([1.0, -1.0, 0.5], np.float32) * largest, 50)
    got = coded(quantizer, values)
    assert np.isfinite(got).all()
    assert (np.sign(got) * np.sign(values) >= 0).all()
    if isinstance(quantizer, Block8 | Float4 | Codebook | BFloat16):
        np.testing.assert_allclose(got, values, rtol=0.01)


@pytest.mark.full
def test_any_length():
    for quantizer in (QSGD(1, 64), Sign(64, zeros=False), Block8(64), Int4(64), Float4(64), BFloat16(), Codebook(4)):
        for m in (1, 65):
            assert np.isfinite(coded(quantizer, vector()[:m])).all()
    for quantizer in ZERO_STAYS:
        assert coded(quantizer, np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_values_of_other_units_do_not_matter(quantizer):
    """And those of the same unit do, where it has several."""
    unit = quantizer.unit or M
    values = vector()
    others = values.copy()
    others[unit : 2 * unit] *= 100
    before, after = coded(quantizer, values), coded(quantizer, others)
    np.testing.assert_array_equal(after[:unit], before[:unit])
    np.testing.assert_array_equal(after[2 * unit :], before[2 * unit :])
    if quantizer.unit != 1 and getattr(quantizer, "norm", None) != "one":
        others[: min(unit, M) // 2] *= 100
        assert (coded(quantizer, others)[unit // 2 : unit] != before[unit // 2 : unit]).any()


@pytest.mark.parametrize("quantizer", quick(SCALED, SCALED[0], SCALED[-1]), ids=str)
@pytest.mark.parametrize("m", quick([25_353, 15_360, 8_192], 25_353))
def test_pieces_are_coded_as_the_whole(monkeypatch, quantizer, m: int):
    """On CPUs a long vector is coded piece by piece, elsewhere at once: to the same bits."""
    values = jnp.asarray(np.random.default_rng(5).standard_t(3, (2, m)).astype(np.float32))
    monkeypatch.setattr(_base, "PIECE", 2**13)

    def code(values):
        message = quantizer.encode(values, jax.random.key(1))
        return message, quantizer.decode(message, m, values.dtype)

    assert "platforms" in str(jax.make_jaxpr(code)(values[0]))
    in_turn = jax.jit(jax.vmap(code))(values)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    at_once = jax.jit(jax.vmap(code))(values)
    monkeypatch.setattr(_base, "PIECE", 2**30)
    for got, want in zip(in_turn, at_once, strict=True):
        np.testing.assert_array_equal(got, want)
    assert in_turn[0].shape[1] == quantizer.words(m, jnp.float32)
    np.testing.assert_array_equal(in_turn[1], jax.jit(jax.vmap(lambda x: code(x)[1]))(values))


def code_as(monkeypatch, on_cpu: bool) -> None:
    """Has all values coded in pieces, as on CPUs, or at once, as elsewhere."""
    monkeypatch.setattr(_base, "PIECE", 2**13)
    if not on_cpu:
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))


@pytest.mark.parametrize("on_cpu", quick([True, False], True))
@pytest.mark.parametrize("size", quick([24_600, 20_000, 8_192], 20_000))
@pytest.mark.parametrize(
    "quantizer",
    [QSGD(), full(TernGrad()), Sign(64), Block8(), full(Int4()), Float4(None), Float16(), full(Codebook(4))],
    ids=str,
)
def test_decodes_into_a_window(monkeypatch, quantizer, size: int, on_cpu: bool):
    """As if the values were decoded first, to the last bit: a product and a sum round twice."""
    m = 25_353
    rng = np.random.default_rng(6)
    values, vector, third = (jnp.asarray(rng.standard_t(3, m + 9).astype(np.float32)) for _ in range(3))
    code_as(monkeypatch, on_cpu)

    @jax.jit
    def code(values, vector, third, begin):
        message = quantizer.encode(values[:m], jax.random.key(1))

        def combine(window, values, first):
            return window - values + lax.dynamic_slice(third, (first,), values.shape)

        into = quantizer.decode_into(vector, begin, message, m, size, combine)
        return into, quantizer.decode(message, m, vector.dtype)

    got, decoded = (np.asarray(x) for x in code(values, vector, third, jnp.int32(5)))
    want = np.array(vector)
    want[5 : 5 + size] = want[5 : 5 + size] - decoded[:size] + np.asarray(third)[:size]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("on_cpu", quick([True, False], True))
@pytest.mark.parametrize(
    "quantizer", quick([Block8(), Int4(None), Sign(64), Float16(), Rotated(Int4())], Sign(64)), ids=str
)
@pytest.mark.parametrize("shape", quick([(4, 35_000), (3, 30_003), (2, 10_000)], (4, 35_000)))
def test_coded_vectors(monkeypatch, quantizer, shape: tuple[int, int], on_cpu: bool):
    """Messages as a part of a vector: decoded, subtracted, scaled, and one of them replaced."""
    length, (rows, size) = 10_001, shape
    rng = np.random.default_rng(7)
    values, vector = (rng.standard_t(3, x).astype(np.float32) for x in ((rows, length), size + 9))
    own = np.arange(length, dtype=np.float32)
    code_as(monkeypatch, on_cpu)

    @jax.jit
    def code(rank, begin, factor):
        messages = jax.vmap(lambda x: quantizer.encode(x, jax.random.key(1)))(values)
        # One by one or at once, as the parts are: some CPUs round products of matrices by their
        # number of rows.
        one = functools.partial(quantizer.decode, m=length, dtype=np.float32)
        decoded = lax.map(one, messages) if on_cpu else jax.vmap(one)(messages)
        parts = [Coded.of(messages, quantizer, length, size, np.float32, of) for of in (None, (rank, own))]
        scaled = [part.rescale(lambda x: x * factor) for part in parts]
        wholes = [part.whole() for part in scaled]
        return decoded, wholes, [part.subtract_from(jnp.asarray(vector), begin) for part in scaled]

    for factor in (1, 0, 0.5, np.nan):
        decoded, wholes, rests = code(jnp.int32(1), jnp.int32(9), jnp.float32(factor))
        own_instead = np.array(decoded)
        own_instead[1] = own
        for rows, whole, rest in zip((np.asarray(decoded), own_instead), wholes, rests, strict=True):
            want = rows.reshape(-1)[:size] * np.float32(factor)
            np.testing.assert_array_equal(whole, want)
            np.testing.assert_array_equal(rest[:9], vector[:9])
            np.testing.assert_array_equal(rest[9:], vector[9:] - want)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_overflowed_is_dropped_where_a_step_does_not_count(monkeypatch, on_cpu: bool):
    code_as(monkeypatch, on_cpu)
    messages = jnp.full((2, Block8().words(20_000, jnp.float32)), 0x7F800000)
    coded = Coded.of(messages, Block8(), 20_000, 30_000, jnp.float32)
    assert not np.isfinite(coded.whole()).any()
    coded = coded.rescale(lambda x: x * 0)
    np.testing.assert_array_equal(coded.whole(), np.zeros(30_000))
    np.testing.assert_array_equal(coded.subtract_from(jnp.ones(30_000), jnp.int32(0)), np.ones(30_000))


@pytest.mark.parametrize("quantizer", [Block8(), QSGD(), Sign(64)], ids=str)
def test_many_messages_are_decoded_without_scatters(monkeypatch, quantizer):
    """On other devices than CPUs, where a scatter would be slow."""
    code_as(monkeypatch, on_cpu=False)
    messages = jnp.zeros((4, quantizer.words(70_000, jnp.float32)), jnp.int32)
    decode = jax.vmap(lambda row: quantizer.decode(row, 70_000, jnp.float32))
    assert "scatter" not in str(jax.make_jaxpr(decode)(messages))


@pytest.mark.parametrize("quantizer", [Block8(), QSGD(), Sign()], ids=str)
def test_no_array_of_decoded_values(quantizer):
    """Where messages are subtracted from a vector, only a piece of them is decoded at a time.

    One message is copied. It has at most a byte for each value, and a decoded value has four.
    """
    length, rows = 2**20, 4
    messages = jax.ShapeDtypeStruct((rows, quantizer.words(length, jnp.float32)), jnp.int32)

    def subtract(vector, messages, begin):
        coded = Coded.of(messages, quantizer, length, rows * length, jnp.float32)
        return coded.subtract_from(vector, begin)

    vector = jax.ShapeDtypeStruct((rows * length,), jnp.float32)
    lowered = jax.jit(subtract, donate_argnums=0).lower(vector, messages, jax.ShapeDtypeStruct((), jnp.int32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2 * length


@pytest.mark.parametrize(
    "quantizer, bits",
    [
        (QSGD(4), 3.2),
        (TernGrad(), 1.6),
        (Sign(None, zeros=False), 1),
        (Sign(None), 1.6),
        (Block8(), 8),
        (Int4(), 4),
        (Float4(), 4),
    ],
)
def test_bits(quantizer, bits: float):
    m = 512_000
    scales = 1 if quantizer.bucket is None else m // quantizer.bucket
    assert quantizer.words(m, np.float32) == scales + m * bits / 32


def residual_norms(quantizer, steps: int, scale: np.ndarray | float = 1.0) -> list[float]:
    """The norms of the residual under error feedback, divided by those of the gradient."""
    residual, norms = np.zeros(M), []
    code = jax.jit(lambda acc, key: quantizer.decode(quantizer.encode(acc, key), M, jnp.float32))
    for step in range(steps):
        gradient = scale * vector(seed=step)
        acc = jnp.asarray(residual + gradient, jnp.float32)
        residual = np.asarray(acc - code(acc, jax.random.key(step)), np.float64)
        norms.append(np.linalg.norm(residual) / np.linalg.norm(gradient))
    return norms


@pytest.mark.full
def test_error_feedback_needs_a_contraction():
    """With unbiased rounding to few levels the residual grows without bound.

    With a division by 1 + ω, or with a biased quantizer, it does not.
    """
    assert residual_norms(QSGD(4, None), 40)[-1] > 1e3
    for quantizer in (
        QSGD(4, None, contract=True),
        QSGD(4, contract=True),
        TernGrad(contract=True),
        Sign(),
        Block8(),
        Int4(),
        Float4(),
    ):
        norms = residual_norms(quantizer, 200)
        omega = 32 if getattr(quantizer, "contract", False) else 4
        assert max(norms) < 2 * omega
        assert np.mean(norms[150:]) < 1.2 * np.mean(norms[100:150])


def test_signs_want_small_buckets():
    """If magnitudes differ much within a bucket, the residual is large. Small buckets help."""
    scale = np.exp(np.random.default_rng(1).normal(0, 1, M))
    means = [np.mean(residual_norms(q, 150, scale)[100:]) for q in (Sign(), Sign(64), Sign(8), Block8())]
    assert means == sorted(means, reverse=True)
    assert means[0] > 2 * means[2]
    assert means[3] < 0.05


@pytest.mark.full
def test_unbiased_means_of_a_whole_step():
    """QSGD without error feedback: over 400 steps the mean update is the mean gradient.

    It is within 5 standard errors.
    """
    size, steps = 3, 400
    gradients = np.stack([vector(seed=worker) for worker in range(size)])
    for split in (False, True, "ring"):
        tx = jsparse.qsgd("workers", split=split)

        def run(gradient, tx=tx):
            def step(state, _):
                update, state = tx.update(gradient, state)
                return state, update

            return jax.lax.scan(step, tx.init(gradient), None, length=steps)[1]

        updates = np.asarray(jax.jit(jax.vmap(run, axis_name="workers"))(gradients), np.float64)[0]
        error = np.abs(updates.mean(0) - gradients.mean(0))
        assert (error <= 5 * updates.std(0) / math.sqrt(steps) + 1e-3).all()
        assert updates.std(0).mean() > 0.05


@pytest.mark.parametrize("quantizer, step", [(Block8(64), 1 / 127), (BFloat16(), 2.0**-7)], ids=["8 bits", "bfloat16"])
@pytest.mark.parametrize("split", quick([False, True], True))
@pytest.mark.parametrize("n", quick([M, 20_000], 20_000))
def test_a_sum_in_fewer_bits(monkeypatch, quantizer, step: float, split: bool, n: int):
    """Compares with the sum of the rounded vectors of all workers, in numpy.

    If the vector is split, a worker does not round its own part before the sum, and then rounds
    the sum of that part. The longer vector is coded in pieces.
    """
    monkeypatch.setattr(_base, "PIECE", 2**10)
    size = 4
    gradients = np.stack([vector(seed=worker, m=n) for worker in range(size)])
    tx = jsparse.quantized("workers", quantize=quantizer, split=split)
    update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="workers"))
    total = np.asarray(update(gradients), np.float64)[0] * size
    rows = 2 * -(-n // (2 * size)) if split else n
    padded = np.pad(gradients, ((0, 0), (0, rows * -(-n // rows) - n))).reshape(size, -1, rows)
    read = np.stack([[coded(quantizer, row) for row in worker] for worker in padded]).astype(np.float64)
    if split:
        read[range(size), range(size)] = padded[range(size), range(size)]
    read = read.sum(0)
    expected = read.reshape(-1)[:n]
    if split:
        # A difference of one unit in the last place of a sum can change how the sum is rounded.
        np.testing.assert_allclose(total, expected, atol=0.51 * step * np.abs(expected).max())
        again = np.stack([coded(quantizer, row.astype(np.float32)) for row in read]).reshape(-1)[:n]
        assert np.isclose(total, again, rtol=1e-6, atol=1e-6).mean() > 0.99
    else:
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantizer", [Block8(64), BFloat16(), Float16()], ids=["8 bits", "bfloat16", "float16"])
@pytest.mark.parametrize("n", quick([M, 12, 5, 1], M))
def test_a_sum_in_a_ring(quantizer, n: int):
    """Compares with a ring in numpy that sums and rounds each part, from its owner's successor on.

    The rounding errors are the residuals.
    """
    size = 4
    gradients = np.stack([vector(seed=worker)[:n] for worker in range(size)])
    tx = jsparse.quantized("workers", quantize=quantizer, split="ring", error_feedback=True)

    def step(gradient):
        update, state = tx.update(gradient, tx.init(gradient))
        return update, state.buckets[0].residual

    updates, residuals = map(np.asarray, jax.jit(jax.vmap(step, axis_name="workers"))(gradients))
    assert (updates == updates[0]).all()
    block = 2 * -(-n // (2 * size))
    padded = np.pad(gradients, ((0, 0), (0, block * size - n))).reshape(size, size, block)
    total = np.zeros((size, block), np.float32)
    left = np.zeros_like(padded)
    for part in range(size):
        for hop in range(1, size + 1):
            worker = (part + hop) % size
            reached = total[part] + padded[worker, part]
            total[part] = coded(quantizer, reached)
            left[worker, part] = reached - total[part]
    np.testing.assert_allclose(updates[0] * size, total.reshape(-1)[:n], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(residuals, left.reshape(size, -1)[:, :n], atol=1e-5)
    np.testing.assert_allclose(updates[0] * size + residuals.sum(0), gradients.sum(0), atol=1e-5)


@pytest.mark.parametrize("block", [2, 64, 128])
def test_a_rotation_is_undone(block: int):
    """By itself it changes nothing but by rounding, also in a shorter last block."""
    values = vector()
    got = np.asarray(compiled(Rotated(Exact(), block))(values, jax.random.key(0)))
    np.testing.assert_allclose(got, values, atol=1e-5 * np.abs(values).max())


@pytest.mark.full
def test_a_rotation_spreads_large_values():
    """Each value of a block has a part of each other; so four bits with one scale lose less."""
    one = np.zeros(256, np.float32)
    one[17] = 16.0
    message = Rotated(Exact(), 256).encode(jnp.asarray(one), jax.random.key(0))
    np.testing.assert_allclose(np.abs(message.view(jnp.float32)), 1.0, rtol=1e-5)
    heavy = np.random.default_rng(0).standard_t(2, 64 * 256).astype(np.float32)

    def error(quantizer):
        got = quantizer.decode(quantizer.encode(jnp.asarray(heavy), jax.random.key(0)), heavy.size, jnp.float32)
        return np.linalg.norm(got - heavy) / np.linalg.norm(heavy)

    assert error(Rotated(Int4(256), 256)) < 0.7 * error(Int4(256))


def test_a_rotated_unbiased_quantizer_is_unbiased():
    quantizer, values = Rotated(QSGD(7, 64, "max"), 64), jnp.asarray(vector()[:200])
    decode = jax.jit(jax.vmap(lambda key: quantizer.decode(quantizer.encode(values, key), 200, jnp.float32)))
    got = np.asarray(decode(jax.random.split(jax.random.key(3), 4000)), np.float64)
    assert quantizer.unbiased
    assert np.abs(got.mean(0) - values).max() < 5 * got.std(0).max() / np.sqrt(4000)


def test_root_mean_square_of_signs():
    values = vector()[:512]
    got = np.asarray(compiled(Sign(512, norm="rms"))(values, jax.random.key(0)))
    np.testing.assert_allclose(got, np.sign(values) * np.sqrt(np.mean(values.astype(np.float64) ** 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotated(Int4(), 100), "block is 100; it must be a power of two"),
        (lambda: Rotated(Int4), "quantize is .*Int4.*; it must be a quantizer"),
        (lambda: Rotated(Codebook(2)), "quantize is Codebook.*for values that are not zero"),
        (lambda: Sign(norm="max"), "norm is 'max'"),
    ],
)
def test_options_of_rotations_and_signs(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
