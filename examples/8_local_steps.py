"""8. Local steps: workers that are far apart train by themselves, and synchronise every 30 steps.

A Transformer learns to predict the next byte of a text, of which each worker reads its own part.
Run it from the root of a checkout, after ``pip install '.[examples]'``, in one process that stands
for four workers, or in a process a host, over the slow links of ``jsparse network``. DIR has a
``train.txt`` and a ``valid.txt``, such as those of WikiText-2::

    python -m examples.8_local_steps --method dense diloco
    jsparse network --rate 20mbit -- python -m examples.8_local_steps DIR --distributed env
"""

import argparse
import functools
import json
import pathlib
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
from examples import report
from examples.models import Transformer
from examples.options import folder_of, told
from jsparse.bench.command import image_file, output_file
from jsparse.bench.hosts import counters
from jsparse.bench.options import real, whole
from jsparse.cli import processes

EVERY_STEP = ("dense", "oktopk")
NAMES = (*EVERY_STEP, "diloco", "streaming", "sparseloco")
EVERY, CONTEXT = 30, 64  # Steps of a round, and bytes of a row.

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "directory",
    nargs="?",
    type=folder_of("train.txt", "valid.txt"),
    help="default: this project's documents are the text",
)
parser.add_argument("--method", nargs="+", choices=NAMES, default=["diloco"], help="default diloco")
parser.add_argument("--rounds", type=whole(1), default=20, help="of 30 steps (default 20)")
parser.add_argument("--rate", type=real(above=0), default=3e-3, help="AdamW's, after its warm-up (default 0.003)")
parser.add_argument("--log", type=output_file, metavar="FILE", help="write a JSON object a line to it, for each round")
parser.add_argument("--plot", type=image_file, metavar="FILE", help="draw the runs to this image file")
processes.add_arguments(parser)
args = parser.parse_args()

# Where there are no accelerators, the workers are CPU devices.
jax.config.update("jax_num_cpu_devices", 1 if args.distributed else 4)
with told(parser):
    processes.join(args)
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
mine = [rank for rank, device in enumerate(mesh.devices) if device.process_index == jax.process_index()]

if args.directory:
    text, valid = (np.fromfile(args.directory / f"{part}.txt", np.uint8) for part in ("train", "valid"))
else:
    text = np.concatenate([np.fromfile(page, np.uint8) for page in sorted(pathlib.Path("docs").glob("*.md"))])
    text, valid = np.split(text, [len(text) * 9 // 10])
part = len(text) // mesh.size  # Each worker reads bytes of its own.

model = Transformer(256, width=64, heads=4, inner=256, layers=2, rngs=nnx.Rngs(0))
graph, params = nnx.split(model, nnx.Param)
params = nnx.as_pure(params)


def loss_fn(params, batch):
    return nnx.merge(graph, params).loss(*batch)


def rows(text, begin):
    """Rows of bytes, and the bytes that follow them."""
    rows = text[begin[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return rows[..., :-1], rows[..., 1:]


def share(number):
    """The batches of a round: in each step four rows for each of this process's workers."""
    begin = np.random.default_rng(number).integers(0, part - CONTEXT, (EVERY, mesh.size, 4))
    begin += part * np.arange(mesh.size)[:, None]
    return rows(text, begin[:, mine].reshape(EVERY, -1))


# The first two synchronise every step. Each of the others makes a round of 30 steps.
schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.rounds * EVERY // 20, args.rounds * EVERY)
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
four_bits = jsparse.quantized("data", quantize=jsparse.quantize.Float4(), error_feedback=False)
sparse = jsparse.sparse_allreduce(
    "data",
    select=jsparse.select.BlockTopK(64, block=4096),
    scope="leaf",
    tiles=64,
    allreduce=jsparse.allreduce.TopkAllGather(),
    wire=jsparse.wire.Compact(jsparse.quantize.Codebook(2)),
    error_feedback=jsparse.ErrorFeedback(decay=0.95),
)
oktopk = jsparse.oktopk("data", density=0.01, wire=jsparse.wire.Compact(jsparse.quantize.BFloat16()))
nesterov = optax.sgd(0.4, momentum=0.9, nesterov=True)
rounds = functools.partial(jsparse.local_steps, loss_fn, inner, mesh, "data", every=EVERY)
steps = {
    "dense": jsparse.train_step(loss_fn, optax.chain(jsparse.dense("data"), inner), mesh, "data"),
    "oktopk": jsparse.train_step(loss_fn, optax.chain(oktopk, inner), mesh, "data"),
    "diloco": rounds(),
    "streaming": rounds(sync=four_bits, outer=nesterov, fragments=2, overlap=2, merge=0.5),
    "sparseloco": rounds(sync=sparse, outer=optax.sgd(1.0)),
}

# All evaluations are on the same rows, which are divided among the workers.
begin = np.linspace(0, len(valid) - CONTEXT - 1, 256 * mesh.size, dtype=int).reshape(mesh.size, -1)
tests = [jax.make_array_from_process_local_data(sharding, x) for x in rows(valid, begin[mine].ravel())]
evaluate = jax.jit(loss_fn)


def sent():
    """The bytes that the interface of this host of ``jsparse network`` has sent."""
    return counters().sent if args.distributed == "env" else 0


def train_round(name, state, batches):
    for batch in zip(*batches, strict=True) if name in EVERY_STEP else [batches]:
        state, _ = steps[name](state, batch)
    return jax.block_until_ready(state)


first, lines = jax.process_index() == 0, []
log = args.log.open("w") if first and args.log else None
for name in args.method:
    train_round(name, steps[name].init(params), share(0))  # It compiles, and does not count.
    state, line = steps[name].init(params), {"method": name, "step": 0, "seconds": 0.0, "bytes": 0, "counted": 0}
    for number in range(args.rounds):
        batches, before, start = share(number), sent(), time.perf_counter()
        state = train_round(name, state, batches)
        line["seconds"] += time.perf_counter() - start
        line["counted"] += sent() - before
        line["step"] += EVERY
        words = int(jsparse.stats(state.opt_state).words.max())  # Of the last step, or round.
        line["bytes"] += 4 * words * (EVERY if name in EVERY_STEP else 1)
        line["loss"] = float(evaluate(state.params, tests))
        lines.append(dict(line))
        told = "{method}, step {step}: loss {loss:.3f}, {seconds:.1f} s, a worker sent {bytes:,} bytes"
        told += "; its interface counted {counted:,}" if args.distributed == "env" else ""
        if first:
            print(told.format(**line), flush=True)
        if log:
            print(json.dumps(line), file=log, flush=True)
if first and args.plot:
    report.plot_rounds(lines, args.plot)
