"""Replicated computation, shared out among the workers.

Each worker computes one part, and one message gathers the results.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import AxisComm, Comm, CommLike, as_comm, axes_of

Task = TypeVar("Task")


def in_parts(fn: Callable[..., Any], comm: CommLike, *arrays: Any) -> Any:
    """``fn(*arrays)``, of which each worker computes a P-th of the rows.

    This is the paper's parallel tensor operator (PTO) for one tensor. The leading axis is cut
    into P equal parts, and each worker calls ``fn`` with its own part. Where P does not divide
    the number of rows, the last parts overlap.

    Args:
      fn: a function that treats each row by itself. It takes arrays of any number of rows and
        returns a pytree of arrays with as many rows; row ``i`` of a result depends only on row
        ``i`` of the arguments. It may not communicate.
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.
      *arrays: pytrees of arrays with equally long leading axes, the same on all workers.

    Returns:
      The result for all rows: the same bits on every worker, and typed as replicated. It equals
      ``fn(*arrays)`` up to the rounding by which compiled programs differ.

    Raises:
      ValueError: leading axes are missing or differ, the results have other numbers of rows, or
        the results are complex.

    **Cost**: ``(P-1) ceil(rows / P)`` rows of the result in one all-gather, ``log P`` messages.

    Example::

      roots = jsparse.in_parts(jnp.linalg.cholesky, "data", matrices)  # shape (layers, d, d)

    References:
      Shi et al., MLSys 2021, section 4.2, equations 12 to 14.
    """
    comm = as_comm(comm)
    lengths = [jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(arrays)]
    if not lengths or len(set(lengths)) > 1 or lengths[0] == ():
        raise ValueError(
            f"the arrays' leading axes are {lengths}; in_parts cuts one axis that all arrays have: pass arrays without "
            "it to fn by a closure, and lists of different arrays to map_in_parts"
        )
    rows = lengths[0][0]
    if not rows:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, *arrays))
    width = -(-rows // comm.size)
    begin = jnp.minimum(comm.rank() * width, rows - width)
    part = fn(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), begin, width), arrays))
    for leaf in jax.tree.leaves(part):
        if leaf.shape[:1] != (width,):
            raise ValueError(f"of {width} rows fn made an array of shape {leaf.shape}; it must return a row for each")
    own, rest = rows // width, rows % width

    def join(parts):
        whole = parts[:own].reshape(own * width, *parts.shape[2:])
        return jnp.concatenate([whole, parts[own, width - rest :]]) if rest else whole

    return jax.tree.map(join, all_gather(comm, part))


def map_in_parts(
    fn: Callable[[Task], Any], comm: CommLike, tasks: Sequence[Task], *, weigh: Callable[[Task], float] | None = None
) -> list[Any]:
    """``[fn(task) for task in tasks]``, where one worker computes each task.

    This is the paper's parallel tensor operator (PTO) for a list of tensors. The tasks are shared
    out by their weights: the heaviest first, and each to the worker with the least work so far.
    Every worker branches to its own tasks. Under ``jax.vmap`` the branches become a choice between
    the results of all branches: the values are the same, but no work is saved.

    Args:
      fn: a function of one task. It may not communicate.
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.
      tasks: the arguments of ``fn``: pytrees of arrays, the same on all workers, or static
        values. An array that is computed before the call is computed on all workers, so let
        ``fn`` slice or combine arrays itself.
      weigh: a function that returns how much work a task is; by default the number of elements in
        its arrays.

    Returns:
      The results in the order of the tasks: the same bits on every worker, and typed as
        replicated.

    Raises:
      ValueError: a result is complex, or is not an array.

    **Cost**: ``P-1`` times the results of the worker whose results are longest, in one all-gather,
    ``log P`` messages.

    Example::

      norms = jsparse.map_in_parts(jnp.linalg.norm, "data", jax.tree.leaves(params))

    References:
      Shi et al., MLSys 2021, section 4.2, equations 12 to 14.
    """
    comm, tasks = as_comm(comm), list(tasks)
    results = [jax.eval_shape(lambda task=task: fn(task)) for task in tasks]
    unit = unit_of(results)
    words = [sum(_words(shape, unit) for shape in jax.tree.leaves(result)) for result in results]
    if not sum(words):
        return jax.tree.map(jnp.zeros_like, results)
    shares = share_out([(weigh or _elements)(task) for task in tasks], comm.size)
    longest = max(sum(words[i] for i in share) for share in shares)

    def compute(share):
        message = join_bits([fn(tasks[i]) for i in share], unit)
        return jnp.pad(message, (0, longest - message.shape[0]))

    # The branch differs between workers, which is possible because the branches do not
    # communicate.
    gathered = comm.all_gather(comm.switch(comm.rank(), [lambda share=share: compute(share) for share in shares]))
    out = {}
    for message, share in zip(gathered, shares, strict=True):
        out.update(zip(share, split_bits(message, [results[i] for i in share], unit), strict=True))
    return [out[i] for i in range(len(tasks))]


def share_out(weights: Sequence[float], size: int) -> list[list[int]]:
    """Shares tasks out among workers, so that the heaviest load is near the least possible.

    It is at most a third above it.

    Args:
      weights: of the tasks.
      size: the number of workers.

    Returns:
      The numbers of each worker's tasks.

    >>> share_out([1, 5, 2, 2], 2)
    [[1], [2, 3, 0]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0.0, rank) for rank in range(size)]
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        load, rank = loads[0]
        shares[rank].append(i)
        heapq.heapreplace(loads, (load + weights[i], rank))
    return shares


