"""The base class of all-reduces, and what an all-reduce reports."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._comm.comm import Comm
from .._vector.arguments import check_fields
from .._vector.sparse_vector import Vector
from ..quantize import Codebook, Quantizer
from ..wire import Messages, Wire


class ReduceReport(NamedTuple):
    """What an all-reduce reports of its last call, beside the result.

    Attributes:
      overflowed: int32 scalar: the number of this worker's elements that did not fit into a
        buffer.
      threshold: scalar: the magnitude that elements of the sum had to reach; 0 without a
        threshold.
    """

    overflowed: jax.Array
    threshold: jax.Array


class AllReduce:
    """Sums the workers' vectors. Base class: a subclass is a frozen dataclass of hyperparameters.

    Attributes:
      sparse: whether it sums sparse vectors. If so, it needs a selector.
      compresses: whether it sends less than a dense sum would.
      lossless: whether it rounds nothing by itself. Wires may round, too.
      unbiased: whether it rounds at random, so that its result is right in expectation.
      staleness: by how many steps its sums are late.
      hands_over: whether a worker may keep sums of others' elements: in place of the senders it
        keeps what did not become part of the total.
      takes_held: whether its call takes ``held``, this worker's whole vector, shape ``(n,)``, from
        which ``x`` was selected.
    """

    sparse: ClassVar[bool] = True
    compresses: ClassVar[bool] = True
    lossless = True
    unbiased = False
    staleness = 0
    hands_over = False
    takes_held = False

    def __post_init__(self):
        check_fields(self)

    def check_wire(self, wire: Wire) -> None:
        """Refuses a wire format that it can't send, by a ValueError. By default it sends all."""

    def init(self, n: int, size: int, dtype: DTypeLike) -> Any:
        """Makes the state for vectors of length ``n`` among ``size`` workers.

        The state is a NamedTuple of arrays, each of which has an axis. By default it is empty. A
        state whose shape depends on ``size`` may have a method ``moved`` (see
        :class:`OkTopkState`). A state of vectors of length ``n`` that are still to be delivered
        has the attribute ``of_elements`` (see :class:`ParameterServerState`): they go along to
        other shards of a model.
        """
        return ()

    def __call__(
        self, comm: Comm, x: Any, state: Any, *, step: jax.Array, wire: Messages
    ) -> tuple[Vector, Vector, Any]:
        """Sums ``x`` over the workers, or as much of ``x`` as the algorithm's budget allows.

        Args:
          comm: the workers.
          x: this worker's vector. A sparse vector is one run, and its capacity is the selector's
            k.
          state: from ``init`` or from the step before.
          step: int32 scalar, alike on all workers.
          wire: the messages of this step.

        Returns:
          ``(total, delivered, state)``. ``total`` has the same bits on every worker. ``delivered``
          is this worker's share of it: the shares of all workers add up to ``total``. So
          ``x - delivered`` still has to be sent. The indices of ``delivered`` may have any order.
          A vector is a :class:`.SparseVector`, an array, or :class:`.Parts`, which need not be
          arrays yet; :func:`.to_dense` makes an array of any.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define this: see jsparse.allreduce.AllReduce")

    def report(self, state: Any) -> ReduceReport:
        """The report of the call that returned ``state``."""
        return ReduceReport(jnp.int32(0), jnp.zeros(()))


def check_keeps_zeros(quantize: Quantizer) -> None:
    """Refuses a quantizer that makes other numbers of the zeros of a dense vector."""
    if isinstance(quantize, Codebook):
        raise ValueError(
            f"quantize is {quantize}, which changes zeros: use it for the values of sparse vectors, in "
            "wire.Compact(...); for a dense vector use quantize.Block8() (8 bits) or quantize.Float4() (4 bits)"
        )
