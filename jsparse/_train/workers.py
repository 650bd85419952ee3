"""Where the workers are: along axes of a mesh, or each in a process of its own."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm, Comm, as_comm
from .._comm.processes import check_equal_values, from_shares, is_share, local_parts, numbers, put
from .._engine.agreement import check_arrays
from .._engine.state import states_in
from .placement import AxisName, check_axis, check_order, check_update, state_specs


class Workers:
    """The workers of a program, as a training step uses them.

    Here each process is one worker with its own arrays, and all run the same program. A subclass
    has them elsewhere.

    Attributes:
      comm: how they communicate.
      batch_axis: the axis of a batch that is divided among the workers.
      lockstep: whether workers must run every loop equally often, as XLA's messages inside a
        worker may be one operation of all.
    """

    lockstep = False

    def __init__(self, comm: Comm, batch_axis: int = 0):
        self.comm, self.batch_axis = comm, batch_axis

    def begin(self, tx: optax.GradientTransformation, params: Any, *, per_worker: bool) -> Any:
        """The state of a chain before the first step, placed on its devices.

        It refuses a chain that would let replicas drift apart.
        """
        # Jitted, so that no two leaves are the same array: the state can be donated.
        state = jax.jit(tx.init)(params)
        check_order(state)
        if not per_worker and not states_in(state):
            raise ValueError(
                "nothing in the chain communicates, so parameters would drift apart: put an all-reduce into it, such "
                "as jsparse.dense(comm), or give each worker parameters of its own: "
                'train_step(..., params="per_worker")'
            )
        # Within one program parameters are the same array. An axis that is not bound is refused.
        if not (isinstance(self.comm, AxisComm) and self.comm.size):
            check_equal_values(numbers(params), lambda digest: self.comm.all_gather(jnp.asarray(digest)))
        return state

    def run(self, local: Callable[..., Any], stacked: Any, state: Any, batch: Any, whole: Any) -> Any:
        """Runs ``local(state, batch, whole) -> (state, report)`` on every worker.

        Args:
          local: is given one worker's part of the state and of the batch.
          stacked: a state of bools: which parts have a leading axis for the workers. It is None
            for the optimizer's state, which tells this itself.
          state, batch: global arrays, or this process's.
          whole: further arguments, of which each worker is given all.
        """
        return local(state, batch, whole)

    def sharers(self, leaf: Any) -> tuple[int, str]:
        """Among how many workers, or devices, a leaf of a batch is divided, and their name."""
        return 1, "this process's workers"

    def whole(self, batch: Any) -> Any:
        """The batch of all processes, made from this process's share."""
        return batch

    def everywhere(self, tree: Any) -> Any:
        """A copy of the tree with the same values on all workers."""
        return _strong_copy(tree)

    def place(self, params: Any) -> Any:
        """A copy of the parameters with the same values on all workers."""
        return self.everywhere(params)

    def params_for_each(self, params: Any) -> Any:
        """A copy of the parameters for each worker, along a leading axis."""
        return self.for_each(params)

    def for_each(self, tree: Any) -> Any:
        """A copy of the tree for each worker, along a leading axis."""
        return copies(self.comm.rank()[None], tree)

    def on_each(self, local: Callable[[Any], Any], *, stacked: bool) -> Callable[[Any], Any]:
        """A jitted function that runs ``local`` on each worker's part of a tree.

        The tree has a leading axis for the workers.

        Args:
          local: a function whose result is alike on all workers.
          stacked: whether the result gets the leading axis again. If so, the argument is donated.
        """
        return jax.jit(on_one(self.comm, local, stacked), donate_argnums=0 if stacked else ())


def workers_of(mesh: Mesh | None, axis: AxisName | Comm, *, check_vma: bool = True, batch_axis: int = 0) -> Workers:
    """The workers along the axes of a mesh; without a mesh, those of a Comm.

    Raises:
      ValueError: the mesh lacks the axis.
    """
    if mesh is not None:
        return OnMesh(mesh, check_axis(mesh, axis), check_vma, batch_axis=batch_axis)
    return Workers(as_comm(axis), batch_axis)


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh | None,
    axis: AxisName | Comm,
    *,
    per_worker: bool = False,
) -> optax.OptState:
    """Initialises a chain's state outside ``shard_map``, each worker's part on its own devices.

    Args:
      tx: the chain.
      params: its parameters, alike on all workers at the beginning. Each of several processes
        passes the same ones, or all pass global arrays.
      mesh: the devices; None if each process is one worker, with arrays of its own.
      axis: the mesh axis, or axes, along which the workers stand. Without a mesh, a :class:`Comm`
        of all workers, such as :class:`MpiComm`. Then all processes must call this function, and
        what types would tell is not checked.
      per_worker: whether each worker is to have parameters of its own, so that updates may differ.
        If so, wrap the whole chain in :func:`jsparse.per_worker`.

    Returns:
      The state as global arrays, placed as :func:`state_specs` says; without a mesh
      ``tx.init(params)``.

    Raises:
      ValueError: the mesh lacks the axis, or there is no mesh and no Comm; a parameter is no
        array, or in shards; several processes have different parameters; or the chain would let
        replicas drift apart: a state that differs between workers is not in
        :func:`jsparse.per_worker`, or, without ``per_worker``, an update is not alike on all
        workers, or the all-reduce is within what may skip it, such as ``optax.MultiSteps`` or
        ``apply_if_finite``.
    """
    check_arrays(params)
    return workers_of(mesh, axis).begin(tx, params, per_worker=per_worker)


