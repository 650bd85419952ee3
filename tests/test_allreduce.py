"""What is particular to single all-reduces; what all of them promise is in test_invariants."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
import oracles
import scenarios
import transports
from algorithms import DENSITY, ROWS, Row
from jsparse._comm.metered import Metered
from jsparse._vector.sparse_vector import SparseVector
from jsparse.allreduce import DsarSplitAllGather, SsarRecursiveDoubling, SsarSplitAllGather, maximum, minimum
from jsparse.allreduce._gather import delta
from jsparse.allreduce._regions import _deal, in_order, index_of
from jsparse.allreduce.oktopk import _cut
from jsparse.wire import Full
from tiers import quick

AXIS = "workers"
P, LENGTH, K = 4, 65536, 2048
SPARCML = [SsarRecursiveDoubling(), SsarSplitAllGather(), DsarSplitAllGather(), DsarSplitAllGather(group=2)]


@functools.cache
def reduction(allreduce, n: int = LENGTH):
    """An all-reduce of vectors of shape ``(P, k)``: ``(dense totals, words sent)``."""

    def run(values, indices):
        comm = Metered(jsparse.AxisComm(AXIS))
        x = SparseVector(values, indices, n)
        state = allreduce.init(n, comm.size, values.dtype)
        total, _, _ = allreduce(comm, x, state, step=jnp.int32(3), wire=Full().at(jnp.int32(3)))
        dense = total.to_dense() if isinstance(total, SparseVector) else total
        return dense, comm.words

    return jax.jit(jax.vmap(run, axis_name=AXIS))


def vectors(sets, dtype=np.float32, k: int = K, n: int = LENGTH):
    rng = np.random.default_rng(0)
    indices = np.full((len(sets), k), n, np.int32)
    values = np.zeros((len(sets), k), dtype)
    for worker, members in enumerate(sets):
        indices[worker, : len(members)] = np.sort(members)
        values[worker, : len(members)] = rng.integers(1, 99, len(members)) * rng.choice([-1, 1], len(members))
    return values, indices


def overlapping(share: float, size: int = P) -> list[np.ndarray]:
    """K indices for each worker: the part ``share`` is the same on all, the rest its own."""
    shuffled = np.random.default_rng(1).permutation(LENGTH)
    common = round(share * K)
    own = K - common
    return [np.r_[shuffled[:common], shuffled[common + w * own : common + (w + 1) * own]] for w in range(size)]


@pytest.mark.full
@pytest.mark.parametrize("overlap", [1.0, 0.75, 0.5, 0.25, 0.0])
@pytest.mark.parametrize("allreduce", SPARCML[:2], ids=["recursive_doubling", "split_allgather"])
def test_messages_follow_the_data(allreduce, overlap: float):
    """At most 1.5 times what the busiest worker would send in messages of exact length.

    With dealt indices 1.2 times: messages are longer by one tenth at most for the random part, and
    by one eighth for the static lengths.
    """
    sets = overlapping(overlap)
    words = int(reduction(allreduce)(*vectors(sets))[1][0])
    if isinstance(allreduce, SsarRecursiveDoubling):
        pairs = [max(len(np.union1d(sets[w], sets[w ^ 1])) for w in range(P))]
        assert words <= 1.5 * 2 * (K + sum(pairs)) + 32
    else:
        assert words <= 1.2 * contents(sets)


def contents(sets) -> int:
    """The words that the busiest worker sends if no message is longer than its contents."""
    owner = oracles.owners(LENGTH, P)
    parts = np.stack([np.bincount(owner[members], minlength=P) for members in sets])
    held = np.bincount(owner[np.unique(np.concatenate(sets))], minlength=P)
    return 2 * max(parts[w].sum() - parts[w][w] + held.sum() - held[(w + 1) % P] for w in range(P))


@pytest.mark.parametrize("lengths", quick([(1, 3), (5, 8), (8, 8), (64, 1), (64, 4), (1003, 7)], (1003, 7)))
def test_every_index_is_dealt_to_one_owner(lengths: tuple[int, int]):
    n, parts = lengths
    owner, block = oracles.owners(n, parts), -(-n // parts)
    members = np.flatnonzero(np.random.default_rng(n).random(n) < 0.7).astype(np.int32)
    indices = np.r_[members, np.full(3, n, np.int32)]
    x = SparseVector(jnp.where(indices < n, 1.0, 0.0), jnp.asarray(indices), n)
    own, place, slot, counts = jax.jit(lambda x: _deal(x, parts))(x)
    np.testing.assert_array_equal(counts, np.bincount(owner[members], minlength=parts))
    np.testing.assert_array_equal(own[: len(members)], owner[members])
    np.testing.assert_array_equal(index_of(place, own, parts, n)[: len(members)], members)
    for part in range(parts):
        np.testing.assert_array_equal(np.asarray(slot)[:-3][owner[members] == part], np.arange(counts[part]))
    np.testing.assert_array_equal(slot[-3:], len(indices))
    # A row longer than its region, as groups of workers have.
    rows = np.full((parts, block + 2), -1)
    rows[owner, np.arange(n) // parts] = np.arange(n)
    np.testing.assert_array_equal(in_order(jnp.asarray(rows), n), np.arange(n))
    np.testing.assert_array_equal(index_of(jnp.full(parts, block), jnp.arange(parts), parts, n), n)


def test_the_longest_vectors_are_dealt_without_overflow():
    n, parts = 2**31 - 1, 7
    last = jnp.full(parts, n // parts)
    np.testing.assert_array_equal(index_of(last, jnp.arange(parts), parts, n), np.r_[n - 1, [n] * 6])
    np.testing.assert_array_equal(index_of(last + 1, jnp.arange(parts), parts, n), n)


CROWDS = {
    "a stretch": np.arange(LENGTH // P),
    "columns of a matrix": np.arange(LENGTH).reshape(-1, 256)[:, 8:72].ravel(),
    "every fourth": np.arange(0, LENGTH, 4),
}


@pytest.mark.full
@pytest.mark.parametrize("crowd", CROWDS)
def test_crowds_are_dealt_evenly(crowd: str):
    """If regions were of consecutive indices, messages would be up to P times as long."""
    sets = [CROWDS[crowd][w::8][:K] for w in range(P)]
    values, indices = vectors(sets)
    totals, words = reduction(SsarSplitAllGather())(values, indices)
    assert words[0] <= 1.2 * contents(sets)
    np.testing.assert_array_equal(totals[0], combine(values, indices))
    _, dense = reduction(DsarSplitAllGather())(values, indices)
    assert dense[0] - LENGTH // P * (P - 1) <= 1.2 * 2 * K * (P - 1) / P


@pytest.mark.full
def test_no_region_is_gathered_that_has_more_elements_than_a_worker():
    """At worst all elements are dealt to one owner. Then the workers' own vectors are gathered."""
    sets = [np.flatnonzero(oracles.owners(LENGTH, P) == 1)[w::8][:K] for w in range(P)]
    values, indices = vectors(sets)
    totals, words = reduction(SsarSplitAllGather())(values, indices)
    split, gather, agree = 2 * K * (P - 1), 2 * K * (P - 1), 2 + 3
    assert words[0] == split + gather + agree
    np.testing.assert_array_equal(totals[0], combine(values, indices))


