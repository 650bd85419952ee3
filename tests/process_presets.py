"""Trains with some presets, in one process or several, and saves the results.

Several processes are those of ``processes.start``.

``process_presets.py DIRECTORY NAME ...``: each process writes what it ends with there.
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
from jax.sharding import Mesh

import jsparse
import processes
from jsparse import quantize, wire

STEPS = 3
N = 600
# Examples of each worker in each step.
EACH = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A preset.

    Attributes:
      make: makes it for an axis, or two.
      options: of ``train_step``.
      floats: whether to train on others than whole numbers: its sums have the same order in any
        number of processes.
      exact: whether sums are alike to the bit.
      two_levels: whether it is over two axes.
      explicit: whether the mesh's axes are explicit.
    """

    make: Callable[..., optax.GradientTransformation]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    floats: bool = False
    exact: bool = True
    two_levels: bool = False
    explicit: bool = False


CASES = {
    "dense": Case(lambda axis: jsparse.dense(axis), explicit=True),
    "oktopk": Case(lambda axis: jsparse.oktopk(axis, density=0.05), floats=True),
    "oktopk-bf16": Case(lambda axis: jsparse.oktopk(axis, density=0.05, wire=wire.Compact(quantize.BFloat16()))),
    "gtopk": Case(lambda axis: jsparse.gtopk(axis, density=0.05), {"check_vma": False}),
    "dsar": Case(lambda axis: jsparse.dsar_split_allgather(axis, density=0.05), {"micro_batches": 2}),
    "hitopk": Case(lambda axes: jsparse.hitopk(*axes, density=0.05), two_levels=True),
    "a2sgd": Case(lambda axis: jsparse.a2sgd(axis), {"params": "per_worker"}, exact=False, explicit=True),
}


def linear(params, batch):
    """Its gradient is the examples' sum: whole numbers."""
    return sum(jnp.vdot(p, x) for p, x in zip(params, jnp.split(batch.sum(0), [200]), strict=True))


def examples(case: Case, workers: int, step: int) -> np.ndarray:
    """Those of all workers."""
    rng = np.random.default_rng(step)
    many = rng.integers(-50, 51, (workers * EACH, N)) * (rng.random((workers * EACH, N)) < 0.7)
    return np.float32(many * np.linspace(1, 20, N).astype(int)) / np.float32(7 if case.floats else 1)


def make_mesh(case: Case) -> tuple[Mesh, str | tuple[str, ...]]:
    """All devices; in two levels, two to a node, or as many as a process has."""
    devices = np.array(jax.devices())
    if case.two_levels:
        node = max(2, len(jax.local_devices())) if jax.process_count() > 1 else 2
        return Mesh(devices.reshape(-1, node), ("nodes", "gpus")), ("nodes", "gpus")
    if case.explicit:
        return jax.make_mesh((len(devices),), ("data",)), "data"
    return Mesh(devices, ("data",)), "data"


def train(case: Case, mesh: Mesh, axis: str | tuple[str, ...]) -> dict[str, np.ndarray]:
    """Trains for some steps on this process's examples.

    Returns what all processes end with, and this process's residuals.
    """
    workers, rank, count = mesh.devices.size, jax.process_index(), jax.process_count()
    own = slice(rank * workers * EACH // count, (rank + 1) * workers * EACH // count)
    tx = optax.chain(case.make(axis), optax.sgd(0.5))
    step = jsparse.train_step(linear, tx, mesh, axis, **case.options)
    state = step.init((jnp.zeros(200), jnp.zeros(N - 200)))
    losses = []
    for number in range(STEPS):
        state, loss = step(state, examples(case, workers, number)[own])
        losses.append(float(loss))
    per_worker = case.options.get("params") == "per_worker"
    if per_worker:
        state = step.sync_params(state)
        params = jsparse.sync_params(state, axis, mesh=mesh)
    else:
        params = state.params
    kept = {"params": np.concatenate(params), "losses": np.array(losses)}
    if per_worker:
        return kept
    traffic = jsparse.traffic(step, state, examples(case, workers, 0)[own])
    residual = jsparse.residual(state.opt_state)
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in residual.addressable_shards}
    stats = jax.tree.map(np.asarray, jsparse.stats(state.opt_state))
    return kept | {
        "residual": np.concatenate([rows[row] for row in sorted(rows)]),
        "traffic": np.array([traffic.bytes, traffic.messages]),
        **stats._asdict(),
    }


def main(directory: str, *names: str) -> None:
    rank = processes.join()
    found = {}
    for name in names:
        case = CASES[name]
        found |= {f"{name}/{what}": value for what, value in train(case, *make_mesh(case)).items()}
    np.savez(pathlib.Path(directory) / f"{rank}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
