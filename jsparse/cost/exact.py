"""What this library sends, read off the traced program."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.cost import Cost
from .._comm.traffic import traffic
from .._engine.shards import OnShards, Placement
from .._engine.transform import SparseAllReduce
from .._vector.arguments import check_count


def exact(
    tx: SparseAllReduce,
    params: Any,
    size: int | tuple[int, int],
    *,
    shards: int | Mapping[str, int] = 1,
    param_specs: Any = None,
) -> tuple[Cost, Cost]:
    """What a worker sends in one ``tx.update``: bytes and messages, at least and at most.

    It traces the update for so many workers, without running it, and adds up what
    :func:`jsparse.traffic` finds. Under ``check_vma=True`` some algorithms send a little more, to
    type their result as alike on all workers. Where the program branches, the least and the most
    take the branch with the fewest and with the most bytes, and likewise, each by itself, with
    messages. No data may take all these branches at once.

    Of a worker that holds a model in shards it tells what each of its devices sends to other
    workers. What the devices of one worker send to each other is left out.

    Args:
      tx: a preset, or :func:`jsparse.sparse_allreduce`; not a chain.
      params: the parameters, or their shapes and types (``jax.ShapeDtypeStruct``).
      size: P; over two levels the nodes, and the workers of a node.
      shards: the number of devices that hold a worker's parameters in shards; or the sizes of the
        mesh's axes within a worker, by name, such as ``{"fsdp": 4, "tensor": 2}``.
      param_specs: as for :func:`jsparse.train_step`, with those names. By default each leaf is cut
        along the first axis of a length that can be cut so.

    Returns:
      The least, and the most: each has ``bytes`` and ``messages``.

    Raises:
      ValueError: ``tx`` is no preset; ``size`` has another number of levels than ``tx``, or is no
        number of workers; or ``shards`` or ``param_specs`` are not of the form above.

    >>> tx = jsparse.topk_allgather("data", density=0.01)
    >>> least, most = exact(tx, jnp.zeros(10_000), 8)
    >>> least == most, most.bytes, most.messages
    (True, 5614, 9)
    >>> exact(tx, jnp.zeros(10_000), 8, shards=4)[1].bytes
    1414
    """
    if not isinstance(tx, SparseAllReduce):
        raise ValueError(f"tx is {type(tx).__name__}; pass the preset alone, such as jsparse.oktopk(...), not a chain")
    sizes = size if isinstance(size, tuple) else (size,)
    levels = len(tx.synchroniser.levels)
    if len(sizes) != levels:
        raise ValueError(f"size is {size}; give one number, and two, (nodes, workers of a node), for hitopk and torus")
    for number in sizes:
        check_count("size", number, "a number of workers")
    workers = {f"workers of level {number}": workers for number, workers in enumerate(sizes)}
    synchroniser, model = tx.synchroniser.over(*map(AxisComm, workers)), _axes(shards)
    if model:
        mesh = AbstractMesh((*workers.values(), *model.values()), (*workers, *model))
        specs = PartitionSpec() if param_specs is None else param_specs
        params, synchroniser = OnShards(synchroniser, Placement.of(mesh, tuple(workers), specs)).of_device(params)
    elif param_specs is not None:
        raise ValueError("param_specs cut parameters along the axes of shards: pass their sizes, shards={name: size}")

    def update(grads):
        return synchroniser.update(grads, synchroniser.init(grads))

    sent = traffic(update, params, axis_sizes={**workers, **model}).over(tuple(workers))
    return sent.least, sent.cost


def _axes(shards: int | Mapping[str, int]) -> dict[str, int]:
    """The axes of a worker's devices, and their sizes; none if a worker is one device."""
    axes = dict(shards) if isinstance(shards, Mapping) else {} if shards == 1 else {"shards": shards}
    for name, size in axes.items():
        check_count(name, size, "a number of a worker's devices")
    return axes
