"""Where the workers of a training stand: each on a device of its own, or all on one device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

import jsparse

AxisName: TypeAlias = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Workers that have a device each.

    Attributes:
      mesh: the devices.
      axis: the names of its axes.
    """

    mesh: Mesh
    axis: AxisName

    @property
    def size(self) -> int:
        """How many workers there are in all processes."""
        return self.mesh.size

    @property
    def shares(self) -> AxisName | None:
        """The axes among which it pays to share out what all workers compute alike."""
        return self.axis

    def train_step(
        self, loss_fn: Callable[..., Any], tx: optax.GradientTransformation, *, check_vma: bool, **options: Any
    ) -> jsparse.TrainStep:
        """The step of :func:`jsparse.train_step`, with its options."""
        return jsparse.train_step(loss_fn, tx, self.mesh, self.axis, check_vma=check_vma, **options)

    def sync_params(self, state: jsparse.TrainState) -> Any:
        """The mean of parameters that each worker has for itself."""
        return jsparse.sync_params(state, self.axis, mesh=self.mesh)


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Workers that share the first device, where ``jax.vmap`` simulates them.

    Their states have the shapes of those on a mesh, so checkpoints fit both.

    Attributes:
      shape: the lengths of the axes.
      axis: their names.
      in_turn: whether gradients are computed for one worker after the other. At once, the
        gradients of kernels are convolutions in groups. In turn they are convolutions in a loop,
        which are slow on CPUs. On GPUs the two were not compared.
    """

    shape: tuple[int, ...]
    axis: AxisName
    in_turn: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def shares(self) -> None:
        return None

    def train_step(
        self, loss_fn: Callable[..., Any], tx: optax.GradientTransformation, *, check_vma: bool, **options: Any
    ) -> "SimulatedStep":
        del check_vma  # Under vmap types do not tell what is alike.
        if self.in_turn:
            loss_fn = in_turn(loss_fn, options["model_state"])
        step = jsparse.train_step(loss_fn, tx, None, self.axis, **options)
        return SimulatedStep(self, step, options["params"] == "per_worker")

    def sync_params(self, state: jsparse.TrainState) -> Any:
        return jax.tree.map(lambda x: x.mean(0), state.params)

    def each(self, local: Callable[..., Any], *own: Any) -> Callable[..., Any]:
        """Runs a function on each worker's part of the arguments.

        Args:
          local: the function.
          own: for each argument, or each part of it, whether workers have parts for themselves.
            These are stacked along an axis, or two, for the workers. So are all results.
        """
        axes = jax.tree.map(lambda own: 0 if own else None, own)
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        for name, length in reversed(list(zip(names, self.shape, strict=True))):
            local = jax.vmap(local, axes, axis_name=name, axis_size=length)
        return local

    def stacked(self, own: Any, tree: Any) -> Any:
        """Arrays of a mesh, as :meth:`each` takes them."""

        def stack(own, part):
            return jax.tree.map(lambda x: x.reshape(*self.shape, -1, *x.shape[1:]) if own else x, part)

        return jax.tree.map(stack, own, tree)

    def joined(self, own: Any, tree: Any) -> Any:
        """Results of :meth:`each`, as a mesh has them: of those that are alike the first."""
        levels = len(self.shape)

        def join(own, part):
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[levels + 1 :]) if own else x[(0,) * levels], part)

        return jax.tree.map(join, own, tree)


class SimulatedStep:
    """A jitted training step of workers that share a device. It donates the old state."""

    def __init__(self, workers: OnOneDevice, step: jsparse.TrainStep, differ: bool):
        self._workers, self._step, self._differ = workers, step, differ
        self._run = jax.jit(self._on_all, donate_argnums=0)

    def init(self, params: Any, model_state: Any = None) -> jsparse.TrainState:
        """The state before the first step."""

        @jax.jit
        def begin(params, model_state):
            state = self._workers.each(self._step.init, False, False)(params, model_state)
            return self._workers.joined(self._own(state), state)

        return begin(params, model_state)

    def __call__(self, state: jsparse.TrainState, batch: Any) -> tuple[jsparse.TrainState, jax.Array]:
        """Trains on one batch of all workers: the new state, and the mean loss."""
        return self._run(state, batch)

    def _on_all(self, state: jsparse.TrainState, batch: Any) -> tuple[jsparse.TrainState, jax.Array]:
        workers, own = self._workers, self._own(state)
        out = workers.each(self._step, own, True)(workers.stacked(own, state), workers.stacked(True, batch))
        return workers.joined((own, False), out)

    def _own(self, state: jsparse.TrainState) -> jsparse.TrainState:
        """Which parts of a state each worker has for itself."""
        specs = jsparse.state_specs(state.opt_state, self._workers.axis)
        return jsparse.TrainState(self._differ, jax.tree.map(lambda spec: spec != PartitionSpec(), specs), False)


Workers: TypeAlias = OnMesh | OnOneDevice


def in_turn(loss_fn: Callable[..., Any], model_state: str | None) -> Callable[..., Any]:
    """A loss whose gradient ``jax.vmap`` computes for one worker after the other."""

    @jax.custom_batching.sequential_vmap
    def value_and_grad(params, batch, kwargs):
        return jax.value_and_grad(loss_fn, has_aux=model_state is not None)(params, batch, **kwargs)

    @jax.custom_vjp
    def loss(params, batch, kwargs):
        return value_and_grad(params, batch, kwargs)[0]

    def backward(grads, outer):
        scale = outer if model_state is None else outer[0]
        return jax.tree.map(lambda grad: scale * grad, grads), None, None

    loss.defvjp(value_and_grad, backward)
    return lambda params, batch, **kwargs: loss(params, batch, kwargs)
