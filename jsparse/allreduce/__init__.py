"""All-reduces: they sum the workers' vectors."""

from ._base import AllReduce, ReduceReport
from .cyclic_topk import CyclicTopK
from .dense import Dense
from .dsar_split_allgather import DsarSplitAllGather
from .extremum import maximum, minimum
from .gtopk import GTopk
from .oktopk import OkTopk, OkTopkState
from .parameter_server import ParameterServer, ParameterServerState
from .quantized import Quantized
from .ssar_recursive_doubling import SsarRecursiveDoubling
from .ssar_split_allgather import SsarSplitAllGather
from .topk_allgather import TopkAllGather

__all__ = [
    "AllReduce",
    "CyclicTopK",
    "Dense",
    "DsarSplitAllGather",
    "GTopk",
    "OkTopk",
    "OkTopkState",
    "ParameterServer",
    "ParameterServerState",
    "Quantized",
    "ReduceReport",
    "SsarRecursiveDoubling",
    "SsarSplitAllGather",
    "TopkAllGather",
    "maximum",
    "minimum",
]
