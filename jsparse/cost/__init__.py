"""What a synchronisation costs: the papers' α-β models, and what this library sends."""

from .predict import ALGORITHMS, DENSE, DIFFERING, Load, Node, Prediction, choose, exact, expected_union, link, predict

__all__ = [
    "ALGORITHMS",
    "DENSE",
    "DIFFERING",
    "Load",
    "Node",
    "Prediction",
    "choose",
    "exact",
    "expected_union",
    "link",
    "predict",
]
