"""What this library sends, read off the traced program."""

from typing import Any

from .._comm.comm import AxisComm
from .._comm.cost import Cost
from .._comm.traffic import traffic
from .._engine.transform import SparseAllReduce


def exact(tx: SparseAllReduce, params: Any, size: int | tuple[int, int]) -> tuple[Cost, Cost]:
    """What a worker sends in one ``tx.update``: bytes and messages, at least and at most.

    It traces the update for so many workers, without running it, and adds up what
    :func:`jsparse.traffic` finds. Under ``check_vma=True`` some algorithms send a little more, to
    type their result as alike on all workers. Where the program branches, the least and the most
    take the branch with the fewest and with the most bytes, and likewise, each by itself, with
    messages. No data may take all these branches at once.

    Args:
      tx: a preset, or :func:`jsparse.sparse_allreduce`; not a chain.
      params: the parameters, or their shapes and types (``jax.ShapeDtypeStruct``).
      size: P; over two levels the nodes, and the workers of a node.

    Returns:
      The least, and the most: each has ``bytes`` and ``messages``.

    Raises:
      ValueError: ``size`` has another number of levels than ``tx``.

    >>> least, most = exact(jsparse.topk_allgather("data", density=0.01), jnp.zeros(10_000), 8)
    >>> least == most, most.bytes, most.messages
    (True, 5614, 9)
    """
    sizes = size if isinstance(size, tuple) else (size,)
    levels = len(tx.synchroniser.levels)
    if len(sizes) != levels:
        raise ValueError(f"size is {size}; give one number, and two, (nodes, workers of a node), for hitopk and torus")
    axes = {f"level{number}": workers for number, workers in enumerate(sizes)}
    synchroniser = tx.synchroniser.over(*map(AxisComm, axes))

    def update(grads):
        return synchroniser.update(grads, synchroniser.init(grads))

    sent = traffic(update, params, axis_sizes=axes)
    return sent.least, sent.cost
