"""The table of algorithms: every contract test runs for each of them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pytest

import jsparse
import oracles
from jsparse._vector.random import key_of, uniform

DENSITY = 0.05


@dataclasses.dataclass(frozen=True)
class Card:
    """What the tables in the README and in the catalogue say of a preset.

    Attributes:
      paper: whose it is.
      bytes: what a worker sends in a step.
      memory: floats that a worker carries from step to step.
      when: when to choose it.
      aliases: other presets of the same algorithm.
    """

    paper: str
    bytes: str
    memory: str
    when: str
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One algorithm with its settings.

    Attributes:
      name: the name in pytest.
      make: makes the transformation for an axis (or Comm) and a density.
      oracle: computes what a step should do; None if only the invariants are tested.
        Where replicas differ, it gets the gradients alone, and gives each worker's update.
      sizes: the numbers of workers for which it is tested.
      sparse: whether it selects, so that it has a residual.
      keeps: whether it keeps what is not delivered; if not, that is lost.
      bound: the most words that a worker may send in a step: a function of n, k and P; None
        without such a bound.
      oracle_args: further arguments of the oracle.
      selects: the oracle of its selector: ``(acc, step, rank, last)`` to ascending indices, where
        ``last`` is the worker's threshold before the step; None for the exact top-k.
      exact: whether integers stay integers, so that their sums can be compared exactly.
      gpus: over two levels, the workers in a node for each number of workers; ``make`` is then
        given two axes.
      scale: the factor of all integers, so that momentum of a half gives integers.
      dense_steps: the number of first steps in which it sums densely.
      alike: whether all workers get the same update, so that nothing may be lost; otherwise each
        has its own.
      lossy: where rounding loses mass on purpose, the most that a step may lose of each element: a
        function of the gradients, shape ``(P, N)``.
      mixes: whether an element of the sum depends on others, as in a product of matrices. Then
        rounding is small beside the largest elements, and not beside each. What is rounded also
        differs between transports, which add up products in different orders.
      waits: how long an element of a constant gradient waits at most, in P n/k steps. Longer where
        elements are chosen at random, or where a threshold lets far more than k of them through.
      reaches: what the time-averaged update of a constant gradient reaches, if it is not the mean
        gradient: the lowest and the highest value of each element, from gradients of shape
        ``(P, n)``.
      pushes: what its memory adds to the residual, if that is not the gradient: a function of the
        memory's arrays by name, shape ``(P, n)``, and of the gradients.
      frequencies: the side of the tiles whose frequencies the residuals are, if they are.
      rule: the update of a step, shape ``(N,)``, and what is taken off the workers' vectors, shape
        ``(P, N)``, where the update is no mean of the latter.
      card: what the tables say of the preset of this name; None for its variants.
    """

    name: str
    make: Callable[..., jsparse.SparseAllReduce]
    oracle: Callable[..., Any] | None = None
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 16)
    sparse: bool = True
    keeps: bool = True
    bound: Callable[[int, int, int], float] | None = None
    oracle_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    selects: Callable[..., Any] | None = None
    gpus: Mapping[int, int] | None = None
    exact: bool = True
    scale: int = 1
    dense_steps: int = 0
    alike: bool = True
    lossy: Callable[[Any], Any] | None = None
    mixes: bool = False
    waits: float = 1.5
    reaches: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    pushes: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray] | None = None
    frequencies: int | None = None
    rule: Callable[[Any], tuple[np.ndarray, np.ndarray]] | None = None
    card: Card | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def preset(self) -> str:
        return self.name.partition("-")[0]

    @property
    def usual_size(self) -> int:
        """The number of workers in the quick tests: 3, over two levels 2 x 2 workers, or the
        fewest above one.
        """
        preferred = 3 if self.gpus is None else 4
        return preferred if preferred in self.sizes else min((size for size in self.sizes if size > 1), default=1)


def some(row: Row, *sizes: int) -> list[int]:
    """Those of these numbers of workers that the row has, and its usual one."""
    return sorted({row.usual_size, *sizes} & {row.usual_size, *row.sizes})


def case(row: Row, size: int, *more: Any, slow: bool = False, full: bool = False) -> Any:
    """A test's parameters ``row``, ``size`` and more: quick at the usual size of the rows in
    ``QUICK``.
    """
    quick = row.name in QUICK and size == row.usual_size and not full
    marks = [pytest.mark.slow] if slow else [] if quick else [pytest.mark.full]
    return pytest.param(row, size, *more, id="-".join(map(str, (row, size, *more))), marks=marks)


