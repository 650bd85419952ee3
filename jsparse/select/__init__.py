"""Selectors: which elements of a vector are sent."""

from ._base import Selector, SelectorState
from .fixed import FixedThreshold
from .gaussian import GaussianThreshold
from .reused import ReusedThreshold, ReusedThresholdState
from .sampled import SampledThreshold
from .top_k import TopK

__all__ = [
    "FixedThreshold",
    "GaussianThreshold",
    "ReusedThreshold",
    "ReusedThresholdState",
    "SampledThreshold",
    "Selector",
    "SelectorState",
    "TopK",
]
