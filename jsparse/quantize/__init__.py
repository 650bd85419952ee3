"""Quantizers, which encode values in fewer bits."""

from ._base import Exact, Quantizer
from .block import Block8, Int4
from .cast import BFloat16, Float16
from .codebook import Codebook, DeviationCodebook
from .float4 import Float4
from .qsgd import QSGD, TernGrad
from .rotated import Rotated
from .sign import Sign

__all__ = [
    "QSGD",
    "BFloat16",
    "Block8",
    "Codebook",
    "DeviationCodebook",
    "Exact",
    "Float4",
    "Float16",
    "Int4",
    "Quantizer",
    "Rotated",
    "Sign",
    "TernGrad",
]
