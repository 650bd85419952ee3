"""The form of a chain's state on one worker: shapes, types, the axes over which it differs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from kernels_pallas import varying_axes

from .._engine.shards import Begun, Placement, noted, placed
from .._engine.state import states_in
from .._train.placement import check_whole_optimizer


@dataclasses.dataclass(frozen=True)
class Local:
    """An array on one worker: its shape and type, and the axes over which it differs."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


class Form(NamedTuple):
    """A state on one worker.

    Attributes:
      state: the state, with a :class:`Local` in place of every array.
      begun: its synchronisations, in the order of the state.
    """

    state: Any
    begun: list[Begun]


@dataclasses.dataclass(frozen=True)
class Site:
    """The workers of a state, and how each of them holds the parameters.

    Attributes:
      axes: the sizes of the mesh's axes, in its order.
      workers: the axes along which the workers stand.
      placement: how a worker's devices hold the parameters; None if each worker is one device.
    """

    axes: Mapping[str, int]
    workers: tuple[str, ...]
    placement: Placement | None

    @classmethod
    def of(cls, before: Any, workers: tuple[str, ...]) -> "Site":
        """The site of an argument ``before`` of :func:`jsparse.reshard`.

        Raises:
          ValueError: it is not of that form, or lacks an axis of the workers.
        """
        match before:
            case (Mapping() as axes, specs) if set(workers) <= set(axes):
                mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
                return cls(axes, workers, None if specs is None else Placement.of(mesh, workers, specs))
        raise ValueError(
            f"before is {before!r}; pass (sizes, specs): the sizes of the old mesh's axes by name, {workers} among "
            "them, such as {'replica': 2, 'fsdp': 4}, and how the parameters were cut there; None if they were whole"
        )

    @property
    def shards(self) -> int:
        """The number of devices of a worker."""
        return 1 if self.placement is None else math.prod(self.axes[name] for name in self.placement.model)

    @property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(self.axes[name] for name in self.workers)

    def windows(self, path: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...] | None:
        """The part of a leaf that each device of a worker holds; None if each has all of it."""
        if self.placement is None:
            return (tuple(slice(0, length) for length in shape),)
        return self.placement.windows(path, shape)

    def form(self, tx: optax.GradientTransformation, params: Any, sizes: Mapping[str, int]) -> Form:
        """The form of a state among as many workers as these axes have; along others there is one.

        Args:
          tx: the chain.
          params: the shapes and types of its parameters.
          sizes: the sizes of the workers' axes.
        """
        within = self.placement.model if self.placement is not None else ()
        axes = {name: sizes.get(name, size if name in within else 1) for name, size in self.axes.items()}
        mesh, found = AbstractMesh(tuple(axes.values()), tuple(axes)), []
        placement = None if self.placement is None else dataclasses.replace(self.placement, mesh=mesh)

        def probe(params):
            with placed(placement), noted() as notes:
                state = tx.init(params)
            if placement is not None:
                check_whole_optimizer(state)
            begun = [note for own in states_in(state) for note in notes if note.state.step is own.step]
            local = jax.tree.map(lambda x: Local(jnp.shape(x), jax.typeof(x).dtype, varying_axes(x)), state)
            found.append(Form(local, begun))
            return jnp.zeros(())

        everywhere, manual = PartitionSpec(), set(axes) - set(within)
        region = jax.shard_map(probe, mesh=mesh, in_specs=everywhere, out_specs=everywhere, axis_names=manual)
        jax.eval_shape(region, params)
        return found[0]