def combine(values, indices, n: int = LENGTH, at=np.add.at, neutral: float = 0):
    """What the result should be, in numpy."""
    combined = np.full(n, neutral, values.dtype)
    for value, index in zip(values, indices, strict=True):
        at(combined, index[index < n], value[index < n])
    return combined


def short_vectors(dtype, n: int = 40, k: int = 8, size: int = 5):
    """Vectors whose sum stays sparse, goes dense, and goes dense on the way."""
    rng = np.random.default_rng(2)
    for kept in (range(8), range(16), range(40)):
        few = [rng.choice(kept, size=rng.integers(1, k + 1), replace=False) for _ in range(size)]
        yield vectors(few, dtype, k, n)


@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("kind", [SsarRecursiveDoubling, SsarSplitAllGather, DsarSplitAllGather])
def test_sparse_dense_and_mixed(kind, dtype):
    with jax.enable_x64(dtype == np.float64):
        for values, indices in short_vectors(dtype):
            totals, _ = reduction(kind(), 40)(values, indices)
            assert totals.dtype == dtype
            np.testing.assert_array_equal(totals, np.tile(combine(values, indices, 40), (5, 1)))


@pytest.mark.parametrize(
    ("function", "at", "neutral"),
    [(maximum, np.maximum.at, -np.inf), (minimum, np.minimum.at, np.inf)],
)
def test_the_largest_and_the_smallest_at_each_index(function, at, neutral):
    """Over the workers that have the index; indices that nobody has are not in the result."""
    run = jax.jit(jax.vmap(lambda v, i: function(AXIS, SparseVector(v, i, 40)), axis_name=AXIS))
    for values, indices in short_vectors(np.float32):
        want = combine(values, indices, 40, at, neutral)
        have = run(values, indices)
        for worker in range(5):
            members = np.asarray(have.indices[worker])
            used = members < 40
            np.testing.assert_array_equal(members[used], np.flatnonzero(np.isfinite(want)))
            np.testing.assert_array_equal(np.asarray(have.values[worker])[used], want[members[used]])
            assert not np.any(np.asarray(have.values[worker])[~used])


