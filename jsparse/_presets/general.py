"""The general form of a sparse all-reduce, and the options that all sparse presets share."""

import difflib
from collections.abc import Callable
from typing import Literal, TypedDict

from .._comm.comm import CommLike, as_comm
from .._engine.mean import over_contributors, over_workers
from .._engine.memory import ErrorFeedback, Memory, NoMemory
from .._engine.reducer import Reducer, Selecting, Whole
from .._engine.space import Flat
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from .._vector.buckets import Scope
from ..allreduce import AllReduce
from ..select import Selector, TopK
from ..wire import Full, Wire

EXAMPLES = {"select": "select.TopK(0.01)", "allreduce": "allreduce.OkTopk()", "wire": "wire.Compact()"}
MEANS = {"workers": over_workers, "contributors": over_contributors}


class Options(TypedDict, total=False):
    """What every sparse preset takes, as in :func:`sparse_allreduce`."""

    select: Selector | None
    wire: Wire
    error_feedback: bool | ErrorFeedback
    scope: Scope
    dense_below: int


def sparse_allreduce(
    comm: CommLike,
    *,
    select: Selector | None,
    allreduce: AllReduce,
    wire: Wire = Full(),
    error_feedback: bool | ErrorFeedback = True,
    scope: Scope = "global",
    dense_below: int = 0,
    tiles: int | None = None,
    mean: Literal["workers", "contributors"] = "workers",
) -> SparseAllReduce:
    """Averages gradients over the workers sparsely: any selector with any all-reduce.

    It takes the place of ``lax.pmean`` of the gradients. Each worker passes its own gradient, and
    gets the mean of what was delivered, the same bits on every worker. What a worker did not get
    delivered stays in its residual and is added to its next gradient, so nothing is lost. It runs
    wherever the axis is bound: in ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap(axis_name=...)``.

    A non-finite gradient on any worker makes the whole update NaN on all of them and leaves the
    state as it was, so ``optax.apply_if_finite`` around what *follows* can skip the step. (Where
    no state is kept, as with ``select=None`` and ``error_feedback=False``, only the elements
    concerned, or their buckets, become NaN.)

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a :class:`Comm`.
      select: which elements a worker sends; None for an all-reduce of dense vectors. Its density
        is that of the all-reduce, too.
      allreduce: how they are summed.
      wire: how they are laid out in messages; for sparse vectors only.
      error_feedback: whether to keep what was not delivered, or how (:class:`ErrorFeedback`).
        Without it, that is lost.
      scope: select among all elements together (``"global"``), or in every leaf for itself
        (``"leaf"``), so that XLA can overlap the leaves' messages with each other and with the
        backward pass.
      dense_below: leaves of fewer elements are summed densely, all together.
      tiles: take leaves with two or more axes longer than 1 as matrices, whose last axis is the
        columns, and select among their elements in the order of square tiles of this side: first
        the whole tiles, row by row, then the smaller ones at the edges. So the blocks of
        ``BlockTopK(k, tiles**2)`` are tiles, as in DeMo and SparseLoCo. The residual is in that
        order, too. None leaves the elements in their own order. The update is dense at once.
      mean: divide the sum by the number of workers (``"workers"``), or each element by the number
        of workers that sent it (``"contributors"``), as DeMo and SparseLoCo do: the update is then
        larger than what was taken off the residuals. For ``TopkAllGather`` only.

    Returns:
      A gradient transformation. Its updates have the shapes and types of the gradients.

    Raises:
      ValueError: an argument is out of range, or does not fit another: random rounding with error
        feedback, sums that arrive late with error feedback, a ``subtract`` that the all-reduce
        refuses, a wire for dense sums. From ``init`` and ``update``: a leaf is not float16,
        bfloat16, float32 or float64; a bucket has ``2**31`` elements or more; the axis is not
        bound. From ``update``: gradients are already summed, or may differ along another mesh
        axis; the state is that of another transformation, or of leaves of other shapes;
        ``mean="contributors"`` with another all-reduce than ``TopkAllGather``.

    Example::

      tx = optax.chain(
          jsparse.sparse_allreduce(
              "data", select=jsparse.select.TopK(0.01), allreduce=jsparse.allreduce.OkTopk()
          ),
          optax.adam(1e-3),
      )
    """
    parts = {"select": (select, Selector), "allreduce": (allreduce, AllReduce), "wire": (wire, Wire)}
    for name, (part, kind) in parts.items():
        if not isinstance(part, kind) and not (name == "select" and part is None):
            raise ValueError(
                f"{name} is {part!r}; it is an object of a class that inherits from jsparse's {kind.__name__}, such as "
                f"{EXAMPLES[name]}"
            )
    if allreduce.sparse and select is None:
        raise ValueError(f"{allreduce} sums sparse vectors; give it a selector, such as select=TopK(0.01)")
    if select is not None and not allreduce.sparse:
        raise ValueError(f"{allreduce} sums dense vectors and selects nothing; pass select=None to sparse_allreduce")
    if select is None and wire != Full():
        raise ValueError(
            f"wire is {wire}, which lays out sparse vectors, and {allreduce} sums dense ones: leave it out; to round "
            "what is sent, use jsparse.quantized"
        )
    if mean not in tuple(MEANS):
        raise ValueError(f'mean is {mean!r}; choose "workers" or "contributors"')
    reducer: Reducer = Whole(allreduce) if select is None else Selecting(select, allreduce, wire)
    synchroniser = Composition(
        as_comm(comm), reducer, memory_of(error_feedback), Flat(scope, dense_below, tiles=tiles), MEANS[mean]
    )
    return SparseAllReduce.of(synchroniser)


def of_density(
    comm: CommLike,
    density: float | None,
    allreduce: AllReduce,
    options: Options,
    default: Callable[[float], Selector] = TopK,
) -> SparseAllReduce:
    """A sparse preset.

    Args:
      comm: the workers that sum.
      density: k / n; None where a selector says it.
      allreduce: how they sum.
      options: of the preset's caller.
      default: makes the selector of a density.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is given twice and differs, or not at all; an option is out of range.
    """
    for name in options:
        if name not in Options.__annotations__:
            known = [*Options.__annotations__, "density"]
            near = difflib.get_close_matches(name, known, 1)
            meant = f", perhaps {near[0]!r} is meant" if near else ""
            raise TypeError(f"{name!r} is no option of this preset{meant}: beside its own it takes {', '.join(known)}")
    select = options.get("select")
    if select is None:
        if density is None:
            raise ValueError("density is missing; pass density=0.01, or a selector, which has its own")
        select = default(density)
    elif isinstance(select, Selector) and density is not None and density != select.density:
        raise ValueError(
            f"density is {density}, and that of select={select} is {select.density}: give it once, to the selector"
        )
    return sparse_allreduce(comm, allreduce=allreduce, **(options | {"select": select}))


def memory_of(error_feedback: bool | ErrorFeedback) -> Memory:
    """The memory that an argument ``error_feedback`` asks for."""
    if isinstance(error_feedback, ErrorFeedback):
        return error_feedback
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback is {error_feedback!r}; it is True, False or jsparse.ErrorFeedback(...)")
    return ErrorFeedback() if error_feedback else NoMemory()
