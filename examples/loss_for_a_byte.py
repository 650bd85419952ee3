"""Loss for a byte: which method reaches the lowest validation loss for the bytes that it sends?

A Transformer learns to predict the next byte of a text, of which each of four workers reads its
own quarter. Every method reads as many rows. Bytes are those of ``jsparse.stats``. A budget is a
part of what dense sums send: sparse methods take the density, and rounds the number of steps, that
keep within it, the former in their dearest step. Methods that have neither send what they send.

A method has six runs to tune its rates in, with one seed, at a budget of 1/256. The best rates are
run with two more seeds, and once at other budgets. (Some methods, which differ little from others
or send much, are run with two rates and one seed.)

All runs are in one process that stands for the workers. DIR has a ``train.txt`` and a
``valid.txt``, such as those of WikiText-2. Runs are lines of a file. What is in it is not run
again, so the program may be ended at any time, and goes on where it was. Run it from the root of a
checkout, after ``pip install '.[examples]'``::

    python -m examples.loss_for_a_byte DIR --out runs.jsonl
    python -m examples.loss_for_a_byte --out runs.jsonl --plot loss_for_a_byte.png
"""

import argparse
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.table
from flax import nnx

import jsparse
from examples import lines as runs
from examples import report
from examples.models import Transformer
from examples.options import folder_of, told
from jsparse import quantize, wire
from jsparse.bench import options
from jsparse.bench.command import image_file, output_file

WORKERS, ROWS, CONTEXT = 4, 4, 64  # Rows of a worker's batch, and bytes of a row.
EVALUATIONS = 10  # At most, in a run.
SEEDS = 3
AXIS = "workers"
# Six peaks of the learning rate are tried, or three with two outer rates each.
ADAM, SIGN, SGD, DEMO, DION = (
    tuple(round(least * 2**i, 6) for i in range(6)) for least in (1e-3, 1e-4, 0.05, 4e-4, 4e-3)
)


class Setting(NamedTuple):
    """What a run depends on.

    Attributes:
      method: its name.
      budget: the bytes that dense sums send, over those that it may send; 0 for methods that send
        what they send.
      rate: the peak of the learning rate.
      outer: the outer learning rate of rounds; 0 for methods of every step.
      seed: of the parameters and of the batches.
      steps: of a worker.
    """

    method: str
    budget: int
    rate: float
    outer: float
    seed: int
    steps: int


class Method(NamedTuple):
    """A method.

    Attributes:
      make: a training step or a round, and the number of steps in it, or None, of the loss
        function, the parameters, the schedule of the learning rate, and the setting.
      rates, outers: that are tried.
      budgets: for which it is run.
      seeds: with how many its best rates are run.
    """

    make: Callable[[Any, Any, optax.Schedule, Setting], tuple[Any, int | None]]
    rates: tuple[float, ...] = ADAM
    outers: tuple[float, ...] = (0.0,)
    budgets: tuple[int, ...] = (0,)
    seeds: int = SEEDS


def adamw(schedule: optax.Schedule, **options: Any) -> optax.GradientTransformation:
    options = {"b2": 0.95, "weight_decay": 0.1} | options
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, **options))


