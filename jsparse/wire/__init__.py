"""Wire formats: how a sparse vector is laid out in a message."""

from .formats import Compact, Full, Wire

__all__ = ["Compact", "Full", "Wire"]
