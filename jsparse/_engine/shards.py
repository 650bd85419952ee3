"""Sharded models: each device of a worker synchronises the shards that it holds.

Nothing is gathered for it. Each device selects from its own shards, and exchanges messages with
the devices of the other workers that hold the same ones.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm, Comm, axes_of
from .._vector.buckets import Bucket
from .._vector.sparse_vector import SparseVector
from .state import SparseAllReduceState
from .synchroniser import Synchroniser

# The share of elements that may go densely, for lack of a cut, without a warning.
MOST_UNCUT = 1 / 8


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where parameters lie on a mesh: alike on all workers, and in shards within a worker.

    Attributes:
      mesh: the devices; their axes alone are enough to tell what a device holds.
      workers: the mesh axes along which the workers stand.
      specs: a PartitionSpec for each subtree of the parameters, by the path to it.
    """

    mesh: Mesh | AbstractMesh
    workers: tuple[str, ...]
    specs: tuple[tuple[tuple[str, ...], PartitionSpec], ...]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, axis: str | tuple[str, ...], specs: Any) -> "Placement":
        """The placement that a tree of PartitionSpecs, or of NamedShardings, says.

        Args:
          mesh: the devices.
          axis: the mesh axis, or axes, along which the workers stand.
          specs: the parameters' tree, or the beginning of it, as ``in_shardings`` of ``jax.jit``
            is. None stands for a subtree that is whole on every device. Where a leaf stands, it
            may have a variable with the spec, as from ``nnx.get_partition_spec``.

        Raises:
          ValueError: a spec names an axis of the workers, or one that the mesh has not.
        """
        workers = (axis,) if isinstance(axis, str) else axis
        table = []
        for path, given in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec):
            name = f"the spec of {jax.tree_util.keystr(path) or 'the parameters'}"
            if not _is_spec(given):
                raise ValueError(f"{name} is {given!r}; pass a jax.sharding.PartitionSpec, a NamedSharding or None")
            spec = given.spec if isinstance(given, NamedSharding) else given if given is not None else PartitionSpec()
            if isinstance(given, NamedSharding) and (there := _other_sizes(given.mesh, mesh)):
                raise ValueError(
                    f"{name} is a NamedSharding of another mesh, whose axes have the sizes {there}, and here they are "
                    f"{dict(mesh.shape)}: pass a NamedSharding of this mesh, or the PartitionSpec alone"
                )
            if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
                raise ValueError(
                    f"{name} is {spec}, which leaves to XLA how an axis is cut, and jsparse must know: put the mesh "
                    "axes along which it is cut in place of UNCONSTRAINED, or None"
                )
            for used in (used for entry in spec for used in axes_in(entry)):
                if used in workers:
                    raise ValueError(
                        f"{name} is {spec}, and the workers stand along {used!r}: parameters are alike on all workers; "
                        "cut them along the other axes of the mesh"
                    )
                if used not in mesh.axis_names:
                    raise ValueError(f"{name} is {spec}, and the mesh has axes {mesh.axis_names}: name one of these")
            table.append((_keys(path), spec))
        return cls(mesh, workers, tuple(table))

    @property
    def model(self) -> tuple[str, ...]:
        """The mesh axes within a worker."""
        return tuple(name for name in self.mesh.axis_names if name not in self.workers)

    @property
    def explicit(self) -> bool:
        """Whether types tell how arrays are placed."""
        return AxisType.Explicit in self.mesh.axis_types

    def spec(self, path: Any, shape: Sequence[int]) -> PartitionSpec:
        """The spec of a leaf.

        Raises:
          ValueError: it has none, or cannot be cut so.
        """
        keys, name = _keys(path), jax.tree_util.keystr(path)
        found = [(len(prefix), spec) for prefix, spec in self.specs if keys[: len(prefix)] == prefix]
        inside = [(len(longer), spec) for longer, spec in self.specs if longer[: len(keys)] == keys]
        if not found and len(inside) == 1:
            found = inside  # Specs of variables, of which nnx.Optimizer passes the arrays.
        if not found:
            raise ValueError(
                f"leaf {name} has no spec: give one for every leaf of the parameters, or for a subtree that holds it; "
                "PartitionSpec() for what is whole on every device"
            )
        _, spec = max(found, key=lambda entry: entry[0])
        if len(spec) > len(shape):
            raise ValueError(f"leaf {name} has shape {tuple(shape)}, and its spec {spec} is for {len(spec)} axes")
        for length, entry in zip(shape, spec, strict=False):
            parts = math.prod(self.mesh.shape[used] for used in axes_in(entry))
            if length % parts:
                raise ValueError(
                    f"leaf {name} has shape {tuple(shape)}, and its spec {spec} cuts an axis of {length} elements in "
                    f"{parts}: choose an axis whose length is a multiple of {parts}, or None"
                )
        used = [i + 1 for i, entry in enumerate(spec) if axes_in(entry)]
        return PartitionSpec(*spec[: max(used, default=0)])

    def cut(self, path: Any, shape: Sequence[int]) -> PartitionSpec | None:
        """How a leaf is cut among all devices of a worker, so that each holds a shard of its own.

        It is the leaf's spec, with the axes that this lacks added where they cut further: where
        two elements at least are left, if they can, so that a shard of a matrix is a matrix. None
        where an axis cuts nothing: then several devices hold the same.
        """
        spec = self._cut(path, shape)
        return None if isinstance(spec, str) else spec

    def uncut(self, path: Any, shape: Sequence[int]) -> str | None:
        """The mesh axis that cuts nothing of a leaf, so that :meth:`cut` is None."""
        spec = self._cut(path, shape)
        return spec if isinstance(spec, str) else None

    def _cut(self, path: Any, shape: Sequence[int]) -> PartitionSpec | str:
        spec = self.spec(path, shape)
        entries = [axes_in(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
        for axis in self.model:
            if any(axis in names for names in entries):
                continue
            parts = [math.prod(self.mesh.shape[name] for name in (*names, axis)) for names in entries]
            fits = [i for i, count in enumerate(parts) if shape[i] % count == 0]
            if not fits:
                return axis
            i = next((i for i in fits if shape[i] > parts[i]), fits[0])
            entries[i] = (*entries[i], axis)
        return PartitionSpec(*(names or None for names in entries))

    def windows(self, path: Any, shape: Sequence[int]) -> tuple[tuple[slice, ...], ...] | None:
        """The part of a leaf that each device of a worker holds, in the order of the devices.

        None where :meth:`cut` is None.
        """
        spec = self.cut(path, shape)
        if spec is None:
            return None
        sizes = [self.mesh.shape[name] for name in self.model]
        windows = []
        for place in itertools.product(*map(range, sizes)):
            at, window = dict(zip(self.model, place, strict=True)), []
            for length, entry in zip(shape, spec, strict=True):
                number, parts = 0, 1
                for name in axes_in(entry):
                    number, parts = number * self.mesh.shape[name] + at[name], parts * self.mesh.shape[name]
                window.append(slice(number * length // parts, (number + 1) * length // parts))
            windows.append(tuple(window))
        return tuple(windows)

    def place(self, x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None = None) -> jax.Array:
        """An array in a program, placed so.

        Args:
          x: the array.
          spec: its spec.
          mesh: None inside ``shard_map`` over the workers.
        """
        where = spec if mesh is None else NamedSharding(mesh, spec)
        return jax.sharding.reshard(x, where) if self.explicit else lax.with_sharding_constraint(x, where)

    def place_tree(self, tree: Any) -> Any:
        """A tree of the parameters' form in a program over the workers, placed as they are."""
        return jax.tree_util.tree_map_with_path(lambda path, x: self.place(x, self.spec(path, x.shape)), tree)

    def cut_batch(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """A leaf of a batch in a program of all workers, cut among them along an axis.

        What is cut so already stays as it is.
        """
        if not self.explicit:
            return x  # shard_map cuts it.
        entries = [axes_in(entry) for entry in jax.typeof(x).sharding.spec]
        if not any(entries[:axis]) and entries[axis][: len(self.workers)] == self.workers:
            return x
        return self.place(x, PartitionSpec(*[None] * axis, self.workers), self.mesh)

    def like_params(self, tree: Any, params: Any) -> Any:
        """A tree in a program over the workers, placed as :meth:`specs_like_params` says."""

        def place(x, spec):
            return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else self.place(x, spec)

        return jax.tree.map(place, tree, self.specs_like_params(tree, params))

    def specs_like_params(self, tree: Any, params: Any) -> Any:
        """How a tree lies on the devices of a worker, by the parameters that its leaves are like.

        A leaf is like a parameter if its path ends as the parameter's, and their shapes are the
        same. It is placed so. The state of a synchronisation is cut along its leading axis. All
        other leaves are whole on every device of a worker.

        Args:
          tree: one worker's arrays, or their shapes.
          params: the parameters, likewise.
        """
        known: dict[Any, list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            known.setdefault((_keys(path)[-1:], jnp.shape(leaf)), []).append(path)

        def spec(path, x):
            if isinstance(x, SparseAllReduceState):
                return jax.tree.map(lambda _: PartitionSpec(self.model or None), x)
            keys = _keys(path)
            for before in ((), (None,)):  # Of parameters of its own, a worker has a row.
                shape = x.shape[len(before) :]
                # A parameter that is the whole tree has an empty path.
                near = [*known.get((keys[-1:], shape), ()), *known.get(((), shape), ())]
                like = [end for end in near if _keys(end) == keys[len(keys) - len(end) :]]
                if like:
                    return PartitionSpec(*before, *self.spec(max(like, key=len), shape))
            return PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=lambda x: isinstance(x, SparseAllReduceState))


def axes_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _other_sizes(there: Mesh | AbstractMesh, here: Mesh | AbstractMesh) -> dict[str, int]:
    """The sizes of a mesh's axes that have another size in this mesh."""
    return {name: size for name, size in there.shape.items() if here.shape.get(name, size) != size}


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


@dataclasses.dataclass(frozen=True)
class OnShards(Synchroniser):
    """A synchroniser of each device's shards, for arrays of a whole worker or of all workers.

    Attributes:
      inner: what synchronises one device's shards.
      placement: how gradients and updates are placed.
      stacked: whether gradients are global arrays with a leading axis for the workers, in a
        program of all workers. Otherwise they are one worker's, inside ``shard_map`` over the
        workers.
    """

    inner: Synchroniser
    placement: Placement
    stacked: bool = False

    def __post_init__(self):
        workers = self.placement.workers
        own = [name for comm in self.levels for name in axes_of(comm)]
        if not own or not set(own) <= set(workers) or (self.stacked and set(own) != set(workers)):
            raise ValueError(
                f"the transformation synchronises over {own or self.levels}, and the workers stand along {workers}: "
                "give both the same axes"
            )

    @property
    def levels(self) -> tuple[Comm, ...]:  # type: ignore[override]
        return self.inner.levels

    @property
    def by_senders(self) -> bool:
        return self.inner.by_senders

    def over(self, *comms: Comm) -> "OnShards":
        return dataclasses.replace(self, inner=self.inner.over(*comms))

    def init(self, params: Any) -> SparseAllReduceState:
        leaves, cut, inner = self._divided(params)
        if self.stacked:
            self._check_places(params)
        self._check_shards(params, inner)
        own = self._each(inner.init, in_specs=(self._specs(cut),), out_specs=self._of_state)
        # Jitted, as outside a program it would run one operation after the other.
        make = jax.jit(
            lambda leaves: own([self._place(x, spec) for x, spec in zip(leaves, self._specs(cut), strict=True)])
        )
        return make(leaves)

    def buckets(self, params: Any) -> list[Bucket]:
        shards, inner = self.of_device(params)
        return inner.buckets(shards)

    def _check_places(self, params: Any) -> None:
        """Refuses parameters that lie otherwise than their specs say."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not isinstance(leaf, jax.Array) or isinstance(leaf, core.Tracer) or len(leaf.sharding.device_set) == 1:
                continue
            wanted = NamedSharding(self.placement.mesh, self.placement.spec(path, leaf.shape))
            if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                raise ValueError(
                    f"leaf {jax.tree_util.keystr(path)} is placed as {leaf.sharding}, and its spec is {wanted.spec}: "
                    "give the spec by which it is placed, or place it with jax.device_put"
                )

    def _check_shards(self, params: Any, inner: Synchroniser) -> None:
        """Refuses shards that can't stand for their leaves. Warns if much goes densely."""
        shards, _ = self.of_device(params)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (path, leaf), shard in zip(leaves, shards, strict=True):
            inner.check_shard(jax.tree_util.keystr(path), leaf.shape, shard.shape)
        wanted, missed = ([leaves[i] for i in ids] for ids in inner.compressed(shards))
        elements, of = (sum(leaf.size for _, leaf in some) for some in (missed, wanted))
        devices = math.prod(self.placement.mesh.shape[name] for name in self.placement.model)
        if devices == 1 or elements <= of * MOST_UNCUT:
            return
        axes = dict.fromkeys(self.placement.uncut(path, leaf.shape) for path, leaf in missed)
        named = " and ".join(f"{axis!r} of size {self.placement.mesh.shape[axis]}" for axis in axes if axis)
        warnings.warn(
            f"{elements} of {of} elements go densely: they are in leaves that the mesh axis {named} can't cut. Choose "
            "a size of the axis that divides a dimension of each large leaf, or a width of the model that is a "
            "multiple of the size",
            stacklevel=2,
        )

    def check_like(self, grads: Any, params: Any) -> None:
        if self.stacked:
            for (path, leaf), own in zip(
                jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True
            ):
                if jnp.shape(leaf)[1:] != jnp.shape(own):
                    raise ValueError(self._not_stacked(path, leaf))

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        leaves, cut, inner = self._divided(grads, stacked=self.stacked)
        specs = self._specs(cut)
        given = [PartitionSpec(self.placement.workers, *spec) for spec in specs] if self.stacked else specs

        def own(leaves, state):
            return inner.update([x[0] for x in leaves] if self.stacked else leaves, state)

        each = self._each(own, in_specs=(given, self._of_state), out_specs=(specs, self._of_state))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        own_specs = [self.placement.spec(path, x.shape[self.stacked :]) for path, x in zip(paths, leaves, strict=True)]
        if self.stacked:
            # First as the parameters: XLA then reduces over the fast axes to shards.
            leaves = [
                self._place(x, PartitionSpec(self.placement.workers, *spec))
                for x, spec in zip(leaves, own_specs, strict=True)
            ]
        means, state = each([self._place(x, spec) for x, spec in zip(leaves, given, strict=True)], state)
        means = [self._place(x, spec) for x, spec in zip(means, own_specs, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(grads), means), state

    def of_device(self, params: Any) -> tuple[list[jax.ShapeDtypeStruct], Synchroniser]:
        """What a device holds of the parameters, as shapes and types, and what synchronises it."""
        leaves, cut, inner = self._divided(params)
        places = [NamedSharding(self.placement.mesh, spec) for spec in self._specs(cut)]
        shards = [place.shard_shape(leaf.shape) for place, leaf in zip(places, leaves, strict=True)]
        return [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shards, leaves, strict=True)], inner

    def _divided(self, tree: Any, *, stacked: bool = False) -> tuple[list[Any], list[Any], Synchroniser]:
        """The leaves, how each is cut, and the synchroniser of one device's shards."""
        named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, SparseVector))
        for path, leaf in named:
            if isinstance(leaf, SparseVector):
                raise ValueError(
                    f"gradient leaf {jax.tree_util.keystr(path)} is a SparseVector; the gradient of a sharded model "
                    "is an array"
                )
            if stacked and leaf.shape[:1] != (self._workers,):
                raise ValueError(self._not_stacked(path, leaf))
        cut = [self.placement.cut(path, leaf.shape[stacked:]) for path, leaf in named]
        whole = tuple(i for i, spec in enumerate(cut) if spec is None)
        model = (AxisComm(self.placement.model),) if self.placement.model else ()
        return [leaf for _, leaf in named], cut, self.inner.on_shards(model, whole)

    def _not_stacked(self, path: Any, leaf: Any) -> str:
        return (
            f"gradient leaf {jax.tree_util.keystr(path)} has shape {leaf.shape}; over a mesh gradients have a leading "
            f"axis for the {self._workers} workers: pass those of jsparse.worker_value_and_grad, and put "
            "optax.MultiSteps, and what else makes gradients of the parameters' shapes, behind jsparse.over_mesh"
        )

    @property
    def _workers(self) -> int:
        return math.prod(self.placement.mesh.shape[name] for name in self.placement.workers)

    def _specs(self, cut: Sequence[PartitionSpec | None]) -> list[PartitionSpec]:
        return [PartitionSpec() if spec is None else spec for spec in cut]

    def _place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return self.placement.place(x, spec, self.placement.mesh if self.stacked else None)

    @property
    def _of_state(self) -> PartitionSpec:
        axes = self.placement.model
        return PartitionSpec((*self.placement.workers, *axes) if self.stacked else axes or None)

    def _each(self, local: Any, *, in_specs: Any, out_specs: Any) -> Any:
        """A function that runs on every device of a worker, or of all workers."""
        if self.stacked:
            if set(self.placement.workers) & set(jax.sharding.get_abstract_mesh().manual_axes):
                raise ValueError(
                    "jsparse.over_mesh(preset, ...) is for a plain jax.jit: inside shard_map use the preset itself"
                )
            return jax.shard_map(local, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs)
        if not self.placement.model:
            return local
        return jax.shard_map(
            local,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.placement.model),
            check_vma=AxisComm(self.placement.workers).typed,
        )


class Begun(NamedTuple):
    """A synchronisation that has begun.

    Attributes:
      state: its state.
      synchroniser: what synchronises.
      params: the shapes and types of its parameters.
    """

    state: SparseAllReduceState
    synchroniser: Synchroniser
    params: Any


_CURRENT: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)
_BEGUN: contextvars.ContextVar[list[Begun] | None] = contextvars.ContextVar("begun", default=None)


@contextlib.contextmanager
def placed(placement: Placement | None) -> Iterator[None]:
    """Within it, transformations synchronise shards: gradients are one worker's, placed so.

    None stands for gradients that are whole on a worker's one device.
    """
    token = _CURRENT.set(placement)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def noted() -> Iterator[list[Begun]]:
    """Within it, each synchronisation that begins is added to a list."""
    notes: list[Begun] = []
    token = _BEGUN.set(notes)
    try:
        yield notes
    finally:
        _BEGUN.reset(token)


def begin(synchroniser: Synchroniser, params: Any) -> SparseAllReduceState:
    """The state before the first step, as the synchroniser is used here."""
    synchroniser, notes = on_shards(synchroniser), _BEGUN.get()
    state = synchroniser.init(params)
    if notes is not None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), params)
        notes.append(Begun(state, synchroniser, shapes))
    return state


def on_shards(synchroniser: Synchroniser) -> Synchroniser:
    """The synchroniser as it is used here: within :func:`placed`, of each device's shards."""
    placement = _CURRENT.get()
    if isinstance(synchroniser, OnShards) and (placement is not None or _BEGUN.get() is not None):
        raise ValueError(
            "the chain holds jsparse.over_mesh(preset, ...), which is for a plain jax.jit: here pass a chain with the "
            "preset itself in its place; their states are the same"
        )
    return synchroniser if placement is None else OnShards(synchroniser, placement)


def place_as_params(tree: Any) -> Any:
    """A tree of the parameters' form, placed as they are within :func:`placed`."""
    placement = _CURRENT.get()
    return tree if placement is None else placement.place_tree(tree)
