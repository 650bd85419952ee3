"""A whole data-parallel training step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from .._comm.comm import Comm
from .._engine.agreement import check_arrays
from .._engine.state import check_not_donated
from .finite import chosen, spoilt
from .gradients import Gradients, Loss
from .on_shards import OnShardedMesh
from .per_worker import laid_out
from .placement import AxisName, check_axis
from .state import TrainState, mean
from .workers import Workers, with_axis, without_axis, workers_of


class Step:
    """A jitted step over a :class:`TrainState`. It donates the old state.

    Attributes:
      tx: the transformation whose state ``opt_state`` is, as :func:`jsparse.reshard` wants it.
    """

    def __init__(self, body: "Body"):
        self._body = body
        self._run = jax.jit(body.run, donate_argnums=0)
        self.tx: optax.GradientTransformation = body.tx

    def init(self, params: Any, model_state: Any = None) -> TrainState:
        """Makes the state before the first step, each worker's part on its own devices.

        Args:
          params: the parameters; they are copied.
          model_state: what the model keeps beside parameters, for one worker; it is copied to all.

        Returns:
          The state. Parameters and a model state that are kept per worker have a leading axis of
          P.

        Raises:
          ValueError: a parameter is no array; several processes begin with different parameters
            or, on a mesh, model states; a model state is missing, or not expected; or as
            :func:`jsparse.init`.
        """
        return self._body.begin(params, model_state)

    def __call__(
        self, state: TrainState, batch: Any, key: jax.Array | None = None, *, extra: Any = None
    ) -> tuple[TrainState, Any]:
        """Trains on one batch.

        Args:
          state: from :meth:`init` or from the step before; donated.
          batch: a pytree of arrays. Its leading axis has the examples of all workers and
            micro-batches. If there are several processes, each passes the examples of its own
            workers, as many as the others do, in the order of its devices in the mesh; or all pass
            global arrays, which are used as they are. Of :func:`local_steps`, the batches of a
            round: a leading axis for its steps, and then that of the examples.
          key: a random key, a different one in each step. It is folded with the worker's rank, the
            micro-batch's number and, of :func:`local_steps`, the inner step's. All processes pass
            the same key.
          extra: what ``loss_fn`` takes as ``extra``: a pytree, of which every worker is given all.
            It is not donated. All processes pass the same values.

        Returns:
          The new state, and the mean loss or ``(loss, aux)``.

        Raises:
          ValueError: the batch can't be divided, or, of rounds, has not ``every`` steps; a key or
            ``extra`` is missing or not expected; ``loss_fn`` does not return what it should, a
            model state of another structure or other shapes, or metrics without a mean; the state
            is that of another number of workers or of another form of rounds, or was donated to a
            step before.
        """
        check_not_donated(state, "the state")
        args, kwargs = self._checked(state, batch, key, extra)
        return self._run(*args, **kwargs)

    def lower(
        self, state: TrainState, batch: Any, key: jax.Array | None = None, *, extra: Any = None
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, or their shapes, as jitted functions do.

        Call what it compiles to with the arguments that were given here, the key by its position.
        That checks nothing. With several processes, pass it global arrays.

        Raises:
          ValueError: as from a call.
        """
        return self.trace(state, batch, key, extra=extra).lower()

    def trace(
        self, state: TrainState, batch: Any, key: jax.Array | None = None, *, extra: Any = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, or their shapes, as jitted functions do.

        Raises:
          ValueError: as from a call.
        """
        args, kwargs = self._checked(state, batch, key, extra)
        return self._run.trace(*args, **kwargs)

    def _checked(
        self, state: TrainState, batch: Any, key: jax.Array | None, extra: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the jitted body, with the batch of all processes.

        A batch is refused if it can't be divided, and so is a key or ``extra`` that is missing or
        not expected.
        """
        workers, gradients = self._body.workers, self._body.gradients
        steps = self._body.batches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            name, shape, (count, sharers) = jax.tree_util.keystr(path), jnp.shape(leaf), workers.sharers(leaf)
            parts, axis = count * gradients.micro_batches, workers.batch_axis
            if shape[:axis] != steps:
                raise ValueError(
                    f"batch leaf {name} has shape {shape}; a round has {steps[0]} steps: stack as many batches along a "
                    "leading axis"
                )
            if len(shape) <= axis or not shape[axis] or shape[axis] % parts:
                raise ValueError(
                    f"batch leaf {name} has shape {shape}; its {'second' if axis else 'leading'} axis is divided among "
                    f"{sharers} and micro-batches, so its length must be a positive multiple of {parts}"
                )
        loss = gradients.loss
        for name, given, wanted in (("key", key, loss.with_key), ("extra", extra, loss.with_extra)):
            if (given is not None) != wanted:
                raise ValueError(
                    f"pass {name} to the step if and only if it was made with with_{name}=True, and loss_fn takes it "
                    f"as the keyword argument {name}"
                )
        args = (state, workers.whole(batch)) if key is None else (state, workers.whole(batch), key)
        return args, {} if extra is None else {"extra": extra}


class TrainStep(Step):
    """A jitted training step, made by :func:`train_step`.

    ``step(state, batch)``, with a ``key`` or ``extra`` where ``loss_fn`` takes them, returns the
    new state and the loss, or ``(loss, aux)``, averaged over workers and micro-batches. It donates
    the old state, which can't be used again.
    """

    def __init__(self, body: "Body"):
        super().__init__(body)
        self._average = body.workers.on_each(functools.partial(mean, body.workers.comm), stacked=True)

    def sync_params(self, state: TrainState) -> TrainState:
        """Averages parameters that are kept per worker, so that training goes on from equal ones.

        All floats are sent in one message. The optimizer's state and the model's state stay as
        they are.

        Args:
          state: from the step before; its parameters are donated.

        Returns:
          The state with equal parameters on all workers, still with a leading axis of P.

        Raises:
          ValueError: parameters are replicated, or the state was donated to a step before.

        **Cost**: that of :func:`jsparse.sync_params`.
        """
        if not self._body.differ:
            raise ValueError(
                'parameters are alike on all workers: sync_params is for train_step(..., params="per_worker")'
            )
        check_not_donated(state.params, "the state")
        return state._replace(params=self._average(state.params))


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
    with_extra: bool = False,
    param_specs: Any = None,
    batch_spec: PartitionSpec | None = None,
    check_vma: bool = True,
) -> TrainStep:
    """Makes a data-parallel training step: gradients, synchronisation and update in one program.

    Args:
      loss_fn: a worker's loss, ``loss_fn(params, batch)``, with the keyword arguments
        ``model_state``, ``key`` and ``extra`` if they are asked for below. It returns the loss;
        with ``has_aux``, ``(loss, aux)``; with ``model_state``, ``(loss, model_state)`` or
        ``(loss, (model_state, aux))``.
      tx: an optax chain that holds one jsparse transformation; with parameters per worker, any
        chain.
      mesh: the devices; None if each process is one worker, with arrays of its own, or if the step
        and its ``init`` are called inside ``jax.vmap(axis_name=axis)``, which simulates workers.
      axis: the mesh axis, or axes, along which the workers stand. Batches are divided along it.
        Parameters are replicated over the whole mesh, unless each worker has its own, or
        ``param_specs`` places them. Without a mesh, the axis of ``vmap``, or a :class:`Comm` of
        all workers, such as :class:`MpiComm`. A batch is then this worker's share, and a leading
        axis of P, below, is one of 1.
      has_aux: whether ``loss_fn`` returns metrics beside the loss: numbers, which are averaged.
      micro_batches: the number of parts in which each worker's share of a batch is computed. They
        are computed one after the other, with one synchronisation for all.
      params: whether all workers have the same parameters (``"replicated"``), or each has its own
        (``"per_worker"``: the leaves, and those of the whole chain's state, have a worker axis).
        The latter is for algorithms after which replicas differ, such as :func:`jsparse.a2sgd`,
        and for a chain without any all-reduce (local SGD). All workers begin with the same
        parameters. Average them now and then with the step's ``sync_params``, and at the end with
        :func:`jsparse.sync_params`.
      model_state: what happens to the values that the model keeps beside parameters, such as
        BatchNorm's statistics. ``"mean"``: they are averaged over the workers after each step; of
        the bytes for that :func:`traffic` tells, not ``stats``. ``"per_worker"``: each worker
        keeps its own, and leaves have a leading axis of P; random keys among them are made
        different. In a state that is averaged, a random key is the same on all workers: use
        ``with_key`` for dropout.
      with_key: whether ``loss_fn`` takes a random key.
      with_extra: whether ``loss_fn`` takes inputs that are not cut up among the workers, such as a
        step's number or the parameters of a teacher: the step's ``extra``.
      param_specs: how each worker holds the parameters in shards, along the axes of the mesh
        beside ``axis``: a PartitionSpec, or NamedSharding, for every leaf, or every subtree. The
        forward and the backward pass are sharded by XLA. Each device synchronises its own shards,
        and only along ``axis``. Parameters, the optimizer's state and the residual stay in shards.
        A leaf that lacks an axis of the mesh is cut by it for the synchronisation. Where it has no
        axis of a length that can be cut so, it is averaged densely, and much of this warns. The
        model state is whole on every device. See :doc:`sharded`.
      batch_spec: with ``param_specs``, how every leaf of a batch is placed. Its first axis is cut
        along ``axis``, and may be cut further: ``PartitionSpec(("replica", "fsdp"))``. The default
        is ``PartitionSpec(axis)``, and arrays that are placed already stay as they are.
      check_vma: as for ``jax.shard_map``: whether to verify that what should be alike on all
        workers is. Without a mesh this can't be verified.

    Returns:
      The step.

    Raises:
      ValueError: the mesh lacks the axis; ``micro_batches`` is not positive; ``params`` or
        ``model_state`` is no known choice; ``batch_spec`` is without ``param_specs``, or these are
        without a mesh, or not of the form above. From ``init``: ``tx`` does not synchronise, and
        parameters are replicated, or it synchronises over other axes than ``axis``; processes
        begin with different parameters; parameters are in shards, and ``param_specs`` is missing,
        or lacks a leaf, or can't cut one; or there is no mesh, and the axis is not bound.

    Warns:
      UserWarning: from ``init``, with ``param_specs``: more than an eighth of the elements are in
        leaves that no axis cuts, and go densely.

    Example::

      tx = optax.chain(jsparse.oktopk("data", density=0.01), optax.sgd(0.1))
      step = jsparse.train_step(loss_fn, tx, mesh, "data")
      state = step.init(params)
      for batch in batches:
          state, loss = step(state, batch)
    """
    if params not in ("replicated", "per_worker"):
        raise ValueError(f'params is {params!r}; choose "replicated" or "per_worker"')
    workers = placed_workers(mesh, axis, check_vma, param_specs, batch_spec)
    differ = params == "per_worker"
    tx = laid_out(tx) if differ else optax.with_extra_args_support(tx)
    loss = Loss(loss_fn, has_aux, model_state is not None, with_key, with_extra)
    return TrainStep(Body(workers, Gradients(loss, workers.comm, micro_batches), tx, differ, model_state))


