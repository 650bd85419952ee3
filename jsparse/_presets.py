"""The published algorithms by name: each a selector with an all-reduce."""

from typing import Literal

from ._comm import CommLike, as_comm
from ._transform import Config, SparseAllReduce
from .allreduce import (
    AllReduce,
    Dense,
    DsarSplitAllGather,
    GTopk,
    OkTopk,
    SsarRecursiveDoubling,
    SsarSplitAllGather,
    TopkAllGather,
)
from .select import GaussianThreshold, Selector, TopK
from .wire import Full, Wire


def dense(comm: CommLike, *, bucket_bytes: int | None = None) -> SparseAllReduce:
    """Averages gradients densely, as ``lax.pmean`` does: the baseline.

    Gradients are summed in float32 (float64, where one of them is).

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      bucket_bytes: None sends one message (the papers' Dense); a number sends one for every so many bytes of leaves,
        from the last to the first, so that XLA can overlap them with the backward pass (DenseOvlp).

    Returns:
      A gradient transformation.

    **Cost**: ``2n (P-1)/P`` words and ``2 log P`` messages a worker, for each bucket.

    References:
      Li and Hoefler, PPoPP 2022, section 5, "Dense" and "DenseOvlp".
    """
    return SparseAllReduce.of(
        Config(as_comm(comm), select=None, allreduce=Dense(), error_feedback=False, bucket_bytes=bucket_bytes)
    )


def topk_allgather(
    comm: CommLike,
    *,
    density: float,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """TopkA: every worker's top-k, gathered everywhere.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker: more than dense from about ``P = n / k`` on.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkA".
    """
    return _sparse(comm, density, TopkAllGather(), select, wire, scope, dense_below)


def gaussiank(
    comm: CommLike,
    *,
    density: float,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """Gaussian-k: what lies in the tails of a fitted normal distribution, gathered everywhere.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      select: the selector; ``select.GaussianThreshold(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker: more than dense from about ``P = n / k`` on.

    References:
      Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019; Li and Hoefler, PPoPP 2022,
      Table 1, "Gaussiank", and section 5.4.
    """
    return topk_allgather(
        comm,
        density=density,
        select=select or GaussianThreshold(density),
        wire=wire,
        scope=scope,
        dense_below=dense_below,
    )


def oktopk(
    comm: CommLike,
    *,
    density: float,
    tau_threshold: int = 32,
    tau_region: int = 64,
    split: Literal["all_to_all", "rotate"] = "all_to_all",
    balance_above: float = 2.0,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """Ok-Topk: the k largest elements of the sum of the workers' top-k.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      tau_threshold, tau_region, split, balance_above: as in :class:`jsparse.allreduce.OkTopk`.
      select: the selector; ``select.TopK(density)`` by default. The paper's is
        ``select.ReusedThreshold(density, tau_threshold)``.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: at most ``6k (P-1)/P + 16P + 512`` words a worker in every step, for float32 at full width.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022.
    """
    reduce = OkTopk(density, tau_threshold, tau_region, split, balance_above)
    return _sparse(comm, density, reduce, select, wire, scope, dense_below)


def gtopk(
    comm: CommLike,
    *,
    density: float,
    topology: Literal["butterfly", "tree", "allgather"] = "butterfly",
    put_back: Literal["exact", "paper"] = "exact",
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """gTop-k: the k largest elements of the sum of the workers' top-k, merged in pairs.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      topology, put_back: as in :class:`jsparse.allreduce.GTopk`.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``2k log P`` words and ``log P`` messages a worker; twice that for the published tree.

    References:
      Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
      ICDCS 2019.
    """
    return _sparse(comm, density, GTopk(topology, put_back), select, wire, scope, dense_below)


def topk_dsa(
    comm: CommLike,
    *,
    density: float,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """TopkDSA: SparCML's dynamic sparse all-reduce of the workers' top-k, by regions, sparse until it fills in.

    The algorithm of :func:`ssar_split_allgather`, by the name under which Ok-Topk's paper compares with it. The density
    of its result, which the paper's section 5.2 reports, is ``stats(opt_state).updated / n``.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``4k (P-1)/P`` words a worker where all select the same, up to ``(2k + n) (P-1)/P``; ``P`` messages.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkDSA", and section 5.2.
    """
    return _sparse(comm, density, SsarSplitAllGather(), select, wire, scope, dense_below)


def ssar_recursive_doubling(
    comm: CommLike,
    *,
    density: float,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """SSAR_Rec_Dbl: everyone's top-k, merged in pairs in log P rounds; for few elements and high latency.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``2k log P`` to ``2k (P-1)`` words a worker, by how much the workers' choices overlap.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3.
    """
    return _sparse(comm, density, SsarRecursiveDoubling(), select, wire, scope, dense_below)


def ssar_split_allgather(
    comm: CommLike,
    *,
    density: float,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """SSAR_Split_AllGather: everyone's top-k, reduced by regions, then gathered; for results that stay sparse.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``4k (P-1)/P`` to ``2k P`` words a worker, by how much the workers' choices overlap.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3.
    """
    return _sparse(comm, density, SsarSplitAllGather(), select, wire, scope, dense_below)


def dsar_split_allgather(
    comm: CommLike,
    *,
    density: float,
    group: int = 1,
    select: Selector | None = None,
    wire: Wire = Full(),
    scope: Literal["global", "leaf"] = "global",
    dense_below: int = 0,
) -> SparseAllReduce:
    """DSAR_Split_AllGather: everyone's top-k, reduced by regions, then gathered densely; for results that fill in.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1.
      group: as in :class:`jsparse.allreduce.DsarSplitAllGather`: early switching.
      select: the selector; ``select.TopK(density)`` by default.
      wire, scope, dense_below: as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    **Cost**: ``(2k + n) (P-1)/P`` words a worker.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.4.
    """
    return _sparse(comm, density, DsarSplitAllGather(group), select, wire, scope, dense_below)


def _sparse(
    comm: CommLike,
    density: float,
    reduce: AllReduce,
    select: Selector | None,
    wire: Wire,
    scope: Literal["global", "leaf"],
    dense_below: int,
) -> SparseAllReduce:
    """A sparse all-reduce with top-k, unless another selector is given."""
    select = TopK(density) if select is None else select
    return SparseAllReduce.of(Config(as_comm(comm), select, reduce, wire, scope=scope, dense_below=dense_below))
