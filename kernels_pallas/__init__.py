"""Selection kernels: one folder an operation, each with a plain JAX form behind one public function."""

from . import bitmap
from ._varying import varying_as, varying_axes
from .kth_magnitude import estimate_kth_magnitude, kth_magnitude
from .select_above import count_above, select_above
from .select_top_k import select_top_k

__all__ = [
    "bitmap",
    "count_above",
    "estimate_kth_magnitude",
    "kth_magnitude",
    "select_above",
    "select_top_k",
    "varying_as",
    "varying_axes",
]
