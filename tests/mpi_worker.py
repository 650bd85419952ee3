"""What each process of ``mpirun`` runs for ``test_mpi.py``: it writes, by rank 0, what became of each case."""

import json
import os
import pathlib
import sys
import time
import traceback

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

from mpi4py import MPI

import jsparse
import scenarios
import transports
from algorithms import DENSITY, ROWS, Row

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def gradients(row: Row) -> list[np.ndarray]:
    """Whole numbers, one gradient that is not finite, and numbers that are rounded when they are summed."""
    rng = np.random.default_rng(0)
    whole = [*scenarios.take("ordinary", SIZE, 3), *scenarios.take("one_region", SIZE, 2)]
    spoilt = whole[0].copy()
    spoilt[SIZE // 2, 700] = np.nan
    rounded = [rng.standard_t(2, (SIZE, transports.N)).astype(np.float32) for _ in range(3)]
    return [*(row.scale * gradient for gradient in whole), spoilt, *rounded]


def run(row: Row) -> list:
    """This process's updates and state after every step."""
    comm = jsparse.MpiComm()
    tx = row.make(comm if row.gpus is None else comm.levels(row.gpus[SIZE]), DENSITY)
    state, update, steps = tx.init(transports.zeros()), jax.jit(tx.update), []
    for gradient in gradients(row):
        mine = jax.tree.map(lambda x: x[0], transports.tree(gradient[RANK : RANK + 1]))
        updates, state = update(mine, state)
        steps.append(jax.tree.map(np.asarray, (updates, state)))
    return steps


def compare(row: Row, steps: list[list]) -> None:
    """All processes' steps with those along an axis of ``jax.vmap``."""
    state, update = transports.workers(row, SIZE)
    for number, gradient in enumerate(gradients(row)):
        updates, state = update(transports.tree(gradient), state)
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *(of_rank[number] for of_rank in steps))
        jax.tree.map(np.testing.assert_array_equal, stacked, (updates, state))


def main(out: str) -> None:
    outcome, times = {}, {}
    rows = [row for row in ROWS if row.gpus is None or SIZE in row.gpus]
    for i, row in enumerate(rows):
        t0=time.time()
        try:
            steps = WORLD.gather(run(row), root=i % SIZE)
        except ValueError:
            outcome[str(row)] = traceback.format_exc()
            continue
        t1=time.time()
        if steps:
            try:
                compare(row, steps)
                outcome[str(row)] = ""
            except Exception:
                outcome[str(row)] = traceback.format_exc()
        print(RANK, row, round(t1-t0,2), round(time.time()-t1,2), outcome.get(str(row), "")[-500:], flush=True)
    everyone = WORLD.gather(outcome)
    if everyone:
        pathlib.Path(out).write_text(json.dumps({name: text for one in everyone for name, text in one.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
