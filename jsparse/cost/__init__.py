"""What a synchronisation costs: the papers' α-β models, and what this library sends."""

from .exact import exact
from .models import expected_union
from .predict import (
    ALGORITHMS,
    DENSE,
    DIFFERING,
    ROUNDING,
    Load,
    Node,
    Prediction,
    Rounds,
    bandwidth,
    choose,
    link,
    predict,
)

__all__ = [
    "ALGORITHMS",
    "DENSE",
    "DIFFERING",
    "ROUNDING",
    "Load",
    "Node",
    "Prediction",
    "Rounds",
    "bandwidth",
    "choose",
    "exact",
    "expected_union",
    "link",
    "predict",
]
