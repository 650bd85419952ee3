"""A worker of ``jsparse bench network``: synchronises in every form, and times and counts each."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.traffic import traffic
from .._engine.synchroniser import Composition
from .._engine.transform import SparseAllReduce, sync
from .._train.workers import number_of_workers
from .._vector.pending import Pending
from .._vector.sparse_vector import SparseVector
from .alone import Alone
from .compiler import Compiler
from .forms import FORMS, Form
from .gradients import in_leaves, worker_gradients
from .job import NetworkJob
from .reports import ask_for_rate, tell, work
from .timing import Meter

# The slower network, and the faster one inside a group of workers.
AXES = ("groups", "workers")


def main(text: str) -> None:
    job = NetworkJob.read(text)
    rank = int(os.environ["JSPARSE_RANK"])
    jax.config.update("jax_num_cpu_devices", job.devices)
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], job.hosts, rank)
    worker = Worker(job, rank)
    for form in FORMS:
        if form.name in job.forms and job.fits(form):
            worker.measure(form)
    jax.distributed.shutdown()


def agreement(mesh: Mesh, axis: str | tuple[str, ...]) -> Callable[[float], float]:
    """A function that returns the largest of the numbers that all workers of a mesh pass to it."""
    along = NamedSharding(mesh, PartitionSpec(axis))
    largest = jax.jit(
        jax.shard_map(lambda x: AxisComm(axis).pmax(x), mesh=mesh, in_specs=along.spec, out_specs=PartitionSpec())
    )

    def agree(number: float) -> float:
        local = np.full(len(mesh.local_devices), number, np.float32)
        return float(largest(jax.make_array_from_process_local_data(along, local)).addressable_data(0)[0])

    return agree


class Worker:
    """One of the job's hosts."""

    def __init__(self, job: NetworkJob, rank: int):
        self._job = job
        self._mesh = Mesh(np.array(jax.devices()).reshape(-1, job.group), AXES)
        # For each of this host's devices, its gradients.
        self._own = [worker_gradients(job.size, rank * job.devices + device) for device in range(job.devices)]
        self._vectors = self._placed(self._own)
        self._meter = Meter(agreement(self._mesh, AXES))
        self._compiler = Compiler(rank, job.hosts)
        (dense,) = (form for form in FORMS if form.name == "dense")
        # What a form computes is compared with one pass over the gradient at about the same time.
        self._pass = self._parts(dense, self._made(dense), self._vectors)["computing"]
        self._compile([self._pass])

    def _made(self, form: Form) -> SparseAllReduce:
        return form.make(*(AXES if form.levels else (AXES,)), density=self._job.density)

    def _compile(self, programs: "Sequence[Whole | Selecting]") -> None:
        compiled = self._compiler.compile([program.lowered for program in programs])
        for program, run in zip(programs, compiled, strict=True):
            program.run = run

    def _placed(self, own: list[Any]) -> list[Any]:
        along = NamedSharding(self._mesh, PartitionSpec(AXES))
        return jax.tree.map(lambda *each: jax.make_array_from_process_local_data(along, np.concatenate(each)), *own)

    def measure(self, form: Form) -> None:
        """Measures one form at every rate, and reports the figures."""
        job = self._job
        grads = self._placed([list(map(in_leaves, own)) for own in self._own]) if form.leaves else self._vectors
        tx = self._made(form)
        whole = Whole(tx, self._mesh, grads, dense_update=form.dense_update)
        parts = self._parts(form, tx, grads)
        self._compile([whole, *parts.values()])
        for rate in job.rates:
            ask_for_rate(rate)
            figures = self._meter.measure(whole, job.repeats)
            timed = whole.words[-len(figures["ms"]) :]
            if job.devices == 1:  # Otherwise part of it does not leave the host.
                figures |= {"least_bytes": whole.sends.least.bytes, "most_bytes": whole.sends.bytes}
                figures["stated_bytes"] = 4 * float(np.mean([int(words) for words in timed]))
            for name, program in {**parts, "pass": self._pass}.items():
                figures[f"{name}_ms"] = self._meter.measure(program, job.repeats)["ms"]
            tell(
                name=form.name,
                rate=rate,
                dense_update=not whole.sparse,
                memory=whole.memory,
                **figures,
            )

    def _parts(self, form: Form, tx: SparseAllReduce, grads: list[Any]) -> "dict[str, Whole | Selecting]":
        """Programs without the network: all computation, and accumulation with selection alone.

        The second is for forms that select from one vector, the whole gradient.
        """
        sizes = [number_of_workers(self._mesh, comm.axis) for comm in tx.synchroniser.levels]
        alone = tx.synchroniser.over(*map(Alone, sizes))
        whole = Whole(SparseAllReduce.of(alone), self._mesh, grads, dense_update=form.dense_update)
        programs: dict[str, Whole | Selecting] = {"computing": whole}
        whole_vector = not (form.leaves or form.levels)
        if whole_vector and isinstance(alone, Composition) and alone.reducer.sparse:
            programs["selection"] = Selecting(alone, self._mesh, grads)
        return programs


