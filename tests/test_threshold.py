"""The threshold that k elements of all workers reach, estimated or searched for."""

import functools

import jax
import numpy as np
import pytest

import jsparse
from jsparse.allreduce._threshold import global_threshold
from transports import AXIS

P, SHARE = 4, 1000
K = P * SHARE


@functools.cache
def compiled():
    def local(values, part, due):
        comm = jsparse.AxisComm(AXIS)
        return global_threshold(comm, values, K, part, due, beside=comm.rank()[None])

    return jax.jit(jax.vmap(local, in_axes=(0, 0, None), axis_name=AXIS))


def thresholds(values: np.ndarray, part: int | np.ndarray, due: bool = False) -> tuple[float, np.ndarray, np.ndarray]:
    """``(threshold, parts, counts)``: the counts are what the parts foretell."""
    foretold = np.broadcast_to(np.asarray(part, np.int32), P)
    threshold, parts, beside = map(np.asarray, compiled()(values.astype(np.float32), foretold, due))
    for alike in (threshold, parts, beside):
        np.testing.assert_array_equal(alike, np.broadcast_to(alike[:1], alike.shape))
    np.testing.assert_array_equal(beside[0, :, 0], np.arange(P))
    return threshold[0], parts[0], np.count_nonzero(np.abs(values.astype(np.float32)) >= threshold[0], axis=1)


def normal(rng):
    return rng.normal(size=(P, 4 * SHARE))


def heavy_tails(rng):
    return normal(rng) ** 3


def uniform(rng):
    return rng.uniform(-1, 1, (P, 4 * SHARE))


def piled(rng):
    """Magnitudes pile up below a threshold, as error feedback makes them."""
    return np.minimum(np.abs(normal(rng)), 1 + 0.02 * rng.exponential(size=(P, 4 * SHARE)))


@pytest.mark.parametrize("draw", [normal, heavy_tails, uniform, piled])
def test_an_estimate_is_near_k_and_foretells_parts_that_are_long_enough(draw):
    """A message as long as its foretold part holds the part."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        _, parts, counts = thresholds(draw(rng), rng.poisson(SHARE, P))
        assert abs(counts.sum() - K) <= 0.02 * K
        assert (counts <= parts).all()
        assert (parts <= 1.06 * counts).all()


EXACT = {
    "it is due": (1, SHARE, True),
    "one has all": (np.array([1000, 1, 1, 1]), SHARE, False),
    "far fewer than before": (1, 16 * SHARE, False),
    "far more than before": (1, SHARE // 16, False),
}


@pytest.mark.parametrize("case", EXACT)
def test_a_threshold_is_exact_if_that_is_due_or_if_it_is_beyond_what_workers_sent(case: str):
    scale, part, due = EXACT[case]
    _, parts, counts = thresholds(normal(np.random.default_rng(0)) * np.reshape(scale, (-1, 1)), part, due)
    assert counts.sum() == K
    np.testing.assert_array_equal(parts, counts)


def test_at_most_k_elements_are_all_taken():
    values = normal(np.random.default_rng(0)) * (np.arange(4 * SHARE) < [[0], [10], [SHARE], [SHARE + 7]])
    threshold, parts, _ = thresholds(values, SHARE)
    assert threshold == 0
    assert (parts >= np.count_nonzero(values, axis=1)).all()
