"""Wire formats: how a sparse vector is laid out in a message."""

from ._base import Messages, Wire
from .compact import Compact
from .full import Full

__all__ = ["Compact", "Full", "Messages", "Wire"]
