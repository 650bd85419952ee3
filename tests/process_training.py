"""A run that is interrupted, and goes on from its last checkpoint.

``process_training.py DIRECTORY STEPS`` trains, and saves every step.

At the end it does the same once more, from the beginning, without a break; what comes of both is
in ``DIRECTORY/RANK.npz``. Without steps it trains until it is killed, and saves nothing.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import jsparse
import processes

AXIS = "data"
WIDE = 300


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def share(number: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's examples in a step."""
    rng = np.random.default_rng([jax.process_index(), number])
    return rng.standard_normal((8, 5)).astype(np.float32), rng.standard_normal(8).astype(np.float32)


def make() -> tuple[jsparse.TrainStep, jsparse.TrainState]:
    """A chain with state per worker before the all-reduce and in it, and a shared one after."""
    tx = optax.chain(
        jsparse.per_worker(optax.trace(0.9)), jsparse.oktopk(AXIS, density=0.05, tau_threshold=4), optax.adam(1e-2)
    )
    step = jsparse.train_step(loss_fn, tx, Mesh(np.array(jax.devices()), (AXIS,)), AXIS)
    return step, step.init({"w": jax.random.normal(jax.random.key(0), (5, WIDE)) / 5, "v": jnp.ones(WIDE) / WIDE})


def forever() -> None:
    step, state = make()
    number = 0
    while True:
        state, loss = step(state, share(number))
        float(loss)
        number += 1
        print(f"step {number}", flush=True)


def unbroken(steps: int) -> jsparse.TrainState:
    step, state = make()
    for number in range(steps):
        state, _ = step(state, share(number))
    return state


def train(directory: pathlib.Path, steps: int) -> jsparse.TrainState:
    step, state = make()
    with ocp.CheckpointManager(
        directory / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as checkpoints:
        last = checkpoints.latest_step()
        if last is not None:
            state = checkpoints.restore(last, args=ocp.args.StandardRestore(state))
        print(f"begins after step {last}", flush=True)
        for number in range(last or 0, steps):
            state, _ = step(state, share(number))
            checkpoints.save(number + 1, args=ocp.args.StandardSave(state))
            print(f"step {number + 1}", flush=True)
    return state


def main(directory: str, steps: str = "") -> None:
    rank = processes.join()
    if not steps:
        forever()
    kept = {}
    for name, state in (("broken", train(pathlib.Path(directory), int(steps))), ("unbroken", unbroken(int(steps)))):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            parts = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            kept[f"{name}{jax.tree_util.keystr(path)}"] = np.stack(parts)
    np.savez(pathlib.Path(directory) / f"{rank}.npz", **kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