def parts(row: Row) -> set[type]:
    """The classes of the selectors, all-reduces, wire formats and quantizers that a row's
    transformation has.
    """

    def within(part: Any) -> Iterator[type]:
        if isinstance(part, tuple):
            for item in part:
                yield from within(item)
        elif dataclasses.is_dataclass(part):
            if type(part).__module__.split(".")[1] in ("select", "allreduce", "wire", "quantize"):
                yield type(part)
            for field in dataclasses.fields(part):
                yield from within(getattr(part, field.name))

    axis = "workers" if row.gpus is None else ("nodes", "gpus")
    return set(within(row.make(axis, DENSITY).synchroniser))


def quick_rows() -> set[str]:
    """The first row of each preset, and those that have a part that no row before has: the others
    are settings.
    """
    found, seen = set(), set()
    for row in sorted(ROWS, key=lambda row: row.name != row.preset):
        new = {row.preset, *parts(row)} - seen
        if new:
            found.add(row.name)
            seen |= new
    return found


def oktopk_bound(n: int, k: int, size: int) -> float:
    return 8 * k * (size - 1) / size + 16 * size + 512


def hitopk_bound(n: int, k: int, size: int) -> float:
    """The bound for two levels and any split of the workers.

    The shards' parts of k are rounded up.
    """
    return 2 * n + 2 * (k + size) * size + 8


def hitopk(**kwargs: Any) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda axes, density: jsparse.hitopk(*axes, density=density, **kwargs)


def hitopk_selecting(make: Callable[[float], Any]) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda axes, density: jsparse.hitopk(*axes, density=density, select=make(density))


def gaussiank(adjust: Literal["oktopk", "never"]) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda comm, density: jsparse.gaussiank(comm, select=select.GaussianThreshold(density, adjust))


def powersgd(subtract: Literal["local", "mean"] = "local") -> Callable[..., jsparse.SparseAllReduce]:
    """Of rank 2; at density 1 of a rank at which factors are longer than matrices, so all goes
    densely.
    """
    return lambda comm, density: jsparse.powersgd(comm, rank=2 if density < 1 else 20, subtract=subtract)


def dion_rule(step: Any) -> tuple[np.ndarray, np.ndarray]:
    """Dion for the one matrix, 20 by 30, at the vector's end; the mean of all other leaves."""
    update, taken = step.acc.mean(0, dtype=np.float64), step.acc.astype(np.float64)
    matrices, q = step.acc[:, -600:].reshape(-1, 20, 30), np.asarray(step.before.buckets[0].reducer.q[0])[0]
    low, off = oracles.dion(matrices, q, 0.9)
    update[-600:], taken[:, -600:] = low.ravel(), off.reshape(-1, 600)
    return update, taken


def powersgd_bound(n: int, k: int, size: int) -> float:
    """Factors of two columns of the one matrix, 20 by 30, and all other leaves; and the opening
    exchange.
    """
    return 2 * (n - 600 + 2 * (20 + 30) + 2) * (size - 1) / size + 3


def oktopk(**kwargs: Any) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda comm, density: jsparse.oktopk(comm, density=density, **kwargs)


def oktopk_form(**kwargs: Any) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda comm, density: jsparse.sparse_allreduce(
        comm, select=select.TopK(density), allreduce=jsparse.allreduce.OkTopk(**kwargs)
    )


def topk_allgather_selecting(make: Callable[[float], Any]) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda comm, density: jsparse.topk_allgather(comm, density=density, select=make(density))


def stochastic(acc: Any, step: int, rank: int, last: float) -> Any:
    """The oracle of ``StochasticTopK(DENSITY, bucket=64)``."""
    numbers = uniform(key_of(0, step, rank), len(acc))
    return oracles.stochastic_in_buckets(acc, round(DENSITY * len(acc)), numbers, bucket=64, step=step)


def reused(acc: Any, step: int, rank: int, last: float) -> Any:
    """The oracle of ``ReusedThreshold(DENSITY, 4, correct=False)``."""
    return oracles.reused_threshold(acc, round(DENSITY * len(acc)), last, step, 4)


def oktopk_selecting(make: Callable[[float], Any]) -> Callable[..., jsparse.SparseAllReduce]:
    return lambda comm, density: jsparse.oktopk(comm, density=density, select=make(density))


