"""The primitives of MSTopK on a GPU: norms from one read, and passes that do several searches."""

import functools

from ..count_above_many.triton import count_above_many
from ..kth_magnitude.triton import in_passes
from ..kth_magnitude.triton import primitives as superset
from ..norms.triton import norms
from .xla import Primitives


def primitives(interpret: bool = False) -> Primitives:
    return Primitives(
        functools.partial(norms, interpret=interpret),
        functools.partial(count_above_many, interpret=interpret),
        lambda narrow, is_open, bracket, searches, n: in_passes(n, searches, narrow, bracket),
        superset(interpret),
    )
