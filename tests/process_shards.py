"""Trains a sharded model, in one process or several, and saves the results.

Several processes are those of ``processes.start``. A replica is one process, or several.

``process_shards.py DIRECTORY REPLICAS NAME ...``: each process writes what it ends with there.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jsparse
import processes

STEPS, WIDE, EXAMPLES = 3, 40, 16
SPECS = {"in": P(None, "fsdp"), "out": P("fsdp"), "filled": P(), "few": P(), "scalar": P()}
ALL, REPLICA = P(("replica", "fsdp")), P("replica")


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
      preset: makes the synchronisation, over the replicas.
      jit: whether in a plain ``jax.jit``, by ``over_mesh``.
      batch_spec: how a batch is cut; None for the default.
      rounds: whether in rounds of two local steps, half of the parameters after each.
    """

    preset: Callable[..., jsparse.SparseAllReduce] = lambda axis: jsparse.oktopk(axis, density=0.05)
    jit: bool = False
    batch_spec: P | None = ALL
    rounds: bool = False


CASES = {
    "oktopk": Case(),
    "whole-replica": Case(batch_spec=None),
    "jit": Case(jit=True),
    "gather": Case(lambda axis: jsparse.topk_allgather(axis, density=0.05)),
    "dense": Case(jsparse.dense),
    "rounds": Case(rounds=True),
}


def loss_fn(params, batch):
    """Its gradient is a sum over examples: whole numbers, whatever their order."""
    x, y = batch
    sums = {"in": x @ params["in"], "out": y @ params["out"], "filled": x @ params["filled"]}
    few = jnp.sum(params["few"]) + params["scalar"]
    return sum(jnp.sum(value) for value in sums.values()) + few * jnp.sum(x)


def params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"in": (12, WIDE), "out": (WIDE, 8), "filled": (12, 20), "few": (3,), "scalar": ()}
    return {name: np.float32(rng.integers(-9, 10, shape)) for name, shape in shapes.items()}


