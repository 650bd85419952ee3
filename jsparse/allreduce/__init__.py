"""All-reduces: how the workers' vectors become their sum."""

from ._base import AllReduce
from .dense import Dense
from .gtopk import GTopk
from .oktopk import OkTopk, OkTopkState
from .topk_allgather import TopkAllGather

__all__ = ["AllReduce", "Dense", "GTopk", "OkTopk", "OkTopkState", "TopkAllGather"]