def test_delta_is_where_pairs_take_as_much_as_values():
    assert delta(1000, np.float32, Full()) == 500
    assert delta(1000, np.float64, Full()) == 666


@pytest.mark.full
def test_it_goes_dense_when_the_data_fill_it():
    """One executable: equal indices stay sparse, others go dense in the last message."""
    n = 1000
    shuffled = np.random.default_rng(3).permutation(n)

    def sent(allreduce, k: int, distance: int) -> int:
        sets = [np.take(shuffled, range(w * distance, w * distance + k), mode="wrap") for w in range(P)]
        return int(reduction(allreduce, n)(*vectors(sets, k=k, n=n))[1][0])

    agree, count = 2, 3  # Words of one ``pmax`` and of the gathered counts.
    assert sent(SsarRecursiveDoubling(), 400, 0) - agree < 2 * 400 + n
    assert sent(SsarRecursiveDoubling(), 400, 200) - agree == 2 * 400 + n
    split = 2 * 67 * (P - 1)
    assert sent(SsarSplitAllGather(), 200, 0) - agree - count == split + 2 * 67 * (P - 1)
    assert sent(SsarSplitAllGather(), 200, 200) - agree - count == split + n // P * (P - 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "row, size",
    [
        pytest.param(
            row,
            size,
            id=f"{row}-{size}",
            marks=[pytest.mark.slow] if size not in row.sizes else [pytest.mark.full] if size > 3 else [],
        )
        for row in ROWS
        for size in {"gtopk": (7, 8), "gtopk-tree": (3, 7, 8)}.get(row.name, ())
    ],
)
def test_the_published_put_back_loses_mass_and_the_exact_one_none(row: Row, size: int):
    """An index that is cut in an inner round comes back through another pair.

    Algorithm 4 neither sends nor keeps the element that was cut.
    """
    gradients = scenarios.take("ordinary", size, 6)
    published = functools.partial(jsparse.gtopk, put_back="paper", **row.oracle_args)
    paper = dataclasses.replace(
        row,
        make=lambda comm, density: published(comm, density=density),
        oracle_args={**row.oracle_args, "put_back": "paper"},
    )
    lost = {}
    for name, variant in (("paper", paper), ("exact", row)):
        state, update = transports.workers(variant, size)
        delivered, kept = np.zeros(transports.N), np.zeros((size, transports.N), np.float32)
        for gradient in gradients:
            updates, state = update(transports.tree(gradient), state)
            want = oracles.gtopk(kept + gradient, density=DENSITY, **variant.oracle_args)
            total = np.round(transports.flat(updates, size)[0].astype(np.float64) * size)
            np.testing.assert_array_equal(total, want.total)
            before, kept = kept, np.asarray(state.buckets[0].residual)
            np.testing.assert_array_equal(before + gradient - kept, want.delivered)
            delivered = delivered + total
        given = np.sum(gradients, axis=(0, 1), dtype=np.float64)
        lost[name] = np.abs(given - kept.sum(0, dtype=np.float64) - delivered).sum() / np.abs(delivered).sum()
    assert lost["exact"] == 0
    assert lost["paper"] > 0.01


@functools.cache
def constant_gradients(size: int, n: int, density: float, **rule: str):
    """Runs gtopk: a function of a gradient, shape ``(size, n)``, and of a number of steps with it.

    It returns the mean of all updates, shape ``(n,)``, and the residuals, shape ``(size, n)``.
    """
    tx = jsparse.gtopk(AXIS, density=density, **rule)

    def run(gradient, steps):
        def step(_, carry):
            total, state = carry
            update, state = tx.update(gradient, state)
            return total + update, state

        total, state = jax.lax.fori_loop(0, steps, step, (jnp.zeros(n), tx.init(jnp.zeros(n))))
        return total / steps, jsparse.residual(state)[0]

    mapped = jax.jit(jax.vmap(run, in_axes=(0, None), axis_name=AXIS))

    def both(gradient, steps):
        mean, residual = mapped(gradient.astype(np.float32), steps)
        return np.asarray(mean)[0], np.asarray(residual)

    return both


