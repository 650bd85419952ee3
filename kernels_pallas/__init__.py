"""Selection kernels: each folder is one operation, with a public function and a plain JAX form."""

from . import bitmap, hashing
from ._implementation import choose, using
from ._in_place import zero_of
from ._varying import varying_as, varying_axes
from .accumulate_and_select import accumulate_and_select
from .add_sparse import add_sparse
from .count_above_many import count_above_many
from .kth_magnitude import estimate_kth_magnitude, kth_magnitude, sample_places
from .magnitude_statistics import MagnitudeStatistics, magnitude_statistics
from .norms import norms
from .select_above import count_above, reaches, select_above
from .select_block_top_k import select_block_top_k
from .select_ms_top_k import select_ms_top_k
from .select_segment_top_k import segment_top_k_bounds, segment_top_k_samples, segments_fit, select_segment_top_k
from .select_stochastic import select_stochastic
from .select_top_k import Marked, TopKSample, select_top_k, top_k_bound, top_k_sample

__all__ = [
    "MagnitudeStatistics",
    "Marked",
    "TopKSample",
    "accumulate_and_select",
    "add_sparse",
    "bitmap",
    "choose",
    "count_above",
    "count_above_many",
    "estimate_kth_magnitude",
    "hashing",
    "kth_magnitude",
    "magnitude_statistics",
    "norms",
    "reaches",
    "sample_places",
    "segment_top_k_bounds",
    "segment_top_k_samples",
    "segments_fit",
    "select_above",
    "select_block_top_k",
    "select_ms_top_k",
    "select_segment_top_k",
    "select_stochastic",
    "select_top_k",
    "top_k_bound",
    "top_k_sample",
    "using",
    "varying_as",
    "varying_axes",
    "zero_of",
]
