"""Trains linear models on sparse data, data-parallel: the application of the SparCML thesis.

They are linear regression, logistic regression and support vector machines, with a penalty on the
weights. A worker's gradient has elements only where its batch has features. It goes to the
all-reduce as a sparse vector, and no array is as long as the weights but the weights themselves.

Run ``python -m examples.linear --help`` from the repository's root, and see docs/linear.md.
"""

import argparse
import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
from examples import cluster
from examples.data import Rows, read_libsvm, sparse
from jsparse.bench.command import output_file
from jsparse.bench.options import real, whole
from jsparse.cli import processes
from jsparse.select import NonZero

# The loss of a row, from its margin and its label.
LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "linear": lambda margin, label: (margin - label) ** 2 / 2,
    "logistic": lambda margin, label: jnp.logaddexp(0, -label * margin),
    "svm": lambda margin, label: jnp.maximum(0, 1 - label * margin),
}
# The strategies of the thesis, and the all-gather.
DENSE = {
    "dense": jsparse.dense,
    "parameter_server": jsparse.parameter_server,
    "parameter_server-async": lambda comm: jsparse.parameter_server(comm, staleness=2),
}
SPARSE = {
    "ssar_recursive_doubling": jsparse.ssar_recursive_doubling,
    "ssar_split_allgather": jsparse.ssar_split_allgather,
    "dsar_split_allgather": jsparse.dsar_split_allgather,
    "topk_allgather": jsparse.topk_allgather,
}
STRATEGIES = (*DENSE, *SPARSE)
# The smallest scale of weights.
SMALL = 1e-3
ALONG, ALIKE = PartitionSpec("workers"), PartitionSpec()


class Weights(NamedTuple):
    """``scale * vector``: the penalty shrinks the scale, and leaves the vector alone.

    Where the scale has become small, :meth:`folded` makes it 1 again.

    Attributes:
      vector: shape ``(columns,)``.
      scale: a scalar.
    """

    vector: jax.Array
    scale: jax.Array

    def folded(self) -> "Weights":
        return Weights(self.scale * self.vector, jnp.ones(()))


class Workers:
    """The workers, along a mesh or as processes of MPI, and the batches of each.

    Attributes:
      comm: how they communicate.
      mesh: where they are; None with MPI.
      count: how many they are.
      data: the batches, with a leading axis for the workers (with MPI, of this process's).
      batches: the batches of each worker.
      capacity: the most distinct columns of any batch.
      columns: the length of the weights.
      rows: all workers' rows.

    Raises:
      ValueError: there are no rows or no features, or a classifier's labels are not of two kinds.
    """

    def __init__(self, args: argparse.Namespace):
        self.comm = jsparse.MpiComm() if args.mpi else jsparse.AxisComm("workers")
        self.mesh = None if args.mpi else Mesh(np.array(cluster.devices(args.workers)), ("workers",))
        self.count = self.mesh.size if self.mesh else self.comm.size
        first = jax.process_index() * args.workers if self.mesh else int(self.comm.rank())
        own = [read(args, part, self.count) for part in range(first, first + (args.workers if self.mesh else 1))]
        ends = [[-rows.labels.min(initial=np.inf), rows.labels.max(initial=-np.inf)] for rows in own]
        low, high = self.on_each(self._largest, (ALONG,), ALIKE)(self.place(np.array(ends, np.float32)))
        if args.loss != "linear":
            own = [signed(rows, -float(low), float(high)) for rows in own]
        cuts = [sparse.cut(rows, args.batch, args.seed) for rows in own]
        sizes = [(*sparse.sizes(cut), sparse.columns(rows)) for cut, rows in zip(cuts, own, strict=True)]
        most = self.on_each(self._largest, (ALONG,), ALIKE)(self.place(np.array(sizes, np.int32)))
        self.batches, self.capacity, elements, self.columns = map(int, most)
        if args.data in sparse.KINDS:
            self.columns = sparse.KINDS[args.data].columns
        counts = np.array([[rows.labels.size] for rows in own], np.int32)
        self.rows = int(self.on_each(lambda count: self.comm.psum(count[0, 0]), (ALONG,), ALIKE)(self.place(counts)))
        if not self.columns:
            raise ValueError(f"{args.data} has {self.rows} rows and no features: name a file with some")
        shape = self.batches, self.capacity, elements, self.columns
        padded = [sparse.pad(cut, args.batch, *shape) for cut in cuts]
        self.data = jax.tree.map(lambda *arrays: self.place(np.stack(arrays)), *padded)

    def on_each(self, fn: Callable[..., Any], specs: Any, outs: Any, donate: Sequence[int] = ()) -> Any:
        """A jitted function that runs on every worker."""
        if self.mesh:
            fn = jax.shard_map(fn, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return jax.jit(fn, donate_argnums=donate)

    def place(self, own: np.ndarray) -> jax.Array:
        """An array with a leading axis for the workers, from the part of this process."""
        if not self.mesh:
            return jnp.asarray(own)
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, ALONG), own)

    def _largest(self, numbers: jax.Array) -> jax.Array:
        return self.comm.pmax(numbers[0])


