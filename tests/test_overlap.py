"""What may overlap with what, in the traced program and in the compiled one.

XLA compiles it for eight GPUs, without having one.

The latter needs JAX's CUDA plugin, and no GPU; docs/extending.md says how to install it.
"""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
from gpus import devices, needs_plugin
from jsparse._comm.collectives import COLLECTIVES
from tiers import quick

AXIS = "workers"
# From the backward pass's point of view the last is the first. Equal sizes would be fused
# together.
WIDTHS = (128, 160, 192, 224, 128)
PRESETS = {
    "dense": lambda: jsparse.dense(AXIS, bucket_bytes=1),
    "topk_allgather": lambda: jsparse.topk_allgather(AXIS, density=0.01, scope="leaf", dense_below=10_000),
    "oktopk": lambda: jsparse.oktopk(AXIS, density=0.01, scope="leaf", dense_below=10_000),
}
RAGGED = {"ragged": lambda: jsparse.oktopk(AXIS, density=0.01, split="ragged")}


@pytest.mark.parametrize("preset", quick(PRESETS, "topk_allgather"))
def test_a_message_waits_only_for_the_gradients_of_its_bucket_and_those_before(preset: str):
    tx, mesh = PRESETS[preset](), Mesh(np.array(jax.devices()[:4]), (AXIS,))
    leaves = [jnp.zeros(size) for size in (10_000, 11_000, 12_000)]
    state = jsparse.init(tx, leaves, mesh, AXIS)
    specs = jsparse.state_specs(state, AXIS)
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(PartitionSpec(AXIS), specs), out_specs=(PartitionSpec(), specs)
    )
    program = jax.make_jaxpr(update)([jnp.zeros(4 * leaf.size) for leaf in leaves], state).eqns[0].params["jaxpr"]

    # Constants stand before the arguments.
    arguments = program.invars[-len(jax.tree.leaves((leaves, state))) :]
    waits_for = {var: {i} for i, var in enumerate(arguments[: len(leaves)])}
    first, branches = {}, 0
    for eqn in program.eqns:
        needs = set().union(*(waits_for.get(var, ()) for var in eqn.invars if not isinstance(var, Literal)))
        # Lowering chooses a branch for each platform, so nothing waits for that choice.
        if eqn.primitive.name == "cond" and not eqn.params.get("branches_platforms"):
            needs = needs | {f"branch {branches}"}
            branches += 1
        waits_for |= dict.fromkeys(eqn.outvars, needs)
        gradients = frozenset(need for need in needs if isinstance(need, int))
        if eqn.primitive.name in COLLECTIVES and gradients:
            first.setdefault(gradients, len(needs) - len(gradients))
    assert list(first) == [{2}, {1, 2}, {0, 1, 2}]
    # Ok-Topk's regions are found in a branch; its predecessors' other branches it does not wait
    # for.
    assert list(first.values()) == ([1, 2, 3] if preset == "oktopk" else [0, 0, 0])


class Op(NamedTuple):
    """An instruction of the compiled program, in the order in which they run."""

    name: str
    kind: str
    inputs: frozenset[str]
    text: str

    @property
    def is_backward(self) -> bool:
        """Whether it multiplies matrices of the backward pass."""
        return "transpose(" in self.text and ("dot" in self.name or "dot_general" in self.text or "gemm" in self.name)


