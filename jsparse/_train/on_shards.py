"""Workers that each hold a model in shards, on several devices of a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.processes import put
from .._engine.shards import Placement, axes_in, placed
from .placement import AxisName, check_update, check_whole_optimizer, state_specs
from .workers import OnMesh, copies, on_one


class OnShardedMesh(OnMesh):
    """Workers along some axes of a mesh, of which each holds a model in shards along the others.

    A program is manual along the workers' axes only. Along the others XLA cuts the forward and the
    backward pass as the parameters' placement asks for.
    """

    lockstep = True

    def __init__(
        self, mesh: Mesh, axis: AxisName, check_vma: bool, param_specs: Any, batch_spec: Any, *, batch_axis: int = 0
    ):
        # Without a spec a batch stays as it is placed.
        self._given_spec = batch_spec is not None
        workers = (axis,) if isinstance(axis, str) else axis
        batch_spec = PartitionSpec(axis) if batch_spec is None else batch_spec
        first = axes_in(batch_spec[0]) if isinstance(batch_spec, PartitionSpec) and batch_spec else ()
        if first[: len(workers)] != workers:
            raise ValueError(
                f"batch_spec is {batch_spec}; a batch is cut along its first axis, and first among the workers: pass a "
                f"PartitionSpec that begins with {workers}, such as PartitionSpec({mesh.axis_names})"
            )
        super().__init__(mesh, axis, check_vma, batch_spec, batch_axis=batch_axis)
        self._placement = Placement.of(mesh, axis, param_specs)
        # The state of a synchronisation has a part for each device.
        self._devices = mesh.size

    def begin(self, tx: optax.GradientTransformation, params: Any, *, per_worker: bool) -> Any:
        everywhere, found = PartitionSpec(), []

        def probe(params):
            with placed(self._placement):
                state = tx.init(params)
                check_whole_optimizer(state)
                found.append(state_specs(state, self._axis))
                check_update(tx, params, state, found[0], self._axis, per_worker)
            return jnp.zeros(())

        jax.eval_shape(self._over_workers(probe, everywhere, everywhere, check_vma=True), params)

        def make(params):
            with placed(self._placement):
                return self._placement.like_params(tx.init(params), params)

        return jax.jit(self._over_workers(make, everywhere, found[0], check_vma=True))(params)

    def _over_workers(self, local: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool) -> Any:
        names = set(self._placement.workers)
        return jax.shard_map(
            local, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=check_vma
        )

    def run(self, local: Callable[..., Any], stacked: Any, state: Any, batch: Any, whole: Any) -> Any:
        self._check_size(state, stacked)

        def on_worker(state, batch, whole):
            params = jax.tree.map(lambda x: x[0], state.params) if stacked.params else state.params
            with placed(self._placement):
                after, report = local(state, batch, whole)
            # Whole, also where its leaves have the parameters' names and shapes.
            kept = self._placement.like_params(after.model_state, ())
            after = self._placement.like_params(after._replace(model_state=None), params)
            return after._replace(model_state=kept), report

        specs, everywhere = self._specs(state, stacked), PartitionSpec()
        if self._given_spec:
            batch = jax.tree.map(lambda x: self._placement.place(x, self._sharding.spec, self._mesh), batch)
        batch = jax.tree.map(functools.partial(self._placement.cut_batch, axis=self.batch_axis), batch)
        step = self._over_workers(
            on_worker, (specs, self._parted, everywhere), (specs, everywhere), check_vma=self._check_vma
        )
        return step(state, batch, whole)

    def sharers(self, leaf: Any) -> tuple[int, str]:
        (parts, sharers), spec = super().sharers(leaf), self._sharding.spec
        if self._given_spec and len(np.shape(leaf)) < len(spec):
            raise ValueError(
                f"batch_spec is {spec}, and a leaf of the batch has shape {np.shape(leaf)}: every leaf is placed so; "
                "name only axes that all leaves have"
            )
        return parts, sharers if axes_in(
            spec[self.batch_axis]
        ) == self._placement.workers else f"the devices of {sharers}"

    def place(self, params: Any) -> Any:
        def prepared(x):
            # Not on one device first, which may have no room for it.
            if isinstance(x, jax.Array):
                return x
            x = np.array(x)
            return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))

        def sharding(path, x):
            return NamedSharding(self._mesh, self._placement.spec(path, x.shape))

        params = jax.tree.map(prepared, params)
        shardings = jax.tree_util.tree_map_with_path(sharding, params)
        return _copied(put(params, shardings), shardings)

    def params_for_each(self, params: Any) -> Any:
        shardings = jax.tree.map(
            functools.partial(NamedSharding, self._mesh),
            self._stacked_specs(params),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return jax.jit(functools.partial(copies, jnp.arange(self._workers)), out_shardings=shardings)(params)

    def _stacked_specs(self, params: Any, *, axis: bool = True) -> Any:
        """The specs of parameters of which each worker has its own, with or without their axis."""
        begin = (self._axis,) if axis else ()
        return jax.tree_util.tree_map_with_path(
            lambda path, x: PartitionSpec(*begin, *self._placement.spec(path, x.shape)), params
        )

    def on_each(self, local: Callable[[Any], Any], *, stacked: bool) -> Callable[[Any], Any]:
        def each(tree):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
            # A leaf that is whole on every device of a worker is averaged there alike, together
            # with shards, from which types would not tell it.
            run = jax.shard_map(
                on_one(self.comm, local, stacked),
                mesh=self._mesh,
                in_specs=(self._stacked_specs(shapes),),
                out_specs=self._stacked_specs(shapes, axis=stacked),
                check_vma=False,
            )
            return run(tree)

        return jax.jit(each, donate_argnums=0 if stacked else ())


def _copied(tree: Any, shardings: Any) -> Any:
    """A copy that is not weakly typed, placed so."""
    return jax.jit(lambda tree: jax.tree.map(lambda x: jnp.array(x, x.dtype), tree), out_shardings=shardings)(tree)
