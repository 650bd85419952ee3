"""The placement of a chain's state, and the refusal of chains that would be placed wrongly."""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas import varying_axes

from .._comm.comm import AxisComm, Comm
from .._engine.state import WorkerState, states_in
from .per_worker import PerWorkerState, ShardedState

AxisName = str | tuple[str, ...]


def state_specs(opt_state: optax.OptState, axis: AxisName) -> Any:
    """A PartitionSpec for every leaf of a chain's state, jsparse's own and others'.

    Args:
      opt_state: the state, or its shapes.
      axis: the mesh axis, or axes, along which the workers stand.

    Returns:
      The state with ``PartitionSpec(axis)`` in place of every leaf that differs between workers
      (in a :class:`ShardedState`, with its own axes), and with ``PartitionSpec()`` in place of
      every other leaf. Use it as ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

    Raises:
      ValueError: a transformation before the all-reduce has a state that differs between workers
        and is not wrapped in :func:`jsparse.per_worker`; or the all-reduce is inside
        ``optax.MultiSteps``, ``apply_if_finite``, ``conditionally_transform`` or
        ``conditionally_mask``.
    """
    check_order(opt_state)

    def spec(state):
        return state.specs(axis) if isinstance(state, WorkerState) else PartitionSpec()

    return jax.tree.map(spec, opt_state, is_leaf=lambda state: isinstance(state, WorkerState))


def check_update(
    tx: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    specs: Any,
    axis: AxisName,
    per_worker: bool,
) -> None:
    """Traces an update, and refuses it if types say that replicated results may differ."""
    comm = AxisComm(axis)
    grads = comm.varying(jax.tree.map(jnp.zeros_like, params))
    params = comm.varying(params) if per_worker else params
    fix = (
        "Wrap the whole chain in jsparse.per_worker(...)"
        if per_worker
        else "Wrap each transformation that stands before the all-reduce and remembers gradients in "
        "jsparse.per_worker(...); let an all-reduce cover every parameter that is trained; and freeze the others "
        "before the all-reduce, with optax.masked(optax.set_to_zero(), mask). "
        "If replicas are meant to differ, as with jsparse.a2sgd, give each worker parameters of its own: "
        'jsparse.train_step(..., params="per_worker"), or in your own loop jsparse.init(..., per_worker=True)'
    )
    axes = {axis} if isinstance(axis, str) else set(axis)
    update = optax.with_extra_args_support(tx).update

    def own(part):
        return isinstance(part, PerWorkerState)

    # What each worker has for itself is typed so: ``init`` has seen nothing that differs.
    state = jax.tree.map(lambda part: comm.varying(part) if own(part) else part, state, is_leaf=own)
    updates, state = update(grads, state, params, value=jnp.zeros(()))

    def check(path, leaf, spec, what):
        if spec == PartitionSpec() and varying_axes(leaf) & axes:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} differs between workers: it depends on gradients that no "
                f"all-reduce has made alike. {fix}"
            )

    if not per_worker:
        jax.tree_util.tree_map_with_path(lambda path, leaf: check(path, leaf, PartitionSpec(), "the update "), updates)
    jax.tree_util.tree_map_with_path(lambda path, leaf, spec: check(path, leaf, spec, "the state "), state, specs)


def check_whole_optimizer(state: Any) -> None:
    """Refuses an optimizer in ``jsparse.sharded`` for a sharded model."""
    if states_in(state, ShardedState):
        raise ValueError(
            "jsparse.sharded cuts an optimizer among the workers, and a sharded model's is cut inside them already, by "
            "param_specs: leave jsparse.sharded out"
        )


def check_axis(mesh: Mesh, axis: AxisName | Comm) -> AxisName:
    """Returns the axis; refuses one that the mesh does not have."""
    if not isinstance(axis, str | tuple):
        raise ValueError(
            f"the axis is {axis!r}; with a mesh, name its axis, or a tuple of its axes; a Comm needs mesh=None"
        )
    names = (axis,) if isinstance(axis, str) else axis
    if not names or len(set(names)) < len(names):
        raise ValueError(f"the axis is {axis!r}: name an axis of the mesh, or a tuple of several, each once")
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(f"the mesh has axes {mesh.axis_names}, and not {missing[0]!r}: name one of its axes")
    return axis


def check_order(state: Any, per_worker: bool = False) -> None:
    """Refuses a chain that would be placed, or run, wrongly.

    Everything inside ``per_worker`` is placed correctly.
    """
    per_worker |= isinstance(state, PerWorkerState)
    if not states_in(state):
        return
    if isinstance(state, optax.MultiStepsState):
        raise ValueError(
            "optax.MultiSteps around the all-reduce sends a message in every micro-step where one would do, and "
            "accumulates each worker's own gradients as if they were alike: use "
            "jsparse.train_step(..., micro_batches=m), or accumulate before tx.update"
        )
    if isinstance(state, optax.ApplyIfFiniteState):
        raise ValueError(
            "optax.apply_if_finite around the all-reduce would skip it on some workers, and the others would wait for "
            "ever: put it around what follows the all-reduce. After a non-finite gradient on any worker the update is "
            "NaN on all workers"
        )
    if isinstance(state, optax.ConditionallyTransformState | optax.ConditionallyMaskState):
        raise ValueError(
            "optax.conditionally_transform and conditionally_mask around the all-reduce would let each worker apply "
            "its own gradient in the steps that they skip, or lose it: put them around what follows the all-reduce; to "
            "synchronise once in several steps, use jsparse.local_steps"
        )
    if type(state) in (tuple, OrderedDict) and not per_worker:  # Of optax.chain, or named_chain.
        members = list(state.items() if isinstance(state, OrderedDict) else enumerate(state))
        last = max(i for i, (_, child) in enumerate(members) if states_in(child))
        for name, child in members[:last]:
            if not states_in(child) and _remembers(child):
                raise ValueError(
                    f"member {name!r} of the chain, with state {type(child).__name__}, stands before the all-reduce "
                    "and remembers gradients, which differ between workers there: wrap it in jsparse.per_worker(...)"
                )
    for child in _children(state):
        check_order(child, per_worker)


def _remembers(state: Any) -> bool:
    """Whether a state depends on gradients.

    That is assumed if it holds floats or flags, except injected hyperparameters.
    """
    if isinstance(state, (PerWorkerState, ShardedState)):
        return False
    if hasattr(state, "hyperparams") and hasattr(state, "inner_state"):
        return _remembers(state.inner_state)
    children = _children(state)
    if children and children[0] is state:
        dtype = state.dtype if hasattr(state, "dtype") else jnp.result_type(state)
        return jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jnp.bool_)
    return any(_remembers(child) for child in children)


def _children(state: Any) -> list[Any]:
    """What a node of a pytree holds, one level down; for a leaf, the leaf."""
    return jax.tree.leaves(state, is_leaf=lambda node: node is not state)
