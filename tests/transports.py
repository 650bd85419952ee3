"""Ways to run workers: each gives the same function of stacked gradients and states."""

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jsparse
from algorithms import DENSITY, Row
from jsparse._comm import gloo

AXIS = "workers"
LEVELS = ("nodes", "gpus")
SHAPES = {"b": (7,), "empty": (0, 4), "scalar": (), "v": (395,), "w": (20, 30)}
N = 1003


def mesh(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), (AXIS,))


def mesh_of(row: Row, size: int) -> Mesh:
    sizes = axis_sizes(row, size)
    return Mesh(np.array(jax.devices()[:size]).reshape(tuple(sizes.values())), tuple(sizes))


def axis(row: Row) -> str | tuple[str, str]:
    return AXIS if row.gpus is None else LEVELS


def axis_sizes(row: Row, size: int) -> dict[str, int]:
    if row.gpus is None:
        return {AXIS: size}
    return dict(zip(LEVELS, (size // row.gpus[size], row.gpus[size]), strict=True))


def vmapped(fn: Callable[..., Any], row: Row, size: int) -> Callable[..., Any]:
    """The function over stacked arguments. Over two levels it uses nested vmaps."""
    if row.gpus is None:
        return jax.vmap(fn, axis_name=AXIS)
    shape = tuple(axis_sizes(row, size).values())
    for name in reversed(LEVELS):
        fn = jax.vmap(fn, axis_name=name)

    def nested(*args):
        split = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), args)
        return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), fn(*split))

    return nested


def zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def tree(flat: np.ndarray) -> dict[str, np.ndarray]:
    """Splits vectors of shape ``(P, N)`` into gradients.

    The leaves' first axis is that of the workers.
    """
    leaves, begin = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        leaves[name] = flat[:, begin : begin + size].reshape(len(flat), *shape)
        begin += size
    return leaves


def flat(leaves: dict[str, Any], size: int) -> np.ndarray:
    return np.concatenate([np.asarray(leaves[name]).reshape(size, -1) for name in SHAPES], axis=1)


def composition(row: Row) -> Any:
    """What forms a row's vectors and remembers them; for phases, what they share."""
    synchroniser = row.make(axis(row), DENSITY).synchroniser
    return getattr(synchroniser, "shared", synchroniser)


def bucket_lengths(row: Row) -> list[int]:
    return [bucket.layout.n for bucket in composition(row).space.buckets(jax.tree.leaves(zeros()))]


@functools.cache
def workers(row: Row, size: int, transport: str = "vmap", density: float = DENSITY) -> tuple[Any, Callable[..., Any]]:
    """One compiled function for each combination of arguments: ``(initial state, update)``.

    ``update(gradients, state)`` takes and returns pytrees whose leaves have a leading axis for the
    workers. Updates have it too, so that a test can check whether workers agree.
    """
    tx = row.make(axis(row), density)
    if transport == "vmap":
        init = vmapped(lambda _: tx.init(zeros()), row, size)
        update = vmapped(tx.update, row, size)
    elif transport == "pmap":
        init = jax.pmap(lambda _: tx.init(zeros()), axis_name=AXIS)
        return init(np.arange(size)), jax.pmap(tx.update, axis_name=AXIS)
    else:
        along, check, on = PartitionSpec(axis(row)), transport != "shard_map unchecked", mesh_of(row, size)

        def unstack(leaves):
            return jax.tree.map(lambda x: x[0], leaves)

        def stack(leaves):
            return jax.tree.map(lambda x: x[None], leaves)

        def local_init(_):
            return stack(tx.init(zeros()))

        def local_update(grads, state):
            with mock.patch.multiple(gloo, in_use=lambda: transport == "gloo", LONG=64):
                updates, state = tx.update(unstack(grads), unstack(state))
            return updates if row.alike else stack(updates), stack(state)

        init = jax.shard_map(local_init, mesh=on, in_specs=along, out_specs=along, check_vma=check)
        # Replicated out_specs: ``check_vma=True`` accepts them only if the types say that all
        # workers agree.
        shared = jax.shard_map(
            local_update,
            mesh=on,
            in_specs=(along, along),
            out_specs=(PartitionSpec() if row.alike else along, along),
            check_vma=check,
        )

        def update(grads, state):
            updates, state = shared(grads, state)
            if not row.alike:
                return updates, state
            return jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (size, *x.shape)), updates), state

    return jax.jit(init)(np.arange(size)), jax.jit(update)


@functools.cache
def traffic(row: Row, size: int) -> jsparse.Traffic:
    """What a worker sends in one update, read from one trace that all tests share."""
    tx = row.make(axis(row), DENSITY)
    state = jax.eval_shape(vmapped(lambda _: tx.init(zeros()), row, size), np.arange(size))
    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    return jsparse.traffic(tx.update, zeros(), local, axis_sizes=axis_sizes(row, size))


def ways_through(traffic: jsparse.Traffic) -> set[tuple[int, int]]:
    """The words and messages of every way through a program's branches."""
    ways = {(0, 0)}
    for part in traffic.parts:
        if hasattr(part, "branches"):
            options = set().union(*(ways_through(branch) for branch in part.branches))
        else:
            options = {(part.times * math.ceil(part.cost.bytes / part.times / 4), part.cost.messages)}
        ways = {(words + w, messages + m) for words, messages in ways for w, m in options}
    return ways
