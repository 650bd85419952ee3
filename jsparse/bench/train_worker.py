"""A worker of ``jsparse bench train``: trains with every form, and times it."""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.processes import put
from .._train.state import TrainState
from .._train.stats import stats
from .._train.step import train_step
from .compiler import Compiler
from .forms import FORMS, Form
from .hosts import counters
from .images import Images, load_images
from .job import Job
from .nets import CLASSES, NETS, WORDS
from .network_worker import Selecting, agreement
from .reports import ask_for_rate, tell, tell_progress, work
from .timing import time_steps, timed

AXIS = "hosts"
MOMENTUM = 0.9
# The number of examples of the data set "random", and of the words of a text in it: as many as the
# papers train LSTM-PTB with.
RANDOM, TEXT = 512, 35
# Each host tests so many images at a time.
TESTED = 500


@dataclasses.dataclass(frozen=True)
class TrainJob(Job):
    """What to train.

    Attributes:
      net: a key of :data:`NETS`.
      width: width of the dense net's hidden layers.
      data, data_dir: as :func:`.load_images` takes them; ``"random"`` is noise in the shape of
        CIFAR-10, or texts of random words for the net ``"lstm"``.
      batch: examples a host and step.
      learning_rate: of SGD with momentum.
      target: the accuracy at which training ends; None to take all steps.
      steps: the largest number of steps.
      every: steps from one test to the next.
      seed: of the parameters and batches.
      repeats: how often each part of a step is timed by itself.
    """

    net: str
    width: int
    data: str
    data_dir: str | None
    batch: int
    learning_rate: float
    target: float | None
    steps: int
    every: int
    seed: int
    repeats: int = 9

    def images(self) -> Images:
        """Loads the data set, or makes the random one.

        A text has a label for each word.
        """
        if self.data != "random":
            return load_images(self.data, None if self.data_dir is None else pathlib.Path(self.data_dir))
        rng = np.random.default_rng(self.seed)
        if self.net == "lstm":
            x, y = rng.integers(0, WORDS, (2, RANDOM, TEXT), np.int32)
        else:
            x, y = rng.random((RANDOM, 32, 32, 3), np.float32), rng.integers(0, CLASSES, RANDOM, np.int32)
        return Images(x, y, x[:1], y[:1])


def main(text: str) -> None:
    job = TrainJob.read(text)
    rank = int(os.environ["JSPARSE_RANK"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], job.hosts, rank)
    trainer = Trainer(job, rank)
    for name in job.forms:
        trainer.train(next(form for form in FORMS if form.name == name))
    jax.distributed.shutdown()


