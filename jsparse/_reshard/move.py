"""Where the parts of a state go, when the number of workers changes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._engine.synchronise import BucketState, SparseAllReduceState
from .._train.per_worker import PerWorkerState, ShardedState
from .._train.placement import PER_WORKER
from ..allreduce.oktopk import OkTopkState
from .redistribute import interpolate, nearest, redistribute

FIX = (
    "pass the chain and the parameters that the state was made with (where each worker has parameters of its own, one "
    "worker's); only the number of workers may differ"
)
# In place of an array: what a new run would begin with.
ANEW = object()


@dataclasses.dataclass(frozen=True)
class Local:
    """An array on one worker: its shape and type, and the axes over which it differs."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Move:
    """From how many workers to how many, and on how many nodes: on one level, as many.

    Attributes:
      old, new: workers.
      old_nodes, new_nodes: nodes.
      sizes: those of the new mesh's axes.
      cut: whether a node's workers hold its residual in shards. Otherwise they hold the same, as where gradients are
        averaged inside a node by one transformation, and between nodes by another.
    """

    old: int
    new: int
    old_nodes: int
    new_nodes: int
    sizes: Mapping[str, int]
    cut: bool

    def part(self, path: Any, now: Any, old: Any, once: Any) -> Any:
        """A part of a chain's state, as on one of the new workers, as given, and as on a worker without others."""
        if isinstance(now, PerWorkerState):
            parts = jax.tree_util.tree_map_with_path(
                lambda within, *parts: self._inside((*path, *within), *parts),
                now.inner,
                old.inner,
                once.inner,
                is_leaf=is_per_worker,
            )
            return PerWorkerState(parts)
        if is_per_worker(now):
            return self._inside(path, now, old, once)
        _check(path, now, old, old.shape == now.shape)
        return old

    def _inside(self, path: Any, now: Any, old: Any, once: Any) -> Any:
        """A part that differs between workers."""
        if isinstance(now, SparseAllReduceState):
            buckets = zip(now.buckets, old.buckets, once.buckets, strict=True)
            return SparseAllReduceState(
                self._of_each(path, now.step, old.step),
                tuple(self._bucket(path, *states) for states in buckets),
                jax.tree.map(lambda *leaves: self._of_each(path, *leaves), now.report, old.report),
            )
        if isinstance(now, ShardedState):
            size = math.prod(self.sizes[name] for name in now.axis)
            inner = jax.tree.map(lambda *leaves: self._recut(path, size, *leaves), now.inner, old.inner, once.inner)
            return ShardedState(inner, now.axis)
        return self._of_each(path, now, old)

    def _bucket(self, path: Any, now: BucketState, old: BucketState, once: BucketState) -> BucketState:
        def vector(now, old, once) -> Any:
            return None if now is None else self._vector(path, now, old, once)

        def state(now, old):
            if isinstance(now, OkTopkState):
                others = [self._of_each(path, *leaves) for leaves in zip(now[1:], old[1:], strict=True)]
                return OkTopkState(self._regions(old.starts, n), *others)
            return self._of_each(path, now, old, own=True)

        n = next((vector.shape[0] for vector in (now.residual, now.velocity) if vector is not None), None)
        select, reduce = jax.tree.map(
            state, (now.select, now.reduce), (old.select, old.reduce), is_leaf=lambda x: isinstance(x, OkTopkState)
        )
        residual = vector(now.residual, old.residual, once.residual)
        return BucketState(residual, select, reduce, vector(now.velocity, old.velocity, once.velocity))

    def _vector(self, path: Any, now: Any, old: np.ndarray, once: Any) -> np.ndarray:
        """A residual or a velocity."""
        if not self.cut or self._same_nodes:
            return self._of_each(path, now, old)
        _check(path, now, old, old.dtype == now.dtype)
        nodes = redistribute(old.reshape(self.old_nodes, -1)[:, : once.shape[0]], self.new_nodes, self.old, self.new)
        filled = now.shape[0] * (self.new // self.new_nodes)
        return np.pad(nodes, ((0, 0), (0, filled - nodes.shape[1]))).reshape(-1)

    def _of_each(self, path: Any, now: Any, old: Any, own: bool = False) -> Any:
        """What each worker has one of.

        Args:
          path: where it stands.
          now, old: as on one of the new workers; as given.
          own: whether its shape on a worker may depend on their number: then it begins anew.
        """
        fits = old.shape == (self.old * now.shape[0], *now.shape[1:]) or not math.prod(now.shape)
        if own and not fits and old.shape[0] % self.old == 0:
            return ANEW
        _check(path, now, old, fits)
        shape = (self.new * now.shape[0], *now.shape[1:])
        if not math.prod(shape):
            return np.zeros(shape, now.dtype)
        rows = old.reshape(self.old, -1)
        if self._same_nodes:
            rows = _dealt(rows.reshape(self.old_nodes, -1), self.new_nodes)
        elif _alike(rows, self.old // self.old_nodes):
            rows = _dealt(rows[:: self.old // self.old_nodes], self.new_nodes)
            rows = rows[np.arange(self.new) // (self.new // self.new_nodes)]
        else:
            rows = _dealt(rows, self.new)
        return rows.reshape(shape)

    def _regions(self, starts: np.ndarray, n: int | None) -> Any:
        """Where Ok-Topk's regions begin, the same on all nodes."""
        if n is None or not self._same_nodes:
            return ANEW
        of_shards = starts.reshape(self.old_nodes, -1, self.old_nodes)[0]
        regions = np.stack([interpolate(row, n, self.new_nodes) for row in of_shards])
        return np.tile(regions.reshape(-1), self.new_nodes)

    def _recut(self, path: Any, size: int, now: Any, old: Any, once: Any) -> Any:
        """An array of an optimizer that is cut among ``size`` workers; each has a number of its own, all alike."""
        n = math.prod(once.shape)
        if n <= 1:
            _check(path, now, old, old.shape[1:] == now.shape[1:])
            return nearest(old, size) if n else np.zeros((size * now.shape[0], *now.shape[1:]), now.dtype)
        _check(path, now, old, old.shape[1:] == now.shape[1:] and n <= old.size < n + self.old)
        whole = np.zeros((size * now.shape[0], *now.shape[1:]), now.dtype)
        whole.reshape(-1)[:n] = old.reshape(-1)[:n]
        return whole

    @property
    def _same_nodes(self) -> bool:
        return self.old * self.new_nodes == self.new * self.old_nodes


def plan(
    mesh: Mesh, names: Sequence[str], now: Any, old: Any, once: Any, halved: Mapping[str, Any], gpus: int | None
) -> Move:
    """What moves where.

    Args:
      mesh: the new one.
      names: the axes of its workers.
      now, once: the state as on one worker of these, and of one.
      old: the state as given.
      halved: for each axis, the state as on one of two workers along it.
      gpus: workers in an old node, if that is said.
    """
    sizes = {name: mesh.shape[name] for name in names}
    workers, wholes, given = _workers(now, old), _vectors(once), _vectors(old)
    cut = {
        name
        for name in names
        if any(half.shape != whole.shape for half, whole in zip(_vectors(halved[name]), wholes, strict=True))
    }
    remembering = [state for state in _ours(once) if jax.tree.leaves(state.buckets)]
    within = cut | {name for name in names if any(name not in state.step.axes for state in remembering)}
    if set(names[len(names) - len(within) :]) != within:
        raise ValueError(f"axis is {names}; name the axes between nodes first, and after them {sorted(within)}")

    def possible(gpus):
        if gpus < 1 or workers % gpus:
            return False
        if not cut:
            return all(_alike(vector.reshape(workers, -1), gpus) for vector in given if len(vector) % workers == 0)
        return all(_is_of_shards(*pair, workers, gpus) for pair in zip(given, wholes, strict=True))

    new = math.prod(sizes.values())
    inside = math.prod(sizes[name] for name in within)
    if not within:
        gpus = 1
    elif gpus is None:
        options = [size for size in range(1, workers + 1) if possible(size)]
        # Where a node's workers have the same, any number that fits says the same.
        gpus = options[0] if len(options) == 1 else inside if not cut and inside in options else None
        if gpus is None and options:
            raise ValueError(f"a node of the old workers had one of {options}: say how many by gpus=...")
    if gpus is None or not possible(gpus):
        raise ValueError(f"the residual is none of {workers} workers in nodes of {gpus or 'any number'}: {FIX}")
    return Move(workers, new, workers // gpus, new // inside, sizes, bool(cut))


def _workers(now: Any, old: Any) -> int:
    """How many workers a state is of; 1, if it is alike on all."""
    found = {state.step.shape[0] for state in _ours(old)}
    for ours, theirs in zip(_leaves(now, PerWorkerState), _leaves(old, PerWorkerState), strict=True):
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        found |= {full.shape[0] // part.shape[0] for part, full in pairs if math.prod(part.shape) and not _ours(ours)}
    if len(found) > 1:
        raise ValueError(f"parts of the state are of {sorted(found)} workers: {FIX}")
    return next(iter(found), 1)


def _check(path: Any, now: Local, old: Any, fits: bool) -> None:
    if not fits or (math.prod(now.shape) and old.dtype != now.dtype):
        raise ValueError(
            f"the state's {jax.tree_util.keystr(path)} has an array of shape {old.shape} and type {old.dtype}; one "
            f"worker of this chain has one of {now.shape} and {now.dtype}: {FIX}"
        )


def _dealt(rows: Any, size: int) -> Any:
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    return redistribute(rows, size, len(rows), size) if floats else nearest(rows, size)


def _alike(rows: Any, gpus: int) -> bool:
    """Whether the rows of each node are the same."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        return gpus == 1
    return np.array_equal(rows, np.repeat(rows[::gpus], gpus, axis=0), equal_nan=rows.dtype.kind == "f")


def _is_of_shards(vector: np.ndarray, whole: Local, workers: int, gpus: int) -> bool:
    """Whether a residual may be that of workers in nodes of ``gpus``: by its length, and by the zeros at its end."""
    n = whole.shape[0]
    return vector.size == workers * -(-n // gpus) and not vector.reshape(workers // gpus, -1)[:, n:].any()


def _vectors(tree: Any) -> list[Any]:
    """All residuals and velocities."""
    vectors = [vector for state in _ours(tree) for b in state.buckets for vector in (b.residual, b.velocity)]
    return [vector for vector in vectors if vector is not None]


def _ours(tree: Any) -> list[Any]:
    return _leaves(tree, SparseAllReduceState)


def _leaves(tree: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def is_per_worker(node: Any) -> bool:
    return isinstance(node, PER_WORKER)
