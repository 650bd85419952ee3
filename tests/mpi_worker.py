"""What each process of ``mpirun`` runs for ``test_mpi.py``.

The command is ``python -m mpi4py mpi_worker.py FILE ROW ...``.

Rank 0 writes to the file, pickled: of every row all processes' updates and states, or why it is
not possible. Then each check runs; one that fails ends all processes, its traceback on standard
output.
"""

import functools
import gc
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from mpi4py import MPI

import jsparse
import processes
import scenarios
import transports
from algorithms import DENSITY, ROWS, Row

gc.set_threshold(*processes.GARBAGE)
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def comms(row: Row) -> Any:
    comm = jsparse.MpiComm()
    return comm if row.gpus is None else comm.levels(row.gpus[SIZE])


def prepare(row: Row) -> tuple[Any, Callable[..., Any]]:
    """The first state, and the compiled update.

    Nothing is sent, so no process waits for another one's compiler.
    """
    tx = row.make(comms(row), DENSITY)
    state, update = tx.init(transports.zeros()), jax.jit(tx.update)
    update.lower(transports.zeros(), state).compile()  # What the first call finds ready.
    return state, update


def run(row: Row, state: Any, update: Callable[..., Any]) -> list[list[np.ndarray]]:
    """The leaves of this process's updates and state after every step."""
    steps = []
    for gradient in scenarios.mixed(SIZE, row.scale):
        mine = jax.tree.map(lambda x: x[0], transports.tree(gradient[RANK : RANK + 1]))
        updates, state = update(mine, state)
        steps.append([np.asarray(leaf) for leaf in jax.tree.leaves((updates, state))])
    return steps


def check_types():
    """Values of types that MPI lacks arrive unchanged.

    Sums are added in the order of ranks, and have the same bits everywhere.
    """
    comm = jsparse.MpiComm()
    moves = {"all_gather": comm.all_gather, "all_to_all": comm.all_to_all}
    moves["ppermute"] = lambda x: comm.ppermute(x, [(0, 1)])
    sums = {"psum": comm.psum, "short psum": lambda x: comm.psum(x[0, :5]), "psum_scatter": comm.psum_scatter}
    everyone = np.random.default_rng(0).standard_normal((SIZE, SIZE, 301)) * 50
    everyone[:, :, 0] = 127  # Sums of narrow integers are taken modulo their range, too.
    summed = ["float32", "bfloat16", "float16", "int8", "uint32"]
    for dtype in [*summed, "float8_e4m3fn", "bool"]:
        rows = jnp.asarray(everyone).astype(dtype)
        some = moves | sums | {"pmax": comm.pmax} if dtype in summed else moves
        got = jax.jit(lambda x, some=some: {name: collective(x) for name, collective in some.items()})(rows[RANK])
        assert {x.dtype for x in got.values()} == {rows.dtype}
        wanted = {"all_gather": rows, "all_to_all": rows[:, RANK], "pmax": rows}
        wanted["ppermute"] = rows[0] if RANK == 1 else jnp.zeros_like(rows[0])
        if dtype in summed:
            wide = np.asarray(rows, np.float32 if rows.dtype.itemsize < 4 and "float" in dtype else rows.dtype)
            total = functools.reduce(np.add, wide).astype(rows.dtype)
            wanted |= {"psum": total, "short psum": total[0, :5], "psum_scatter": total[RANK]}
            wanted["pmax"] = rows.max(0)
        for name, x in got.items():
            np.testing.assert_array_equal(x, wanted[name], err_msg=f"{name} of {dtype}")
    assert comm.psum(jnp.array(True)) == SIZE
    assert jnp.isnan(comm.pmax(jnp.where(RANK == 0, jnp.nan, jnp.ones(2)))).all()
    none = jnp.zeros((0,))
    assert comm.psum(none).shape == comm.pmax(none.astype(jnp.int32)).shape == (0,)


def check_order():
    """Messages are sent in the order of the trace.

    So it is in loops, in branches, and where no message depends on another.
    """
    comm = jsparse.MpiComm()
    around = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]

    @jax.jit
    def program(x, turn):
        # Of one shape, so that MPI would not notice if they changed places.
        parts = [comm.all_gather(x + 1), comm.ppermute(x + 2, around), comm.all_gather(x + 3)]
        comm.all_gather(x + 4)
        branch = comm.switch(turn, [lambda: comm.ppermute(x + 5, around), lambda: comm.all_gather(x + 6)[0]])
        looped = comm.repeat(5, lambda i, a: comm.psum(a + i), x.astype(jnp.int32))
        one = comm.repeat(3, lambda i, a: lax.cond(turn > 0, comm.pmax, lambda a: a + 1, a), x)
        return parts, branch, looped, one

    x, left = jnp.full(3, float(RANK)), (RANK - 1) % SIZE
    for turn in (0, 1, 0):
        parts, branch, looped, one = program(x, jnp.int32(turn))
        ranks = np.repeat(np.arange(SIZE, dtype=np.float32)[:, None], 3, axis=1)
        np.testing.assert_array_equal(parts[0], ranks + 1)
        np.testing.assert_array_equal(parts[1], np.full(3, left + 2))
        np.testing.assert_array_equal(parts[2], ranks + 3)
        np.testing.assert_array_equal(branch, np.full(3, 6 if turn else left + 5))
        np.testing.assert_array_equal(one, np.full(3, SIZE - 1 if turn else RANK + 3))
        expected = np.arange(SIZE)
        for i in range(5):
            expected = np.full(SIZE, np.sum(expected + i))
        np.testing.assert_array_equal(looped, np.full(3, expected[0]))