def of_signs(first: optax.GradientTransformation, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(first, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(schedule))


def sent(sync: Any, params: Any) -> float:
    """The most bytes that a synchronisation sends, over those of a dense one."""
    n = sum(leaf.size for leaf in jax.tree.leaves(params))
    return jsparse.cost.exact(sync, params, WORKERS)[1].bytes / (8 * n * (WORKERS - 1) / WORKERS)


def every_step(chain: Callable[[Any, optax.Schedule, Setting], Any], **options: Any) -> Method:
    """A method of every step, of a function that makes the chain."""

    def make(loss_fn, params, schedule, setting):
        return jsparse.train_step(loss_fn, chain(params, schedule, setting), None, AXIS), None

    return Method(make, **options)


def sparse(
    preset: Callable[[float], Any],
    optimizer: Callable[..., Any] = adamw,
    budgets: tuple[int, ...] = (256,),
    **options: Any,
) -> Method:
    """A sparse method: its density is the highest whose dearest step is within the budget."""

    def chain(params, schedule, setting):
        low, high = 1e-5, 1.0
        for _ in range(16):
            middle = math.sqrt(low * high)
            fits = sent(preset(middle), params) <= 1 / setting.budget
            low, high = (middle, high) if fits else (low, middle)
        return optax.chain(preset(low), optimizer(schedule))

    return every_step(chain, budgets=budgets, **options)


def rounds(
    sync: Any,
    outer: Callable[[float], Any],
    outers: tuple[float, float],
    inner: Callable[[optax.Schedule], Any] = adamw,
    budgets: tuple[int, ...] = (256,),
    **options: Any,
) -> Method:
    """A method of rounds, which have as few steps as keep its bytes within the budget."""

    def make(loss_fn, params, schedule, setting):
        # A round of a single step has no time for a message under way.
        least = max(sent(sync, params) * setting.budget, 2 * options.get("overlap", 0))
        fit = [steps for steps in range(1, setting.steps + 1) if setting.steps % steps == 0 and steps >= least]
        if not fit:
            raise ValueError(f"{setting}: one round sends more than the budget of all {setting.steps} steps")
        step = jsparse.local_steps(
            loss_fn, inner(schedule), None, AXIS, every=fit[0], sync=sync, outer=outer(setting.outer), **options
        )
        return step, fit[0]

    return Method(make, ADAM[1::2], outers, budgets)


def fewer_steps() -> Method:
    """AdamW with dense sums of larger batches, as few of them as keep within the budget."""

    def make(loss_fn, params, schedule, setting):
        if setting.budget > setting.steps:
            raise ValueError(f"{setting}: one step sends more than the budget of all {setting.steps} steps")
        fit = next(count for count in range(setting.budget, setting.steps + 1) if setting.steps % count == 0)

        def mean_loss(params, batches):  # One batch after the other, so that memory is that of one.
            return jnp.mean(jax.lax.map(jax.checkpoint(lambda batch: loss_fn(params, batch)), batches))

        tx = optax.chain(DENSE, adamw(lambda count: schedule(fit * count + fit // 2)))
        return jsparse.train_step(mean_loss, tx, None, AXIS), fit

    return Method(make, ADAM, budgets=(256, 32))


def nesterov(rate: float) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=0.9, nesterov=True)


def muon(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(schedule, adam_b2=0.95, weight_decay=0.1, adam_weight_decay=0.1),
    )


def selecting(select: jsparse.select.Selector) -> Any:
    return jsparse.sparse_allreduce(AXIS, select=select, allreduce=jsparse.allreduce.TopkAllGather(), wire=BF16)


def whole(preset: Any) -> Method:
    return every_step(lambda params, schedule, setting: optax.chain(preset, adamw(schedule)), **ONCE)


THREE = (256, 32, 1500)
ONCE: dict[str, Any] = {"rates": (0.004, 0.008), "seeds": 1}
BF16 = wire.Compact(quantize.BFloat16())
DENSE = jsparse.dense(AXIS)
FOUR_BITS = jsparse.quantized(AXIS, quantize=quantize.Float4(), error_feedback=False)
SPARSELOCO = jsparse.sparse_allreduce(
    AXIS,
    select=jsparse.select.BlockTopK(64),
    allreduce=jsparse.allreduce.TopkAllGather(),
    tiles=64,
    wire=wire.Compact(quantize.Codebook(2)),
    error_feedback=jsparse.ErrorFeedback(decay=0.95),
)
METHODS = {
    "dense": every_step(lambda params, schedule, setting: optax.chain(DENSE, adamw(schedule))),
    "dense, fewer steps": fewer_steps(),
    # The inner optimizer of MuLoCo, in every step.
    "dense, muon": every_step(lambda params, schedule, setting: optax.chain(DENSE, muon(schedule))),
    "topk_allgather": sparse(lambda density: jsparse.topk_allgather(AXIS, density=density, wire=BF16), budgets=THREE),
    "oktopk": sparse(lambda density: jsparse.oktopk(AXIS, density=density, wire=BF16), budgets=THREE),
    "gtopk": sparse(lambda density: jsparse.gtopk(AXIS, density=density, wire=BF16)),
    "scalecom": sparse(lambda density: jsparse.scalecom(AXIS, density=density)),
    "dgc": sparse(
        lambda density: jsparse.dgc(AXIS, density=density, wire=BF16, clip_norm=1.0), optax.sgd, (256, 32), rates=SGD
    ),
    # The estimate is a momentum already.
    "ef21": sparse(
        lambda density: jsparse.ef21_changes(AXIS, density=density, wire=BF16),
        lambda schedule: optax.chain(optax.trace(1.0), adamw(schedule, b1=0.0)),
    ),
    "demo": sparse(
        lambda density: jsparse.demo(AXIS, k=max(1, round(4096 * density)), wire=BF16),
        functools.partial(of_signs, optax.scale_by_sign()),
        rates=DEMO,
        budgets=THREE,
    ),
    "vote": every_step(
        lambda params, schedule, setting: of_signs(
            optax.chain(jsparse.per_worker(optax.scale_by_lion()), jsparse.vote(AXIS)), schedule
        ),
        rates=SIGN,
    ),
    "onebit_adam": every_step(
        lambda params, schedule, setting: jsparse.onebit_adam(
            AXIS, schedule, freeze_step=setting.steps // 5, b2=0.95, weight_decay=0.1
        )
    ),
    "powersgd, rank 1": every_step(
        lambda params, schedule, setting: optax.chain(jsparse.powersgd(AXIS, rank=1), adamw(schedule))
    ),
    "dion, rank 1/16": every_step(
        lambda params, schedule, setting: jsparse.dion(
            AXIS, schedule, rank_fraction=1 / 16, weight_decay=0.1, others=adamw(schedule), matrices=of_blocks
        ),
        rates=DION,
    ),
    "quantized, 4 bits": every_step(
        lambda params, schedule, setting: optax.chain(
            jsparse.quantized(AXIS, quantize=quantize.Float4()), adamw(schedule)
        )
    ),
    "local averaging": rounds(DENSE, optax.sgd, (0.7, 1.0), budgets=(256, 32)),
    "diloco": rounds(DENSE, nesterov, (0.4, 0.7), budgets=(256, 32)),
    "diloco, 4 bits": rounds(FOUR_BITS, nesterov, (0.4, 0.7), budgets=THREE),
    "muloco, 4 bits": rounds(
        FOUR_BITS, functools.partial(optax.sgd, momentum=0.6, nesterov=True), (0.4, 0.7), muon, THREE
    ),
    "streaming, 4 bits": rounds(FOUR_BITS, nesterov, (0.2, 0.4), budgets=(256, 32), fragments=2, overlap=2, merge=0.5),
    "sparseloco": rounds(SPARSELOCO, optax.sgd, (1.0, 3.0), budgets=THREE),
    "gaussiank": sparse(lambda density: jsparse.gaussiank(AXIS, density=density, wire=BF16), **ONCE),
    "topk_dsa": sparse(lambda density: jsparse.topk_dsa(AXIS, density=density, wire=BF16), **ONCE),
    "ssar_recursive_doubling": sparse(
        lambda density: jsparse.ssar_recursive_doubling(AXIS, density=density, wire=BF16), **ONCE
    ),
    "random_k": sparse(lambda density: selecting(jsparse.select.RandomK(density)), **ONCE),
    "block_top_k": sparse(lambda density: selecting(jsparse.select.BlockTopK(max(1, round(4096 * density)))), **ONCE),
    "stochastic_top_k": sparse(lambda density: selecting(jsparse.select.StochasticTopK(density)), **ONCE),
    "qsgd": whole(jsparse.qsgd(AXIS)),
    "quantized, 8 bits": whole(jsparse.quantized(AXIS, quantize=quantize.Block8())),
    "quantized, TernGrad": whole(jsparse.quantized(AXIS, quantize=quantize.TernGrad())),
    "quantized, sign": whole(jsparse.quantized(AXIS, quantize=quantize.Sign())),
}


def of_blocks(params: Any) -> Any:
    """Which leaves Dion updates: all but the embedding and the last layer."""
    return jax.tree.map_with_path(lambda path, _: "blocks" in jax.tree_util.keystr(path), params)


class Task(NamedTuple):
    """The model and its text.

    Attributes:
      loss_fn: the mean loss of rows of bytes and those that follow.
      params: the first parameters.
      text: uint8, shape ``(WORKERS, bytes)``.
      tests: rows of the validation text, and the bytes that follow.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    text: jax.Array
    tests: tuple[jax.Array, jax.Array]


def task_of(directory: pathlib.Path, seed: int) -> Task:
    text, valid = (np.fromfile(directory / f"{part}.txt", np.uint8) for part in ("train", "valid"))
    part = len(text) // WORKERS
    begins = np.linspace(0, len(valid) - CONTEXT - 1, 1024, dtype=int)
    model = Transformer(256, width=64, heads=4, inner=256, layers=2, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    return Task(
        lambda params, batch: nnx.merge(graph, params).loss(*batch),
        nnx.as_pure(params),
        jnp.asarray(text[: part * WORKERS].reshape(WORKERS, part)),
        rows(jnp.asarray(valid), jnp.asarray(begins)),
    )


def rows(text: jax.Array, begins: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of bytes from these places on, and the bytes that follow them."""
    found = text[begins[..., None] + jnp.arange(CONTEXT + 1)].astype(jnp.int32)
    return found[..., :-1], found[..., 1:]


def train(task: Task, setting: Setting) -> dict[str, Any]:
    """A run: its losses, bytes and seconds, after about each tenth of the steps, or each round."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, setting.rate, setting.steps // 20, setting.steps)
    step, every = METHODS[setting.method].make(task.loss_fn, task.params, schedule, setting)
    in_round = every or 1
    multiples = range(in_round, setting.steps + 1, in_round)
    part = next(steps for steps in multiples if steps * EVALUATIONS >= setting.steps and setting.steps % steps == 0)

    def worker(text, state, begins):
        def one(carry, begins):
            state, total = carry
            state, _ = step(state, rows(text, begins if every else begins[0]))
            return (state, total + 4.0 * jsparse.stats(state.opt_state).words.sum()), None

        return jax.lax.scan(one, (state, jnp.float32(0)), begins.reshape(part // in_round, in_round, ROWS))[0]

    begin = jax.jit(jax.vmap(lambda _: step.init(task.params), axis_name=AXIS))
    go_on = jax.jit(jax.vmap(worker, axis_name=AXIS), donate_argnums=1)
    evaluate = jax.jit(task.loss_fn)
    rng = np.random.default_rng(setting.seed)
    state, line, start = begin(jnp.arange(WORKERS)), {"at": [], "bytes": [], "loss": []}, time.perf_counter()
    for number in range(setting.steps // part):
        begins = rng.integers(0, task.text.shape[1] - CONTEXT, (WORKERS, part, ROWS))
        state, total = go_on(task.text, state, jnp.asarray(begins))
        # A run that has diverged is NaN on all workers.
        alike = jax.tree.map(lambda x: bool(((x == x[:1]) | jnp.isnan(x).all(0)).all()), state.params)
        if not all(jax.tree.leaves(alike)):
            raise AssertionError(f"replicas differ: {setting}")
        params = jax.tree.map(lambda x: x[0], state.params)
        line["at"].append((number + 1) * part)
        line["bytes"].append(float(total.max()) + (line["bytes"] or [0.0])[-1])
        line["loss"].append(float(evaluate(params, task.tests)))
    return setting._asdict() | {"every": every or 0, "seconds": time.perf_counter() - start} | line


def settings(methods: list[str], budgets: list[int], steps: int, lines: list[dict[str, Any]]) -> Iterator[Setting]:
    """What is to be run, in an order in which an early end leaves most.

    First all rates of all methods, at 1/256 or without a budget. Then the best of these, with a
    second seed, once at the other budgets, and with a third seed.
    """
    for name in methods:
        if (budget := METHODS[name].budgets[0]) in (0, *budgets):
            for rate in METHODS[name].rates:
                for outer in METHODS[name].outers:
                    yield Setting(name, budget, rate, outer, 0, steps)
    chosen = {name: best(of(lines, name, METHODS[name].budgets[0], steps, 0)) for name in methods}

    def again(seed: int) -> Iterator[Setting]:
        for name, found in chosen.items():
            if found and found["budget"] in (0, *budgets) and seed < METHODS[name].seeds:
                yield Setting(name, found["budget"], found["rate"], found["outer"], seed, steps)

    first, *others = range(1, SEEDS)
    yield from again(first)
    for name, found in chosen.items():
        for budget in METHODS[name].budgets[1:]:
            if found and budget in budgets:
                yield Setting(name, budget, found["rate"], found["outer"], 0, steps)
    for seed in others:
        yield from again(seed)


def of(lines: list[dict[str, Any]], name: str, budget: int, steps: int, seed: int) -> list[dict[str, Any]]:
    wanted = {"method": name, "budget": budget, "steps": steps, "seed": seed}
    return [line for line in lines if wanted.items() <= line.items()]


def best(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    finite = [line for line in lines if math.isfinite(line["loss"][-1])]
    return min(finite, key=lambda line: line["loss"][-1], default=None)


def table(lines: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Prints the best of each method and budget; returns these runs."""
    out = rich.table.Table(
        title=f"validation loss after {steps} steps of {WORKERS} workers, nats a byte",
        caption="loss: mean over the seeds; the rates were chosen on the first of them. H: steps of a round.",
    )
    for name in ("method", "budget", "loss", "from - to", "seeds", "MB sent", "dense / sent", "H", "rate", "outer"):
        out.add_column(name, justify="left" if name == "method" else "right", no_wrap=name == "method")
    dense = best(of(lines, "dense", 0, steps, 0))
    found = []
    for name, budget in ((name, budget) for name, method in METHODS.items() for budget in method.budgets):
        first = best(of(lines, name, budget, steps, 0))
        if not first:
            continue
        same = {key: first[key] for key in ("method", "budget", "steps", "rate", "outer")}
        seeds = [line["loss"][-1] for line in lines if same.items() <= line.items()]
        found.append(first | {"mean": statistics.mean(seeds)})
        out.add_row(
            name,
            f"1/{budget}" if budget else "-",
            f"{statistics.mean(seeds):.3f}",
            f"{min(seeds):.3f} - {max(seeds):.3f}",
            str(len(seeds)),
            f"{first['bytes'][-1] / 1e6:.2f}",
            f"{dense['bytes'][-1] / first['bytes'][-1]:.0f}" if dense else "",
            str(first["every"] or ""),
            f"{first['rate']:g}",
            f"{first['outer']:g}" if first["outer"] else "",
        )
    rich.console.Console(width=120).print(out)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "directory",
        nargs="?",
        type=folder_of("train.txt", "valid.txt"),
        help="of the text; without it, no run is made",
    )
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="the runs, a JSON object a line")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), help="default all")
    parser.add_argument(
        "--budget", nargs="+", type=options.whole(1), default=[256, 32, 1500], help="default 256 32 1500"
    )
    parser.add_argument("--steps", type=options.whole(20), default=1200, help="of each run (default 1200)")
    parser.add_argument(
        "--minutes", type=options.real(0, infinite=True), default=math.inf, help="begin no run after so many"
    )
    parser.add_argument("--plot", type=image_file, metavar="FILE", help="draw loss by bytes and by steps")
    args = parser.parse_args(argv)

    with told(parser):
        lines = runs.read(args.out)
    task = functools.cache(functools.partial(task_of, args.directory))
    start = time.monotonic()
    for setting in settings(args.method, args.budget, args.steps, lines) if args.directory else ():
        if any(setting._asdict().items() <= line.items() for line in lines):
            continue
        if time.monotonic() - start > 60 * args.minutes:
            break
        with told(parser):
            lines.append(train(task(setting.seed), setting))
        runs.add(args.out, lines[-1])
        print(f"{setting}: {lines[-1]['loss'][-1]:.3f}, {lines[-1]['seconds']:.0f} s", flush=True)
        jax.clear_caches()
    found = table(lines, args.steps)
    if args.plot and found:
        report.plot_bytes(found, args.plot)


if __name__ == "__main__":
    main()