def synchroniser(tx: SparseAllReduce, dense_update: bool) -> Callable[..., Any]:
    """A step ``(gradient, state) -> (state, mean)``, whose mean stays sparse where it can.

    The state comes first among the results: JAX hands donated memory to the first result of its
    shape, and a dense mean has the shape of the residual here.

    Args:
      tx: the transformation.
      dense_update: return the update, which is dense.
    """

    def step(grads, state):
        mean, state = tx.update(grads, state) if dense_update else sync(tx, grads, state)
        return state, mean

    return step


class Whole:
    """Whole synchronisations: each call synchronises the next gradient.

    Attributes:
      lowered: the program, to be compiled.
      run: the program, compiled. To be set before a call.
      sends: what one synchronisation can send, at least and at most.
      words: the words that each synchronisation reports as sent.
      sparse: whether the mean stays sparse.
    """

    run: jax.stages.Compiled

    def __init__(self, tx: SparseAllReduce, mesh: Mesh, grads: list[Any], *, dense_update: bool):
        along, everywhere = PartitionSpec(AXES), PartitionSpec()
        own = jax.tree.map(lambda x: x.addressable_data(0), grads[0])
        n = sum(leaf.size for leaf in jax.tree.leaves(own))
        step = jax.shard_map(
            synchroniser(tx, dense_update),
            mesh=mesh,
            in_specs=(along, along),
            out_specs=(along, everywhere),
            check_vma=False,
        )
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), own)
        begin = jax.shard_map(lambda: tx.init(zeros()), mesh=mesh, in_specs=(), out_specs=along, check_vma=False)
        self._state: Any = jax.jit(begin)()
        run = jax.jit(step, donate_argnums=1)
        self.sends = traffic(run, grads[0], self._state)
        self.lowered = run.lower(grads[0], self._state)
        self._n = n
        self._grads = itertools.cycle(grads)
        self.words: list[Any] = []
        self.sparse = isinstance(self.lowered.out_info[1], SparseVector)

    @property
    def memory(self) -> float | None:
        """Temporary memory, over the gradient's own; None where XLA does not tell."""
        memory = self.run.memory_analysis()
        return memory.temp_size_in_bytes / (4 * self._n) if memory else None

    def __call__(self) -> None:
        self._state, _ = jax.block_until_ready(self.run(next(self._grads), self._state))
        self.words.append(self._state.report.words.addressable_data(0)[0])


class Selecting:
    """Accumulation and selection alone: each call selects from the next gradient.

    Nothing is delivered, so the whole accumulated vector stays in the residual.

    Args:
      synchroniser: what selects.
      mesh: the workers. Each selects for itself.
      grads: the gradients, of all workers.

    Attributes:
      lowered, run: as of :class:`Whole`.
    """

    run: jax.stages.Compiled

    def __init__(self, synchroniser: Any, mesh: Mesh, grads: list[jax.Array]):
        (bucket,) = synchroniser.space.buckets([jax.typeof(grads[0].addressable_data(0))])
        layout, select = synchroniser.space.layout(bucket), synchroniser.reducer.select

        def begin():
            return jnp.zeros(layout.n), select.init_for(layout), jnp.zeros(1, jnp.int32)

        def step(grad, carried):
            residual, state, number = carried
            # The condition is computed: with a constant one XLA adds in a slower way than in a
            # step.
            pending = Pending(residual, [grad[: layout.n]], number[0] >= 0, layout, float(jnp.finfo(layout.dtype).max))
            acc, x, state = select.accumulate_and_select(pending, state, number[0], jnp.int32(0))
            # What was selected stays in the residual, too: nothing is delivered.
            return (acc, state, number + 1), x

        along = PartitionSpec(mesh.axis_names)
        run = jax.shard_map(step, mesh=mesh, in_specs=(along, along), out_specs=(along, along), check_vma=False)
        self._state = jax.jit(jax.shard_map(begin, mesh=mesh, in_specs=(), out_specs=along, check_vma=False))()
        self.lowered = jax.jit(run, donate_argnums=1).lower(grads[0], self._state)
        self._grads = itertools.cycle(grads)

    def __call__(self) -> None:
        self._state, _ = jax.block_until_ready(self.run(next(self._grads), self._state))


if __name__ == "__main__":
    work(main)