def check_traffic():
    """The traffic is that of an axis: the same bytes, and what a step says that it sent.

    Where floats are not summed, the messages are the same, too.
    """
    grads = transports.zeros()
    for name, make in {
        "oktopk": lambda comm: jsparse.oktopk(comm, density=DENSITY),
        "gtopk": lambda comm: jsparse.gtopk(comm, density=DENSITY),
        "topk_allgather": lambda comm: jsparse.topk_allgather(comm, density=DENSITY),
        "ssar": lambda comm: jsparse.ssar_split_allgather(comm, density=DENSITY),
        "parameter_server": jsparse.parameter_server,
    }.items():
        traced = []
        for comm in (jsparse.MpiComm(), "workers"):
            tx = make(comm)
            sizes = {"workers": SIZE} if comm == "workers" else None
            traced.append(jsparse.traffic(lambda g, tx=tx: tx.update(g, tx.init(g)), grads, axis_sizes=sizes))
        here, there = traced
        assert (here.cost, here.least) == (there.cost, there.least), f"{name}\n{here}\n{there}"
        assert "over world" in str(here)
    # A sum of floats is composed: as many bytes, but for rounding up, in other messages.
    here = jsparse.traffic(jsparse.MpiComm().psum, jnp.ones(60_000))
    assert [part.name for part in here.parts] == ["all_to_all", "all_gather"]
    assert here.bytes == jsparse.traffic(lambda x: lax.psum(x, "p"), jnp.ones(60_000), axis_sizes={"p": SIZE}).bytes
    assert [part.name for part in jsparse.traffic(jsparse.MpiComm().pmax, jnp.arange(3)).parts] == ["pmax"]


def check_a2sgd():
    """A transformation after which replicas differ equals that along an axis, to the bit.

    The exception is what compilation rounds.

    What it makes of ``g - mean + mean`` depends on the program around it, with one communicator,
    too.
    """
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((SIZE, transports.N)).astype(np.float32)
    tx, along = jsparse.a2sgd(jsparse.MpiComm()), jsparse.a2sgd("workers")
    grads = transports.tree(gradients)
    mine = jax.tree.map(lambda x: x[RANK], grads)
    step = jax.vmap(lambda g: along.update(g, along.init(g)), axis_name="workers")
    for compiled, tolerance in ((lambda fn: fn, 0), (jax.jit, 3e-7)):
        updates, state = compiled(tx.update)(mine, tx.init(mine))
        expected, theirs = jax.tree.map(lambda x: x[RANK], compiled(step)(grads))
        same = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
        jax.tree.map(same, updates, expected)
        np.testing.assert_array_equal(state.step, theirs.step)


def loss_fn(params, batch, model_state, key):
    x, y = batch
    noise = jax.random.normal(key, y.shape)
    loss = jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y + 0.0 * noise) ** 2)
    return loss, ({"mean": jnp.mean(y)}, {"noise": noise[0]})


def training() -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((5, 7)).astype(np.float32), "v": np.ones(7, np.float32)}
    sizes = ((4 * SIZE, 5), (4 * SIZE,))
    return params, [tuple(rng.standard_normal(size).astype(np.float32) for size in sizes) for _ in range(3)]


def share(batch: Any) -> Any:
    return jax.tree.map(lambda x: x[4 * RANK : 4 * RANK + 4], batch)


def check_training():
    """At density 1 the step trains as one process with the whole batch does.

    All processes have the same parameters.
    """
    comm = jsparse.MpiComm()
    if SIZE == 2:
        preset = jsparse.oktopk(comm, density=1.0)
    else:
        preset = jsparse.hitopk(*comm.levels(2 if SIZE == 4 else 1), density=1.0)
    tx = optax.chain(optax.clip_by_global_norm(1e6), preset, optax.sgd(0.1))
    step = jsparse.train_step(loss_fn, tx, None, comm, has_aux=True, micro_batches=2, model_state="mean", with_key=True)
    expected, batches = training()
    state = step.init(expected, {"mean": jnp.zeros(())})
    for number, batch in enumerate(batches):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(expected, batch, None, jax.random.key(0))
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)
        state, (got, aux) = step(state, share(batch), jax.random.key(number))
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, expected)
    everyone = WORLD.allgather(jax.tree.map(np.asarray, (state.params, state.model_state, got, aux)))
    jax.tree.map(np.testing.assert_array_equal, everyone[0], everyone[-1])
    assert jsparse.stats(state.opt_state).step == 3
    assert jsparse.metrics(state)["jsparse/bytes"] == 4 * jsparse.stats(state).words[0]
    assert not jsparse.residual(state.opt_state).any()


