"""What MSTopK is made of on a GPU: norms from one read, and passes that make several searches at once, unrolled."""

import functools

from ..count_above_many.triton import count_above_many
from ..kth_magnitude.triton import passes
from ..kth_magnitude.triton import primitives as superset
from ..norms.triton import norms
from .xla import Primitives


def primitives(interpret: bool = False) -> Primitives:
    return Primitives(
        functools.partial(norms, interpret=interpret),
        functools.partial(count_above_many, interpret=interpret),
        _searches_at_once,
        superset(interpret),
    )


def _searches_at_once(narrow, is_open, bracket, searches, n):
    for halvings in passes(n, searches):
        bracket = narrow(bracket, halvings)
    return bracket
