"""The forms of synchronisation that ``jsparse bench network`` compares."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .. import quantize, select, wire
from .._engine.transform import SparseAllReduce
from .._presets import dense as _dense_presets
from .._presets import sparse as presets


class Form(NamedTuple):
    """One way to synchronise.

    Attributes:
      name: its name in the table.
      make: makes the transformation. It takes a comm (two comms for ``levels``) and ``density=``.
      dense_update: make the mean dense where it could stay sparse.
      levels: whether ``make`` takes two levels: pairs of hosts, and the hosts of a pair.
    """

    name: str
    make: Callable[..., SparseAllReduce]
    dense_update: bool = False
    levels: bool = False


def preset(make: Callable[..., SparseAllReduce], selector: Callable[[float], Any] | None = None, **options: Any):
    """A form's ``make``: a preset with these options, and a selector of the form's density."""

    def form(*comms: Any, density: float) -> SparseAllReduce:
        chosen = {} if selector is None else {"select": selector(density)}
        return make(*comms, density=density, **chosen, **options)

    return form


def float16(split: bool | Literal["ring"]):
    """A form's ``make``: casts gradients to float16, as DDP's hook does.

    With ``split="ring"`` partial sums are cast, too.
    """

    def form(comm: Any, density: float) -> SparseAllReduce:
        return _dense_presets.quantized(comm, quantize=quantize.Float16(), split=split, error_feedback=False)

    return form


BF16, FOUR_BITS = wire.Compact(quantize.BFloat16()), wire.Compact(quantize.Codebook(4))
FORMS = [
    Form("dense", lambda comm, density: _dense_presets.dense(comm)),
    Form("dense, float16", float16(split=True)),
    Form("dense, float16, ring", float16(split="ring")),
    Form("oktopk", preset(presets.oktopk)),
    Form("oktopk, dense update", preset(presets.oktopk), dense_update=True),
    Form("oktopk, sampled", preset(presets.oktopk, select.SampledThreshold)),
    Form("oktopk, reused", preset(presets.oktopk, select.ReusedThreshold)),
    Form("oktopk, rotate", preset(presets.oktopk, split="rotate")),
    Form("oktopk, compact", preset(presets.oktopk, wire=wire.Compact())),
    Form("oktopk, compact bf16", preset(presets.oktopk, wire=BF16)),
    Form("oktopk, compact bf16, dense update", preset(presets.oktopk, wire=BF16), dense_update=True),
    Form("oktopk, compact bf16, sampled", preset(presets.oktopk, select.SampledThreshold, wire=BF16)),
    Form("oktopk, compact 4 bits", preset(presets.oktopk, wire=FOUR_BITS)),
    Form("topk_allgather", preset(presets.topk_allgather)),
    Form("topk_allgather, compact bf16", preset(presets.topk_allgather, wire=BF16)),
    Form("gaussiank", preset(presets.gaussiank)),
    Form("dgc", preset(presets.dgc)),
    Form("gtopk", preset(presets.gtopk)),
    Form("gtopk, tree", preset(presets.gtopk, topology="tree")),
    Form("topk_dsa", preset(presets.topk_dsa)),
    Form("ssar_recursive_doubling", preset(presets.ssar_recursive_doubling)),
    Form("ssar_split_allgather", preset(presets.ssar_split_allgather)),
    Form("dsar_split_allgather", preset(presets.dsar_split_allgather)),
    Form("hitopk", preset(presets.hitopk), levels=True),
]