def shares_of(x: np.ndarray, y: np.ndarray, rank: int, hosts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a host's share of the test images and labels, at most ``TESTED`` at a time.

    All shares are equally long. Blank images fill the last ones. Their label is -1, which no net
    gives.
    """
    count = min(TESTED, -(-len(y) // hosts))
    for start in range(0, len(y), hosts * count):
        own = slice(start + rank, start + hosts * count, hosts)
        blank = count - len(y[own])
        x_own, y_own = (np.pad(a[own], [(0, blank), *[(0, 0)] * (a.ndim - 1)]) for a in (x, y))
        y_own[count - blank :] = -1
        yield x_own, y_own


class Trainer:
    """One of the job's hosts. Each program is compiled on one of them, and run on all."""

    def __init__(self, job: TrainJob, rank: int):
        self._job, self._rank, self._images = job, rank, job.images()
        self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self._agree = agreement(self._mesh, AXIS)
        self._compiler = Compiler(rank, job.hosts)
        net = NETS[job.net](self._images.train_x.shape[1:], job.width, nnx.Rngs(job.seed))
        self._graph, params = nnx.split(net, nnx.Param)
        self._params = jax.tree.map(np.asarray, nnx.as_pure(params))
        self._sgd = optax.sgd(job.learning_rate, momentum=MOMENTUM)
        shares = shares_of(self._images.test_x, self._images.test_y, rank, job.hosts)
        self._tests = [self._of_all_hosts(share) for share in shares]
        self._first_batches = list(itertools.islice(self._batches(), 3))

        params = put(self._params, NamedSharding(self._mesh, PartitionSpec()))
        # Each host's parameters and momentum, joined along their first axes. With an axis for the
        # hosts, XLA would copy them in every step.
        self._own_state = self._of_all_hosts((self._params, jax.tree.map(np.asarray, self._sgd.init(self._params))))
        on_each = functools.partial(jax.shard_map, mesh=self._mesh, check_vma=False)
        parted, replicated = PartitionSpec(AXIS), PartitionSpec()
        local = on_each(self._local_step, in_specs=(parted, parted), out_specs=parted)
        gradient = on_each(self._gradient, in_specs=(replicated, parted), out_specs=parted)
        right = on_each(self._right_of, in_specs=(replicated, parted), out_specs=replicated)
        self._run_local, run_gradient, self._count_right = self._compiler.compile(
            [
                jax.jit(local, donate_argnums=0).lower(self._own_state, self._first_batches[0]),
                jax.jit(gradient).lower(params, self._first_batches[0]),
                jax.jit(right).lower(params, self._tests[0]),
            ]
        )
        self._grads = [run_gradient(params, batch) for batch in self._first_batches]
        self._compute()  # Before the clock runs.

    def train(self, form: Form) -> None:
        """Trains from the start at every rate, and reports the figures."""
        job = self._job
        tx = form.make(AXIS, density=job.density)
        step = train_step(self._loss, optax.chain(tx, self._sgd), self._mesh, AXIS, check_vma=False)
        programs = [step.lower(step.init(self._params), self._first_batches[0])]
        parts: dict[str, Callable[[], None]] = {"computation": self._compute}
        if tx.synchroniser.reducer.sparse:
            parts["selection"] = selecting = Selecting(tx.synchroniser, self._mesh, self._grads)
            programs.append(selecting.lowered)
            run, selecting.run = self._compiler.compile(programs)
        else:
            (run,) = self._compiler.compile(programs)
        alone = {f"{name}_ms": time_steps(part, self._agree, job.repeats) for name, part in parts.items()}
        jax.block_until_ready(run(step.init(self._params), self._first_batches[0]))  # Before the clock runs.
        size = self._grads[0].size // job.hosts
        for rate in job.rates:
            ask_for_rate(rate)
            figures = self._run(run, step.init(self._params), functools.partial(tell_progress, form.name))
            tell(name=form.name, rate=rate, parameters=size, **alone, **figures)

    def _run(self, step: Callable[..., Any], state: TrainState, show: Callable[[float], None]) -> dict[str, Any]:
        """Trains to the target, and returns the times, bytes, losses and accuracies.

        Args:
          step: the training step.
          state: the state before the first step.
          show: takes the part of the steps that is done.
        """
        job, batches = self._job, self._batches()
        times, accuracies, losses, words, sent = [], [], [], [], 0
        for number in range(1, job.steps + 1):
            batch = next(batches)
            self._agree(0.0)
            before = counters().sent
            ms, (state, loss) = timed(step, state, batch)
            sent += counters().sent - before
            times.append(ms)
            losses.append(float(loss.addressable_data(0)))
            words.append(int(stats(state.opt_state).words[0]))
            show(number / job.steps)
            if job.target is not None and (number % job.every == 0 or number == job.steps):
                accuracies.append(self._accuracy(state.params))
                if accuracies[-1] >= job.target:
                    break
        return {
            "step_ms": times,
            "accuracy": accuracies,
            "loss": losses,
            "sent_bytes": sent / len(times),
            "stated_bytes": 4 * float(np.mean(words)),
        }

    def _compute(self) -> None:
        """A step without synchronisation; each call goes on from the one before."""
        self._own_state = jax.block_until_ready(self._run_local(self._own_state, self._first_batches[0]))

    def _accuracy(self, params: Any) -> float:
        """The accuracy on all test images, of which each host tests its share, off the clock."""
        right = sum(int(self._count_right(params, share).addressable_data(0)) for share in self._tests)
        return right / len(self._images.test_y)

    def _batches(self) -> Iterator[Any]:
        """Yields batches of all hosts, without end."""
        job, images = self._job, self._images
        rng = np.random.default_rng(job.seed)
        while True:
            order = rng.permutation(len(images.train_y))
            whole = len(order) // (job.hosts * job.batch)
            for batch in order[: whole * job.hosts * job.batch].reshape(whole, job.hosts, job.batch):
                own = batch[self._rank]
                yield self._of_all_hosts((images.train_x[own], images.train_y[own]))

    def _of_all_hosts(self, own: Any) -> Any:
        """Global arrays, of which each host has its own part."""
        along = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, along), own)

    def _logits(self, params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(self._graph, params)(x)

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self._logits(params, x), y).mean()

    def _gradient(self, params: Any, batch: Any) -> jax.Array:
        return ravel_pytree(jax.grad(self._loss)(params, batch))[0]

    def _local_step(self, carry: Any, batch: Any) -> Any:
        params, state = carry
        updates, state = self._sgd.update(jax.grad(self._loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def _right_of(self, params: Any, share: Any) -> jax.Array:
        """How many of the images, on all hosts, the net classifies correctly."""
        x, y = share
        return AxisComm(AXIS).psum(jnp.sum(jnp.argmax(self._logits(params, x), axis=-1) == y))


if __name__ == "__main__":
    work(main)
