"""The published sparse algorithms by name: each combines a selector with an all-reduce."""

import dataclasses
from typing import Literal, Unpack

from .._comm.comm import CommLike, as_comm
from .._engine.momentum import MomentumCorrection
from .._engine.space import Shards
from .._engine.transform import SparseAllReduce
from ..allreduce import (
    AllReduce,
    CyclicTopK,
    DsarSplitAllGather,
    GTopk,
    OkTopk,
    SsarRecursiveDoubling,
    SsarSplitAllGather,
    TopkAllGather,
)
from ..select import DgcThreshold, GaussianThreshold, MSTopK
from .general import Options, of_density


def topk_allgather(comm: CommLike, *, density: float | None = None, **options: Unpack[Options]) -> SparseAllReduce:
    """TopkA: gathers every worker's top-k on all workers.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker. From about ``P = n / k`` on, a
    dense all-reduce sends less.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkA".
    """
    return of_density(comm, density, TopkAllGather(), options)


def gaussiank(comm: CommLike, *, density: float | None = None, **options: Unpack[Options]) -> SparseAllReduce:
    """Gaussian-k: selects the tails of a fitted normal distribution, and gathers them.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``GaussianThreshold(density)`` by default), ``wire``,
        ``error_feedback``, ``scope`` and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``2k (P-1)`` words and ``log P`` messages a worker. From about ``P = n / k`` on, a
    dense all-reduce sends less.

    References:
      Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019; Li and
      Hoefler, PPoPP 2022, Table 1, "Gaussiank", and section 5.4.
    """
    return of_density(comm, density, TopkAllGather(), options, GaussianThreshold)


def oktopk(
    comm: CommLike,
    *,
    density: float | None = None,
    tau_threshold: int = 32,
    tau_region: int | None = 1,
    split: Literal["all_to_all", "rotate", "ragged"] = "all_to_all",
    put_back: Literal["senders", "owner", "server"] = "senders",
    **options: Unpack[Options],
) -> SparseAllReduce:
    """Ok-Topk: nearly the k largest elements of the sum of the workers' top-k.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      tau_threshold, tau_region, split, put_back: as in :class:`jsparse.allreduce.OkTopk`, which
        has more options.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: at most ``8k (P-1)/P + 16P + 512`` words a worker in every step, for float32 at full
    width.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022.
    """
    return of_density(comm, density, OkTopk(tau_threshold, tau_region, split, put_back), options)


def gtopk(
    comm: CommLike,
    *,
    density: float | None = None,
    topology: Literal["butterfly", "tree", "allgather"] = "butterfly",
    put_back: Literal["exact", "owner", "paper"] = "exact",
    **options: Unpack[Options],
) -> SparseAllReduce:
    """gTop-k: the k largest elements of the sum of the workers' top-k, merged in pairs.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      topology, put_back: as in :class:`jsparse.allreduce.GTopk`.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``2k log P`` words and ``log P`` messages a worker, and more if P is not a power of
    two; ``4k log P`` and ``2 log P`` for the published tree.

    References:
      Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
      Bandwidth Networks, ICDCS 2019.
    """
    return of_density(comm, density, GTopk(topology, put_back), options)


def topk_dsa(comm: CommLike, *, density: float | None = None, **options: Unpack[Options]) -> SparseAllReduce:
    """TopkDSA: SparCML's dynamic sparse all-reduce of the workers' top-k.

    It reduces by regions, and its messages stay sparse until the result fills in. This is the
    algorithm of :func:`ssar_split_allgather`, under the name that the Ok-Topk paper uses in its
    comparison. The density of the result, which section 5.2 of that paper reports, is
    ``metrics(opt_state)["jsparse/density"]``.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``4k (P-1)/P`` words a worker if all workers select the same elements; up to
    ``(2k + n) (P-1)/P`` if the result fills in; and padding: see
    :class:`jsparse.allreduce.SsarSplitAllGather`.

    References:
      Li and Hoefler, PPoPP 2022, Table 1, "TopkDSA", and section 5.2.
    """
    return of_density(comm, density, SsarSplitAllGather(), options)


