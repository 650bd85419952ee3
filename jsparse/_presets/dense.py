"""The published dense algorithms by name."""

from typing import Literal

from .._comm.comm import CommLike, as_comm
from .._engine.a2sgd import TwoMeans
from .._engine.memory import ErrorFeedback
from .._engine.reducer import Whole
from .._engine.space import Flat, Shards
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce
from ..allreduce import Dense, ParameterServer, Quantized
from ..quantize import QSGD, Quantizer
from .general import memory_of


def dense(comm: CommLike, *, bucket_bytes: int | None = None) -> SparseAllReduce:
    """Averages gradients densely, as ``lax.pmean`` does: the baseline.

    Gradients are summed in float32, or in float64 if one of them is float64.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      bucket_bytes: None sends one message (the papers' Dense). A number sends one message for each
        group of leaves of so many bytes, from the last leaf to the first, so that XLA can overlap
        the messages with the backward pass (DenseOvlp).

    Returns:
      A gradient transformation.

    Raises:
      ValueError: ``bucket_bytes`` is out of range; and as from :func:`sparse_allreduce`.

    **Cost**: ``2n (P-1)/P`` words and ``2 log P`` messages a worker, for each bucket.

    References:
      Li and Hoefler, PPoPP 2022, section 5, "Dense" and "DenseOvlp".
    """
    return SparseAllReduce.of(Composition(as_comm(comm), Whole(Dense()), space=Flat(bucket_bytes=bucket_bytes)))


def parameter_server(comm: CommLike, *, staleness: int = 0) -> SparseAllReduce:
    """A parameter server: averages gradients densely through one worker, with or without delay.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      staleness: how many steps late gradients are applied. 0 is the synchronous server; larger
        values imitate an asynchronous one. The first ``staleness`` updates are zero.

    Returns:
      A gradient transformation.

    Raises:
      ValueError: ``staleness`` is below 0; and as from :func:`sparse_allreduce`.

    **Cost**: ``2n (P-1)`` words and ``2 (P-1)`` messages through the root.

    References:
      Renggli, Efficient Sparse AllReduce For Scalable Machine Learning, master's thesis, ETH
      Zurich, 2017, section 4.2.2.
    """
    return SparseAllReduce.of(Composition(as_comm(comm), Whole(ParameterServer(staleness))))


def qsgd(
    comm: CommLike,
    *,
    levels: int = 4,
    bucket: int | None = 512,
    split: bool | Literal["ring"] = False,
    error_feedback: bool = False,
) -> SparseAllReduce:
    """QSGD: averages gradients that each worker rounds at random to a few levels.

    The average is right in expectation.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      levels, bucket: as in :class:`jsparse.quantize.QSGD`.
      split: as in :class:`jsparse.allreduce.Quantized`.
      error_feedback: whether to keep what was rounded away. Values are then divided by 1 + ω, so
        that the residual stays bounded, and the average is no longer right in expectation.

    Returns:
      A gradient transformation.

    Raises:
      ValueError: ``levels`` or ``bucket`` is out of range; and as from :func:`sparse_allreduce`.

    **Cost**, with 4 levels: 3.2 bits a value and 4 bytes a bucket, ``0.102 n (P-1)`` words and
    ``log P`` messages a worker; split ``0.204 n (P-1)/P`` words and ``P - 1 + log P`` messages.

    References:
      Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
      NIPS 2017.
    """
    quantize = QSGD(levels, bucket, contract=memory_of(error_feedback).feeds_back)
    return quantized(comm, quantize=quantize, split=split, error_feedback=error_feedback)


