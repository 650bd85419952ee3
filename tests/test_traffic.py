"""What a program sends, read off it; and Ok-Topk's bound."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jsparse
import transports
from algorithms import oktopk_bound
from jsparse import cost
from jsparse._comm.collectives import COLLECTIVES
from transports import AXIS

SIZES = {AXIS: 4}


def test_each_collective_has_its_cost():
    x = jnp.ones(1000)

    def program(x):
        lax.psum(x, AXIS)
        lax.pmax(x[:10], AXIS)
        lax.all_gather(x, AXIS)
        lax.all_to_all(x.reshape(4, 250), AXIS, 0, 0)
        lax.ppermute(x, AXIS, [(0, 1)])
        lax.psum_scatter(x, AXIS, tiled=True)
        lax.pbroadcast(x, (AXIS,), 0)

    traffic = jsparse.traffic(program, x, axis_sizes=SIZES)
    costs = [(part.name, part.cost.bytes, part.cost.messages) for part in traffic.parts]
    assert costs == [
        ("psum", 6000, 4),
        ("pmax", 60, 4),
        ("all_gather", 12000, 2),
        ("all_to_all", 3000, 3),
        ("ppermute", 4000, 1),
        ("psum_scatter", 3000, 2),
        ("pbroadcast", 4000, 2),
    ]
    assert traffic.bytes == sum(cost[1] for cost in costs)


def test_loops_are_multiplied_and_branches_kept_apart():
    def program(x, n):
        x = lax.fori_loop(0, 5, lambda i, x: lax.psum(x, AXIS), x)
        return lax.cond(n > 0, lambda: lax.psum(x, AXIS), lambda: lax.psum(x[:2], AXIS)[0] * x)

    traffic = jsparse.traffic(program, jnp.ones(1000), jnp.int32(1), axis_sizes=SIZES)
    loop, branches = traffic.parts
    assert (loop.times, loop.cost.bytes) == (5, 30000)
    assert sorted(branch.bytes for branch in branches.branches) == [12, 6000]
    assert traffic.bytes == 36000
    text = str(traffic)
    assert "psum float32[1000] over workers x 5" in text
    assert "branch 1" in text


def test_bytes_and_messages_are_bounded_each_by_itself():
    """One branch sends the most bytes, another the most messages."""

    def program(x, which):
        long = lambda: lax.psum(x, AXIS)[:1]  # noqa: E731
        often = lambda: lax.fori_loop(0, 5, lambda i, y: lax.psum(y, AXIS), x[:1])  # noqa: E731
        return lax.cond(which > 0, long, often)

    traffic = jsparse.traffic(program, jnp.ones(1000), jnp.int32(1), axis_sizes=SIZES)
    (branches,) = traffic.parts
    assert {(branch.bytes, branch.messages) for branch in branches.branches} == {(6000, 4), (30, 20)}
    assert (traffic.bytes, traffic.messages) == (6000, 20)
    assert (traffic.least.bytes, traffic.least.messages) == (30, 4)


def test_axes_that_the_program_binds_itself():
    @jax.jit
    def step(x):
        along, whole = PartitionSpec(AXIS), PartitionSpec()
        inner = jax.shard_map(lambda x: lax.psum(x, AXIS), mesh=transports.mesh(2), in_specs=along, out_specs=whole)
        return inner(x)

    assert jsparse.traffic(step, jax.ShapeDtypeStruct((20,), jnp.float32)).bytes == 40


def test_a_loop_of_unknown_length_is_refused():
    def program(x):
        return lax.while_loop(lambda x: x[0] < 5, lambda x: lax.psum(x, AXIS), x)

    with pytest.raises(NotImplementedError, match="fori_loop"):
        jsparse.traffic(program, jnp.ones(3), axis_sizes=SIZES)


def test_groups_of_an_axis():
    groups = [[0, 1], [2, 3]]
    program = lambda x: lax.all_gather(x, AXIS, axis_index_groups=groups)  # noqa: E731
    assert jsparse.traffic(program, jnp.ones(1000), axis_sizes=SIZES).bytes == 4000


def test_a_collective_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.delitem(COLLECTIVES, "ppermute")
    with pytest.raises(NotImplementedError, match="ppermute"):
        jsparse.traffic(lambda x: lax.ppermute(x, AXIS, [(0, 1)]), jnp.ones(8), axis_sizes=SIZES)


def test_a_ragged_exchange_sends_at_most_its_operand():
    def program(x):
        sizes = jnp.full(4, 2, jnp.int32)
        offsets = jnp.arange(4, dtype=jnp.int32) * 2
        return lax.ragged_all_to_all(x, x, offsets, sizes, offsets, sizes, axis_name=AXIS)

    most = jsparse.traffic(program, jnp.ones(8), axis_sizes={AXIS: 4})
    assert (most.bytes, most.messages) == (24, 3)


@pytest.mark.parametrize(
    ("tx", "n", "size"),
    [
        (jsparse.dense(AXIS), 1_500_000_000, 64),
        (jsparse.topk_allgather(AXIS, density=0.01), 1_000_000_000, 256),
        (jsparse.oktopk(AXIS, density=0.01), 2**31 - 1, 8),
    ],
    ids=["dense", "topk", "oktopk"],
)
def test_the_longest_gradients_trace(tx: jsparse.SparseAllReduce, n: int, size: int):
    grads = jax.ShapeDtypeStruct((n,), jnp.float32)
    assert jsparse.traffic(lambda g: tx.update(g, tx.init(g)), grads, axis_sizes={AXIS: size}).bytes > 2**28


SPLITS = [("all_to_all", size) for size in (1, 2, 3, 4, 7, 8, 16, 33, 64, 256, 1000)]
SPLITS += [("rotate", size) for size in (1, 2, 3, 8, 33, 64)]  # A program P times as long.


@pytest.mark.full
@pytest.mark.parametrize(("split", "size"), SPLITS)
def test_oktopk_keeps_its_bound(split: str, size: int):
    """``8k(P-1)/P + 16P + 512`` words in the dearest branches, whatever the sizes.

    By the closed formulas, which are those of the traced program: that is read in a third of the
    cases, in turn.
    """
    lengths = [(1, 1.0), (10, 0.1), (999, 0.01), (100_003, 0.01), (14_728_266, 0.01), (133_547_324, 0.02)]
    # One element more than the workers, or than twice as many, makes the shares unequal.
    lengths += [(10 * size, (m * size + 1) / (10 * size)) for m in (1, 2)]
    for number, (n, density) in enumerate(lengths, SPLITS.index((split, size))):
        k = max(1, round(density * n))
        tx = jsparse.oktopk(AXIS, density=density, split=split)
        grads = jax.ShapeDtypeStruct((n,), jnp.float32)
        least, most = cost.exact(tx, grads, size)
        assert most.bytes <= 4 * oktopk_bound(n, k, size), f"n={n}, k={k}"
        if number % 3 == 0:
            traffic = jsparse.traffic(lambda g, tx=tx: tx.update(g, tx.init(g)), grads, axis_sizes={AXIS: size})
            assert (traffic.least, traffic.cost) == (least, most), f"n={n}, k={k}"


@pytest.mark.full
def test_the_papers_balancing_rule_is_the_stated_exception():
    n, size = 1_000_000, 16
    reduce = jsparse.allreduce.OkTopk(balance_above=4.0)
    tx = jsparse.sparse_allreduce(AXIS, select=jsparse.select.TopK(0.01), allreduce=reduce)
    grads = jax.ShapeDtypeStruct((n,), jnp.float32)
    traffic = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), grads, axis_sizes={AXIS: size})
    assert oktopk_bound(n, 10_000, size) < traffic.bytes / 4 <= 12 * 10_000 + 16 * size + 512


def test_topk_allgather_sends_as_the_paper_says():
    n, k, size = 100_000, 1000, 8
    tx = jsparse.topk_allgather(AXIS, density=0.01)
    grads = jax.ShapeDtypeStruct((n,), jnp.float32)
    traffic = jsparse.traffic(lambda g: tx.update(g, tx.init(g)), grads, axis_sizes={AXIS: size})
    # And the two words with which a step opens.
    assert traffic.bytes == 4 * 2 * k * (size - 1) + 4 * 2 * 2 * (size - 1) // size
    assert traffic.messages == 3 + 2 * 3


def test_dense_in_buckets_sends_the_same_bytes_in_more_messages():
    leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1000, 24, 3000, 1000, 16)]

    def traffic(**kwargs):
        tx = jsparse.dense(AXIS, **kwargs)
        return jsparse.traffic(lambda g: tx.update(g, tx.init(g)), leaves, axis_sizes={AXIS: 8})

    one, several = traffic(), traffic(bucket_bytes=8000)
    assert one.bytes == several.bytes == 2 * 4 * 5040 * 7 // 8
    assert [part.payload for part in one.parts] == ["float32[5040]"]
    assert [part.payload for part in several.parts] == ["float32[1016]", "float32[3000]", "float32[1024]"]