def examples(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of all replicas in a step. No two columns have the same sum."""
    rng = np.random.default_rng(number)
    return tuple(
        np.float32(rng.integers(-50, 51, (EXAMPLES, width)) * np.linspace(1, 20, width).astype(int))
        for width in (12, WIDE)
    )


def make_mesh(replicas: int) -> Mesh:
    """The mesh of all processes; in one process, of as many devices."""
    count, each = jax.process_count(), jax.local_device_count()
    if count == 1:
        return Mesh(np.array(jax.devices()).reshape(replicas, -1), ("replica", "fsdp"))
    between = (replicas, count // replicas)
    devices = mesh_utils.create_hybrid_device_mesh((1, each), between, process_is_granule=True)
    return Mesh(devices, ("replica", "fsdp"))


def share(batch: Any, mesh: Mesh, spec: P) -> Any:
    """This process's share of a batch, in numpy: the rows of its devices, each once."""

    def rows(x):
        found = NamedSharding(mesh, spec).addressable_devices_indices_map(x.shape).values()
        own = {index[0].indices(len(x)) for index in found}
        return np.concatenate([x[slice(*each)] for each in sorted(own)])

    return jax.tree.map(rows, batch)


def trained(case: Case, mesh: Mesh) -> tuple[Any, Any, list[float], Any]:
    """Trains for some steps. Returns the step, a batch, the losses and the state."""
    spec = case.batch_spec or REPLICA
    if case.jit:
        step, state = plain(case, mesh)
    elif case.rounds:
        step = jsparse.local_steps(
            loss_fn,
            optax.sgd(0.5),
            mesh,
            "replica",
            every=2,
            fragments=2,
            outer=optax.sgd(0.5, momentum=0.5),
            sync=case.preset("replica"),
            param_specs=SPECS,
            batch_spec=case.batch_spec,
        )
        state = step.init(in_shards(mesh))
    else:
        tx = optax.chain(case.preset("replica"), optax.sgd(0.5, momentum=0.5))
        step = jsparse.train_step(loss_fn, tx, mesh, "replica", param_specs=SPECS, batch_spec=case.batch_spec)
        state = step.init(params())
    losses = []
    for number in range(STEPS):
        batch = share(examples(number), mesh, spec)
        if case.rounds:
            batch = jax.tree.map(lambda *x: np.stack(x), batch, share(examples(number + STEPS), mesh, spec))
        if case.jit:
            along = NamedSharding(mesh, spec)
            batch = jax.tree.map(lambda x, along=along: jax.make_array_from_process_local_data(along, x), batch)
        state, loss = step(state, batch)
        losses.append(float(jnp.sum(loss)))
    return step, batch, losses, state


def in_shards(mesh: Mesh) -> Any:
    """The first parameters as global arrays, of which each process has some shards."""
    return jax.device_put(params(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS))


def plain(case: Case, mesh: Mesh) -> tuple[Any, jsparse.TrainState]:
    """The same in a plain ``jax.jit``: a step, and its first state."""
    sync = jsparse.over_mesh(case.preset("replica"), mesh, "replica", SPECS)
    tx = optax.chain(sync, optax.sgd(0.5, momentum=0.5))
    grad_fn = jsparse.worker_value_and_grad(loss_fn, mesh, "replica", SPECS)

    @jax.jit
    def step(state, batch):
        loss, grads = grad_fn(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return jsparse.TrainState(optax.apply_updates(state.params, updates), opt_state, None), loss

    placed = in_shards(mesh)
    return step, jsparse.TrainState(placed, tx.init(placed), None)


def train(case: Case, mesh: Mesh) -> dict[str, np.ndarray]:
    """What training ends with: of arrays in shards, the shards of this process."""
    step, batch, losses, state = trained(case, mesh)
    traffic = jsparse.traffic(step.lower(state, batch).compile(), mesh=mesh).over("replica")
    stats = jax.tree.map(np.asarray, jsparse.stats(state.opt_state))
    kept = {"losses": np.array(losses), "traffic": np.array([traffic.bytes, traffic.messages]), **stats._asdict()}
    arrays = {**state.params, "residual": jsparse.residual(state.opt_state)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        arrays[f"state{jax.tree_util.keystr(path)}"] = leaf
    return kept | shards(arrays)


def shards(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The shards of this process, by the array's name and the shard's place in it."""
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            place = [index.indices(length)[:2] for index, length in zip(shard.index, array.shape, strict=True)]
            first = found.setdefault(f"{name}@{place}", np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, first, err_msg=name)
    return found


def check_beginnings(mesh: Mesh) -> None:
    """Processes that begin with other parameters are told, and which."""
    step = jsparse.train_step(loss_fn, optax.chain(jsparse.dense("replica")), mesh, "replica", param_specs=SPECS)
    other = params() | {"out": params(seed=jax.process_index())["out"]}
    with pytest.raises(ValueError, match=r"different values of \['out'\]; all begin"):
        step.init(other)
    placed = step.init(params()).params
    jax.tree.map(np.testing.assert_array_equal, shards(step.init(placed).params), shards(placed))


def check_batches(mesh: Mesh) -> None:
    """A share in numpy, on this process's device, and a global array are the same batch."""
    step = jsparse.train_step(
        loss_fn, optax.chain(jsparse.dense("replica")), mesh, "replica", param_specs=SPECS, batch_spec=ALL
    )
    own, along = share(examples(0), mesh, ALL), NamedSharding(mesh, ALL)
    whole = jax.tree.map(lambda x: jax.make_array_from_process_local_data(along, x), own)
    ended = [step(step.init(params()), batch) for batch in (own, jax.tree.map(jnp.asarray, own), whole)]
    for state, loss in ended:
        np.testing.assert_array_equal(loss, ended[0][1])
        jax.tree.map(np.testing.assert_array_equal, shards(state.params), shards(ended[0][0].params))
    assert step._run._cache_size() == 1
    with pytest.raises(ValueError, match=r"this process's workers .* multiple of"):
        step(ended[0][0], jax.tree.map(lambda x: x[:1], own))


def check_checkpoints(mesh: Mesh, directory: pathlib.Path) -> None:
    """A run that goes on from a checkpoint ends with the bits of one that was never stopped."""
    tx = optax.chain(jsparse.oktopk("replica", density=0.05), optax.adam(1e-2))
    step = jsparse.train_step(loss_fn, tx, mesh, "replica", param_specs=SPECS, batch_spec=ALL)

    def run(state, numbers, checkpoints=None):
        for number in numbers:
            state, _ = step(state, share(examples(number), mesh, ALL))
            if checkpoints:
                checkpoints.save(number + 1, args=ocp.args.StandardSave(state))
        return state

    with ocp.CheckpointManager(directory) as checkpoints:
        run(step.init(params()), range(2), checkpoints)
    with ocp.CheckpointManager(directory) as checkpoints:
        assert checkpoints.latest_step() == 2
        state = checkpoints.restore(2, args=ocp.args.StandardRestore(step.init(params())))
    ends = [run(state, range(2, 4)), run(step.init(params()), range(4))]
    broken, unbroken = (
        shards({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(end)})
        for end in ends
    )
    assert broken.keys() == unbroken.keys()
    jax.tree.map(np.testing.assert_array_equal, broken, unbroken)


def main(directory: str, replicas: str, *names: str) -> None:
    rank = processes.join()
    mesh = make_mesh(int(replicas))
    found = {}
    for name in names:
        found |= {f"{name}/{what}": value for what, value in train(CASES[name], mesh).items()}
    np.savez(pathlib.Path(directory) / f"{rank}.npz", **found)
    check_beginnings(mesh)
    check_batches(mesh)
    check_checkpoints(mesh, pathlib.Path(directory) / "checkpoints")
    print("all held")


if __name__ == "__main__":
    main(*sys.argv[1:])
