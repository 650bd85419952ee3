"""jsparse: sparse gradient all-reduces as optax transformations, for slow networks."""

from . import allreduce, cost, data, quantize, select, wire
from ._comm.collectives import Traffic
from ._comm.comm import AxisComm, Comm
from ._comm.mpi import MpiComm
from ._comm.traffic import traffic
from ._engine.memory import ErrorFeedback
from ._engine.phases import phases
from ._engine.state import SparseAllReduceState
from ._engine.transform import SparseAllReduce, apply_sparse, sync
from ._presets.demo import demo
from ._presets.dense import a2sgd, dense, parameter_server, qsgd, quantized, torus
from ._presets.dion import dion, scale_by_dion
from ._presets.ef21 import ef21, ef21_changes
from ._presets.files import from_file
from ._presets.general import sparse_allreduce
from ._presets.onebit_adam import onebit_adam, onebit_momentum
from ._presets.powersgd import powersgd
from ._presets.sparse import (
    dgc,
    dsar_split_allgather,
    gaussiank,
    gtopk,
    hitopk,
    oktopk,
    scalecom,
    ssar_recursive_doubling,
    ssar_split_allgather,
    topk_allgather,
    topk_dsa,
)
from ._presets.vote import vote
from ._reshard.reshard import reshard
from ._share.parts import in_parts, map_in_parts
from ._share.sharded import sharded
from ._share.trust_ratio import lamb, lars, scale_by_trust_ratio
from ._train.gradients import local_value_and_grad
from ._train.local_state import LocalState
from ._train.metrics import metrics
from ._train.over_mesh import over_mesh, worker_value_and_grad
from ._train.per_worker import PerWorkerState, ShardedState, per_worker
from ._train.placement import state_specs
from ._train.rounds import LocalSteps, local_steps
from ._train.state import TrainState, sync_params
from ._train.stats import Stats, residual, stats
from ._train.step import TrainStep, train_step
from ._train.workers import init
from ._vector.sparse_vector import SparseVector

__all__ = [
    "AxisComm",
    "Comm",
    "ErrorFeedback",
    "LocalState",
    "LocalSteps",
    "MpiComm",
    "PerWorkerState",
    "ShardedState",
    "SparseAllReduce",
    "SparseAllReduceState",
    "SparseVector",
    "Stats",
    "Traffic",
    "TrainState",
    "TrainStep",
    "a2sgd",
    "allreduce",
    "apply_sparse",
    "cost",
    "data",
    "demo",
    "dense",
    "dgc",
    "dion",
    "dsar_split_allgather",
    "ef21",
    "ef21_changes",
    "from_file",
    "gaussiank",
    "gtopk",
    "hitopk",
    "in_parts",
    "init",
    "lamb",
    "lars",
    "local_steps",
    "local_value_and_grad",
    "map_in_parts",
    "metrics",
    "oktopk",
    "onebit_adam",
    "onebit_momentum",
    "over_mesh",
    "parameter_server",
    "per_worker",
    "phases",
    "powersgd",
    "qsgd",
    "quantize",
    "quantized",
    "reshard",
    "residual",
    "scale_by_dion",
    "scale_by_trust_ratio",
    "scalecom",
    "select",
    "sharded",
    "sparse_allreduce",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
    "state_specs",
    "stats",
    "sync",
    "sync_params",
    "topk_allgather",
    "topk_dsa",
    "torus",
    "traffic",
    "train_step",
    "vote",
    "wire",
    "worker_value_and_grad",
]
