"""Selectors, which choose the elements of a vector to send."""

from ._base import Selector, SelectorState
from .block import BlockTopK
from .bucketed import BucketedTopK
from .chunked import ChunkedTopK
from .dgc import DgcThreshold
from .fixed import FixedThreshold
from .gaussian import GaussianThreshold
from .mstopk import MSTopK
from .non_zero import NonZero
from .per_leaf import PerLeaf, PerLeafState
from .random_k import RandomK
from .reused import ReusedThreshold, ReusedThresholdState
from .sampled import SampledThreshold
from .stochastic import StochasticTopK
from .top_k import TopK

__all__ = [
    "BlockTopK",
    "BucketedTopK",
    "ChunkedTopK",
    "DgcThreshold",
    "FixedThreshold",
    "GaussianThreshold",
    "MSTopK",
    "NonZero",
    "PerLeaf",
    "PerLeafState",
    "RandomK",
    "ReusedThreshold",
    "ReusedThresholdState",
    "SampledThreshold",
    "Selector",
    "SelectorState",
    "StochasticTopK",
    "TopK",
]
