"""The forms of synchronisation that ``jsparse bench network`` compares."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .. import quantize, select, wire
from .._engine.transform import SparseAllReduce
from .._presets import dense as _dense_presets
from .._presets import sparse as presets
from .._presets.demo import demo
from .._presets.dion import scale_by_dion
from .._presets.ef21 import ef21_changes
from .._presets.general import sparse_allreduce
from .._presets.onebit_adam import onebit_momentum
from .._presets.powersgd import powersgd
from .._presets.vote import vote
from ..allreduce import OkTopk


class Form(NamedTuple):
    """One way to synchronise.

    Attributes:
      name: its name in the table.
      make: makes the transformation. It takes a comm (two comms for ``levels``) and ``density=``.
      dense_update: make the mean dense where it could stay sparse.
      levels: whether ``make`` takes two levels: pairs of hosts, and the hosts of a pair.
      leaves: whether the gradient has the leaves of a net. Otherwise it is one vector.
      pairs: whether workers form pairs, so that their number has to be even.
    """

    name: str
    make: Callable[..., SparseAllReduce]
    dense_update: bool = False
    levels: bool = False
    leaves: bool = False
    pairs: bool = False


def preset(make: Callable[..., SparseAllReduce], selector: Callable[[float], Any] | None = None, **options: Any):
    """A form's ``make``: a preset with these options, and a selector of the form's density."""

    def form(*comms: Any, density: float) -> SparseAllReduce:
        chosen = {} if selector is None else {"select": selector(density)}
        return make(*comms, density=density, **chosen, **options)

    return form


def of_all(make: Callable[..., SparseAllReduce], **options: Any):
    """A form's ``make``: a preset that has no density, with these options."""
    return lambda *comms, density: make(*comms, **options)


def rounded(quantizer: Any, split: bool | Literal["ring"] = True, error_feedback: bool | None = None):
    """A form's ``make``: rounds all values."""
    return of_all(_dense_presets.quantized, quantize=quantizer, split=split, error_feedback=error_feedback)


def unbalanced(comm: Any, *, density: float) -> SparseAllReduce:
    """Ok-Topk whose parts are gathered as they are."""
    return sparse_allreduce(comm, select=select.TopK(density), allreduce=OkTopk(balance_above=math.inf))


def per_leaf(comm: Any, *, density: float) -> SparseAllReduce:
    """Every worker's top-k of each leaf, gathered as one message."""
    return presets.topk_allgather(comm, select=select.PerLeaf(select.TopK(density)))


BF16, FOUR_BITS = wire.Compact(quantize.BFloat16()), wire.Compact(quantize.Codebook(4))
# DDP's size of a bucket.
BUCKET = 25 * 2**20
FORMS = [
    Form("dense", of_all(_dense_presets.dense)),
    Form("dense, buckets", of_all(_dense_presets.dense, bucket_bytes=BUCKET), dense_update=True, leaves=True),
    # DDP's hook casts gradients so. In the ring partial sums are cast, too.
    Form("dense, float16", rounded(quantize.Float16(), error_feedback=False)),
    Form("dense, float16, ring", rounded(quantize.Float16(), split="ring", error_feedback=False)),
    Form("torus", of_all(_dense_presets.torus), levels=True),
    Form("parameter_server", of_all(_dense_presets.parameter_server)),
    Form("a2sgd", of_all(_dense_presets.a2sgd), dense_update=True),
    Form("qsgd", of_all(_dense_presets.qsgd)),
    Form("quantized, 8 bits", rounded(quantize.Block8())),
    Form("quantized, 4 bits", rounded(quantize.Float4())),
    Form("quantized, TernGrad", rounded(quantize.TernGrad())),
    Form("quantized, sign", rounded(quantize.Sign())),
    Form("quantized, 4 bits, rotated", rounded(quantize.Rotated(quantize.Int4()))),
    Form("vote", of_all(vote), dense_update=True),
    # Of the steps that are measured none is dense.
    Form("onebit_momentum", of_all(onebit_momentum, freeze_step=1), dense_update=True),
    Form("demo", of_all(demo), dense_update=True, leaves=True),
    Form("scale_by_dion, rank 1/16", of_all(scale_by_dion, rank_fraction=1 / 16), dense_update=True, leaves=True),
    Form("powersgd, rank 4", of_all(powersgd, rank=4), dense_update=True, leaves=True),
    Form("powersgd, rank 32", of_all(powersgd, rank=32), dense_update=True, leaves=True),
    Form("oktopk", preset(presets.oktopk)),
    Form("oktopk, dense update", preset(presets.oktopk), dense_update=True),
    Form("topk_allgather, leaf", preset(presets.topk_allgather, scope="leaf"), dense_update=True, leaves=True),
    Form("topk_allgather, per leaf", per_leaf, dense_update=True, leaves=True),
    Form("oktopk, sampled", preset(presets.oktopk, select.SampledThreshold)),
    Form("oktopk, reused", preset(presets.oktopk, select.ReusedThreshold)),
    Form("oktopk, rotate", preset(presets.oktopk, split="rotate")),
    # Without the paper's balance: of the regions, and of the parts that are gathered.
    Form("oktopk, equal regions", preset(presets.oktopk, tau_region=None)),
    Form("oktopk, not balanced", unbalanced),
    Form("oktopk, compact", preset(presets.oktopk, wire=wire.Compact())),
    Form("oktopk, compact bf16", preset(presets.oktopk, wire=BF16)),
    Form("oktopk, compact bf16, dense update", preset(presets.oktopk, wire=BF16), dense_update=True),
    Form("oktopk, compact bf16, sampled", preset(presets.oktopk, select.SampledThreshold, wire=BF16)),
    Form("oktopk, compact 4 bits", preset(presets.oktopk, wire=FOUR_BITS)),
    Form("topk_allgather", preset(presets.topk_allgather)),
    Form("topk_allgather, compact bf16", preset(presets.topk_allgather, wire=BF16)),
    Form("ef21_changes", preset(ef21_changes), dense_update=True),
    Form("scalecom", preset(presets.scalecom)),
    Form("gaussiank", preset(presets.gaussiank)),
    Form("dgc", preset(presets.dgc)),
    Form("gtopk", preset(presets.gtopk)),
    Form("gtopk, tree", preset(presets.gtopk, topology="tree")),
    Form("topk_dsa", preset(presets.topk_dsa)),
    Form("ssar_recursive_doubling", preset(presets.ssar_recursive_doubling)),
    Form("ssar_split_allgather", preset(presets.ssar_split_allgather)),
    Form("dsar_split_allgather", preset(presets.dsar_split_allgather)),
    # It switches to dense vectors early.
    Form("dsar_split_allgather, pairs", preset(presets.dsar_split_allgather, group=2), pairs=True),
    Form("hitopk", preset(presets.hitopk), levels=True),
]