class Program:
    """A computation of the compiled text."""

    def __init__(self, text: str):
        self.ops: list[Op] = []
        self.ancestors: dict[str, frozenset[str]] = {}
        for line in text.splitlines():
            found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([a-z][a-z\-]*)\((.*)", line)
            if found:
                name, kind, rest = found.groups()
                inputs = frozenset(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
                self.ops.append(Op(name, kind, inputs, line))
                self.ancestors[name] = inputs.union(*(self.ancestors.get(i, frozenset()) for i in inputs))

    def messages(self, kind: str) -> list[tuple[Op, list[Op]]]:
        """Asynchronous collectives of a kind, each with the operations between start and end."""
        result = []
        for i, op in enumerate(self.ops):
            if op.kind == f"{kind}-start" and '"is_sync":true' not in op.text:
                end = next(j for j, other in enumerate(self.ops) if op.name in other.inputs and "-done" in other.kind)
                result.append((op, self.ops[i + 1 : end]))
        return result

    def needed(self, op: Op, test) -> int:
        """How many instructions that pass a test an instruction waits for."""
        return sum(other.name in self.ancestors[op.name] and test(other) for other in self.ops)


def loss_fn(params, batch):
    x, y = batch
    for i, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"][None]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return jnp.mean((x - y) ** 2)


@functools.cache
def compiled(preset: str) -> str:
    """A training step, compiled for eight GPUs."""
    tx = optax.chain((PRESETS | RAGGED)[preset](), optax.sgd(0.1))
    return compiled_step(lambda mesh: jsparse.train_step(loss_fn, tx, mesh, AXIS))


def compiled_step(make, *steps: int) -> str:
    """A step over a mesh, compiled for eight GPUs; ``steps`` are those of a round."""
    params = [{"b": jnp.zeros(m), "w": jnp.zeros((n, m))} for n, m in itertools.pairwise(WIDTHS)]
    here = make(Mesh(np.array(jax.devices()[:8]), (AXIS,))).init(params)
    mesh = Mesh(np.array(devices("1x8x1")), (AXIS,))

    def there(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(lambda x: there(x, x.sharding.spec), here)
    parted = PartitionSpec(*[None for _ in steps], AXIS)
    batch = [there(jnp.zeros((*steps, 4096, WIDTHS[i])), parted) for i in (0, -1)]
    with jax.set_mesh(mesh):
        return make(mesh).lower(state, batch).compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()


def main(text: str) -> Program:
    assert "is_scheduled=true" in text
    return Program(text[text.index("\nENTRY") :])


@pytest.mark.full
@needs_plugin
def test_dense_buckets_overlap_with_the_backward_pass():
    program = main(compiled("dense"))
    sums = program.messages("all-reduce")
    assert len(sums) >= 2 * (len(WIDTHS) - 1), "XLA has merged them"
    overlapped = [any(op.is_backward for op in meanwhile) for _, meanwhile in sums]
    assert sum(overlapped) >= len(WIDTHS) - 2


@needs_plugin
@pytest.mark.full
def test_sparse_buckets_overlap_with_each_other_and_with_the_backward_pass():
    program = main(compiled("topk_allgather"))
    gathers = program.messages("all-gather")
    assert len(gathers) == len(WIDTHS) - 1, "XLA has merged them"
    waits = [program.needed(op, lambda other: other.is_backward) for op, _ in gathers]
    assert waits == sorted(set(waits)), "each waits for more of the backward pass than the one before"
    assert all(any(op.kind == "fusion" for op in meanwhile) for _, meanwhile in gathers)
    assert any(op.is_backward for _, meanwhile in gathers for op in meanwhile)


@needs_plugin
@pytest.mark.full
def test_oktopk_buckets_overlap_with_each_other_except_in_branches():
    text = compiled("oktopk")
    program = main(text)
    exchanges = program.messages("all-to-all")
    assert len(exchanges) == len(WIDTHS) - 1
    for i, (exchange, _) in enumerate(exchanges):
        # A bucket's own regions and its predecessors', and none of the branches in which results
        # are gathered.
        assert 1 <= program.needed(exchange, lambda op: op.kind == "conditional") <= i + 1
    assert any(op.kind == "fusion" for _, meanwhile in exchanges for op in meanwhile)
    # What is gathered in a branch begins and ends there.
    gathers = [part for part in text.split("\n\n") if "all-gather-start(" in part and not part.startswith("ENTRY")]
    assert gathers
    assert all(part.count("all-gather-start(") == part.count("all-gather-done(") for part in gathers)


@needs_plugin
@pytest.mark.full
def test_a_ragged_split_compiles_for_gpus():
    """The CPU has no such collective."""
    assert compiled("ragged").count(" ragged-all-to-all(") + compiled("ragged").count(" ragged-all-to-all-start(") == 1


ROUNDS = {
    "overlap": {"overlap": 2},
    "fragments": {"overlap": 2, "fragments": 2, "merge": 0.5},
    "sparse": {"overlap": 2, "sync": jsparse.topk_allgather(AXIS, density=0.01)},
    "eager": {"eager": True},
}


@needs_plugin
@pytest.mark.full
@pytest.mark.parametrize("form", ROUNDS)
def test_local_steps_run_while_a_message_is_under_way(form: str):
    """Between start and end of each long message of a round there is a loop of inner steps."""

    def make(mesh):
        return jsparse.local_steps(loss_fn, optax.sgd(0.1), mesh, AXIS, every=12, **ROUNDS[form])

    program = main(compiled_step(make, 12))
    long = [
        meanwhile
        for op, meanwhile in program.messages("all-gather" if form == "sparse" else "all-reduce")
        if max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"[fs]32\[([\d,]+)\]", op.text)) > 1000
    ]
    assert len(long) == ROUNDS[form].get("fragments", 1)
    assert all(any(op.kind == "while" for op in meanwhile) for meanwhile in long)