class OnMesh(Workers):
    """Workers along axes of a mesh, in one program.

    Each of several processes has some of its devices.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: AxisName,
        check_vma: bool,
        batch_spec: PartitionSpec | None = None,
        *,
        batch_axis: int = 0,
    ):
        super().__init__(AxisComm(axis), batch_axis)
        self._mesh, self._axis, self._check_vma = mesh, axis, check_vma
        self._workers = self._devices = number_of_workers(mesh, axis)
        self._parted = PartitionSpec(*[None] * batch_axis, axis)
        self._sharding = NamedSharding(mesh, PartitionSpec(*[None] * batch_axis, *(batch_spec or (axis,))))

    def begin(self, tx: optax.GradientTransformation, params: Any, *, per_worker: bool) -> Any:
        everywhere = PartitionSpec()
        found = []

        def probe(params):
            state = tx.init(params)
            found.append(state_specs(state, self._axis))
            check_update(tx, params, state, found[0], self._axis, per_worker)
            return jnp.zeros(())

        jax.eval_shape(jax.shard_map(probe, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere), params)
        make = jax.jit(jax.shard_map(tx.init, mesh=self._mesh, in_specs=everywhere, out_specs=found[0]))
        _check_whole(params)
        return make(put(params, NamedSharding(self._mesh, everywhere)))

    def run(self, local: Callable[..., Any], stacked: Any, state: Any, batch: Any, whole: Any) -> Any:
        self._check_size(state, stacked)
        specs, everywhere = self._specs(state, stacked), PartitionSpec()
        step = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(specs, self._parted, everywhere),
            out_specs=(specs, everywhere),
            check_vma=self._check_vma,
        )
        if AxisType.Explicit in self._mesh.axis_types:
            batch = jax.tree.map(lambda x: jax.sharding.reshard(x, self._sharding), batch)
        return step(state, batch, whole)

    def _specs(self, state: Any, stacked: Any) -> Any:
        """How the parts of a state are divided among the workers."""
        params, kept = (
            PartitionSpec(self._axis) if by else PartitionSpec() for by in (stacked.params, stacked.model_state)
        )
        return type(state)(params, state_specs(state.opt_state, self._axis), kept)

    def _check_size(self, state: Any, stacked: Any) -> None:
        """Refuses a state of another number of workers."""
        parts = [(own.step, self._devices) for own in states_in(state.opt_state)]
        for tree, by in zip(state, stacked, strict=True):
            parts += [(leaf, self._workers) for leaf in jax.tree.leaves(tree) if by]
        for part, count in parts:
            if part.shape[:1] != (count,):
                raise ValueError(
                    f"an array of the state has shape {part.shape}, and there are {self._workers} workers, with "
                    f"{count} parts in all: carry the state over to as many workers with jsparse.reshard(tx, "
                    "opt_state, params, mesh, axis)"
                )

    def sharers(self, leaf: Any) -> tuple[int, str]:
        parts = number_of_workers(self._mesh, self._sharding.spec[self.batch_axis])
        if is_share(leaf, self._sharding):
            return local_parts(self._sharding, self.batch_axis, parts), "this process's workers"
        return parts, "workers"

    def whole(self, batch: Any) -> Any:
        return from_shares(batch, self._sharding)

    def everywhere(self, tree: Any) -> Any:
        _check_whole(tree)
        return put(_strong_copy(tree), NamedSharding(self._mesh, PartitionSpec()))

    def for_each(self, tree: Any) -> Any:
        ranks = jnp.arange(self._workers)
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis))
        return jax.jit(functools.partial(copies, ranks), out_shardings=sharding)(tree)

    def on_each(self, local: Callable[[Any], Any], *, stacked: bool) -> Callable[[Any], Any]:
        parted = PartitionSpec(self._axis)
        out = parted if stacked else PartitionSpec()
        each = jax.shard_map(on_one(self.comm, local, stacked), mesh=self._mesh, in_specs=parted, out_specs=out)
        return jax.jit(each, donate_argnums=0 if stacked else ())


def _check_whole(tree: Any) -> None:
    """Refuses arrays in shards, which would become whole on every device."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, core.Tracer) and not leaf.is_fully_replicated:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is sharded, as {leaf.sharding}, and would become whole on every "
                "device: for parameters in shards pass their placement as param_specs to jsparse.train_step, or use "
                "jsparse.over_mesh; what else there is must be whole on every device"
            )


def number_of_workers(mesh: Mesh, axis: AxisName) -> int:
    """The number of workers along the axes of a mesh."""
    return math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis))


def on_one(comm: Comm, local: Callable[[Any], Any], stacked: bool) -> Callable[[Any], Any]:
    """A function of one worker's part. Its result has the leading axis if ``stacked``."""

    def one(tree):
        out = local(without_axis(tree))
        return with_axis(comm, out) if stacked else out

    return one


def without_axis(tree: Any) -> Any:
    """One worker's part of a tree, without the leading axis for the workers."""
    return jax.tree.map(lambda x: x[0], tree)


def with_axis(comm: Comm, tree: Any) -> Any:
    """One worker's part of a tree, with the leading axis for the workers."""
    return jax.tree.map(lambda x: comm.varying(x)[None], tree)


def copies(ranks: jax.Array, tree: Any) -> Any:
    """A copy for each of these workers, stacked.

    Random keys among the leaves are made different for each worker.
    """

    def copies(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
            return fold_in(x.reshape(-1), ranks).reshape(len(ranks), *x.shape)
        return jnp.broadcast_to(x, (len(ranks), *x.shape))

    return jax.tree.map(copies, tree)


def _strong_copy(tree: Any) -> Any:
    """A copy that is not weakly typed.

    A step would return a weakly typed array as a strongly typed one, and the next step would be
    compiled again.
    """

    def copy(x):
        x = jnp.asarray(x)
        return jnp.copy(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.array(x, x.dtype)

    return jax.tree.map(copy, tree)