def check_replicas_that_differ():
    """A2SGD, by its train step: parameters are each process's own until they are averaged."""
    comm = jsparse.MpiComm()
    params, batches = training()
    tx = optax.chain(jsparse.a2sgd(comm), optax.sgd(0.1))
    step = jsparse.train_step(
        lambda params, batch: loss_fn(params, batch, None, jax.random.key(0))[0], tx, None, comm, params="per_worker"
    )
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, share(batch))
    everyone = WORLD.allgather(np.asarray(state.params["w"]))
    assert everyone[0].shape == (1, 5, 7)
    assert not np.array_equal(everyone[0], everyone[-1])
    average = jsparse.sync_params(state, comm)
    np.testing.assert_allclose(average["w"], np.mean(everyone, axis=0)[0], rtol=1e-6)
    np.testing.assert_array_equal(step.sync_params(state).params["w"][0], average["w"])


def check_rounds():
    """Streaming rounds of local steps, as simulated workers take them."""

    def loss(params, batch):
        return loss_fn(params, batch, None, jax.random.key(0))[0]

    def run(comm, mapped):
        sync = jsparse.topk_allgather(comm, density=0.2)
        options = {"every": 4, "fragments": 2, "overlap": 1, "merge": 0.5}
        step = jsparse.local_steps(loss, optax.adam(1e-2), None, comm, sync=sync, **options)
        params, batches = training()
        stacked = [jax.tree.map(lambda x: np.stack([x] * 4), batch) for batch in batches]
        state = mapped(lambda _: step.init(params))(jnp.arange(SIZE))
        for batch in stacked:
            parts = jax.tree.map(lambda x: np.stack(np.split(x, SIZE, axis=1)), batch)
            state, losses = mapped(step)(state, parts)
        return state, losses

    def here(fn):
        def own(*args):
            first = jax.tree.map(lambda x: x[RANK] if x.shape[0] == SIZE else x, args[-1])
            return fn(*args[:-1], first)

        return own

    state, losses = run(jsparse.MpiComm(), here)
    simulated, wanted = run("workers", functools.partial(jax.vmap, axis_name="workers"))
    np.testing.assert_allclose(losses, wanted[RANK], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b[RANK], rtol=1e-4, atol=1e-6), state.params, simulated.params
    )
    everyone = WORLD.allgather(jax.tree.map(np.asarray, state.params))
    jax.tree.map(np.testing.assert_array_equal, everyone[0], everyone[-1])
    np.testing.assert_array_equal(state.opt_state.counts.inner.taken, 4)


def refused(message: str, fn: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(ValueError, match=message):
        fn(*args)


def check_refusals():
    comm, params = jsparse.MpiComm(), {"w": np.ones(3, np.float32)}
    dense = optax.chain(jsparse.dense(comm), optax.sgd(0.1))
    differing = {"w": np.full(3, RANK, np.float32)}
    refused("different values of", jsparse.init, dense, differing, None, comm)
    refused("nothing in the chain communicates", jsparse.init, optax.sgd(0.1), params, None, comm)
    refused("optax.MultiSteps", jsparse.init, optax.MultiSteps(dense, 2), params, None, comm)
    unlike = {"steps": range(SIZE), "every": SIZE}
    refused("leave steps out", functools.partial(jsparse.local_steps, **unlike), loss_fn, optax.sgd(0.1), None, comm)
    refused("is not bound here", jsparse.train_step(loss_fn, dense, None, "data").init, params)
    refused("a Comm needs mesh=None", jsparse.train_step, loss_fn, dense, jax.make_mesh((1,), ("data",)), comm)
    refused("pass an mpi4py communicator", jsparse.MpiComm, "world")
    refused("one of them twice", jsparse.torus, comm, comm)
    if SIZE == 3:
        refused("nodes have 1 or 2", comm.levels, 2)


CHECKS = [
    check_types,
    check_order,
    check_traffic,
    check_a2sgd,
    check_training,
    check_replicas_that_differ,
    check_rounds,
    check_refusals,
]


def table(names: list[str]) -> dict[str, Any]:
    """Of each row this process's steps, or why it is not possible."""
    found: dict[str, Any] = {}
    ready = {}
    for row in ROWS:
        if str(row) in names:
            try:
                ready[row] = prepare(row)
            except Exception:
                found[str(row)] = traceback.format_exc()
    for row, (state, update) in ready.items():
        print(f"{row}, on rank {RANK}", flush=True)
        found[str(row)] = run(row, state, update)
    return found


if __name__ == "__main__":
    everyone = WORLD.gather(table(sys.argv[2:]))
    if everyone:
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(everyone))
    for check in CHECKS:
        print(f"{check.__name__}, on rank {RANK}", flush=True)
        check()
