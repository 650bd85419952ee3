"""A worker of ``jsparse bench train``: trains with every form, and times it."""

import dataclasses
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
from jax.sharding import Mesh

from .._train.stats import stats
from .._train.step import train_step
from .forms import FORMS, Form
from .hosts import counters
from .images import Images, load_images
from .job import Job
from .nets import CLASSES, NETS
from .network_worker import Selecting, agreement
from .reports import ask_for_rate, tell, work
from .timing import time_steps, timed

AXIS = "hosts"
MOMENTUM = 0.9
# The number of images of the data set "random".
RANDOM = 512


@dataclasses.dataclass(frozen=True)
class TrainJob(Job):
    """What to train.

    Attributes:
      net: a key of :data:`NETS`.
      width: width of the dense net's hidden layers.
      data, data_dir: as :func:`.load_images` takes them; ``"random"`` is noise in the shape of
        CIFAR-10.
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
        """Loads the data set, or makes the random one."""
        if self.data != "random":
            return load_images(self.data, None if self.data_dir is None else pathlib.Path(self.data_dir))
        rng = np.random.default_rng(self.seed)
        x, y = rng.random((RANDOM, 32, 32, 3), np.float32), rng.integers(0, CLASSES, RANDOM, np.int32)
        return Images(x, y, x[:1], y[:1])


def main(text: str) -> None:
    job = TrainJob.read(text)
    rank = int(os.environ["JSPARSE_RANK"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], job.hosts, rank)
    trainer = Trainer(job, rank)
    for number, name in enumerate(job.forms):
        trainer.train(next(form for form in FORMS if form.name == name), number * len(job.rates))
    jax.distributed.shutdown()


class Trainer:
    """One of the job's hosts."""

    def __init__(self, job: TrainJob, rank: int):
        self._job, self._rank, self._images = job, rank, job.images()
        self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self._agree = agreement(self._mesh, AXIS)
        net = NETS[job.net](self._images.train_x.shape[1:], job.width, nnx.Rngs(job.seed))
        self._graph, params = nnx.split(net, nnx.Param)
        self._params = jax.tree.map(np.asarray, nnx.as_pure(params))
        self._evaluate = jax.jit(
            lambda params, x, y: jnp.sum(jnp.argmax(nnx.merge(self._graph, params)(x), axis=-1) == y)
        )

    def train(self, form: Form, done: int) -> None:
        """Trains from the start at every rate, and reports the figures.

        Args:
          form: how to synchronise.
          done: how many trainings were done before, for the progress bar.
        """
        job = self._job
        tx = form.make(AXIS, density=job.density)
        sgd = optax.sgd(job.learning_rate, momentum=MOMENTUM)
        step = train_step(self._loss, optax.chain(tx, sgd), self._mesh, AXIS, check_vma=False)
        # This compiles the step, before the clock runs.
        jax.block_until_ready(step(step.init(self._params), next(self._batches())))
        local, grads = self._local_step(sgd)
        parts: dict[str, Callable[[], None]] = {"computation": local}
        if tx.synchroniser.reducer.sparse:
            here = Mesh(np.array(jax.local_devices()), (AXIS,))
            selecting = Selecting(tx.synchroniser, here, grads)
            selecting.run = selecting.lowered.compile()
            parts["selection"] = selecting
        alone = {f"{name}_ms": time_steps(part, self._agree, job.repeats) for name, part in parts.items()}
        for number, rate in enumerate(job.rates, done):
            ask_for_rate(rate)
            run = self._run(step, lambda at, number=number: tell(name=form.name, done=number * job.steps + at))
            tell(name=form.name, done=(number + 1) * job.steps, rate=rate, parameters=grads[0].size, **alone, **run)

    def _run(self, step: Any, show: Callable[[int], None]) -> dict[str, Any]:
        """Trains to the target, and returns the times, bytes, losses and accuracies.

        Args:
          step: the training step.
          show: is called with the number of steps done, on worker 0.
        """
        job = self._job
        state, batches = step.init(self._params), self._batches()
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
            if self._rank == 0:
                show(number)
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

    def _accuracy(self, params: Any) -> float:
        """The accuracy on all test images, of which each host tests its share, off the clock."""
        own = jax.tree.map(lambda x: x.addressable_data(0), params)
        share = slice(self._rank, None, self._job.hosts)
        x, y = self._images.test_x[share], self._images.test_y[share]
        right = sum(int(self._evaluate(own, x[i : i + 500], y[i : i + 500])) for i in range(0, len(y), 500))
        # Agreement gives the largest number; so hosts pass theirs in turn, and the others pass -1.
        turns = [self._agree(float(right if turn == self._rank else -1)) for turn in range(self._job.hosts)]
        return sum(turns) / len(self._images.test_y)

    def _batches(self) -> Iterator[Any]:
        """Yields this host's share of each batch, without end."""
        job, images = self._job, self._images
        rng = np.random.default_rng(job.seed)
        while True:
            order = rng.permutation(len(images.train_y))
            whole = len(order) // (job.hosts * job.batch)
            for batch in order[: whole * job.hosts * job.batch].reshape(whole, job.hosts, job.batch):
                yield images.train_x[batch[self._rank]], images.train_y[batch[self._rank]]

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        x, y = batch
        logits = nnx.merge(self._graph, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def _local_step(self, sgd: optax.GradientTransformation) -> tuple[Callable[[], None], list[jax.Array]]:
        """A step without synchronisation, to be timed, and three batches' raveled gradients."""
        batches = list(itertools.islice(self._batches(), 3))
        flat = jax.jit(lambda params, batch: ravel_pytree(jax.grad(self._loss)(params, batch))[0])
        grads = [flat(self._params, batch) for batch in batches]

        def local(params, state, batch):
            updates, state = sgd.update(jax.grad(self._loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        params = jax.tree.map(jnp.array, self._params)
        carry = params, jax.jit(sgd.init)(params)
        run, cycle = jax.jit(local, donate_argnums=(0, 1)), itertools.cycle(batches)

        def step() -> None:
            nonlocal carry
            carry = jax.block_until_ready(run(*carry, next(cycle)))

        step()
        return step, grads


if __name__ == "__main__":
    work(main)
