"""The move of a state to another number of workers: where each array goes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.state import ANEW, WorkerState, states_in
from .._train.per_worker import PerWorkerState
from .form import Local
from .redistribute import interpolate, joined, nearest, parted, redistribute

FIX = (
    "pass the chain and the parameters that the state was made with (if each worker has parameters of its own, pass "
    "one worker's); only the number of workers may differ, and, as before says, their shards"
)


@dataclasses.dataclass(frozen=True)
class Move:
    """The old and the new numbers of workers and nodes. On one level, each worker is a node.

    Attributes:
      old, new: the numbers of workers.
      old_nodes, new_nodes: the numbers of nodes.
      axes: the sizes of the new mesh's axes.
      cut: whether the workers of a node hold its residual in shards. Otherwise they hold the same
        residual, as when one transformation averages gradients inside a node and another one sums
        between nodes.
    """

    old: int
    new: int
    old_nodes: int
    new_nodes: int
    axes: Mapping[str, int]
    cut: bool

    def tree(self, now: Any, old: Any, once: Any, *, of_each: bool = False) -> Any:
        """Moves a tree of states.

        Args:
          now: the state as it is on one of the new workers.
          old: the state as given.
          once: the state as it is on a worker without others.
          of_each: whether arrays outside any :class:`WorkerState` differ between workers.
            Otherwise they are alike on all.
        """

        def part(path, now, old, once):
            try:
                if isinstance(now, WorkerState):
                    return now.moved(old, once, self)
                return self.of_each(now, old) if of_each else self.alike(now, old)
            except ValueError as error:
                raise ValueError(f"the state{jax.tree_util.keystr(path)}: {error}") from error

        return jax.tree_util.tree_map_with_path(
            part, now, old, once, is_leaf=lambda node: isinstance(node, WorkerState)
        )

    def alike(self, now: Local, old: Any) -> Any:
        """Moves an array that is the same on all workers."""
        _check(now, old, old.shape == now.shape)
        return old

    def of_each(self, now: Local, old: Any, own: bool = False) -> Any:
        """Moves an array of which each worker has its own.

        Args:
          now: the array as it is on one of the new workers.
          old: the array as given.
          own: whether its shape on a worker may depend on their number. If its shape does not fit
            then, it begins anew.
        """
        if old is ANEW:
            return ANEW
        fits = old.shape == (self.old * now.shape[0], *now.shape[1:]) or not math.prod(now.shape)
        if own and not fits and old.shape[0] % self.old == 0:
            return ANEW
        _check(now, old, fits)
        shape = (self.new * now.shape[0], *now.shape[1:])
        if not math.prod(shape):
            return np.zeros(shape, now.dtype)
        rows = old.reshape(self.old, -1)
        if self.same_nodes:
            rows = _dealt(rows.reshape(self.old_nodes, -1), self.new_nodes)
        elif _alike(rows, self.old // self.old_nodes):
            rows = _dealt(rows[:: self.old // self.old_nodes], self.new_nodes)
            rows = rows[np.arange(self.new) // (self.new // self.new_nodes)]
        else:
            rows = _dealt(rows, self.new)
        return rows.reshape(shape)

    def vector(self, now: Local, old: Any, once: Local, shards: int) -> Any:
        """Moves a vector in the coordinates of the synchroniser's space, such as a residual.

        Args:
          now, old, once: as in :meth:`tree`.
          shards: the number of devices of a worker, each of which has such a vector.
        """
        if not self.cut or self.same_nodes:
            return self.of_each(now, old)
        _check(now, old, old.dtype == now.dtype and len(old) % (self.old * shards) == 0)
        had = joined(old, self.old_nodes, self.old // self.old_nodes, shards, once.shape[0] // shards)
        moved = redistribute(had.reshape(self.old_nodes, -1), self.new_nodes, self.old, self.new)
        return parted(moved.reshape(self.new_nodes, shards, -1), self.new // self.new_nodes)

    def boundaries(self, starts: Any, n: int | None) -> Any:
        """Moves the first indices of regions of ``n`` elements, the same on all nodes.

        The new regions have equal shares of what the old ones held.
        """
        if n is None or starts is ANEW or not self.same_nodes:
            return ANEW
        of_shards = starts.reshape(self.old_nodes, -1, self.old_nodes)[0]
        regions = np.stack([interpolate(row, n, self.new_nodes) for row in of_shards])
        return np.tile(regions.reshape(-1), self.new_nodes)

    def recut(self, axis: Sequence[str], now: Local, old: Any, once: Local) -> Any:
        """Moves an array that is cut among the workers along ``axis``.

        An array of one element is not cut: each worker has a copy, and all copies are alike.
        """
        size, n = math.prod(self.axes[name] for name in axis), math.prod(once.shape)
        whole = np.zeros((size * now.shape[0], *now.shape[1:]), now.dtype)
        if n <= 1:
            _check(now, old, old.shape[1:] == now.shape[1:])
            return nearest(old, size) if n else whole
        _check(now, old, old.shape[1:] == now.shape[1:] and n <= old.size < n + self.old)
        whole.reshape(-1)[:n] = old.reshape(-1)[:n]
        return whole

    @property
    def same_nodes(self) -> bool:
        """Whether a node has as many workers as before."""
        return self.old * self.new_nodes == self.new * self.old_nodes


def between(axes: Mapping[str, int], now: Any, old: Any, once: Any, halved: Mapping[str, Any]) -> Move:
    """The move from the workers of a state to those of a mesh.

    Args:
      axes: the axes along which the new workers stand, with their sizes.
      now: the state as it is on one of the new workers.
      old: the state as given.
      once: the state as it is on a worker without others.
      halved: for each axis, the state as it is on one of two workers along that axis.
    """
    names = tuple(axes)
    cut = {name for name in names if _shapes(halved[name]) != _shapes(once)}
    remembering = [state for state in states_in(once) if jax.tree.leaves(state.buckets)]
    within = cut | {name for name in names if any(name not in state.step.axes for state in remembering)}
    if set(names[len(names) - len(within) :]) != within:
        raise ValueError(f"axis is {names}; name the axes between nodes first, and then {sorted(within)}")
    workers, nodes = _workers(now, old), _nodes(now, old)
    if workers % nodes:
        raise ValueError(f"the state is of {workers} workers, which do not fill {nodes} nodes equally: {FIX}")
    new = math.prod(axes.values())
    return Move(workers, new, nodes, new // math.prod(axes[name] for name in within), axes, bool(cut))


def _workers(now: Any, old: Any) -> int:
    """The number of workers that a state belongs to; 1 if the state is alike on all workers."""
    found = {
        there.step.shape[0] // here.step.shape[0] for here, there in zip(states_in(now), states_in(old), strict=True)
    }
    for here, there in zip(states_in(now, PerWorkerState), states_in(old, PerWorkerState), strict=True):
        if not states_in(here):
            pairs = zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True)
            found |= {full.shape[0] // part.shape[0] for part, full in pairs if math.prod(part.shape)}
    return _only(found, "workers", f": {FIX}", 1)


def _nodes(now: Any, old: Any) -> int:
    """The number of nodes that a state belongs to: those with residuals of their own.

    The state records it itself, in its ``sizes``.
    """
    found = set()
    for here, there in zip(states_in(now), states_in(old), strict=True):
        shards = here.step.shape[0]
        workers, levels = there.step.shape[0] // shards, here.sizes.shape[0] // shards
        wanted = (there.step.shape[0] * levels,)
        if there.sizes.shape != wanted:
            raise ValueError(
                f"the state's sizes have shape {there.sizes.shape}; for {workers} workers it is {wanted}: {FIX}"
            )
        if jax.tree.leaves(here.buckets):
            found.add(int(there.sizes[0]))
    return _only(found, "nodes", "; move each by itself", _workers(now, old))


def _only(found: set[int], what: str, fix: str, otherwise: int) -> int:
    """The one number that was found."""
    if len(found) > 1:
        raise ValueError(f"parts of the state belong to different numbers of {what}, {sorted(found)}{fix}")
    return next(iter(found), otherwise)


def _check(now: Local, old: Any, fits: bool) -> None:
    if not fits or (math.prod(now.shape) and old.dtype != now.dtype):
        raise ValueError(
            f"it has an array of shape {old.shape} and type {old.dtype}; one worker of this chain has shape "
            f"{now.shape} and type {now.dtype}: {FIX}"
        )


def _dealt(rows: Any, size: int) -> Any:
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    return redistribute(rows, size, len(rows), size) if floats else nearest(rows, size)


def _alike(rows: Any, gpus: int) -> bool:
    """Whether all workers of each node have the same row."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        return gpus == 1
    return np.array_equal(rows, np.repeat(rows[::gpus], gpus, axis=0), equal_nan=rows.dtype.kind == "f")


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of all residuals, velocities and other vectors of the memories in a tree."""
    memories = [bucket.memory for state in states_in(tree) for bucket in state.buckets]
    return [vector.shape for vector in jax.tree.leaves(memories)]