def ssar_recursive_doubling(
    comm: CommLike, *, density: float | None = None, **options: Unpack[Options]
) -> SparseAllReduce:
    """SSAR_Rec_Dbl: every worker's top-k, merged in pairs in log P rounds.

    It is for few elements and high latency.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``2k log P`` to ``2k (P-1)`` words a worker: the more the workers' choices overlap,
    the fewer. It is more if P is not a power of two.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3.
    """
    return of_density(comm, density, SsarRecursiveDoubling(), options)


def ssar_split_allgather(
    comm: CommLike, *, density: float | None = None, **options: Unpack[Options]
) -> SparseAllReduce:
    """SSAR_Split_AllGather: every worker's top-k, reduced by regions, then gathered.

    It is for results that stay sparse.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; and as from
        :func:`sparse_allreduce`.

    **Cost**: ``4k (P-1)/P`` to about ``2k P`` words a worker: the more the workers' choices
    overlap, the fewer; and padding: see :class:`jsparse.allreduce.SsarSplitAllGather`.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.3.
    """
    return of_density(comm, density, SsarSplitAllGather(), options)


def dsar_split_allgather(
    comm: CommLike,
    *,
    density: float | None = None,
    group: int = 1,
    **options: Unpack[Options],
) -> SparseAllReduce:
    """DSAR_Split_AllGather: every worker's top-k, reduced by regions, then gathered densely.

    It is for results that fill in.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      group: the number of workers in a group, for early switching, as in
        :class:`jsparse.allreduce.DsarSplitAllGather`.
      **options: ``select`` (``TopK(density)`` by default), ``wire``, ``error_feedback``, ``scope``
        and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; P is no multiple of
        ``group`` (from ``update``); and as from :func:`sparse_allreduce`.

    **Cost**: ``(2k + n) (P-1)/P`` words a worker, and padding: see
    :class:`jsparse.allreduce.SsarSplitAllGather`.

    References:
      Renggli, SparCML thesis, 2017, section 3.3.4.
    """
    return of_density(comm, density, DsarSplitAllGather(group), options)


def dgc(
    comm: CommLike,
    *,
    density: float | None = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float | None = None,
    factor_masking: bool = True,
    allreduce: AllReduce | None = None,
    **options: Unpack[Options],
) -> SparseAllReduce:
    """Deep Gradient Compression: applies momentum before selection.

    So elements that wait in the residual arrive with the momentum that they gathered meanwhile.

    In each step, a worker clips its gradient g, adds it to its velocity, ``u = m u + g``, adds the
    velocity to its residual, ``v = v + u``, and selects from ``v``. Where its elements are
    delivered, ``v`` and ``u`` become 0. Put plain SGD after it, ``optax.sgd(learning_rate)``: the
    updates contain the momentum already. At density 1, and in the leaves of ``dense_below``,
    nothing is masked, and that is momentum SGD. For the paper's warm-up see :func:`phases`.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      momentum: m, at least 0 and below 1.
      nesterov: whether ``m u + g`` is added to ``v`` in place of ``u``.
      clip_norm: the norm to which the *sum* of the workers' gradients is clipped. Each worker
        clips its own gradient to ``clip_norm / sqrt(P)``. None does not clip. What is clipped is
        not fed back.
      factor_masking: whether ``u`` becomes 0 where elements are delivered, so that old momentum
        has no further effect.
      allreduce: the all-reduce of the selected elements; by default the paper's,
        ``allreduce.TopkAllGather()``.
      **options: ``select`` (``DgcThreshold(density)`` by default), ``wire``, ``error_feedback``,
        ``scope`` and ``dense_below``, as in :func:`sparse_allreduce`.

    Returns:
      A gradient transformation. Its state holds a velocity beside the residual, both of shape
      ``(n,)`` on a worker.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; ``momentum`` or
        ``clip_norm`` is out of range; and as from :func:`sparse_allreduce`.

    Example::

      tx = optax.chain(jsparse.dgc("data", density=0.001, clip_norm=1.0), optax.sgd(0.1))

    **Cost**: that of the all-reduce; with the default ``2k (P-1)`` words and ``log P`` messages a
    worker.

    References:
      Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
      Training, ICLR 2018, sections 3.1 to 3.3, Algorithm 4. At density 1 it does what the authors'
      code does.
    """
    reduce = TopkAllGather() if allreduce is None else allreduce
    plain = of_density(comm, density, reduce, options, DgcThreshold).synchroniser
    memory = MomentumCorrection(momentum, plain.memory, nesterov, factor_masking, clip_norm)
    return SparseAllReduce.of(dataclasses.replace(plain, memory=memory))


