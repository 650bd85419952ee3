"""The state of rounds of local steps, and the three transformations that make it."""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kernels_pallas import varying_axes

from .._comm.comm import AxisComm, Comm
from .._engine.shards import noted, placed
from .._engine.state import SparseAllReduceState, states_in
from .finite import chosen, finite
from .fragments import Fragments
from .per_worker import PerWorkerState, as_parts


class Counts(NamedTuple):
    """What a worker did; int32 leaves.

    Attributes:
      taken: shape ``(1,)``: inner steps that it took in the last round.
      since: shape ``(fragments,)``: steps that it took since it last told what it moved of each
        fragment.
    """

    taken: jax.Array
    since: jax.Array


class Outgoing(NamedTuple):
    """What a worker tells the others of a fragment.

    Attributes:
      moved: its outer gradient, so scaled that the plain mean over workers is the weighted one.
      loss: float32, shape ``(1,)``: the weighted mean loss, alike on all workers.
    """

    moved: Any
    loss: jax.Array


class LocalState(NamedTuple):
    """The ``opt_state`` of :func:`local_steps`.

    Attributes:
      inner: the inner optimizer's state, each worker's own.
      counts: what each worker did, :class:`Counts`.
      skipped: int32 scalar: inner steps of all workers so far that were not finite.
      workers: each worker's own parameters; None without fragments, ``overlap`` and ``merge``.
        (With ``eager`` alone they are in ``TrainState.params``.)
      sync: the state of the synchronisation, for each fragment.
      outer: the outer optimizer's state, for each fragment.
      pending: with eager updates, for each fragment what each worker will tell in the next round,
        :class:`Outgoing`; otherwise None.
    """

    inner: PerWorkerState
    counts: PerWorkerState
    skipped: jax.Array
    workers: PerWorkerState | None
    sync: tuple[Any, ...]
    outer: tuple[Any, ...]
    pending: tuple[PerWorkerState, ...] | None


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The three transformations of a round, and their state.

    Attributes:
      inner: of a worker's own steps.
      sync: averages what workers moved.
      outer: takes the mean.
      fragments: the parts of the parameters.
      differ: whether workers keep parameters of their own from round to round.
      eager: whether a mean is used a round late.
      weights: by what outer gradients are weighted.
      comm: the workers' network.
    """

    inner: optax.GradientTransformationExtraArgs
    sync: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    fragments: Fragments
    differ: bool
    eager: bool
    weights: Literal["workers", "steps"]
    comm: Comm

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The three as one, which makes their state."""
        return optax.GradientTransformationExtraArgs(cast(Any, self.init), cast(Any, self.update))

    def init(self, params: Any) -> LocalState:
        """The state before the first round."""
        inner = self.inner.init(params)
        if states_in(inner):
            raise ValueError(
                "inner holds an all-reduce, which would send a message in every inner step: pass it as sync, and the "
                "optimizer alone as inner"
            )
        parts = self.fragments.split(params)
        sync = tuple(map(self.sync.init, parts))
        if not all(map(states_in, sync)):
            raise ValueError(
                "sync does not communicate, so what workers moved would never be averaged: pass a preset such as "
                "jsparse.oktopk(axis, density=0.01), or a chain that holds one"
            )
        if (self.eager or self.weights == "steps") and any(map(self.by_senders, parts)):
            raise ValueError(
                'mean="contributors" divides each element by the number of workers that sent it, and '
                + ("eager updates replace" if self.eager else 'weights="steps" changes')
                + ' a worker\'s share of a mean over all workers: take mean="workers"'
            )
        none = jnp.zeros(1, jnp.int32)
        counts = Counts(none, jnp.zeros(len(parts), jnp.int32))
        own = PerWorkerState(as_parts(params)) if self.differ else None
        pending = None
        if self.eager:
            moved = [as_parts(jax.tree.map(jnp.zeros_like, part)) for part in parts]
            # No loss is known yet.
            pending = tuple(PerWorkerState(Outgoing(part, jnp.full(1, jnp.inf, jnp.float32))) for part in moved)
        return LocalState(
            cast(PerWorkerState, inner),
            PerWorkerState(counts),
            jnp.zeros((), jnp.int32),
            own,
            sync,
            tuple(map(self.outer.init, parts)),
            pending,
        )

    def by_senders(self, part: Any) -> bool:
        """Whether ``sync`` divides by the workers that sent an element, of such a fragment."""
        with noted() as notes, placed(None):
            # A new function: JAX would not trace one that it has traced before.
            jax.eval_shape(lambda part: self.sync.init(part), part)
        return any(note.synchroniser.by_senders for note in notes)

    def update(self, grads: Any, state: LocalState, params: Any = None, **extra: Any) -> tuple[Any, LocalState]:
        """A round of one step, without anything that a step of a loop of one's own would have.

        It shows which parts of a state differ between workers, and which do not.
        """
        updates, inner = self.inner.update(grads, state.inner, params, **extra)
        moved = jax.tree.map(jnp.negative, updates)
        parts = self.fragments.split(moved), self.fragments.split(params), state.sync, state.outer
        total, sync, outer = jax.tree.map(jnp.zeros_like, params), [], []
        axes = set(np.ravel(self.comm.axis)) if isinstance(self.comm, AxisComm) else set()
        for f, (moved, part, before, kept) in enumerate(zip(*parts, strict=True)):
            average, after = self.averaged(moved, before, part, **extra)
            if self.eager and any(varying_axes(leaf) & axes for leaf in jax.tree.leaves(average)):
                raise ValueError(
                    "sync leaves workers different means: pass an all-reduce over all of axis, and not jsparse.a2sgd"
                )
            update, kept = self.outer_update(average, kept, part, **extra)
            total = self.fragments.put(total, f, update)
            sync.append(after)
            outer.append(kept)
        return total, state._replace(inner=inner, sync=tuple(sync), outer=tuple(outer))

    def averaged(self, moved: Any, sync: Any, anchor: Any, **extra: Any) -> tuple[Any, Any]:
        """The mean of what workers moved, and the state of the synchronisation.

        If the mean is not finite, this library's states undo it themselves, and count it. Other
        states in the chain are as before.
        """
        average, after = self.sync.update(moved, sync, anchor, **extra)
        good = finite(average)

        def kept(after, before):
            return after if isinstance(after, SparseAllReduceState) else jnp.where(good, after, before)

        undone = jax.tree.map(kept, after, sync, is_leaf=lambda x: isinstance(x, SparseAllReduceState))
        return average, undone

    def outer_update(self, average: Any, outer: Any, anchor: Any, **extra: Any) -> tuple[Any, Any]:
        """The update of the outer optimizer, and its state.

        Both are as if there were no round if the mean is not finite.
        """
        updates, after = self.outer.update(average, outer, anchor, **extra)
        good = finite((average, updates))
        updates = jax.tree.map(lambda x: jnp.where(good, x, jnp.zeros_like(x)), updates)
        return updates, chosen(good, after, outer)