def quantized(
    comm: CommLike,
    *,
    quantize: Quantizer,
    split: bool | Literal["ring"] = True,
    error_feedback: bool | ErrorFeedback | None = None,
) -> SparseAllReduce:
    """Averages dense gradients in fewer bits, by any quantizer.

    There are quantizers for TernGrad, for signs with a scale, for 4 and 8 bits a value, for
    bfloat16 and for float16.

    Args:
      comm: a mesh axis name, a tuple of them, or a Comm.
      quantize: the quantizer, such as ``quantize.Sign()``.
      split: as in :class:`jsparse.allreduce.Quantized`.
      error_feedback: whether to keep what was rounded away, or how (:class:`ErrorFeedback`). The
        default is to keep it unless the quantizer is unbiased.

    Returns:
      A gradient transformation.

    Raises:
      ValueError: the quantizer is one for sparse values alone, such as ``Codebook``; it rounds at
        random, and there is error feedback; and as from :func:`sparse_allreduce`.

    **Cost**, with b bits a value: split ``2 (P-1)/P n b/32`` words and ``P - 1 + log P`` messages
    a worker; else ``(P-1) n b/32`` words and ``log P`` messages.

    References:
      Those of the quantizer; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    """
    allreduce = Quantized(quantize, split)
    if error_feedback is None:
        error_feedback = not allreduce.unbiased
    return SparseAllReduce.of(Composition(as_comm(comm), Whole(allreduce), memory_of(error_feedback)))


def a2sgd(comm: CommLike, *, per_leaf: bool = False) -> SparseAllReduce:
    """A2SGD, two-level gradient averaging: workers average two means of their gradients.

    A worker takes the mean of its gradient's elements that are at least 0, and the mean of the
    magnitudes of the other elements. Both means are averaged over the workers. The magnitude of an
    element that reaches the mean of its own kind changes by as much as the average differs from
    that mean. All other elements stay as they are.

    So updates differ between workers, and so do parameters after a step. Train with
    ``train_step(..., params="per_worker")``, and average the parameters with
    :func:`jsparse.sync_params` at the end, and now and then before. The paper's algorithm then
    takes one step with :func:`jsparse.dense` from the average (lines 11 and 12).

    The mean of no elements is 0. Means are computed in float32, or in float64 if a leaf is
    float64. If a gradient on any worker is not finite, or its sum is not, all updates are NaN.

    Args:
      comm: a mesh axis name, a tuple of them (taken as one axis), or a Comm.
      per_leaf: whether every leaf has two means of its own, as in the paper's section III
        (layer-wise), instead of two for the whole gradient (Algorithm 1). They are sent in one
        message.

    Returns:
      A gradient transformation. Its updates have the shapes and types of the gradients, and differ
      between workers.

    Raises:
      ValueError: as from :func:`sparse_allreduce`.

    **Cost**: ``4 (P-1)/P`` words (a sum of two words, 64 bits) and ``2 log P`` messages a worker;
    with ``per_leaf`` as many words for each leaf.

    References:
      Bhattacharya et al., O(1) Communication for Distributed SGD through Two-Level Gradient
      Averaging, CLUSTER 2021, equation 2 and Algorithm 1. In the paper, if no element is positive,
      zeros change too: they become the others' mean. Here they stay zero.

    Example::

      tx = optax.chain(jsparse.a2sgd("data"), optax.sgd(0.1, momentum=0.9))
      step = jsparse.train_step(loss_fn, tx, mesh, "data", params="per_worker")
      state = step.init(params)
      for batch in batches:
          state, loss = step(state, batch)
      params = jsparse.sync_params(state, "data", mesh=mesh)
    """
    return SparseAllReduce.of(TwoMeans((as_comm(comm),), per_leaf))


def torus(inter: CommLike, intra: CommLike) -> SparseAllReduce:
    """2D-torus all-reduce: each worker sums its shard of the vector between the nodes, densely.

    Args:
      inter: the mesh axis along which the nodes stand, a tuple of axes, or a Comm.
      intra: the mesh axis along which the workers of a node stand, a tuple of axes, or a Comm.

    Returns:
      A gradient transformation.

    Raises:
      ValueError: both levels are the same axis; and as from :func:`sparse_allreduce`.

    **Cost**, with m nodes of g workers: inside a node ``2n (g-1)/g`` words and ``2 log g``
    messages a worker, between nodes ``2n/g (m-1)/m`` words and ``2 log m`` messages.

    References:
      Shi et al., MLSys 2021, section 5.3, "2DTAR"; Mikami et al., Massively Distributed SGD:
      ImageNet/ResNet-50 Training in a Flash, 2018.
    """
    return SparseAllReduce.of(Composition(as_comm(inter), Whole(Dense()), space=Shards(intra=as_comm(intra))))
