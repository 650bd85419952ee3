"""Gathering parts of unequal length: as they are, and balanced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse.allreduce._gather import _reduce_to, gather_parts
from kernels_pallas import bitmap
from tiers import quick
from transports import AXIS

N = 1000
SHARE = 10
CAPACITY = 60
OTHERS = 7


@functools.cache
def gather(size: int, balance_above: float | None):
    def local(values, indices, parts, step):
        mine = jsparse.SparseVector(values, indices, N)
        wire = jsparse.wire.Full().at(step)
        # The elements of the region that are not chosen are the negative ones.
        chosen = bitmap.pack(values > 0)
        return gather_parts(
            jsparse.AxisComm(AXIS), mine, chosen, parts, SHARE, balance_above=balance_above, step=step, wire=wire
        )[0]

    return jax.jit(jax.vmap(local, in_axes=(0, 0, None, None), axis_name=AXIS))


def parts_of(counts, rng):
    """Each worker's elements, as padded buffers.

    So many are chosen. Others, which are negative, are not. Each worker has a region. The regions
    are in the order of ranks.
    """
    pool = np.sort(rng.permutation(N)[: (counts + OTHERS).sum()])
    shape = len(counts), CAPACITY + OTHERS
    values, indices = np.zeros(shape, np.float32), np.full(shape, N, np.int32)
    for worker, count in enumerate(counts + OTHERS):
        own, pool = pool[:count], pool[count:]
        indices[worker, :count], values[worker, :count] = own, own + 1
        values[worker, rng.permutation(count)[:OTHERS]] *= -1
    return values, indices


COUNTS = {
    "even": lambda size, rng: np.full(size, SHARE),
    "none": lambda size, rng: np.zeros(size, int),
    "one has all": lambda size, rng: np.where(np.arange(size) == size - 1, min(SHARE * size, CAPACITY), 0),
    "two have all": lambda size, rng: np.where(np.arange(size) < 2, SHARE * min(size, 6) // 2, 0),
    "random": lambda size, rng: rng.multinomial(SHARE * size, rng.dirichlet(np.ones(size))).clip(0, CAPACITY),
    "a little less": lambda size, rng: rng.multinomial(SHARE * size - 3, np.ones(size) / size),
    "too many": lambda size, rng: rng.integers(SHARE, CAPACITY + 1, size),
    "too many on one": lambda size, rng: np.where(np.arange(size) == 0, CAPACITY, SHARE),
}


@pytest.mark.parametrize("balance_above", quick([1.0, 2.0, 4.0, None], 1.0, None))
@pytest.mark.parametrize("size", quick([1, 2, 5, 8], 5))
@pytest.mark.parametrize("name", COUNTS)
def test_everything_that_fits_arrives(name: str, size: int, balance_above: float | None):
    rng = np.random.default_rng(size)
    for step in range(3):
        counts = COUNTS[name](size, rng)
        values, indices = parts_of(counts, rng)
        got = gather(size, balance_above)(values, indices, jnp.asarray(counts, jnp.int32), jnp.int32(step))
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), got)
        found, mine = np.asarray(got.indices[0]), np.sort(indices[values > 0])
        arrived = found[found < N]
        assert (np.diff(arrived) > 0).all()
        assert (found[len(arrived) :] == N).all()
        np.testing.assert_array_equal(got.values[0][: len(arrived)], arrived + 1)
        assert np.isin(arrived, mine).all()
        if counts.sum() <= SHARE * size:
            np.testing.assert_array_equal(arrived, mine)
        else:
            # At least nine tenths of the room is used, but for what rounding leaves over on each
            # worker.
            assert len(arrived) >= 0.9 * SHARE * size - size


@pytest.mark.parametrize("size", quick([2, 5, 8], 5))
def test_what_does_not_fit_takes_turns(size: int):
    counts = np.full(size, CAPACITY)
    values, indices = parts_of(counts, np.random.default_rng(0))
    arrived = set()
    for step in range(4 * CAPACITY // SHARE):
        got = gather(size, 2.0)(values, indices, jnp.asarray(counts, jnp.int32), jnp.int32(step))
        arrived |= set(np.asarray(got.indices[0]).tolist()) - {N}
    assert arrived == set(indices[values > 0].tolist())


@pytest.mark.parametrize("scale", [1, 1000, 100_000_000])
def test_reducing_in_proportion(scale: int):
    rng = np.random.default_rng(0)
    for room in (1, 7, 10):
        counts = rng.integers(0, 10, 16) * scale + rng.integers(0, scale, 16)
        counts = counts // max(1, -(-counts.sum() // (2**31 - 1)))
        got = np.asarray(_reduce_to(jnp.asarray(counts, jnp.int32), room * scale), np.int64)
        fair = counts * min(1, room * scale / counts.sum())
        assert got.sum() <= max(room * scale, 0) or (got == counts).all()
        assert (got <= fair + 1e-6).all()
        assert (got >= fair - counts * 2**-13 - 1).all()


def test_a_part_longer_than_foretold_loses_only_what_does_not_fit():
    counts = np.array([12, 8, 11, 9])
    values, indices = parts_of(counts, np.random.default_rng(0))
    # A part of 10 goes in a message of 11 places, the first length above.
    for foretold, places in ((12, 12), (10, 11), (1, 11)):
        got = gather(4, 2.0)(values, indices, jnp.full(4, foretold, jnp.int32), jnp.int32(0))
        assert np.count_nonzero(np.asarray(got.indices[0]) < N) == np.minimum(counts, places).sum()
