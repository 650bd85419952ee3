"""Rounds of local steps: workers train by themselves, and synchronise what they moved."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .._comm.comm import AxisComm, Comm
from .._engine.shards import place_as_params
from .._presets.dense import dense
from .._vector.arguments import check_kind
from .finite import check_finite, chosen, finite, spoilt
from .fragments import FragmentOf, Fragments
from .gradients import Gradients, Loss
from .local_state import Counts, LocalState, Outgoing, Rounds
from .per_worker import PerWorkerState, as_parts, from_parts, laid_out
from .placement import AxisName
from .state import TrainState, mean
from .step import Body, Step, placed_workers
from .workers import with_axis, without_axis


class LocalSteps(Step):
    """A jitted round of local steps, made by :func:`local_steps`.

    ``step(state, batches)``, with a ``key`` or ``extra`` where ``loss_fn`` takes them, runs one
    round. It returns the new state and the losses, or ``(losses, aux)``, with a leading axis for
    the steps of the round: means over the workers that took the step, and NaN where none did. It
    donates the old state.
    """


def local_steps(
    loss_fn: Callable[..., Any],
    inner: optax.GradientTransformation,
    mesh: Mesh | None,
    axis: AxisName | Comm,
    *,
    every: int = 30,
    outer: optax.GradientTransformation | None = None,
    sync: optax.GradientTransformation | None = None,
    steps: Sequence[int] | None = None,
    weights: Literal["workers", "steps"] = "workers",
    fragments: int | FragmentOf = 1,
    overlap: int = 0,
    merge: float = 0.0,
    eager: bool = False,
    has_aux: bool = False,
    micro_batches: int = 1,
    model_state: Literal["mean", "per_worker"] | None = None,
    with_key: bool = False,
    with_extra: bool = False,
    param_specs: Any = None,
    batch_spec: PartitionSpec | None = None,
    check_vma: bool = True,
) -> LocalSteps:
    """Makes a round of local steps and one synchronisation, in one program: DiLoCo and its family.

    In a round, each worker takes ``every`` steps of ``inner`` by itself, from the same parameters.
    What a worker moved, ``params - worker's params``, is its *outer gradient*. ``sync`` averages
    these over the workers, and ``outer`` takes a step with the mean as its gradient. Its result is
    set on all workers, so that replicas agree to the bit, and the next round begins with it.

    A step is skipped on that worker alone if its gradient, or what it makes of the parameters, is
    not finite, or if it would make a finite model state infinite or NaN. A worker without a finite
    step contributes nothing to the mean. If there is no such step on any worker, or the mean is
    not finite, ``sync``, the outer optimizer and what they change stay as they were.

    Args:
      loss_fn: a worker's loss, as for :func:`train_step`.
      inner: the optimizer of a worker's own steps. Its state is the worker's own, and stays from
        round to round. It must not hold an all-reduce.
      mesh, axis: as for :func:`train_step`.
      every: the number of inner steps in a round, H.
      outer: the optimizer that takes the mean outer gradient. The default is
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``, as DiLoCo has it.
      sync: what averages outer gradients: a preset, or a chain that holds one. The default is
        ``jsparse.dense(axis)``.
      steps: the number of steps that each worker takes, one for each of the P workers, from 0 to
        ``every``, where workers are not equally fast. They are spread evenly over fragments, and
        over the time before and while a message is under way. There a worker uses the first
        batches. Of a sharded model all workers compute ``every`` steps, and discard those that are
        too many. Not for MPI.
      weights: how outer gradients are weighted: ``"workers"`` alike, ``"steps"`` by the finite
        steps that a worker took. The latter is not for ``mean="contributors"``.
      fragments: into how many parts the parameters are divided, of which one after the other is
        synchronised, evenly spread over a round. So a round sends as much, and at most a part at a
        time. A number divides the leaves, in their order, into as many parts of like size. A
        function of the parameters returns a tree of their form with each leaf's part, from 0; or,
        for a leaf that stacks layers along its leading axis, a part for each layer.
      overlap: τ, how many inner steps are taken between the beginning of a synchronisation and the
        use of its result, so that the network and the computation work at the same time.
      merge: α, how much a worker keeps of its own parameters when a result arrives: they become
        ``α own + (1 - α) new``. With 0, the steps that it took meanwhile are discarded.
      eager: whether a mean is used a whole round late, so that its message has a round's time. A
        worker's own share of it is replaced by the fresh one, with the weight that it has now.
        Each worker then has parameters and an outer optimizer of its own: leaves of ``params``
        have a leading axis of P, and :func:`jsparse.sync_params` averages them at the end. It
        excludes ``overlap``, ``merge`` and ``mean="contributors"``.
      has_aux, micro_batches, with_key, with_extra: as for :func:`train_step`.
      model_state: as for :func:`train_step`; ``"mean"`` averages at the end of a round.
      param_specs, batch_spec: as for :func:`train_step`. ``batch_spec`` is for the batch of one
        step.
      check_vma: as for :func:`train_step`.

    Returns:
      The round. Its state is a :class:`TrainState`. ``params`` are those of the outer optimizer,
      alike on all workers (with ``eager`` each worker's own, with a leading axis of P);
      ``opt_state`` is a :class:`LocalState`. With fragments, ``overlap`` or
      ``merge``, workers go on from parameters of their own, which the latter holds.

    Raises:
      ValueError: a number is out of range; ``weights`` is no known choice; ``eager`` is with
        ``overlap`` or ``merge``, or ``steps`` with MPI; or as for :func:`train_step`. And by
        ``init``: ``inner`` holds an all-reduce, or ``sync`` holds none; ``sync`` does not fit
        ``eager`` or ``weights``; a fragment has no parameters; a parameter is not finite. And by a
        round: ``overlap`` is longer than what is between two fragments.

    References:
      Douillard et al., 2023 (DiLoCo), Algorithm 1; 2025 (Streaming DiLoCo), Algorithm 2; Kale et
      al., 2025 (eager updates).

    Example::

      step = jsparse.local_steps(loss_fn, optax.adamw(4e-4), mesh, "data", every=30)
      state = step.init(params)
      for batches in rounds:  # 30 batches, stacked along a leading axis
          state, losses = step(state, batches)
    """
    check_kind("every", every, int)
    check_kind("overlap", overlap, int)
    check_kind("merge", merge, float)
    if weights not in ("workers", "steps"):
        raise ValueError(f'weights is {weights!r}; choose "workers" or "steps"')
    if not 0 <= merge < 1:
        raise ValueError(f"merge is {merge}; it is the part of its own parameters that a worker keeps: from 0, below 1")
    parts = Fragments.of(fragments)
    if every < 1 or (isinstance(fragments, int) and every < fragments):
        raise ValueError(f"every is {every}; a round has at least one step for each fragment")
    if steps is not None and np.ndim(steps) != 1:
        raise ValueError(f"steps is {steps!r}; give a number of steps for each worker, such as (30, 30, 20)")
    for number in () if steps is None else steps:
        check_kind("steps", number, int)
        if not 0 <= number <= every:
            raise ValueError(f"steps is {steps}; a worker takes from 0 to {every} steps in a round")
    if overlap < 0:
        raise ValueError(f"overlap is {overlap}; it is a number of inner steps, at least 0")
    if overlap >= every and not merge:
        raise ValueError(
            f"overlap is {overlap}, and a round has {every} steps, of which without merge those that overlap are "
            "discarded: choose a smaller overlap, or a merge above 0"
        )
    if eager and (overlap or merge):
        raise ValueError("eager updates come a whole round late: leave overlap and merge out, or eager")
    workers = placed_workers(mesh, axis, check_vma, param_specs, batch_spec, batch_axis=1)
    if steps is not None and not isinstance(workers.comm, AxisComm):
        raise ValueError(
            "unlike numbers of steps would give MPI's processes unlike programs, which round what is alike in unlike "
            "ways: leave steps out, or use a mesh over jax.distributed"
        )
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    tx = Rounds(
        inner=laid_out(inner),
        sync=optax.with_extra_args_support(dense(workers.comm) if sync is None else sync),
        outer=laid_out(outer) if eager else optax.with_extra_args_support(outer),
        fragments=parts,
        differ=fragments != 1 or overlap > 0 or merge > 0,
        eager=eager,
        weights=weights,
        comm=workers.comm,
    )
    loss = Loss(loss_fn, has_aux, model_state is not None, with_key, with_extra)
    return LocalSteps(
        _Round(
            workers,
            Gradients(loss, workers.comm, micro_batches),
            tx.transformation,
            eager,
            model_state,
            tx,
            every,
            None if steps is None else tuple(map(int, steps)),
            overlap,
            merge,
        )
    )


class _Carry(NamedTuple):
    """What a worker carries from one inner step to the next.

    Attributes:
      params: its parameters.
      inner: its inner optimizer's state.
      kept: its model state.
      counts: what it did.
      took: float32, shape ``(every,)``: 1 where it took the step.
      reports: the loss and the metrics of each step; 0 where it did not take it.
    """

    params: Any
    inner: Any
    kept: Any
    counts: Counts
    took: jax.Array
    reports: Any


@dataclasses.dataclass(frozen=True)
class _Round(Body):
    """The body of a round. Its methods are in the order in which they run.

    Attributes:
      rounds: the transformations; ``tx`` is made of them.
      every: the number of inner steps.
      steps: how many of them each worker takes; None for all.
      overlap: how many inner steps are taken while a message is under way.
      merge: how much a worker keeps of its own parameters.
    """

    rounds: Rounds
    every: int
    steps: tuple[int, ...] | None
    overlap: int
    merge: float

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.every,)

    def begin(self, params: Any, kept: Any) -> TrainState:
        state = super().begin(params, kept)
        check_finite(params)
        return state

    def local_step(self, state: TrainState, batch: Any, whole: Any) -> tuple[TrainState, Any]:
        """One round on one worker."""
        comm = self.workers.comm
        anchor, kept = self.change_own(without_axis, state.params, state.model_state)
        opt: LocalState = state.opt_state
        own = anchor if opt.workers is None else from_parts(opt.workers.inner, anchor)
        counts: Counts = opt.counts.inner
        step = functools.partial(self.inner_step, batch, *whole)
        shapes = jax.eval_shape(lambda: self.gradients(comm.varying(own), kept, _at(batch, 0), *whole)[1])
        reports = jax.tree.map(lambda x: jnp.zeros((self.every, *x.shape), jnp.result_type(x, jnp.float32)), shapes)
        counts = counts._replace(taken=jnp.zeros_like(counts.taken))
        carry = comm.varying(_Carry(own, opt.inner, kept, counts, jnp.zeros(self.every), reports))
        carry = carry._replace(params=place_as_params(carry.params))

        fragments, sync, outer = self.rounds.fragments, list(opt.sync), list(opt.outer)
        pending = None if opt.pending is None else list(opt.pending)
        parts = fragments.split(anchor)
        self.check_state(opt, len(parts))
        for f, part in enumerate(parts):
            before, after = self.stretches(f, len(parts))
            if pending is None:
                carry = self.run_steps(step, before, carry)
                carry, sent = self.outgoing(f, part, carry)
            else:
                sent = pending[f].inner
                sent = sent._replace(moved=from_parts(sent.moved, part))
            average, sync[f] = self.rounds.averaged(sent.moved, sync[f], part, value=sent.loss[0])
            if pending is not None:
                carry = self.run_steps(step, before, carry)
                # XLA would merge the mean's message with the weights', which waits for steps.
                took, _ = lax.optimization_barrier((carry.took, average))
                carry, fresh = self.outgoing(f, part, carry._replace(took=took))
                pending[f] = PerWorkerState(fresh._replace(moved=as_parts(fresh.moved)))
                replace = functools.partial(_with_fresh_share, comm.size)
                average = jax.tree.map(replace, comm.varying(average), fresh.moved, sent.moved)
            updates, outer[f] = self.rounds.outer_update(average, outer[f], part, value=sent.loss[0])
            new = optax.apply_updates(part, updates)
            anchor = fragments.put(anchor, f, new)
            carry = self.run_steps(step, after, carry)
            # XLA would merge this message with the report, which waits for these steps.
            took, _ = lax.optimization_barrier((carry.took, average))
            carry = carry._replace(took=took)
            if self.merge == 0:  # These steps are discarded.
                carry = self.counted_from_here(f, carry)
            mine = jax.tree.map(self.merged, fragments.take(carry.params, f), comm.varying(new))
            carry = carry._replace(params=fragments.put(carry.params, f, mine))

        report, kept, skipped = self.told(carry)
        params, kept = self.change_own(functools.partial(with_axis, comm), anchor, kept)
        opt = LocalState(
            inner=carry.inner,
            counts=PerWorkerState(carry.counts),
            skipped=opt.skipped + skipped,
            workers=PerWorkerState(as_parts(carry.params)) if self.rounds.differ else None,
            sync=tuple(sync),
            outer=tuple(outer),
            pending=None if pending is None else tuple(pending),
        )
        return TrainState(params, opt, kept), report

    def check_state(self, opt: LocalState, fragments: int) -> None:
        """Refuses a state of a round with other fragments, or of another form."""
        if fragments > self.every:
            raise ValueError(f"every is {self.every}; a round has at least one step for each of {fragments} fragments")
        had = (len(opt.sync), opt.workers is not None, opt.pending is not None)
        have = (fragments, self.rounds.differ, self.rounds.eager)
        if had != have:
            raise ValueError(
                "the state is of rounds of another form: (fragments, whether workers go on from parameters of their "
                f"own, eager) were {had}, and are {have}: begin a new state with init(params) from its params"
            )

    def counted_from_here(self, f: int, carry: _Carry) -> _Carry:
        """Begins anew to count the steps in which a fragment moves."""
        return carry._replace(counts=carry.counts._replace(since=carry.counts.since.at[f].set(0)))

    def outgoing(self, f: int, anchor: Any, carry: _Carry) -> tuple[_Carry, Outgoing]:
        """What a worker tells of a fragment. It asks the others for their weights."""
        comm = self.workers.comm
        moved = jax.tree.map(jnp.subtract, anchor, self.rounds.fragments.take(carry.params, f))
        loss = (jnp.sum(carry.reports[0]) / jnp.maximum(jnp.sum(carry.took), 1)).astype(jnp.float32)
        weight = carry.counts.since[f].astype(jnp.float32)
        weight = jnp.minimum(weight, 1) if self.rounds.weights == "workers" else weight
        total, losses = comm.psum(jnp.stack([weight, weight * loss]))
        # Without any weight it is NaN, and the synchronisation is undone everywhere.
        factor = weight * (total if self.rounds.by_senders(anchor) else comm.size) / total
        loss = losses / total
        if self.rounds.eager:  # Others' means arrive all the same.
            factor, loss = jnp.where(total > 0, factor, 0), jnp.where(total > 0, loss, jnp.inf)
        moved = jax.tree.map(lambda x: jnp.where(weight > 0, x, 0) * factor.astype(x.dtype), moved)
        # The steps that follow overlap with the long message, not with this short one before it.
        since, _ = lax.optimization_barrier((carry.counts.since, loss))
        carry = carry._replace(counts=carry.counts._replace(since=since))
        return self.counted_from_here(f, carry), Outgoing(moved, loss[None])

    def run_steps(self, step: Callable[..., _Carry], stretch: tuple[int, int, Any], carry: _Carry) -> _Carry:
        """Takes the steps of a stretch."""
        begin, end, stop = stretch
        if self.workers.lockstep and self.steps is not None:
            return lax.fori_loop(begin, end, lambda number, carry: step(number, carry, wanted=number < stop), carry)
        return lax.fori_loop(begin, stop, step, carry)

    def stretches(self, f: int, fragments: int) -> tuple[tuple[int, int, Any], tuple[int, int, Any]]:
        """The steps before a fragment is sent, and those until its mean is used.

        Each stretch is its first step, its end, and where this worker's own steps end.
        """
        begin, end = (self.every * i // fragments for i in (f, f + 1))
        if self.overlap > end - begin:
            raise ValueError(
                f"overlap is {self.overlap}, and there are {end - begin} steps from one fragment to the next: choose "
                "fewer steps, or fewer fragments, or a larger every"
            )
        pause = end - self.overlap
        if self.steps is None:
            return (begin, pause, pause), (pause, end, end)
        if len(self.steps) != self.workers.comm.size:
            raise ValueError(
                f"steps is {self.steps}; there are {self.workers.comm.size} workers: give a number for each"
            )
        # A worker's steps are spread evenly over the round; what is left over comes early.
        steps = np.array(self.steps)
        reached = [-(-steps * number // self.every) for number in (begin, pause, end)]
        early, late = begin + reached[1] - reached[0], pause + reached[2] - reached[1]
        rank = self.workers.comm.rank()
        early, late = (jnp.asarray(stop, jnp.int32)[rank] for stop in (early, late))
        return (begin, pause, early), (pause, end, late)

    def inner_step(self, batch: Any, key: Any, extra: Any, number: Any, carry: _Carry, wanted: Any = True) -> _Carry:
        """One step of the inner optimizer. If it is not wanted, or not finite, nothing changes."""
        key = None if key is None else jax.random.fold_in(key, number)
        kept, report, grads = self.gradients(carry.params, carry.kept, _at(batch, number), key, extra)
        updates, inner = self.rounds.inner.update(grads, carry.inner, carry.params, value=report[0])
        params = optax.apply_updates(carry.params, updates)
        taken = finite((grads, params)) & ~spoilt(carry.kept, kept) & wanted
        params, inner, kept = chosen(taken, (params, inner, kept), (carry.params, carry.inner, carry.kept))
        one = jnp.asarray(taken, jnp.int32)
        counts = Counts(carry.counts.taken + one, carry.counts.since + one)
        report = jax.tree.map(lambda x, every: jnp.where(taken, x, 0).astype(every.dtype), report, carry.reports)
        after = _Carry(
            place_as_params(params),
            inner,
            kept,
            counts,
            carry.took.at[number].set(one.astype(jnp.float32)),
            jax.tree.map(lambda every, x: every.at[number].set(x), carry.reports, report),
        )
        return self.workers.comm.varying(after)

    def merged(self, own: jax.Array, new: jax.Array) -> jax.Array:
        """A worker's parameters after a result has arrived."""
        return new if self.merge == 0 else (self.merge * own + (1 - self.merge) * new).astype(own.dtype)

    def told(self, carry: _Carry) -> tuple[Any, Any, jax.Array]:
        """The report of a round, averaged over those that took each step; the model state; and how
        many steps were skipped on all workers.
        """
        shared = (carry.reports, carry.took, carry.kept if self.model_state == "mean" else None)
        sums, took, kept = mean(self.workers.comm, shared)
        kept = kept if self.model_state == "mean" else carry.kept
        size = self.workers.comm.size
        wanted = self.every * size if self.steps is None else sum(self.steps)
        skipped = wanted - jnp.round(jnp.sum(took) * size).astype(jnp.int32)
        return jax.tree.map(lambda x: x / took.reshape(-1, *[1] * (x.ndim - 1)), sums), kept, skipped


def _at(batch: Any, number: Any) -> Any:
    """The batch of one step."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), batch)


def _with_fresh_share(size: int, average: jax.Array, fresh: jax.Array, sent: jax.Array) -> jax.Array:
    """A mean in which a worker's share is replaced by a fresh one."""
    return average + (fresh - sent) / size