@pytest.mark.full
@pytest.mark.parametrize("put_back", ["exact", "owner"])
@pytest.mark.parametrize("topology", ["butterfly", "tree", "allgather"])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_training_goes_on_where_sums_cancel(size: int, topology: str, put_back: str):
    """The k largest elements of each worker add up to 0, so they are delivered and make room."""
    signs = np.where(np.arange(size) % 2, -1, 1) * (np.arange(size) < size // 2 * 2)
    gradient = np.full((size, 16), 0.5)
    gradient[:, :2] = signs[:, None]
    mean, _ = constant_gradients(size, 16, 2 / 16, topology=topology, put_back=put_back)(gradient, 300)
    np.testing.assert_allclose(mean, gradient.mean(0), atol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("topology", ["butterfly", "allgather"])
def test_an_owner_bounds_residuals_where_sums_nearly_cancel(topology: str):
    """Two workers' sums are a thousandth of their elements, less than what all others send.

    With ``"exact"`` both keep sending the same elements, and nothing else.
    """
    size, n, k = 8, 400, 20
    gradient = np.zeros((size, n))
    gradient[0, : n // 2], gradient[1, : n // 2], gradient[2:, n // 2 :] = 1000, -999, 10
    norms = {}
    for put_back in ("exact", "owner"):
        _, residual = constant_gradients(size, n, k / n, topology=topology, put_back=put_back)(gradient, 200)
        norms[put_back] = np.abs(residual).sum() / np.abs(gradient).sum()
    assert norms["owner"] < n / k
    assert norms["exact"] > 0.9 * 200


@pytest.mark.parametrize(("size", "count"), [(3, 11), (64, 530), (64, 127)])
def test_oktopk_cuts_regions_of_equal_parts(size: int, count: int):
    """Where k / P is no whole number too: no region has one element more than another."""
    indices = size * np.sort(np.random.default_rng(0).choice(LENGTH, count, replace=False)).astype(np.int32)
    x = SparseVector(jnp.ones(count), jnp.asarray(indices), size * LENGTH)
    starts = np.asarray(_cut(x, jnp.zeros(size, jnp.int32)))
    parts = np.diff([*np.searchsorted(indices, starts), count])
    assert set(parts) <= {count // size, count // size + 1}


@dataclasses.dataclass(frozen=True)
class Ragged(jsparse.AxisComm):
    """Does with an all-gather what a GPU does with one ragged exchange."""

    def ragged_all_to_all(self, x, lengths, arriving, output):
        rows, counts = (self.all_gather(each)[:, self.rank()] for each in (x, lengths))
        there = (jnp.arange(x.shape[1])[None] < arriving[:, None])[..., None]
        return jnp.where(there & (counts == arriving)[:, None, None], rows, output)


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 8])
def test_a_ragged_split_sends_only_what_is_selected_and_gives_the_same_bits(size: int):
    rng = np.random.default_rng(size)
    gradients = rng.normal(size=(4, size, 1003)).astype(np.float32) ** 3
    runs = {}
    for split, comm in (("all_to_all", AXIS), ("ragged", Ragged(AXIS))):
        tx = jsparse.oktopk(comm, density=0.05, split=split)
        state = jax.vmap(lambda _, tx=tx: tx.init(jnp.zeros(1003)), axis_name=AXIS)(jnp.arange(size))
        update, steps = jax.jit(jax.vmap(tx.update, axis_name=AXIS)), []
        for gradient in gradients:
            updates, state = update(gradient, state)
            steps.append((updates, state.buckets, state.report.words))
        runs[split] = steps
    room = math.ceil((1.25 + math.log2(size) / 8) * math.ceil(50 / size))
    for (updates, state, words), (other, others, fewer) in zip(*runs.values(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, (updates, state), (other, others))
        # Lengths are told in one word for each worker.
        saved = np.asarray(words, np.int64) - np.asarray(fewer, np.int64) + size - 1
        assert (saved >= 2 * ((size - 1) * room - 50)).all()
        assert (saved < 2 * (size - 1) * room).all()


def test_where_no_ragged_split_can_be():
    with pytest.raises(ValueError, match="leave wire out"):
        jsparse.oktopk(Ragged(AXIS), density=0.05, split="ragged", wire=jsparse.wire.Compact())


def test_topk_dsa_is_ssar_split_allgather_by_another_name():
    """So that what holds for the one, with any number of workers, holds for the other."""
    assert (
        jsparse.topk_dsa(AXIS, density=0.05).synchroniser
        == jsparse.ssar_split_allgather(AXIS, density=0.05).synchroniser
    )
