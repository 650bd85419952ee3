"""Synchronisation in a plain ``jax.jit`` over arrays on a mesh, without a ``shard_map``."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .._comm.comm import AxisComm
from .._engine.agreement import check_arrays
from .._engine.shards import OnShards, Placement
from .._engine.transform import SparseAllReduce
from .gradients import local_value_and_grad
from .placement import AxisName, check_axis
from .state import mean


def worker_value_and_grad(
    loss_fn: Callable[..., Any],
    mesh: Mesh | None,
    axis: AxisName,
    specs: Any = None,
    *,
    has_aux: bool = False,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` for a plain ``jax.jit``, which gives each worker's own gradient.

    In a plain ``jax.jit`` over a sharded batch XLA sums the gradient over all devices itself. This
    function returns the workers' gradients side by side, placed so that nothing is summed over
    ``axis``. Give them to the transformation of :func:`over_mesh`.

    Args:
      loss_fn: a worker's loss, ``loss_fn(params, *batch, **whole)``. It sees its worker's part of
        the batch. In it ``jax.lax.axis_index(axis)`` is the worker's number, by which a key for
        dropout is folded.
      mesh: the devices. None is for a function that knows no mesh, inside ``jax.jit``: it takes
        the mesh on which the parameters are placed. Then the batch must be placed, too, or
        ``jax.jit`` be given ``in_shardings``.
      axis: the mesh axis, or axes, along which the workers stand.
      specs: how each worker holds the parameters in shards, as ``param_specs`` of
        :func:`train_step`. :func:`over_mesh` places the gradients so in any case. Give them for
        what stands before it in the chain.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``. It is then traced twice more, for the
        shapes of ``aux``.
      check_vma: as for ``jax.shard_map``.

    Returns:
      A function of ``(params, *batch, **whole)``. The leaves of ``batch`` are cut along their
      first axis among the workers. What is passed by keyword is given to each worker whole. The
      function returns ``(value, gradients)``: the mean of the workers' losses, and gradients with
      a leading axis of P. With ``has_aux`` the value is ``(loss, aux)``, and ``aux`` has the
      shapes that it has for the whole batch. What has an axis for the examples, such as logits,
      is put side by side. All else travels in one message with the loss: floats, such as batch
      statistics, are averaged, and of other types it is the largest. So return means, not sums.

    Raises:
      ValueError: the mesh lacks the axis, or is None and parameters are placed on none; a
        parameter is no array; ``specs`` are not of the form above; a batch cannot be divided; or a
        leaf of ``aux`` has several axes for the examples.

    Example::

      grad_fn = jsparse.worker_value_and_grad(loss_fn, mesh, "data")
      sync = jsparse.over_mesh(jsparse.oktopk("data", density=0.01), mesh, "data")
      tx = optax.chain(sync, optax.adam(1e-3))

      @jax.jit
      def step(params, opt_state, batch):
          loss, grads = grad_fn(params, batch)
          updates, opt_state = tx.update(grads, opt_state, params)
          return optax.apply_updates(params, updates), opt_state, loss
    """
    comm, parted, whole = AxisComm(axis), PartitionSpec(axis), PartitionSpec()

    def placement_on(mesh):
        return Placement.of(mesh, check_axis(mesh, axis), whole if specs is None else specs)

    known = None if mesh is None else placement_on(mesh)

    def fn(params, *batch, **kwargs):
        check_arrays(params)
        placement = known or placement_on(_mesh_of(params))
        workers = math.prod(placement.mesh.shape[name] for name in placement.workers)
        _check_batch(batch, workers)

        def run(local, out_specs):
            each = jax.shard_map(
                local,
                mesh=placement.mesh,
                in_specs=(whole, parted, whole),
                out_specs=out_specs,
                axis_names=set(placement.workers),
                check_vma=check_vma,
            )
            return each(params, jax.tree.map(placement.cut_batch, batch), kwargs)

        outputs = _Outputs(jax.tree.structure(0), (None,))
        if has_aux:

            def probe(params, batch, kwargs):
                nonlocal outputs
                outputs = _Outputs.of(loss_fn, workers, comm.varying(params), batch, kwargs)
                return jnp.zeros(())

            jax.eval_shape(lambda: run(probe, whole))

        def local(params, batch, kwargs):
            value, grads = local_value_and_grad(loss_fn, axis, has_aux=has_aux)(params, *batch, **kwargs)
            if specs is not None and placement.model:
                grads = placement.place_tree(grads)
            return outputs.join(comm, value), jax.tree.map(lambda x: comm.varying(x)[None], grads)

        value, grads = run(local, (outputs.specs(axis), parted))
        return jax.tree.unflatten(outputs.structure, value), grads

    return fn


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """How what the workers' loss functions return becomes that of the whole batch.

    Attributes:
      structure: of what is returned.
      axes: the axis of the examples in each leaf; None if it has none.
    """

    structure: Any
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, loss_fn: Callable[..., Any], workers: int, *args: Any) -> "_Outputs":
        """Compares the shapes for a worker's part of a batch with those for the whole."""

        def on_part(params, batch, kwargs):
            return loss_fn(params, *batch, **kwargs)

        def on_whole(params, batch, kwargs):
            return on_part(params, jax.tree.map(lambda x: jnp.concatenate([x] * workers), batch), kwargs)

        part, whole = jax.eval_shape(on_part, *args), jax.eval_shape(on_whole, *args)
        axes = []
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(part), jax.tree.leaves(whole), strict=True):
            longer = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
            if len(longer) > 1 or any(a.shape[i] * workers != b.shape[i] for i in longer):
                raise ValueError(
                    f"output {jax.tree_util.keystr(path)} of loss_fn has shape {a.shape} for a worker's part of the "
                    f"batch, and {b.shape} for the whole: return what has one axis for the examples, or none"
                )
            axes.append(longer[0] if longer else None)
        return cls(jax.tree.structure(part), tuple(axes))

    def specs(self, axis: AxisName) -> list[PartitionSpec]:
        """The spec of each leaf in a program over the workers."""
        return [PartitionSpec() if i is None else PartitionSpec(*[None] * i, axis) for i in self.axes]

    def join(self, comm: AxisComm, tree: Any) -> list[jax.Array]:
        """The leaves of a worker's outputs. Those without examples become alike on all workers."""
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
        shared = [_wide(x) for x, i in zip(leaves, self.axes, strict=True) if i is None]
        shared = iter(mean(comm, shared))
        return [
            next(shared).astype(x.dtype) if i is None else comm.varying(x)
            for x, i in zip(leaves, self.axes, strict=True)
        ]