def signed(rows: Rows, low: float, high: float) -> Rows:
    """The rows with labels -1 and 1 in place of a file's two labels."""
    strange = rows.labels[(rows.labels != low) & (rows.labels != high)]
    if low == high or strange.size:
        raise ValueError(
            f"the labels are {', '.join(f'{x:g}' for x in sorted({low, *strange[:1].tolist(), high}))}; a classifier "
            "takes labels of two kinds: take --loss linear, or another file"
        )
    return rows._replace(labels=np.where(rows.labels == high, 1, -1).astype(np.float32))


def read(args: argparse.Namespace, part: int, parts: int) -> Rows:
    """A worker's rows."""
    if args.data in sparse.KINDS:
        return sparse.made_up(args.rows, sparse.KINDS[args.data], args.seed + part)
    return read_libsvm(pathlib.Path(args.data), part, parts)


def margins(weights: Weights, batch: sparse.Batches) -> jax.Array:
    """The product of each row with the weights, shape ``(size,)``."""
    own = weights.scale * weights.vector.at[batch.columns].get(mode="fill", fill_value=0)
    return jax.ops.segment_sum(batch.values * own[batch.places], batch.rows, batch.labels.size, indices_are_sorted=True)


def train(name: str, workers: Workers, args: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Trains with one strategy, and returns the figures of each epoch."""
    loss, comm, columns = LOSSES[args.loss], workers.comm, workers.columns
    capacity = min(args.capacity or workers.capacity, columns)
    # Of the mean batch, so that an epoch's gradients are those of all rows.
    size = workers.rows / (workers.batches * workers.count)
    if name in DENSE:
        tx = DENSE[name](comm)
    else:
        # Where all non-zero elements fit, nothing is ever left over.
        keep = capacity < workers.capacity
        tx = SPARSE[name](comm, select=NonZero(capacity / columns), error_feedback=keep)

    def gradient(weights, data, number):
        batch = jax.tree.map(lambda array: array[0, number], data)
        slope = jax.grad(lambda x: jnp.sum(batch.present * loss(x, batch.labels)))(margins(weights, batch))
        values = jax.ops.segment_sum(batch.values * slope[batch.rows], batch.places, batch.columns.size)
        return jsparse.SparseVector(values[None] / size, batch.columns[None], columns)

    def exchange(weights, state, gradient, rate):
        gradient = jax.tree.map(lambda array: array[0], gradient)
        scale = weights.scale * (1 - rate * args.l2)
        mean, state = jsparse.sync(tx, gradient, state)
        vector: Any = jsparse.apply_sparse(weights.vector, mean, -rate / scale)
        return Weights(vector, scale), state

    def evaluate(weights, data):
        def one(batch):
            x = margins(weights, batch)
            sums = batch.present * loss(x, batch.labels), batch.present * (x * batch.labels > 0)
            return jnp.stack([jnp.sum(part) for part in sums])

        each = lax.map(one, jax.tree.map(lambda array: array[0], data))
        mean, right = comm.psum(jnp.sum(each, axis=0)) / workers.rows
        penalty = args.l2 / 2 * weights.scale**2 * jnp.sum(weights.vector**2)
        return mean + penalty, right

    gradient = workers.on_each(gradient, (ALIKE, ALONG, ALIKE), ALONG)
    exchange = workers.on_each(exchange, (ALIKE, ALONG, ALONG, ALIKE), (ALIKE, ALONG), donate=(0, 1))
    evaluate = workers.on_each(evaluate, (ALIKE, ALONG), ALIKE)
    fold = workers.on_each(Weights.folded, (ALIKE,), ALIKE, donate=(0,))
    nothing = workers.on_each(lambda: Weights(jnp.zeros(columns), jnp.ones(())), (), ALIKE)

    def begin():
        state = jsparse.init(tx, jnp.zeros(columns), workers.mesh, "workers" if workers.mesh else comm)
        return nothing(), state

    # A step that does not count, so that everything is compiled before the clock starts.
    exchange(*begin(), gradient(nothing(), workers.data, np.int32(0)), np.float32(0))

    run: dict[str, Any] = {"strategy": name, "columns": columns, "capacity": capacity, "workers": workers.count}
    run |= {figure: [] for figure in ("loss", "accuracy", "seconds", "computing", "communicating", "bytes")}
    (weights, state), rng = begin(), np.random.default_rng(args.seed)
    scale = 1.0
    for epoch in range(args.epochs):
        seconds, sent = np.zeros(2), 0
        for i, number in enumerate(rng.permutation(workers.batches)):
            rate = step_size(args, epoch, epoch * workers.batches + i)
            start = time.perf_counter()
            part = jax.block_until_ready(gradient(weights, workers.data, np.int32(number)))
            middle = time.perf_counter()
            weights, state = jax.block_until_ready(exchange(weights, state, part, rate))
            scale *= 1 - rate * args.l2
            if scale < SMALL:
                weights, scale = fold(weights), 1.0
            seconds += middle - start, time.perf_counter() - middle
            # This process's own; jsparse.stats would gather those of all workers in every step.
            sent += 4 * int(state.report.words.addressable_data(0)[0])
        value, right = evaluate(weights, workers.data)
        run["loss"].append(float(value))
        run["accuracy"].append(float(right))
        run["seconds"].append(float(seconds.sum()))
        run["computing"].append(float(seconds[0]))
        run["communicating"].append(float(seconds[1]))
        run["bytes"].append(sent)
        tell(
            f"{name}, epoch {epoch + 1}: loss {value:.5f}, {seconds.sum():.2f} s, of these {seconds[1]:.2f} s "
            f"communicating; {sent / 1e6:.3g} MB sent"
        )
    run["weights"] = np.asarray(fold(weights).vector)
    return run


def step_size(args: argparse.Namespace, epoch: int, step: int) -> np.float32:
    """``epoch``: falls by a factor after each epoch. ``inverse``: falls as 1 / step."""
    if args.schedule == "epoch":
        return np.float32(args.step_size * args.decay**epoch)
    return np.float32(args.step_size / (1 + args.step_size * args.l2 * step))


def objective(rows: Rows, weights: np.ndarray, loss: str, l2: float) -> float:
    """The mean loss of the rows and the penalty, in double precision."""
    products = np.add.reduceat(np.append(rows.values * weights[rows.indices], 0.0), rows.indptr[:-1])
    products[np.diff(rows.indptr) == 0] = 0
    each = {
        "linear": lambda x, y: (x - y) ** 2 / 2,
        "logistic": lambda x, y: np.logaddexp(0, -y * x),
        "svm": lambda x, y: np.maximum(0, 1 - y * x),
    }[loss](products, rows.labels)
    return float(np.mean(each) + l2 / 2 * np.sum(weights**2))


def solved(rows: Rows, loss: str, l2: float) -> np.ndarray:
    """scikit-learn's weights for the same problem."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.svm import LinearSVC

    count = rows.labels.size
    x = csr_matrix((rows.values.astype(np.float64), rows.indices, rows.indptr))
    model: Any = {
        "linear": lambda: Ridge(alpha=l2 * count, fit_intercept=False, solver="sparse_cg", tol=1e-10),
        "logistic": lambda: LogisticRegression(C=1 / (l2 * count), fit_intercept=False, tol=1e-8, max_iter=10**4),
        "svm": lambda: LinearSVC(loss="hinge", C=1 / (l2 * count), fit_intercept=False, tol=1e-6, max_iter=10**6),
    }[loss]()
    return np.ravel(model.fit(x, rows.labels).coef_)


def compare(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Tells how far each run's loss is off that of scikit-learn's solver."""
    rows = read(args, 0, 1)
    if args.loss != "linear":
        rows = signed(rows, float(rows.labels.min()), float(rows.labels.max()))
    best = objective(rows, solved(rows, args.loss, args.l2), args.loss, args.l2)
    for run in runs:
        run["relative"] = (objective(rows, run["weights"], args.loss, args.l2) - best) / best
        print(f"{run['strategy']}: the loss is {run['relative']:+.2e} times off scikit-learn's, {best:.6f}")


def check(args: argparse.Namespace) -> None:
    """Refuses numbers that are out of range.

    Raises:
      ValueError: a number is.
    """
    if not 0 < args.decay <= 1:
        raise ValueError(f"--decay is {args.decay}; it is above 0, and at most 1")
    if args.step_size * args.l2 >= 1:
        raise ValueError(f"a step shrinks the weights by {args.step_size * args.l2}, all of them: lower --step-size")
    if args.schedule == "inverse" and not args.l2:
        raise ValueError("--schedule inverse divides by a multiple of --l2, which is 0: take --schedule epoch")
    if args.compare and args.data in sparse.KINDS:
        raise ValueError("--compare reads a file, and this data is made up: leave it out")
    if args.compare and not args.l2:
        raise ValueError("scikit-learn's solvers take a penalty above 0: leave --compare out, or raise --l2")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help=f"a file in LIBSVM's format, or made-up data: {' or '.join(sparse.KINDS)}")
    parser.add_argument("--loss", choices=LOSSES, default="logistic", help="default logistic")
    parser.add_argument(
        "--strategy",
        action="append",
        choices=[*STRATEGIES, "all"],
        metavar="NAME",
        help=f"all, or one of {', '.join(STRATEGIES)}; repeatable (default ssar_split_allgather)",
    )
    parser.add_argument("--workers", type=whole(1), help="workers of each process (default: 8; 1 in each of several)")
    parser.add_argument("--mpi", action="store_true", help="each process of mpirun is a worker")
    parser.add_argument("--epochs", type=whole(0), default=10, help="default 10")
    parser.add_argument("--batch", type=whole(1), default=1000, help="rows a worker and step (default 1000)")
    parser.add_argument("--l2", type=real(0), default=1e-3, help="the penalty is l2 / 2 |weights|^2 (default 1e-3)")
    parser.add_argument("--step-size", type=real(above=0), default=1.0, help="of the first step (default 1)")
    parser.add_argument(
        "--schedule",
        choices=["epoch", "inverse"],
        default="epoch",
        help="the step size is multiplied by --decay after each epoch, or divided by 1 + step-size * l2 * step",
    )
    parser.add_argument("--decay", type=real(0), default=0.9, help="default 0.9")
    parser.add_argument(
        "--capacity",
        type=whole(1),
        help="elements that a worker sends in a step; what is left over waits in its residual (default: the most "
        "distinct columns of any batch, so that nothing is left over)",
    )
    parser.add_argument("--rows", type=whole(1), default=10_000, help="made-up rows of each worker (default 10000)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the batches, and of made-up rows (default 0)")
    parser.add_argument("--compare", action="store_true", help="compare the loss with that of scikit-learn's solver")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this JSON file")
    processes.add_arguments(parser)
    args = parser.parse_args(argv)
    names = args.strategy or ["ssar_split_allgather"]
    names = STRATEGIES if "all" in names else names
    args.workers = (1 if args.distributed or args.mpi else 8) if args.workers is None else args.workers
    with contextlib.suppress(RuntimeError):  # It is too late if this process has used JAX already.
        jax.config.update("jax_num_cpu_devices", args.workers)
    try:
        check(args)
        if not args.mpi:
            processes.join(args)
        workers = Workers(args)
        first = not (int(workers.comm.rank()) if args.mpi else jax.process_index())
        runs = [train(name, workers, args, print if first else lambda line: None) for name in names]
        if args.compare and first:
            compare(runs, args)
    except ValueError as error:
        parser.error(str(error))
    if args.json and first:
        args.json.write_text(json.dumps([{key: run[key] for key in run if key != "weights"} for run in runs]))


if __name__ == "__main__":
    main()