def scalecom(comm: CommLike, *, density: float | None = None, **options: Unpack[Options]) -> SparseAllReduce:
    """ScaleCom: the workers take turns in choosing the elements that all of them send.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      density: k / n, above 0 and at most 1. It may be left out if ``select`` is given, which has a
        density of its own.
      **options: ``select`` (``TopK(density)`` by default), ``error_feedback``, ``scope`` and
        ``dense_below``, as in :func:`sparse_allreduce`; ``wire`` may be ``Full()`` only. The
        paper's low-pass filter, for large batches, is
        ``error_feedback=jsparse.ErrorFeedback(low_pass=0.1)``. By default nothing is lost.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; ``wire`` is not
        ``Full()``; and as from :func:`sparse_allreduce`.

    **Cost**: ``4k (P-1)/P`` words and ``4 log P`` messages a worker.

    References:
      Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
      Distributed Training, NeurIPS 2020, Algorithm 1; :class:`jsparse.allreduce.CyclicTopK`.
    """
    return of_density(comm, density, CyclicTopK(), options)


def hitopk(
    inter: CommLike,
    intra: CommLike,
    *,
    density: float | None = None,
    allreduce: AllReduce | None = None,
    **options: Unpack[Options],
) -> SparseAllReduce:
    """HiTopKComm: sums densely inside a node, and sparsely between nodes.

    The gradients of a node are reduce-scattered, so each worker has a shard of their sum. It adds
    its residual to the shard, selects from the result, and sums with the workers that have the
    same shard on other nodes. The shards of that sum are gathered inside the node. A worker's
    residual is that of its shard, of ``ceil(n / intra.size)`` elements: ``jsparse.residual`` has
    shape ``(P, shard)``.

    Args:
      inter: the mesh axis along which the nodes stand, a tuple of axes, or a Comm.
      intra: the mesh axis along which the workers of a node stand, a tuple of axes, or a Comm.
        Other functions (``jsparse.train_step``, ``jsparse.init``,
        ``jsparse.local_value_and_grad``) take both as their axis: ``(inter, intra)``.
      density: k / n of each shard, above 0 and at most 1. It may be left out if ``select`` is
        given, which has a density of its own.
      allreduce: the all-reduce between the nodes; by default the paper's,
        ``allreduce.TopkAllGather()``.
      **options: ``select`` (``MSTopK(density)`` by default), ``wire``, ``error_feedback``,
        ``scope`` and ``dense_below``, as in :func:`sparse_allreduce`. The wire is for messages
        between the nodes; inside them it is ``Full()``.

    Returns:
      A gradient transformation.

    Raises:
      TypeError: an option is not known.
      ValueError: the density is missing, or given twice with different values; both levels are the
        same axis; and as from :func:`sparse_allreduce`.

    **Cost**, with m nodes of g workers and k of n elements: inside a node ``n (g-1)/g`` words for
    the reduce-scatter and ``2km (g-1)/g`` for the all-gather (at most ``n (g-1)/g``), ``2 log g``
    messages; between nodes ``2k (m-1)/g`` words and ``log m`` messages a worker.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters,
      MLSys 2021, section 3, Algorithms 1 (MSTopK) and 2 (HiTopKComm, which keeps no residual:
      ``error_feedback=False``).
    """
    reduce = TopkAllGather() if allreduce is None else allreduce
    flat = of_density(inter, density, reduce, options, MSTopK).synchroniser
    space = Shards(flat.space.scope, flat.space.dense_below, intra=as_comm(intra))
    return SparseAllReduce.of(dataclasses.replace(flat, space=space))