def _wide(x: jax.Array) -> jax.Array:
    # XLA:CPU cannot sum bfloat16 where only some axes are manual.
    return x.astype(jnp.result_type(x, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _mesh_of(params: Any) -> Any:
    """The mesh on which parameters in a program are placed."""
    for leaf in jax.tree.leaves(params):
        mesh = jax.typeof(leaf).sharding.mesh
        if not mesh.empty:
            return mesh
    raise ValueError(
        "mesh is None, and the parameters are placed on no mesh: pass the mesh, or place them on one by jax.device_put"
    )


def _check_batch(batch: Any, workers: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or not shape[0] or shape[0] % workers:
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(path)} has shape {shape}; its first axis is divided among the "
                f"workers, so its length must be a positive multiple of {workers}. Pass by keyword what each worker "
                "gets whole"
            )


def over_mesh(preset: SparseAllReduce, mesh: Mesh, axis: AxisName, specs: Any = None) -> SparseAllReduce:
    """A preset for a plain ``jax.jit``: it takes the gradients of all workers side by side.

    Use it in place of the preset, with the gradients of :func:`worker_value_and_grad`. Nothing
    else in a loop changes: optax chains, ``flax``'s ``TrainState`` and ``nnx.Optimizer``, and
    ``optax.inject_hyperparams`` around what follows work as they are. Each device selects from the
    shards that it holds, and exchanges messages along ``axis`` only.

    What stands before it in a chain sees the gradients of all workers side by side. There
    ``optax.clip_by_global_norm`` would take the norm over all workers, and moments would get other
    shapes than ``init`` gives them. To clip each worker's gradient, apply ``jax.vmap`` of the
    clipping to the gradients before the chain, or use :func:`train_step`. ``optax.masked``,
    ``optax.MultiSteps`` and ``optax.apply_if_finite`` stand behind it, not around it.

    Args:
      preset: such as ``jsparse.oktopk("data", density=0.01)``, or :func:`phases`; not a chain, as
        :func:`ef21`, :func:`dion` and :func:`onebit_adam` are. Those need :func:`train_step`.
      mesh: the devices.
      axis: the mesh axis, or axes, along which the workers stand: those of the preset.
      specs: how each worker holds the parameters in shards, as ``param_specs`` of
        :func:`train_step`. It may be left out if the mesh has no other axes.

    Returns:
      A gradient transformation. ``init`` takes the parameters. ``update`` takes gradients with a
      leading axis of P, and returns their mean, placed as the parameters. In its state each array
      has a part for each device, workers first, along its leading axis.

    Raises:
      ValueError: ``preset`` is no preset, is over a mesh already or synchronises over other axes
        than ``axis``, or its updates differ between workers; the mesh lacks the axis, or has
        others and ``specs`` is missing; a spec names ``axis``, or an axis that the mesh lacks, or
        is ``UNCONSTRAINED``. From ``init``: a parameter has no spec, or is placed otherwise. From
        ``update``: gradients have no leading axis of P, or it is inside ``shard_map``.

    Warns:
      UserWarning: from ``init``: more than an eighth of the elements are in leaves that no axis
        cuts, and go densely.
    """
    if not isinstance(preset, SparseAllReduce):
        raise ValueError(
            f"preset is {type(preset).__name__}; pass a preset such as jsparse.oktopk(...), and put the other members "
            "of a chain around it: optax.chain(jsparse.over_mesh(preset, mesh, axis), optax.adam(1e-3)). For ef21, "
            "dion and onebit_adam, which are chains themselves, take jsparse.train_step"
        )
    if isinstance(preset.synchroniser, OnShards):
        raise ValueError("preset is over a mesh already: pass the preset itself")
    if not preset.synchroniser.alike:
        raise ValueError(
            "the preset gives each worker an update of its own, and parameters in a plain jit are alike on all: use "
            'jsparse.train_step(..., params="per_worker")'
        )
    placement = Placement.of(mesh, check_axis(mesh, axis), PartitionSpec() if specs is None else specs)
    if specs is None and any(mesh.shape[name] > 1 for name in placement.model):
        raise ValueError(
            f"the mesh has the axes {placement.model} beside {axis!r}: pass specs, which say how parameters are cut "
            "along them; PartitionSpec() if they are whole on every device"
        )
    return SparseAllReduce.of(OnShards(preset.synchroniser, placement, stacked=True))
