"""jsparse: training over slow networks, with sparse gradient all-reduces as optax transformations."""

from . import allreduce, cost, select, wire
from ._comm import AxisComm, Comm
from ._error_feedback import ErrorFeedback
from ._per_worker import PerWorkerState, per_worker
from ._phases import phases
from ._presets import (
    dense,
    dgc,
    dsar_split_allgather,
    gaussiank,
    gtopk,
    hitopk,
    oktopk,
    parameter_server,
    ssar_recursive_doubling,
    ssar_split_allgather,
    topk_allgather,
    topk_dsa,
    torus,
)
from ._sparse_vector import SparseVector
from ._state import Stats, init, residual, state_specs, stats
from ._sync import apply_sparse, sync
from ._synchronise import SparseAllReduceState
from ._traffic import Traffic, traffic
from ._train_step import TrainState, TrainStep, local_value_and_grad, train_step
from ._transform import SparseAllReduce, sparse_allreduce

__all__ = [
    "AxisComm",
    "Comm",
    "ErrorFeedback",
    "PerWorkerState",
    "SparseAllReduce",
    "SparseAllReduceState",
    "SparseVector",
    "Stats",
    "Traffic",
    "TrainState",
    "TrainStep",
    "allreduce",
    "apply_sparse",
    "cost",
    "dense",
    "dgc",
    "dsar_split_allgather",
    "gaussiank",
    "gtopk",
    "hitopk",
    "init",
    "local_value_and_grad",
    "oktopk",
    "parameter_server",
    "per_worker",
    "phases",
    "residual",
    "select",
    "sparse_allreduce",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
    "state_specs",
    "stats",
    "sync",
    "topk_allgather",
    "topk_dsa",
    "torus",
    "traffic",
    "train_step",
    "wire",
]