def all_gather(comm: Comm, tree: Any) -> Any:
    """Every worker's arrays, each stacked by rank, in one message: shapes ``(P, *shape)``."""
    unit = unit_of(tree)
    message = join_bits(tree, unit)
    everyone = comm.all_gather(message) if message.size else jnp.zeros((comm.size, 0), unit)
    return split_bits(everyone, tree, unit)


def unit_of(tree: Any) -> jnp.dtype:
    """The unsigned integer type in which to join a tree's arrays.

    It is as wide as the narrowest array's type, at most 32 bits.

    Raises:
      ValueError: an array is complex, or its type has no whole bytes.
    """
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        real = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
        bits = jax.dtypes.itemsize_bits(leaf.dtype) if real else 0
        if leaf.dtype != bool and bits < 8:
            raise ValueError(
                f"a result has type {leaf.dtype}; it can be a bool, or an integer or a float of whole bytes: "
                "convert it in fn"
            )
    return jnp.dtype(f"uint{8 * min([4, *(leaf.dtype.itemsize for leaf in leaves)])}")


def join_bits(tree: Any, unit: jnp.dtype) -> jax.Array:
    """Joins the bits of arrays in one vector, in which no backend widens narrow floats.

    Args:
      tree: the arrays.
      unit: the vector's type, from :func:`unit_of`.
    """
    leaves = [leaf.reshape(-1).view(unit) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros(0, unit)


def split_bits(message: jax.Array, like: Any, unit: jnp.dtype) -> Any:
    """Splits what :func:`join_bits` made into arrays again.

    Args:
      message: one such vector, or several along leading axes, which the results have, too.
      like: the arrays' tree, or their shapes and types.
      unit: as in :func:`join_bits`.
    """
    shapes, treedef = jax.tree.flatten(like)
    ends = itertools.accumulate(_words(shape, unit) for shape in shapes)
    *parts, _ = jnp.split(message, list(ends), axis=-1)

    def read(bits, shape):
        return bits.view(shape.dtype).reshape(*message.shape[:-1], *shape.shape)

    return jax.tree.unflatten(treedef, map(read, parts, shapes))


def check_replicated(comm: Comm, tree: Any, what: str) -> None:
    """Checks that a tree is the same on all workers, as far as JAX's types tell.

    Args:
      comm: the workers.
      tree: its arrays.
      what: what a leaf is, for the error.

    Raises:
      ValueError: a leaf's type says that it differs between workers.
    """
    levels = [comm, *map(AxisComm, axes_of(comm))]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if any(level.typed and level.may_differ(leaf) for level in levels):
            raise ValueError(
                f"{what} leaf {jax.tree_util.keystr(path)} differs between workers, but only replicated computation "
                "can be shared out: put this after the all-reduce in the chain"
            )


def _words(shape: Any, unit: jnp.dtype) -> int:
    """The length of an array in units."""
    return math.prod(shape.shape) * (shape.dtype.itemsize // unit.itemsize)


def _elements(task: Any) -> int:
    """The number of elements in a task's arrays."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(task))
