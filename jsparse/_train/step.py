"""A whole data-parallel training step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from .._comm.comm import Comm
from .gradients import Gradients, Loss
from .per_worker import per_worker
from .placement import AxisName
from .state import TrainState, mean
from .workers import Workers, with_axis, without_axis, workers_of


class TrainStep:
    """A jitted training step, made by :func:`train_step`.

    ``step(state, batch)``, or ``step(state, batch, key)``, returns the new state and the loss, or
    ``(loss, aux)``, averaged over workers and micro-batches. It donates the old state, which can't
    be used again.
    """

    def __init__(self, body: "Body"):
        self._body = body
        self._run = jax.jit(body.run, donate_argnums=0)
        self._average = body.workers.on_each(functools.partial(mean, body.workers.comm), stacked=True)

    def init(self, params: Any, model_state: Any = None) -> TrainState:
        """Makes the state before the first step, each worker's part on its own devices.

        Args:
          params: the parameters; they are copied.
          model_state: what the model keeps beside parameters, for one worker; it is copied to all.

        Returns:
          The state. Parameters and a model state that are kept per worker have a leading axis of
          P.

        Raises:
          ValueError: several processes begin with different parameters or model states; or as
            :func:`jsparse.init`.
        """
        return self._body.begin(params, model_state)

    def sync_params(self, state: TrainState) -> TrainState:
        """Averages parameters that are kept per worker, so that training goes on from equal ones.

        All floats are sent in one message. The optimizer's state and the model's state stay as
        they are.

        Args:
          state: from the step before; its parameters are donated.

        Returns:
          The state with equal parameters on all workers, still with a leading axis of P.

        Raises:
          ValueError: parameters are replicated.

        **Cost**: that of :func:`jsparse.sync_params`.
        """
        if not self._body.differ:
            raise ValueError(
                'parameters are alike on all workers: sync_params is for train_step(..., params="per_worker")'
            )
        return state._replace(params=self._average(state.params))

    def __call__(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> tuple[TrainState, Any]:
        """Trains on one batch.

        Args:
          state: from :meth:`init` or from the step before; donated.
          batch: a pytree of arrays. Its leading axis has the examples of all workers and
            micro-batches. If there are several processes, each passes the examples of its own
            workers, as many as the others do, in the order of its devices in the mesh; or all pass
            global arrays, which are used as they are.
          key: a random key, a different one in each step. It is folded with the worker's rank and
            the micro-batch's number. All processes pass the same key.

        Returns:
          The new state, and the mean loss or ``(loss, aux)``.

        Raises:
          ValueError: the batch can't be divided, or a key is missing or not expected.
        """
        return self._run(state, self._whole(batch, key), key)

    def lower(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> jax.stages.Lowered:
        """Lowers the step for these arguments, or their shapes, as jitted functions do."""
        return self.trace(state, batch, key).lower()

    def trace(self, state: TrainState, batch: Any, key: jax.Array | None = None) -> jax.stages.Traced:
        """Traces the step for these arguments, or their shapes, as jitted functions do."""
        return self._run.trace(state, self._whole(batch, key), key)

    def _whole(self, batch: Any, key: jax.Array | None) -> Any:
        """The batch of all processes.

        It is refused if it can't be divided, or if a key is missing or not expected.
        """
        workers, gradients = self._body.workers, self._body.gradients
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape, (count, whose) = jnp.shape(leaf), workers.sharers(leaf)
            parts = count * gradients.micro_batches
            if not shape or not shape[0] or shape[0] % parts:
                raise ValueError(
                    f"batch leaf {jax.tree_util.keystr(path)} has shape {shape}; its leading axis is divided among "
                    f"{whose}workers and micro-batches, so its length must be a positive multiple of {parts}"
                )
        if (key is not None) != gradients.loss.with_key:
            raise ValueError(
                "pass a random key to the step if and only if train_step was given with_key=True, "
                "and loss_fn takes it as the keyword argument key"
            )
        return workers.whole(batch)


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
    """Makes a data-parallel training step: gradients, synchronisation and update in one program.

    Args:
      loss_fn: a worker's loss, ``loss_fn(params, batch)``, with the keyword arguments
        ``model_state`` and ``key`` if they are asked for below. It returns the loss; with
        ``has_aux``, ``(loss, aux)``; with ``model_state``, ``(loss, model_state)`` or
        ``(loss, (model_state, aux))``.
      tx: an optax chain that holds one jsparse transformation; with parameters per worker, any
        chain.
      mesh: the devices; None if each process is one worker, with arrays of its own.
      axis: the mesh axis, or axes, along which the workers stand. Batches are divided along it.
        Parameters are replicated over the whole mesh, unless each worker has its own. Without a
        mesh, a :class:`Comm` of all workers, such as :class:`MpiComm`. A batch is then this
        process's share, and a leading axis of P, below, is one of 1.
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
        BatchNorm's statistics. ``"mean"``: they are averaged over the workers after each step; the
        bytes for that are sent and counted. ``"per_worker"``: each worker keeps its own, and
        leaves have a leading axis of P; random keys among them are made different. In a state that
        is averaged, a random key is the same on all workers: use ``with_key`` for dropout.
      with_key: whether ``loss_fn`` takes a random key.
      check_vma: as for ``jax.shard_map``: whether to verify that what should be alike on all
        workers is. Without a mesh this can't be verified.

    Returns:
      The step.

    Raises:
      ValueError: the mesh lacks the axis, or there is no mesh and no Comm; ``micro_batches`` is
        not positive. From ``init``: ``tx`` does not synchronise, and parameters are replicated; or
        processes begin with different ones.

    Example::

      tx = optax.chain(jsparse.oktopk("data", density=0.01), optax.sgd(0.1))
      step = jsparse.train_step(loss_fn, tx, mesh, "data")
      state = step.init(params)
      for batch in batches:
          state, loss = step(state, batch)
    """
    workers = workers_of(mesh, axis, check_vma=check_vma)
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}; it is the number of parts of a batch, at least 1")
    if params not in ("replicated", "per_worker"):
        raise ValueError(f'params is {params!r}; choose "replicated" or "per_worker"')
    if model_state not in (None, "mean", "per_worker"):
        raise ValueError(f'model_state is {model_state!r}; choose "mean", "per_worker" or None')
    differ = params == "per_worker"
    tx = per_worker(tx) if differ else optax.with_extra_args_support(tx)
    gradients = Gradients(Loss(loss_fn, has_aux, model_state is not None, with_key), workers.comm, micro_batches)
    return TrainStep(Body(workers, gradients, tx, differ, model_state))


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

    def begin(self, params: Any, kept: Any) -> TrainState:
        """The state before the first step."""
        if (kept is None) != (self.model_state is None):
            raise ValueError(
                f"train_step was given model_state={self.model_state!r}, and init {'no' if kept is None else 'a'} "
                "model state: pass it to both (train_step takes model_state='mean' or 'per_worker'), or to neither"
            )
        params, kept = self.workers.everywhere(jax.tree.map(_strong_copy, (params, kept)))
        opt_state = self.workers.begin(self.tx, params, per_worker=self.differ)
        params, kept = self.change_own(self.workers.for_each, params, kept)
        return TrainState(params, opt_state, kept)

    def run(self, state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
        """One step on all workers."""
        stacked = TrainState(self.differ, None, self.model_state == "per_worker")
        state, (value, aux) = self.workers.run(self.local_step, stacked, state, batch, key)
        return state, (value, aux) if self.gradients.loss.has_aux else value

    def local_step(self, state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
        """One step on one worker: its gradient, the synchronisation in the chain, the update."""
        params, kept = self.change_own(without_axis, state.params, state.model_state)
        kept, report, grads = self.gradients(params, kept, batch, key)
        report, kept = self.share(report, kept)
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


def _strong_copy(x: Any) -> jax.Array:
    """A copy that is not weakly typed.

    A step would return a weakly typed array as a strongly typed one, and the next step would be
    compiled again.
    """
    x = jnp.asarray(x)
    return jnp.copy(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.array(x, x.dtype)