def in_tiles(comm: Any, density: float, **kwargs: Any) -> jsparse.SparseAllReduce:
    """The largest 3 of every 60, the default density, in tiles of 8 by 8."""
    select, gather = jsparse.select.BlockTopK(round(60 * density), 60), jsparse.allreduce.TopkAllGather()
    return jsparse.sparse_allreduce(comm, select=select, allreduce=gather, tiles=8, **kwargs)


def dense_first(dense: Any, *sparse: Any) -> jsparse.SparseAllReduce:
    """Phases of two steps each; the last has no end."""
    *stages, last = dense, *sparse
    return jsparse.phases((*((2, stage) for stage in stages), last))


def oktopk_compact_bound(n: int, k: int, size: int) -> float:
    return 4 * k * (size - 1) / size + 16 * size + 512


def wired(preset: Callable[..., jsparse.SparseAllReduce], values: Any, **kwargs: Any):
    """A preset on the compact wire with these values."""
    return lambda axis, density: preset(
        *(axis if isinstance(axis, tuple) else [axis]), density=density, wire=jsparse.wire.Compact(values), **kwargs
    )


select, quantize = jsparse.select, jsparse.quantize
# Values that keep integers; values that depend on others in the message; values that also depend
# on chance.
BF16, BLOCKS, LEVELS = quantize.BFloat16(), quantize.Block8(64), quantize.QSGD(7, 64, "max", contract=True)
# Nodes by workers: 1x1, 1x2, 1x3, 2x2, 5x1, 7x1, 2x4, 4x4, 8x8, 16x16; and 1x7, 4x2, 16x4, 64x4.
GPUS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1, 7: 1, 8: 4, 16: 4, 64: 8, 256: 16}
OTHER_GPUS = {7: 7, 8: 2, 64: 4, 256: 4}
SEARCHES = {"searches": 30}  # Of MSTopK.
ROWS = [
    Row(
        "dense",
        lambda comm, density: jsparse.dense(comm),
        oracles.dense,
        sparse=False,
        card=Card("one message, or overlapped buckets", "`8n(P-1)/P`", "", "fast networks"),
    ),
    Row("dense-bucketed", lambda comm, density: jsparse.dense(comm, bucket_bytes=1000), oracles.dense, (3, 8), False),
    Row(
        "parameter_server",
        lambda comm, density: jsparse.parameter_server(comm),
        oracles.parameter_server,
        sparse=False,
        bound=lambda n, k, size: 2 * n * (size - 1),
        card=Card("dense through one worker, at once or some steps late", "`8n(P-1)`", "n a step late", "to compare"),
    ),
    Row(
        "a2sgd",
        lambda comm, density: jsparse.a2sgd(comm),
        lambda gradients: oracles.a2sgd([gradients])[0],
        (1, 2, 3, 8),
        sparse=False,
        bound=lambda n, k, size: 4,
        exact=False,
        alike=False,
        reaches=lambda gradients: 2 * (oracles.a2sgd([gradients])[0].mean(0),),
        card=Card(
            "A2SGD (Bhattacharya et al., CLUSTER 2021): two means; replicas differ", "`16(P-1)/P`", "", "to compare"
        ),
    ),
    Row(
        "a2sgd-leaf",
        lambda comm, density: jsparse.a2sgd(comm, per_leaf=True),
        lambda gradients: oracles.of_each_leaf(oracles.a2sgd, gradients, (7, 1, 395, 600)),
        (3, 8),
        sparse=False,
        bound=lambda n, k, size: 4 * 4,
        exact=False,
        alike=False,
        reaches=lambda gradients: 2 * (oracles.of_each_leaf(oracles.a2sgd, gradients, (7, 1, 395, 600)).mean(0),),
    ),
    Row(
        "torus",
        lambda axes, density: jsparse.torus(*axes),
        oracles.torus,
        sparse=False,
        gpus=GPUS,
        card=Card("2D torus (Mikami et al., 2018)", "`8n(m-1)/P` between nodes", "", "fast networks inside nodes"),
    ),
    Row(
        "topk_allgather",
        lambda comm, density: jsparse.topk_allgather(comm, density=density),
        oracles.topk_allgather,
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        card=Card("TopkA: all-gather", "`8k(P-1)`", "n", "two or three workers"),
    ),
    Row(
        "topk_allgather-leaf",
        lambda comm, density: jsparse.topk_allgather(comm, density=density, scope="leaf"),
        sizes=(3,),
    ),
    Row(
        "gaussiank",
        lambda comm, density: jsparse.gaussiank(comm, density=density),
        oracles.gaussiank,
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        card=Card("Gaussian-k (Shi et al., 2019)", "`8k(P-1)`", "n", "to compare"),
    ),
    Row(
        "gaussiank-oktopk",
        gaussiank(adjust="oktopk"),
        oracles.gaussiank,
        (3, 8),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        oracle_args={"adjust": "oktopk"},
    ),
    Row(
        "gaussiank-never",
        gaussiank(adjust="never"),
        oracles.gaussiank,
        (3, 8),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        oracle_args={"adjust": "never"},
    ),
    Row(
        "hitopk",
        hitopk(),
        oracles.hitopk,
        bound=hitopk_bound,
        oracle_args=SEARCHES,
        gpus=GPUS,
        card=Card(
            "HiTopKComm with MSTopK (Shi et al., MLSys 2021)",
            "`8k(m-1)/g` between nodes",
            "n/g",
            "nodes of several GPUs",
        ),
    ),
    Row(
        "hitopk-wide",
        hitopk(),
        oracles.hitopk,
        (7, 8),
        bound=hitopk_bound,
        oracle_args=SEARCHES,
        gpus=OTHER_GPUS,
    ),
    Row(
        "hitopk-no_feedback",
        hitopk(error_feedback=False),
        oracles.hitopk,
        (4, 7),
        keeps=False,
        bound=hitopk_bound,
        oracle_args=SEARCHES,
        gpus=GPUS,
        # What a node does not select never comes.
        reaches=lambda gradients: (np.minimum(gradients, 0).mean(0), np.maximum(gradients, 0).mean(0)),
    ),
    Row("hitopk-topk", hitopk_selecting(select.TopK), oracles.hitopk, (4, 7), bound=hitopk_bound, gpus=GPUS),
    Row(
        "hitopk-oktopk",
        lambda axes, density: jsparse.hitopk(*axes, density=density, allreduce=jsparse.allreduce.OkTopk()),
        sizes=(8,),
        gpus=GPUS,
    ),
    Row("hitopk-leaf", hitopk(scope="leaf", dense_below=10), sizes=(4,), gpus=GPUS),
    Row(
        "oktopk",
        oktopk(),
        oracles.oktopk,
        bound=oktopk_bound,
        card=Card(
            "Ok-Topk (Li and Hoefler, PPoPP 2022)", "at most `32k(P-1)/P + 64P + 2048`", "n", "bandwidth decides"
        ),
    ),
    Row(
        "oktopk-often",
        oktopk(tau_threshold=2, tau_region=3),
        oracles.oktopk,
        (3, 8),
        bound=oktopk_bound,
        oracle_args={"tau_threshold": 2, "tau_region": 3},
    ),
    Row("oktopk-rotate", oktopk(split="rotate"), oracles.oktopk, (3, 8), bound=oktopk_bound),
    *(
        Row(f"oktopk-{name}", oktopk_form(**form), oracles.oktopk, sizes, bound=bound, oracle_args=args)
        for name, form, sizes, bound, args in (
            ("owner", {"put_back": "owner"}, (3, 8), oktopk_bound, {"put_back": "owner"}),
            ("server", {"put_back": "server"}, (3, 8), oktopk_bound, {"put_back": "server"}),
            ("paper-balance", {"balance_above": 4.0}, (8,), None, {}),
            ("direct", {"balance_above": math.inf}, (8,), None, {}),
            ("equal-regions", {"tau_region": None}, (8,), oktopk_bound, {"tau_region": None}),
            ("narrow", {"room": 1.0}, (8,), oktopk_bound, {"room": 1.0}),
            ("uncorrected", {"correct": False}, (8,), oktopk_bound, {}),
        )
    ),
    Row("oktopk-reused", oktopk_selecting(select.ReusedThreshold), sizes=(2, 7), bound=oktopk_bound),
    Row(
        "oktopk-reused-uncorrected",
        oktopk_selecting(lambda density: select.ReusedThreshold(density, 4, correct=False)),
        oracles.oktopk,
        (2, 7),
        bound=oktopk_bound,
        selects=reused,
    ),
    Row("oktopk-sampled", oktopk_selecting(select.SampledThreshold), sizes=(2, 7), bound=oktopk_bound),
    Row(
        "oktopk-fixed",
        oktopk_selecting(lambda density: select.FixedThreshold(2.0, density)),
        sizes=(2, 7),
        bound=oktopk_bound,
        waits=12,
    ),
    Row("oktopk-mstopk", oktopk_selecting(select.MSTopK), sizes=(2, 7), bound=oktopk_bound),
    # A lower expected number, so that the three workers together do not exceed 3 k.
    Row(
        "topk_allgather-stochastic",
        lambda comm, density: jsparse.topk_allgather(comm, select=select.StochasticTopK(0.8 * density)),
        sizes=(3,),
    ),
    Row("topk_allgather-dgc", topk_allgather_selecting(select.DgcThreshold), sizes=(3,)),
    Row("topk_allgather-nonzero", topk_allgather_selecting(select.NonZero), sizes=(3,)),
    Row("topk_allgather-bucketed", topk_allgather_selecting(lambda d: select.BucketedTopK(d, 64)), sizes=(3,)),
    # 3 of every 60, the default density.
    Row(
        "topk_allgather-block",
        lambda comm, density: jsparse.topk_allgather(comm, select=select.BlockTopK(round(60 * density), 60)),
        oracles.topk_allgather,
        (3, 8),
        selects=lambda acc, step, rank, last: oracles.block_top_k(acc, 3, 60),
    ),
    # A lower density: the numbers of the leaves are rounded up, together to more than k. The
    # lengths are those of the leaves in transports.py that have elements.
    Row(
        "topk_allgather-per_leaf",
        lambda comm, density: jsparse.topk_allgather(comm, select=select.PerLeaf(select.TopK(0.9 * density))),
        oracles.topk_allgather,
        (3, 8),
        selects=lambda acc, step, rank, last: oracles.top_k_per_leaf(acc, 0.9 * DENSITY, (7, 1, 395, 600)),
    ),
    Row("oktopk-per_leaf", oktopk_selecting(lambda d: select.PerLeaf(select.ReusedThreshold(d))), sizes=(3,)),
    Row("topk_allgather-chunked", topk_allgather_selecting(select.ChunkedTopK), sizes=(3,)),
    Row("topk_allgather-random_k", topk_allgather_selecting(select.RandomK), sizes=(3,), waits=4),
    Row(
        "topk_allgather-random_k-own",
        topk_allgather_selecting(lambda density: select.RandomK(density, shared=False)),
        sizes=(3,),
        waits=4,
    ),
    Row(
        "gtopk",
        lambda comm, density: jsparse.gtopk(comm, density=density),
        oracles.gtopk,
        bound=lambda n, k, size: 2 * k * (size.bit_length() + 1) + -(-k // 32) + 4,
        card=Card("gTop-k (Shi et al., ICDCS 2019)", "`8k log P`", "n", "latency decides"),
    ),
    Row(
        "gtopk-tree",
        lambda comm, density: jsparse.gtopk(comm, density=density, topology="tree"),
        oracles.gtopk,
        (3, 8),
        bound=lambda n, k, size: 4 * k * (size - 1).bit_length() + 4,
        oracle_args={"topology": "tree"},
    ),
    Row(
        "gtopk-allgather",
        lambda comm, density: jsparse.gtopk(comm, density=density, topology="allgather"),
        oracles.gtopk,
        (3, 8),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        oracle_args={"topology": "allgather"},
    ),
    Row(
        "gtopk-owner",
        lambda comm, density: jsparse.gtopk(comm, density=density, put_back="owner"),
        oracles.gtopk,
        (2, 7, 8),
        bound=lambda n, k, size: 2 * k * (size.bit_length() + 1) + 4,
        oracle_args={"put_back": "owner"},
    ),
    Row(
        "gtopk-tree-owner",
        lambda comm, density: jsparse.gtopk(comm, density=density, topology="tree", put_back="owner"),
        oracles.gtopk,
        (3,),
        bound=lambda n, k, size: 4 * k * (size - 1).bit_length() + 4,
        oracle_args={"topology": "tree", "put_back": "owner"},
    ),
    Row(
        "gtopk-allgather-owner",
        lambda comm, density: jsparse.gtopk(comm, density=density, topology="allgather", put_back="owner"),
        oracles.gtopk,
        (3, 8),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        oracle_args={"topology": "allgather", "put_back": "owner"},
    ),
    Row(
        "ssar_recursive_doubling",
        lambda comm, density: jsparse.ssar_recursive_doubling(comm, density=density),
        oracles.topk_allgather,
        card=Card(
            "SparCML (Renggli, thesis, 2017)",
            "`8k log P` to `8k(P-1)`",
            "n",
            "workers select the same indices, few elements",
        ),
    ),
    Row(
        "ssar_split_allgather",
        lambda comm, density: jsparse.ssar_split_allgather(comm, density=density),
        oracles.topk_allgather,
        card=Card(
            "SparCML; TopkDSA in Ok-Topk's paper",
            "from `16k(P-1)/P`, by the data",
            "n",
            "workers select the same indices",
            aliases=("topk_dsa",),
        ),
    ),
    Row(
        "ssar_recursive_doubling-stochastic",
        lambda comm, density: jsparse.ssar_recursive_doubling(comm, select=select.StochasticTopK(density, bucket=64)),
        oracles.topk_allgather,
        (3, 8),
        selects=stochastic,
    ),
    Row("topk_dsa", lambda comm, density: jsparse.topk_dsa(comm, density=density), oracles.topk_allgather, (4,)),
    Row(
        "dsar_split_allgather",
        lambda comm, density: jsparse.dsar_split_allgather(comm, density=density),
        oracles.topk_allgather,
        card=Card("SparCML", "from `(8k + 4n)(P-1)/P`", "n", "the sum fills in"),
    ),
    Row(
        "dsar_split_allgather-group",
        lambda comm, density: jsparse.dsar_split_allgather(comm, density=density, group=2),
        oracles.topk_allgather,
        (2, 8),
    ),
    Row(
        "scalecom",
        lambda comm, density: jsparse.scalecom(comm, density=density),
        oracles.cyclic_top_k,
        bound=lambda n, k, size: 4 * k * (size - 1) / size + 8,
        card=Card("ScaleCom (Chen et al., NeurIPS 2020)", "`16k(P-1)/P`", "n", "workers' data are alike"),
    ),
    Row(
        "ef21_changes",
        lambda comm, density: jsparse.ef21_changes(comm, density=density, momentum=0.5),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        exact=False,
        pushes=lambda memory, gradient: 0.5 * (gradient - memory["velocity"]),
        # The sum of all changes is a momentum: their mean over the steps comes to nothing.
        reaches=lambda gradients: 2 * (np.zeros(gradients.shape[1]),),
        card=Card("EF21-SGDM (Fatkhullin et al., NeurIPS 2023)", "`8k(P-1)`", "2n", "the update must be smooth"),
    ),
    Row(
        "ef21_changes-oktopk",
        lambda comm, density: jsparse.ef21_changes(
            comm, density=density, momentum=0.0, allreduce=jsparse.allreduce.OkTopk()
        ),
        oracles.oktopk,
        sizes=(3, 8),
        bound=oktopk_bound,
        reaches=lambda gradients: 2 * (np.zeros(gradients.shape[1]),),
        pushes=lambda memory, gradient: gradient - memory["velocity"],
    ),
    # 3 of 64 coefficients.
    Row(
        "demo",
        lambda comm, density: jsparse.demo(comm, k=round(64 * density), chunk=8, decay=1.0, mean="workers"),
        sizes=(3, 8),
        exact=False,
        mixes=True,
        frequencies=8,
        card=Card(
            "DeMo (Peng et al., ICLR 2026): k frequencies of a tile of c elements",
            "`8 n k/c (P-1)`",
            "n",
            "few bytes in every step, with signs",
        ),
    ),
    Row(
        "vote",
        lambda comm, density: jsparse.vote(comm),
        sizes=(3, 8),
        sparse=False,
        keeps=False,
        bound=lambda n, k, size: 2 * (size - 1) * (-(-n // (20 * size)) + 3),
        rule=lambda step: (oracles.vote(step.acc), step.acc),
        reaches=lambda gradients: 2 * (oracles.vote(gradients),),
        card=Card("Signum, distributed Lion: the sign that most workers have", "`0.4 n (P-1)/P`", "", "sign descent"),
    ),
    Row(
        "vote-one-bit",
        lambda comm, density: jsparse.vote(comm, zeros=False),
        sizes=(3,),
        sparse=False,
        keeps=False,
        rule=lambda step: (np.where(np.where(step.acc < 0, -1, 1).sum(0) < 0, -1, 1), step.acc),
        reaches=lambda gradients: 2 * (np.where(np.where(gradients < 0, -1, 1).sum(0) < 0, -1, 1),),
    ),
    Row(
        "onebit_momentum",
        lambda comm, density: jsparse.onebit_momentum(comm, freeze_step=2, momentum=0.5),
        sizes=(3, 8),
        sparse=False,
        exact=False,
        pushes=lambda memory, gradient: 0.5 * (memory["velocity"] + gradient),
        card=Card(
            "1-bit Adam (Tang et al., ICML 2021): signs of the momentum",
            "`8n(P-1)/P`, then `n/4 (P-1)/P`",
            "2n",
            "Adam, in one bit",
        ),
    ),
    Row(
        "quantized",
        lambda comm, density: jsparse.quantized(comm, quantize=BF16),
        sizes=(3,),
        sparse=False,
        card=Card(
            "TernGrad, signs, 4 or 8 bits, bfloat16, float16: b bits a value",
            "`b/4 n (P-1)/P`",
            "n, or none",
            "bytes should halve, nothing else change",
        ),
    ),
    Row(
        "quantized-ring",
        lambda comm, density: jsparse.quantized(comm, quantize=BF16, split="ring"),
        sizes=(3, 8),
        sparse=False,
    ),
    Row(
        "quantized-ring-blocks",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.Block8(), split="ring"),
        sizes=(3,),
        sparse=False,
        exact=False,
    ),
    Row(
        "quantized-terngrad",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.TernGrad(contract=True)),
        sizes=(3,),
        sparse=False,
        exact=False,
    ),
    Row(
        "quantized-float4",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.Float4()),
        sizes=(3,),
        sparse=False,
        exact=False,
    ),
    Row(
        "quantized-int4",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.Int4(), split=False),
        sizes=(3,),
        sparse=False,
        exact=False,
    ),
    Row(
        "quantized-rotated",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.Rotated(quantize.Int4(), 64)),
        sizes=(3,),
        sparse=False,
        exact=False,
        mixes=True,
    ),
    Row(
        "quantized-sign",
        lambda comm, density: jsparse.quantized(comm, quantize=quantize.Sign()),
        sizes=(3,),
        sparse=False,
        exact=False,
    ),
    Row(
        "qsgd",
        lambda comm, density: jsparse.qsgd(comm),
        sizes=(3, 8),
        sparse=False,
        exact=False,
        lossy=oracles.qsgd_rounding,
        card=Card("QSGD (Alistarh et al., NIPS 2017), 3.2 bits a value", "`0.408 n (P-1)`", "", "to compare"),
    ),
    Row(
        "qsgd-feedback",
        lambda comm, density: jsparse.qsgd(comm, error_feedback=True),
        sizes=(8,),
        sparse=False,
        exact=False,
    ),
    Row("topk_allgather-compact", wired(jsparse.topk_allgather, quantize.Exact()), oracles.topk_allgather, (3,)),
    Row("topk_allgather-float16", wired(jsparse.topk_allgather, quantize.Float16()), sizes=(3,), exact=False),
    Row("topk_allgather-codebook", wired(jsparse.topk_allgather, quantize.Codebook(2)), sizes=(3,), exact=False),
    Row(
        "topk_allgather-deviations",
        wired(jsparse.topk_allgather, quantize.DeviationCodebook(4)),
        sizes=(3,),
        exact=False,
    ),
    Row("oktopk-bf16", wired(jsparse.oktopk, BF16), sizes=(3, 8), bound=oktopk_compact_bound),
    Row("oktopk-blocks", wired(jsparse.oktopk, BLOCKS), sizes=(8,), exact=False),
    Row("gtopk-bf16", wired(jsparse.gtopk, BF16), sizes=(7,)),
    # A message holds a part of each value, and the rest waits: in each round again.
    Row("gtopk-levels", wired(jsparse.gtopk, LEVELS), sizes=(3,), exact=False, waits=6),
    Row("gtopk-owner-bf16", wired(jsparse.gtopk, BF16, put_back="owner"), sizes=(7,)),
    # With put_back="exact", what cancels only to rounding would keep its places for ever.
    Row(
        "gtopk-owner-allgather-levels",
        wired(jsparse.gtopk, LEVELS, topology="allgather", put_back="owner"),
        sizes=(3,),
        exact=False,
    ),
    Row("gtopk-tree-blocks", wired(jsparse.gtopk, BLOCKS, topology="tree"), sizes=(5,), exact=False),
    Row("ssar_recursive_doubling-bf16", wired(jsparse.ssar_recursive_doubling, BF16), sizes=(8,)),
    Row("ssar_recursive_doubling-blocks", wired(jsparse.ssar_recursive_doubling, BLOCKS), sizes=(7,), exact=False),
    Row("ssar_split_allgather-bf16", wired(jsparse.ssar_split_allgather, BF16), oracles.split_in_bfloat16, (8,)),
    Row("ssar_split_allgather-blocks", wired(jsparse.ssar_split_allgather, BLOCKS), sizes=(3,), exact=False),
    Row(
        "dsar_split_allgather-quantized",
        lambda comm, density: jsparse.sparse_allreduce(
            comm,
            select=select.TopK(density),
            allreduce=jsparse.allreduce.DsarSplitAllGather(group=2, quantize=quantize.Block8()),
            wire=jsparse.wire.Compact(BF16),
        ),
        sizes=(8,),
        exact=False,
    ),
    Row("hitopk-bf16", wired(jsparse.hitopk, BF16), sizes=(4,), gpus=GPUS),
    Row("oktopk-leaf", oktopk(scope="leaf", dense_below=10), sizes=(3,)),
    Row(
        "dgc",
        lambda comm, density: jsparse.dgc(comm, density=density, momentum=0.5),
        sizes=(3, 8),
        bound=lambda n, k, size: 2 * k * (size - 1) + 4,
        scale=32,
        # What waits gathers momentum: it arrives as itself to 1 / (1 - m) times itself.
        reaches=lambda gradients: (
            np.minimum(gradients, 2 * gradients).mean(0),
            np.maximum(gradients, 2 * gradients).mean(0),
        ),
        card=Card("Deep Gradient Compression (Lin et al., ICLR 2018)", "`8k(P-1)`", "2n", "density 0.1 % and below"),
    ),
    Row(
        "phases",
        lambda comm, density: dense_first(
            jsparse.dense(comm), jsparse.oktopk(comm, density=density), jsparse.gtopk(comm, density=density)
        ),
        sizes=(3,),
        dense_steps=2,
    ),
    Row(
        "phases-leaf",
        lambda axes, density: dense_first(
            jsparse.torus(*axes), jsparse.hitopk(*axes, density=density, scope="leaf", dense_below=10)
        ),
        sizes=(4,),
        gpus=GPUS,
        dense_steps=2,
    ),
    Row(
        "phases-tiles",
        lambda comm, density: dense_first(jsparse.dense(comm), in_tiles(comm, density)),
        sizes=(3,),
        dense_steps=2,
    ),
    Row(
        "powersgd",
        powersgd(),
        sizes=(1, 2, 3, 7, 8),
        sparse=False,
        bound=powersgd_bound,
        exact=False,
        mixes=True,
        card=Card(
            "PowerSGD (Vogels et al., NeurIPS 2019): matrices by factors of rank r",
            "`8(P-1)/P (r s + d)`",
            "n, and the factors",
            "layers are large matrices",
        ),
    ),
    Row(
        "scale_by_dion",
        lambda comm, density: jsparse.scale_by_dion(comm, rank_fraction=0.1, momentum=0.9),
        sizes=(3, 8),
        sparse=False,
        bound=powersgd_bound,
        exact=False,
        mixes=True,
        rule=dion_rule,
        card=Card(
            "Dion (Ahn et al., 2025): orthonormal updates of rank r",
            "`8(P-1)/P (r s + d)`",
            "n, and the factors",
            "Muon, with fewer bytes",
        ),
    ),
    Row(
        "powersgd-mean",
        powersgd("mean"),
        sizes=(3, 8),
        sparse=False,
        bound=powersgd_bound,
        exact=False,
        mixes=True,
    ),
    Row(
        "general",
        lambda comm, density: jsparse.sparse_allreduce(
            comm, select=select.FixedThreshold(1.0, density), allreduce=jsparse.allreduce.TopkAllGather()
        ),
        sizes=(4,),
    ),
    Row("general-tiles", in_tiles, sizes=(3,)),
    Row(
        "general-contributors",
        lambda comm, density: jsparse.sparse_allreduce(
            comm,
            select=jsparse.select.TopK(density),
            allreduce=jsparse.allreduce.TopkAllGather(),
            mean="contributors",
        ),
        sizes=(3, 8),
        rule=lambda step: oracles.over_contributors(step.acc, max(1, round(DENSITY * step.acc.shape[1]))),
    ),
    Row("general-tiles-leaf", lambda comm, density: in_tiles(comm, density, scope="leaf", dense_below=10), sizes=(3,)),
]
QUICK = quick_rows()
