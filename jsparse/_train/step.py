"""A whole data-parallel training step."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from .._comm.comm import Comm, CommLike, as_comm
from .per_worker import per_worker
from .placement import AxisName, check_axis, init, of_processes
from .state import TrainState, averaging, mean
from .workers import OnMesh, Process


def local_value_and_grad(
    loss_fn: Callable[..., Any], axis: CommLike, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of each worker's own loss, with each worker's own gradient.

    Under ``jax.shard_map(check_vma=True)`` the gradient with respect to replicated parameters is summed over the
    workers before one sees it; here it is not. Elsewhere this is ``jax.value_and_grad``.

    Args:
      loss_fn: the worker's loss, without any psum or pmean over workers in it.
      axis: the mesh axis, or axes, along which the workers stand.
      argnums: which argument, or arguments, to differentiate.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, gradient)``.
    """
    comm = as_comm(axis)
    value_and_grad = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)

    def local(*args, **kwargs):
        args = list(args)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            args[i] = comm.varying(args[i])
        value, grads = value_and_grad(*args, **kwargs)
        return value, comm.varying(grads)

    return local


class TrainStep:
    """A jitted training step, made by :func:`train_step`.

    ``step(state, batch)``, or ``step(state, batch, key)``, returns the new state and the loss, or ``(loss, aux)``,
    averaged over workers and micro-batches. It donates the old state, which can't be used again.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        place: Callable[..., TrainState],
        sync: Callable[[Any], Any] | None,
        ground: OnMesh | Process,
        micro_batches: int,
        with_key: bool,
    ):
        self._run, self._place, self._sync, self._with_key = run, place, sync, with_key
        self._ground, self._micro_batches = ground, micro_batches

    def init(self, params: Any, model_state: Any = None) -> TrainState:
        """Makes the state before the first step, each worker's part on its own devices.

        Args:
          params: the parameters; they are copied.
          model_state: what the model keeps beside them, for one worker; it is copied to all.

        Returns:
          The state. Parameters and a model state kept per worker have a leading axis of P.

        Raises:
          ValueError: several processes begin with different parameters or model states; or as :func:`jsparse.init`.
        """
        return self._place(params, model_state)

    def sync(self, state: TrainState) -> TrainState:
        """Averages the parameters that workers have of their own, so that training goes on from equal ones.

        All floats go in one message. The optimizer's and the model's state stay as they are.

        Args:
          state: from the step before; its parameters are donated.

        Returns:
          The state with equal parameters on all workers, still with a leading axis of P.

        Raises:
          ValueError: parameters are replicated.

        **Cost**: that of :func:`jsparse.sync_params`.
        """
        if self._sync is None:
            raise ValueError('parameters are alike on all workers: sync is for train_step(..., params="per_worker")')
        return state._replace(params=self._sync(state.params))

    def __call__(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> tuple[TrainState, Any]:
        """Trains on one batch.

        Args:
          state: from :meth:`init` or from the step before; donated.
          batch: a pytree of arrays, the leading axis the examples of all workers and micro-batches. Where there are
            several processes, each passes its own workers' examples, as many as the others do, in the order of its
            devices in the mesh; or all pass global arrays, which are taken as they are.
          key: a random key, another in each step; it is folded with the worker's rank and the micro-batch's number. All
            processes pass the same.

        Returns:
          The new state, and the mean loss or ``(loss, aux)``.

        Raises:
          ValueError: the batch can't be divided, or a key is missing or not expected.
        """
        return self._run(state, self._whole(batch, key), key)

    def lower(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> jax.stages.Lowered:
        """Lowers the step for these arguments (or their shapes), as the method of a jitted function does."""
        return self.trace(state, batch, key).lower()

    def trace(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> jax.stages.Traced:
        """Traces the step for these arguments (or their shapes), as the method of a jitted function does."""
        return self._run.trace(state, self._whole(batch, key), key)

    def _whole(self, batch: Any, key: jax.Array | None) -> Any:
        """The batch of all processes; refused if it can't be divided, or if a key is missing or too much."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape, (workers, whose) = jnp.shape(leaf), self._ground.sharers(leaf)
            parts = workers * self._micro_batches
            if not shape or not shape[0] or shape[0] % parts:
                raise ValueError(
                    f"batch leaf {jax.tree_util.keystr(path)} has shape {shape}; its leading axis is divided among "
                    f"{whose}workers and micro-batches, so its length must be a positive multiple of {parts}"
                )
        if (key is not None) != self._with_key:
            raise ValueError(
                "pass a random key to the step if and only if train_step was given with_key=True, "
                "and loss_fn takes it as the keyword argument key"
            )
        return self._ground.whole(batch)


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh | None,
    axis: AxisName | Comm,
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
    params: Literal["replicated", "per_worker"] = "replicated",
    model_state: Literal["mean", "per_worker"] | None = None,
    with_key: bool = False,
    check_vma: bool = True,
) -> TrainStep:
    """Makes a whole data-parallel training step: gradients, synchronisation, update, in one jitted program.

    Args:
      loss_fn: a worker's loss, ``loss_fn(params, batch)``, with ``model_state=`` and ``key=`` as keyword arguments
        where they are asked for below. It returns the loss; with ``has_aux``, ``(loss, aux)``; with ``model_state``,
        ``(loss, model_state)`` or ``(loss, (model_state, aux))``.
      tx: an optax chain that holds one of our transformations; for parameters per worker, any.
      mesh: the devices; None where each process is one worker, with arrays of its own.
      axis: the mesh axis, or axes, along which the workers stand. Batches are divided along it; parameters are
        replicated over the whole mesh, unless each worker has its own. Without a mesh a :class:`Comm` of all workers,
        such as :class:`MpiComm`: a batch is then this process's share, and what has a leading axis of P, below, has
        one of 1.
      has_aux: whether ``loss_fn`` returns metrics beside the loss: numbers, which are averaged.
      micro_batches: how many parts each worker's share of a batch is computed in, one after the other, with one
        synchronisation for all.
      params: whether all workers have the same parameters (``"replicated"``), or each its own (``"per_worker"``:
        leaves, and those of the whole chain's state, have a worker axis): for algorithms after which replicas differ,
        such as :func:`jsparse.a2sgd`, or a chain without any all-reduce (local SGD). All begin with the same; the
        step's ``sync`` averages them now and then, :func:`jsparse.sync_params` at the end.
      model_state: what becomes of what the model keeps beside parameters, such as BatchNorm's statistics: averaged
        over the workers after each step (``"mean"``; its bytes are sent and counted), or kept by each worker for
        itself (``"per_worker"``: leaves have a leading axis of P; random keys among them are made different). A key in
        a state that is averaged is the same on all workers: take ``with_key`` for dropout.
      with_key: whether ``loss_fn`` takes a random key.
      check_vma: as for ``jax.shard_map``: whether to verify that what should be alike on all workers is. Without a
        mesh nothing can see it.

    Returns:
      The step.

    Raises:
      ValueError: the mesh lacks the axis, or there is no mesh and no Comm; ``micro_batches`` is not positive; from
        ``init``: ``tx`` does not synchronise, and parameters are replicated; or processes begin with different ones.

    Example::

      tx = optax.chain(jsparse.oktopk("data", density=0.01), optax.sgd(0.1))
      step = jsparse.train_step(loss_fn, tx, mesh, "data")
      state = step.init(params)
      for batch in batches:
          state, loss = step(state, batch)
    """
    ground = Process(of_processes(axis)) if mesh is None else OnMesh(mesh, check_axis(mesh, axis), check_vma)
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}; it is how many parts a batch has, at least 1")
    if params not in ("replicated", "per_worker"):
        raise ValueError(f'params is {params!r}; choose "replicated" or "per_worker"')
    if model_state not in (None, "mean", "per_worker"):
        raise ValueError(f'model_state is {model_state!r}; choose "mean", "per_worker" or None')
    differ = params == "per_worker"
    tx = per_worker(tx) if differ else tx
    comm = ground.comm
    update = optax.with_extra_args_support(tx).update
    uniform = _uniform(loss_fn, has_aux=has_aux, has_model_state=model_state is not None, with_key=with_key)
    value_and_grad = local_value_and_grad(uniform, comm, has_aux=True)

    def micro_step(params, kept, part, key, number):
        if with_key:
            key = jax.random.fold_in(jax.random.fold_in(key, comm.rank()), number)
        (value, (kept, aux)), grads = value_and_grad(params, part, kept, key)
        return kept, (value, aux), grads

    def accumulate(params, kept, batch, key):
        if micro_batches == 1:
            return micro_step(params, kept, batch, key, 0)
        parts = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)

        def add(carry, numbered):
            kept, total = carry
            kept, report, grads = micro_step(params, kept, numbered[1], key, numbered[0])
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype) / micro_batches, total, grads)
            return (comm.varying(kept), total), report

        wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.result_type(p, jnp.float32)), params)
        start = comm.varying((kept, wide))
        (kept, total), reports = lax.scan(add, start, (jnp.arange(micro_batches), parts))
        report = jax.tree.map(lambda x: jnp.mean(x, axis=0), reports)
        return kept, report, jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)

    def local_step(state, batch, key):
        params, kept = state.params, state.model_state
        if differ:
            params = jax.tree.map(lambda x: x[0], params)
        if model_state == "per_worker":
            kept = jax.tree.map(lambda x: x[0], kept)
        kept, report, grads = accumulate(params, kept, batch, key)
        report = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x, jnp.float32)), report)
        if model_state == "mean":
            report, kept = mean(comm, (report, kept))
        else:
            report = mean(comm, report)
            kept = jax.tree.map(lambda x: comm.varying(x)[None], kept)
        updates, opt_state = update(grads, state.opt_state, params, value=report[0])
        params = optax.apply_updates(params, updates)
        if differ:
            params = jax.tree.map(lambda x: comm.varying(x)[None], params)
        return TrainState(params, opt_state, kept), report

    # Which parts of the state have a leading axis for the workers; the optimizer's tells itself.
    stacked = TrainState(differ, None, model_state == "per_worker")

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, batch, key):
        state, (value, aux) = ground.run(local_step, stacked, state, batch, key)
        return state, (value, aux) if has_aux else value

    def place(params, kept):
        if (kept is None) != (model_state is None):
            raise ValueError(
                f"train_step was given model_state={model_state!r}, and init {'no' if kept is None else 'a'} model "
                "state: say what becomes of one, or leave it out in both places"
            )
        params, kept = ground.replicate(jax.tree.map(_strong_copy, (params, kept)))
        opt_state = init(tx, params, mesh, axis, per_worker=differ)
        if differ:
            params = ground.for_each(params)
        if model_state == "per_worker":
            kept = ground.for_each(kept)
        return TrainState(params, opt_state, kept)

    sync = averaging(mesh, axis, True) if differ else None
    return TrainStep(run, place, sync, ground, micro_batches, with_key)


def _uniform(
    loss_fn: Callable[..., Any], *, has_aux: bool, has_model_state: bool, with_key: bool
) -> Callable[..., Any]:
    """The loss function in one form: ``(params, batch, model_state, key) -> (loss, (model_state, aux))``."""

    def uniform(params, batch, model_state, key):
        kwargs = {"model_state": model_state} if has_model_state else {}
        if with_key:
            kwargs["key"] = key
        out = loss_fn(params, batch, **kwargs)
        if has_model_state:
            loss, rest = out
            return loss, rest if has_aux else (rest, None)
        loss, aux = out if has_aux else (out, None)
        return loss, (None, aux)

    return uniform


def _strong_copy(x: Any) -> jax.Array:
    """A copy that is not weakly typed: a step would return it so, and the next be compiled anew."""
    x = jnp.asarray(x)
    return jnp.copy(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.array(x, x.dtype)
