"""The sparse vector against dense numpy."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jsparse
from tiers import quick

CAPACITY = 6


def vector(runs, n: int) -> tuple[jsparse.SparseVector, np.ndarray]:
    """A vector of several runs, of sets of indices; and what it stands for."""
    indices = np.full((len(runs), CAPACITY), n, np.int32)
    values = np.zeros((len(runs), CAPACITY), np.float32)
    dense = np.zeros(n, np.float32)
    for number, members in enumerate(runs):
        members = sorted(members)[:CAPACITY]
        indices[number, : len(members)] = members
        values[number, : len(members)] = [2.0**number * (i + 1) for i in members]
        dense[members] += values[number, : len(members)]
    return jsparse.SparseVector(jnp.asarray(values), jnp.asarray(indices), n), dense


@jax.jit
def operations(x: jsparse.SparseVector):
    return {"dense": x.to_dense(), "merged": x.merge(), "count": x.count}


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from([5, 32, 33, 100]), st.data())
def test_runs_are_summed(n: int, data):
    runs = data.draw(st.lists(st.sets(st.integers(0, n - 1), max_size=CAPACITY), min_size=3, max_size=3))
    x, dense = vector(runs, n)
    got = operations(x)
    np.testing.assert_array_equal(got["dense"], dense)
    np.testing.assert_array_equal(got["count"], [len(run) for run in runs])
    members = sorted(set().union(*runs))
    np.testing.assert_array_equal(got["merged"].indices, members + [n] * (got["merged"].capacity - len(members)))
    np.testing.assert_array_equal(got["merged"].values[: len(members)], dense[members])
    assert (np.asarray(got["merged"].values)[len(members) :] == 0).all()


@pytest.mark.parametrize("n", quick([20, 64], 64))
def test_joining_and_concatenating(n: int):
    ordered, dense = vector([{1, 2}, set(), {5, 9, 13}], n)
    shuffled, _ = vector([{5, 9, 13}, {1, 2}, set()], n)
    for x in (ordered.concatenate(7), ordered.join(7), shuffled.join(7)):
        np.testing.assert_array_equal(x.indices, [1, 2, 5, 9, 13, n, n])
    np.testing.assert_array_equal(ordered.join(7).to_dense(), dense)
    padded = ordered.resize(9)
    assert padded.indices.shape == (3, 9)
    np.testing.assert_array_equal(padded.to_dense(), dense)


def test_windows():
    x, _ = vector([{3, 4, 8, 11, 12, 19}], 20)
    run = jsparse.SparseVector(x.values[0], x.indices[0], 20)
    windows = run.window(jnp.array([0, 2]), jnp.array([2, 4]), 3)
    np.testing.assert_array_equal(windows.indices, [[3, 4, 20], [8, 11, 12]])
    # Of four, three: round a circle.
    for start, expected in [(1, [11, 12, 19]), (2, [8, 12, 19]), (3, [8, 11, 19]), (4, [8, 11, 12])]:
        np.testing.assert_array_equal(run.window(jnp.int32(2), jnp.int32(4), 3, start).indices, expected)