def placed_workers(
    mesh: Mesh | None,
    axis: AxisName | Comm,
    check_vma: bool,
    param_specs: Any,
    batch_spec: PartitionSpec | None,
    *,
    batch_axis: int = 0,
) -> Workers:
    """The workers of a step, each with whole parameters or with shards of them."""
    if param_specs is None:
        if batch_spec is not None:
            raise ValueError("batch_spec is for sharded models; pass param_specs with it, or leave it out")
        return workers_of(mesh, axis, check_vma=check_vma, batch_axis=batch_axis)
    if mesh is None:
        raise ValueError("param_specs places parameters on a mesh, and there is none: pass the mesh")
    return OnShardedMesh(mesh, check_axis(mesh, axis), check_vma, param_specs, batch_spec, batch_axis=batch_axis)


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a training step. Its methods are in the order in which they run.

    Attributes:
      workers: the workers that run it.
      gradients: computes a worker's gradient.
      tx: the chain.
      differ: whether each worker has parameters of its own.
      model_state: what happens to the model state.
    """

    workers: Workers
    gradients: Gradients
    tx: optax.GradientTransformationExtraArgs
    differ: bool
    model_state: Literal["mean", "per_worker"] | None

    def __post_init__(self):
        if self.model_state not in (None, "mean", "per_worker"):
            raise ValueError(f'model_state is {self.model_state!r}; choose "mean", "per_worker" or None')

    @property
    def batches(self) -> tuple[int, ...]:
        """The lengths of a batch's axes before that of the examples."""
        return ()

    def begin(self, params: Any, kept: Any) -> TrainState:
        """The state before the first step."""
        if (kept is None) != (self.model_state is None):
            raise ValueError(
                f"the step was made with model_state={self.model_state!r}, and init was given "
                f"{'no' if kept is None else 'a'} model state: make the step with model_state='mean' or 'per_worker' "
                "and pass the state to init, or do neither"
            )
        check_arrays(params)
        params, kept = self.workers.place(params), self.workers.everywhere(kept)
        opt_state = self.workers.begin(self.tx, params, per_worker=self.differ)
        if self.differ:
            params = self.workers.params_for_each(params)
        if self.model_state == "per_worker":
            kept = self.workers.for_each(kept)
        return TrainState(params, opt_state, kept)

    def run(self, state: TrainState, batch: Any, key: Any = None, *, extra: Any = None) -> tuple[TrainState, Any]:
        """One step on all workers."""
        stacked = TrainState(self.differ, None, self.model_state == "per_worker")
        state, (value, aux) = self.workers.run(self.local_step, stacked, state, batch, (key, extra))
        return state, (value, aux) if self.gradients.loss.has_aux else value

    def local_step(self, state: TrainState, batch: Any, whole: Any) -> tuple[TrainState, Any]:
        """One step on one worker: its gradient, the synchronisation in the chain, the update."""
        params, kept = self.change_own(without_axis, state.params, state.model_state)
        after, report, grads = self.gradients(params, kept, batch, *whole)
        report, after = self.share(report, after)
        kept = chosen(spoilt(kept, after), kept, after)
        updates, opt_state = self.tx.update(grads, state.opt_state, params, value=report[0])
        stack = functools.partial(with_axis, self.workers.comm)
        params, kept = self.change_own(stack, optax.apply_updates(params, updates), kept)
        return TrainState(params, opt_state, kept), report

    def change_own(self, change: Callable[[Any], Any], params: Any, kept: Any) -> tuple[Any, Any]:
        """Changes those of the parameters and the model state that each worker has for itself."""
        parts = (params, self.differ), (kept, self.model_state == "per_worker")
        params, kept = (change(tree) if own else tree for tree, own in parts)
        return params, kept

    def share(self, report: Any, kept: Any) -> tuple[Any, Any]:
        """Averages the report over the workers, and the model state if it is to be averaged."""
        report = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x, jnp.float32)), report)
        if self.model_state == "mean":
            return mean(self.workers.comm, (report, kept))
        return mean(self.workers.comm, report), kept
