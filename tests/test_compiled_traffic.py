"""What a compiled program sends: which axes it crosses, how many bytes, and whose it is."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
from gpus import devices, needs_plugin
from jsparse._comm.collectives import Branches, Collective
from jsparse._comm.compiled import _Program
from tiers import quick

AXIS = "workers"
MESHES = {"2x4": {"replica": 2, "fsdp": 4}, "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2}}
IN_ORDER, MIXED = (0, 1, 2, 3, 4, 5, 6, 7), (3, 6, 1, 0, 7, 4, 2, 5)


def mesh_of(name: str, order: tuple[int, ...] = IN_ORDER) -> Mesh:
    sizes = MESHES[name]
    return Mesh(np.array(jax.devices())[list(order)].reshape(tuple(sizes.values())), tuple(sizes))


def mapped(fn, mesh: Mesh):
    """The function on each device's part of an array."""
    along = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=along, out_specs=along, check_vma=False))


def compiled(fn, *args) -> jax.stages.Compiled:
    return jax.jit(fn).lower(*args).compile()


def sent(traffic: jsparse.Traffic) -> set[tuple]:
    """What is sent, but for the order and for the shapes that XLA gives it."""
    return {(part.name, part.axes, part.times, part.cost) for part in traffic.collectives}


# Real programs.


@pytest.mark.parametrize("order", [IN_ORDER, MIXED], ids=["in order", "mixed"])
@pytest.mark.parametrize("name", MESHES)
def test_each_collective_crosses_its_axes(name: str, order: tuple[int, ...]):
    """As the traced program names them. No two have the same kind and length."""
    mesh = mesh_of(name, order)
    subsets = [axes for count in (1, 2, 3) for axes in itertools.combinations(mesh.axis_names, count)]

    def program(x):
        results = []
        for number, axes in enumerate(subsets):
            here, size = x[: 32 * (number + 1)], int(np.prod([mesh.shape[axis] for axis in axes]))
            rows = here.reshape(size, -1)
            results += [lax.psum(here, axes), lax.pmax(here, axes), lax.pmin(here, axes), lax.all_gather(here, axes)]
            results += [lax.all_to_all(rows, axes, 0, 0), lax.psum_scatter(rows, axes)]
            results += [lax.ppermute(here, axes, [(size - 1, 0)])]
        return sum(jnp.sum(jnp.sin(result)) for result in results)[None]

    step, x = mapped(program, mesh), jnp.ones(8 * 1000)
    found = jsparse.traffic(step.lower(x).compile(), mesh=mesh)
    traced = jsparse.traffic(step, x)
    assert found.bytes == traced.bytes
    assert found.axes == traced.axes == mesh.axis_names
    for axes in subsets:
        assert found.over(axes).bytes == traced.over(axes).bytes < (axes == mesh.axis_names) + found.bytes
    for kind in ("all_gather", "all_to_all", "psum_scatter", "ppermute"):
        one, other = ({part for part in sent(traffic) if part[0] == kind} for traffic in (found, traced))
        assert one == other, kind
    for kind in ("psum", "pmax", "pmin"):
        for axes in subsets:
            one, other = (
                sum(part.cost.bytes for part in traffic.parts if (part.name, part.axes) == (kind, axes))
                for traffic in (found, traced)
            )
            assert one == other > 0, (kind, axes)


@pytest.mark.parametrize("order", [IN_ORDER, MIXED], ids=["in order", "mixed"])
def test_what_xla_adds_is_not_ours(order: tuple[int, ...]):
    """The gradient's sum over the axis of the batch, and the layer that is gathered for it."""
    mesh = mesh_of("2x4", order)

    def there(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = there((64, 32), PartitionSpec("fsdp")), there((16, 64), PartitionSpec(("replica", "fsdp")))
    program = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x).compile()
    traffic = jsparse.traffic(program, mesh=mesh)
    assert [part.ours for part in traffic.collectives] == [False] * len(traffic.parts)
    assert all(part.op_name for part in traffic.collectives)
    # A quarter of the weights is summed over both replicas; all other messages stay inside.
    across = traffic.over("replica")
    assert [(part.name, part.axes) for part in across.parts] in (
        [("psum", ("replica",))],
        [("psum", ("replica", "fsdp"))],
    )
    assert across.bytes >= 4 * 64 * 32 // 4
    assert traffic.over("fsdp").bytes >= 4 * 64 * 32 * 3 // 4
    assert "by XLA for jit(" in str(traffic)


@pytest.mark.parametrize("local", [True, False], ids=["local gradients", "summed gradients"])
def test_nothing_of_xla_crosses_the_slow_axis(local: bool):
    """A layer that is sharded inside a slow network. Between replicas only the selected is sent.

    Unless the gradient of replicated weights is taken by ``jax.grad``, which sums it.
    """
    mesh, specs = mesh_of("2x4", MIXED), PartitionSpec("fsdp")
    tx = jsparse.over_mesh(jsparse.topk_allgather("replica", density=0.05), mesh, "replica", specs)

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    @jax.jit
    def step(w, x):
        if local:
            grads = jsparse.worker_value_and_grad(loss, mesh, "replica", specs)(w, x)[1]
        else:
            grads = jnp.stack([jax.grad(loss)(w, x)] * 2)
        return w - 0.1 * tx.update(grads, tx.init(w))[0]

    def there(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    program = step.lower(there((64, 32), specs), there((16, 64), PartitionSpec(("replica", "fsdp")))).compile()
    traffic = jsparse.traffic(program, mesh=mesh)
    across = traffic.over("replica")
    ours = [part for part in across.collectives if part.ours]
    # Of each shard's 16 x 32 elements; and the word and the flag with which a step opens.
    assert sum(part.cost.bytes for part in ours) == 2 * 4 * round(0.05 * 16 * 32) + 8
    others = {part.name for part in across.collectives if not part.ours}
    assert ("psum" in others) is not local
    assert not (local and others)
    assert traffic.over("fsdp").bytes > 4 * 64 * 32 // 2


PRESETS = {
    "dense": lambda: jsparse.dense(AXIS),
    "buckets": lambda: jsparse.dense(AXIS, bucket_bytes=500),
    "topk_allgather": lambda: jsparse.topk_allgather(AXIS, density=0.05),
    "leaf": lambda: jsparse.topk_allgather(AXIS, density=0.05, scope="leaf", dense_below=100),
    "oktopk": lambda: jsparse.oktopk(AXIS, density=0.05),
    "rotate": lambda: jsparse.oktopk(AXIS, density=0.05, split="rotate"),
    "gtopk": lambda: jsparse.gtopk(AXIS, density=0.05),
    "ssar_recursive_doubling": lambda: jsparse.ssar_recursive_doubling(AXIS, density=0.05),
    "topk_dsa": lambda: jsparse.topk_dsa(AXIS, density=0.05),
    "dsar_split_allgather": lambda: jsparse.dsar_split_allgather(AXIS, density=0.05),
    "qsgd": lambda: jsparse.qsgd(AXIS),
    "powersgd": lambda: jsparse.powersgd(AXIS),
    "parameter_server": lambda: jsparse.parameter_server(AXIS),
}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"] - y) ** 2)


def params():
    return {"w": jnp.zeros((40, 30)), "b": jnp.zeros(30), "v": jnp.zeros((30, 5))}


BATCH = (np.zeros((16, 40), np.float32), np.zeros((16, 5), np.float32))


@pytest.mark.parametrize("preset", quick(PRESETS, "topk_dsa"))
def test_a_training_step_sends_what_its_trace_says(preset: str):
    """The same bytes in every branch, in fewer messages where XLA merges sums; all of it ours."""
    mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,))
    step = jsparse.train_step(loss_fn, optax.chain(PRESETS[preset](), optax.sgd(0.1)), mesh, AXIS)
    state = step.init(params())
    traced = jsparse.traffic(step, state, BATCH)
    found = jsparse.traffic(step.lower(state, BATCH).compile(), mesh=mesh)
    assert (found.bytes, found.least.bytes) == (traced.bytes, traced.least.bytes)
    assert all(part.ours for part in found.collectives)
    assert {part.axes for part in found.collectives} == {(AXIS,)}
    # A message for each operand that XLA has merged into another's.
    merged = sum(part.cost.messages * part.payload.count(" + ") for part in found.collectives if part.name == "psum")
    merged += sum(
        part.cost.messages * (int(count) - 1)
        for part in found.collectives
        for count in re.findall(r"(\d+) x ", part.payload)
        if part.name == "psum"
    )
    assert found.messages + merged == traced.messages
    assert found.least.messages + merged == traced.least.messages


def test_everything_that_jsparse_sends_is_ours():
    """What a step averages beside gradients, and what workers share, are no part of an update."""
    mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,))
    tx = jsparse.a2sgd(AXIS)
    step = jsparse.train_step(loss_fn, tx, mesh, AXIS, params="per_worker")
    state = step.init(params())
    last = jax.jit(step.sync_params).lower(state).compile()
    lamb = optax.chain(jsparse.topk_allgather(AXIS, density=0.05), jsparse.lamb(AXIS, 0.1))
    shared = jsparse.train_step(loss_fn, lamb, mesh, AXIS)
    for program in (
        step.lower(state, BATCH).compile(),
        last,
        shared.lower(shared.init(params()), BATCH).compile(),
    ):
        found = list(jsparse.traffic(program, mesh=mesh).collectives)
        assert found
        assert all(part.ours for part in found)


def test_a_sum_of_the_model_is_not_ours_nor_is_one_that_holds_it():
    """XLA merges sums, and names each part of what it has merged."""
    mesh = mesh_of("2x4")
    comm = jsparse.AxisComm("replica")

    def both(x):
        return comm.psum(x) + lax.psum(jnp.sin(x), "replica")

    alone = [mapped(fn, mesh) for fn in (comm.psum, lambda x: lax.psum(x, "replica"), both)]
    found = [list(jsparse.traffic(fn.lower(jnp.ones(80)).compile(), mesh=mesh).collectives) for fn in alone]
    ours, theirs, merged = found
    assert [part.ours for part in ours] == [True]
    assert [part.ours for part in theirs] == [False]
    assert [(part.payload, part.ours) for part in merged] == [("2 x float32[10]", False)]


def test_loops_are_multiplied_and_branches_kept_apart():
    mesh = mesh_of("2x4")

    def program(x):
        x = lax.fori_loop(0, 5, lambda i, x: lax.psum(jnp.sin(x), "replica"), x)
        branches = [lambda: lax.psum(x, "fsdp"), lambda: lax.ppermute(x, "replica", [(0, 1)]), lambda: x]
        return lax.switch(jnp.int32(x[0]), branches)

    step, x = mapped(program, mesh), jnp.ones(800)
    found, traced = jsparse.traffic(step.lower(x).compile(), mesh=mesh), jsparse.traffic(step, x)
    loop, branches = found.parts
    assert isinstance(loop, Collective)
    assert (loop.times, loop.cost) == (5, traced.parts[0].cost)
    assert isinstance(branches, Branches)
    assert [[part.name for part in branch.parts] for branch in branches.branches] == [["psum"], ["ppermute"], []]
    assert (found.cost, found.least) == (traced.cost, traced.least)
    for traffic in (found, traced):
        across, inside = traffic.over("replica"), traffic.over("fsdp")
        assert [len(branch.parts) for branch in across.parts[1].branches] == [0, 1, 0]
        assert across.bytes == 5 * 400 + 400
        assert [len(branch.parts) for branch in inside.parts[0].branches] == [1, 0, 0]
        assert (inside.bytes, inside.least.bytes) == (600, 0)
        assert traffic.over(("replica", "fsdp")) == traffic
    assert "psum float32[100] over replica x 5, by XLA for jit(program)/" in str(found)


def test_a_loop_of_unknown_length_is_refused():
    mesh = mesh_of("2x4")

    def program(x):
        return lax.while_loop(lambda x: x[0] < 5, lambda x: lax.psum(x, "replica"), x)

    program = mapped(program, mesh).lower(jnp.ones(8)).compile()
    with pytest.raises(NotImplementedError, match="fori_loop"):
        jsparse.traffic(program, mesh=mesh)


def test_a_loop_of_unknown_length_may_be_silent():
    silent = compiled(lambda x: lax.while_loop(lambda x: x[0] < 5, jnp.sin, x), jnp.ones(8))
    assert not jsparse.traffic(silent, mesh=Mesh(jax.devices()[:1], (AXIS,))).parts


def test_arguments_that_do_not_tell_the_order_of_devices():
    """An unused one, scalars, random keys; the devices are those of the mesh inside."""
    mesh = mesh_of("2x4", MIXED)
    whole = PartitionSpec()

    @jax.jit
    def step(unused, scalar, key):
        drawn = jax.random.normal(key, (8,)) * scalar
        return jax.shard_map(
            lambda x: lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
            mesh=mesh,
            in_specs=whole,
            out_specs=whole,
            check_vma=False,
        )(drawn)

    program = step.lower(jnp.ones(3), 2.0, jax.random.key(0)).compile()
    assert [part.axes for part in jsparse.traffic(program, mesh=mesh).parts] == [("fsdp",)]
    in_order = jsparse.traffic(program, mesh=mesh_of("2x4")).parts
    assert [part.axes for part in in_order] == [("replica", "fsdp")]


def test_results_tell_the_devices_where_there_are_no_arguments():
    mesh = mesh_of("2x4", MIXED)
    along = PartitionSpec(mesh.axis_names)

    def step():
        rank = lax.axis_index(mesh.axis_names)[None]
        return lax.ppermute(rank, "fsdp", [(0, 1)])

    program = compiled(jax.shard_map(step, mesh=mesh, in_specs=(), out_specs=along, check_vma=False))
    assert [part.axes for part in jsparse.traffic(program, mesh=mesh).parts] == [("fsdp",)]
    with pytest.raises(ValueError, match="neither arguments nor results"):
        jsparse.traffic(compiled(lambda: None), mesh=mesh)


def test_wrong_use_is_refused_with_the_fix_named():
    mesh = mesh_of("2x4")
    program = mapped(lambda x: lax.psum(x, "fsdp"), mesh).lower(jnp.ones(80)).compile()
    for others in (jax.devices()[:4], jax.devices()[:1]):
        with pytest.raises(ValueError, match=r"compiled for 8 devices.* has \d.*pass the mesh along which"):
            jsparse.traffic(program, mesh=Mesh(np.array(others), ("data",)))
    for wrong in ({}, {"args": [jnp.ones(80)], "mesh": mesh}, {"axis_sizes": {"fsdp": 4}, "mesh": mesh}):
        with pytest.raises(ValueError, match="mesh=mesh"):
            jsparse.traffic(program, *wrong.pop("args", ()), **wrong)
    with pytest.raises(ValueError, match="compile"):
        jsparse.traffic(jnp.sin, jnp.ones(80), mesh=mesh)
    for traffic in (
        jsparse.traffic(program, mesh=mesh),
        jsparse.traffic(lambda x: lax.psum(x, "fsdp"), jnp.ones(8), axis_sizes=MESHES["2x4"]),
    ):
        assert not traffic.over("replica").parts
        with pytest.raises(ValueError, match=r"no axis 'replca'.*replica, fsdp"):
            traffic.over("replca")


@needs_plugin
def test_a_program_for_gpus():
    """There collectives are asynchronous, in two instructions each, and keep narrow floats."""
    sizes = MESHES["2x4"]
    mesh = Mesh(np.array(devices("1x8x1"))[list(MIXED)].reshape(tuple(sizes.values())), tuple(sizes))
    comm, inner = jsparse.AxisComm("replica"), jsparse.AxisComm("fsdp")

    def program(x):
        x = comm.psum(x.astype(jnp.bfloat16)).astype(jnp.float32) + inner.ppermute(x, [(0, 1), (1, 3)])
        x = jnp.sum(inner.all_to_all(inner.all_gather(jnp.sin(x))), axis=0) + inner.psum_scatter(jnp.stack([x] * 4))
        x = lax.fori_loop(0, 3, lambda i, x: comm.pmax(jnp.sin(x)), x)
        return lax.cond(x[0] > 0, lambda: comm.psum(jnp.cos(x)), lambda: x)

    x = jax.ShapeDtypeStruct((800,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    step = mapped(program, mesh)
    lowered = step.lower(x).compile(compiler_options={"xla_gpu_autotune_level": 0})
    assert "-start(" in lowered.as_text()
    found, traced = jsparse.traffic(lowered, mesh=mesh), jsparse.traffic(step, x)
    assert sent(found) == sent(traced)
    assert (found.cost, found.least) == (traced.cost, traced.least)
    assert all(part.ours for part in found.collectives)
    assert "psum bfloat16[100] over replica, by jsparse" in str(found)


# Texts, of all forms.


def read(*lines: str, computations: str = "", header: str = "num_partitions=8") -> list[Collective | Branches]:
    """What a text sends, on a mesh of 2 x 4."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule m, {header}\n\n{computations}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{P}\n{body}\n}}\n"
    places = np.stack(np.unravel_index(np.arange(8), (2, 4)), axis=1)
    program = _Program(text, ("replica", "fsdp"), places)
    return list(program.walk(program.entry, 1))


P = "  %p = f32[8]{0} parameter(0)"
SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}"""
REDUCE = "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%sum"
GROUPS = {
    "{{0,4},{1,5},{2,6},{3,7}}": (("replica",), 2),
    "{{0,1,2,3},{4,5,6,7}}": (("fsdp",), 4),
    "{{0,3},{1,2},{4,7},{5,6}}": (("fsdp",), 2),
    "{{0,5},{1,4},{2,7},{3,6}}": (("replica", "fsdp"), 2),
    "{{0,1,2,3,4,5,6,7}}": (("replica", "fsdp"), 8),
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": ((), 1),
    "{}": (("replica", "fsdp"), 8),
    "[2,4]<=[8]": (("fsdp",), 4),
    "[4,2]<=[8]": (("fsdp",), 2),
    "[1,8]<=[8]": (("replica", "fsdp"), 8),
    "[4,2]<=[2,4]T(1,0)": (("replica",), 2),
    "[2,4]<=[4,2]T(1,0)": (("replica", "fsdp"), 4),
    "[4,2]<=[2,2,2]T(0,2,1)": (("fsdp",), 2),
    "mesh['replica'=2,'fsdp'=4] {'replica'}": (("replica",), 2),
    "mesh['replica'=2,'fsdp'=4] {'fsdp'}": (("fsdp",), 4),
    "mesh['replica'=2,'fsdp'=4] {'replica','fsdp'}": (("replica", "fsdp"), 8),
    "mesh[a=2,b=2,c=2] {b}": (("fsdp",), 2),
    "mesh['a'=4,'b'=1,'c'=2] {'a'}": (("replica", "fsdp"), 4),
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": (("replica",), 2),
    "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}": (("fsdp",), 2),
    "mesh['a'=8] {'a':(1)2}": (("replica",), 2),
    "mesh['a'=8] {'a':(2)4}": (("fsdp",), 4),
    "mesh['a'=8] {'a':(2)2}": (("fsdp",), 2),
    "mesh['a'=8] {'a':(1)2,'a':(4)2}": (("replica", "fsdp"), 4),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_all_forms_of_groups(groups: str):
    (part,) = read(REDUCE.replace("GROUPS", groups), computations=SUM)
    axes, size = GROUPS[groups]
    assert part.axes == axes
    assert (part.cost.bytes, part.cost.messages) == (-(-2 * 32 * (size - 1) // size), 2 * (size - 1).bit_length())


MODES = {
    # Replicas and partitions, the instruction, and the axes of a mesh of 2 x 4.
    "replicas": (8, 1, "all-reduce(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum", ("replica",)),
    "replicas of each partition": (2, 4, "all-reduce(%p), replica_groups={{0,1}}, to_apply=%sum", ("replica",)),
    "replicas with their partitions": (
        *(2, 4, "all-reduce(%p), channel_id=1, replica_groups={{0},{1}}, to_apply=%sum"),
        ("fsdp",),
    ),
    "partitions of each replica": (2, 4, "all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}", ("fsdp",)),
    "pairs of partitions": (2, 4, "collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}", ("fsdp",)),
    "pairs of replicas": (2, 4, "collective-permute(%p), source_target_pairs={{0,1}}", ("replica",)),
    "to itself": (1, 8, "collective-permute(%p), channel_id=1, source_target_pairs={{1,1}}", ()),
    "no pairs": (1, 8, "collective-permute(%p), channel_id=1, source_target_pairs={}", ()),
    "all replicas": (2, 4, "all-reduce(%p), replica_groups={}, to_apply=%sum", ("replica",)),
    "all partitions": (2, 4, "all-to-all(%p), channel_id=1, replica_groups={}", ("fsdp",)),
}


@pytest.mark.parametrize("mode", MODES)
def test_groups_count_replicas_or_partitions_or_both(mode: str):
    replicas, partitions, instruction, axes = MODES[mode]
    header = f"replica_count={replicas}, num_partitions={partitions}"
    (part,) = read(f"ROOT %r = f32[8]{{0}} {instruction}", computations=SUM, header=header)
    assert part.axes == axes
    assert (part.cost.bytes > 0) == bool(axes)


EACH = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}"
GLOBAL = "dimensions={0}, use_global_device_ids=true"
# Instructions, and what they send: name, operands, bytes and messages.
FORMS = {
    "broadcast": ([f"%r = f32[8]{{0}} collective-broadcast(%p), {EACH}"], ("pbroadcast", "float32[8]", 32, 2)),
    "ragged": (
        ["%i = s32[4]{0} constant({...})", f"%r = f32[8]{{0}} ragged-all-to-all(%p, %p, %i, %i, %i, %i), {EACH}"],
        ("ragged_all_to_all", "float32[8]", 24, 3),
    ),
    "operands of other types": (
        [
            '%q = bf16[2,3]{1,0:T(8,128)(2,1)} custom-call(), custom_call_target="Name = (f) {\'"',
            f"%r = (f32[8]{{0}}, bf16[2,3]{{1,0}}) all-gather(%p, /*index=1*/%q), {EACH}, {GLOBAL}",
        ],
        ("all_gather", "float32[8] + bfloat16[2,3]", 3 * (32 + 12), 2),
    ),
    "operands with their types": (
        [f"r = (f32[8]{{0}}, f32[8]{{0}}) all-gather(f32[8]{{0}} p, f32[8]{{0:S(1)}} p), {EACH}, {GLOBAL}"],
        ("all_gather", "2 x float32[8]", 3 * 64, 2),
    ),
    "narrow types": (
        ["%q = f8e4m3fn[5]{0} copy()", "%s = pred[] copy()", f"%r = (s4[3]{{0}}) all-gather(%q, %s), {EACH}, {GLOBAL}"],
        ("all_gather", "float8_e4m3fn[5] + bool[]", 18, 2),
    ),
    "in two instructions": (
        [
            f"%s = ((f32[8]{{0}}), f32[8]{{0}}) all-to-all-start(%p), {EACH}, dimensions={{0}}",
            "%r = f32[8]{0} all-to-all-done(%s)",
        ],
        ("all_to_all", "float32[8]", 24, 3),
    ),
    "in two instructions that call": (
        [
            "%s = ((f32[8]{0}), f32[2]{0}) async-start(%p), calls=%inner",
            "%u = ((f32[8]{0}), f32[2]{0}) async-update(%s), calls=%inner",
            "%r = f32[2]{0} async-done(%u), calls=%inner",
        ],
        ("psum_scatter", "float32[8]", 24, 2),
    ),
    "in a call": (["%r = f32[2]{0} call(%p), to_apply=%inner"], ("psum_scatter", "float32[8]", 24, 2)),
    "in a fusion": (
        ["%r = f32[2]{0} fusion(%p), kind=kCustom, calls=%inner, control-predecessors={%p}"],
        ("psum_scatter", "float32[8]", 24, 2),
    ),
    "in a loop": (
        ['%r = f32[2]{0} while(%p), condition=%sum, body=%inner, backend_config={"known_trip_count":{"n":"7"}}'],
        ("psum_scatter", "float32[8]", 7 * 24, 14),
    ),
    "in the condition of a loop": (
        ['%r = f32[2]{0} while(%p), condition=%inner, body=%sum, backend_config={"known_trip_count":{"n":"7"}}'],
        ("psum_scatter", "float32[8]", 8 * 24, 16),
    ),
}
INNER = f"""%inner (p: f32[8]) -> f32[2] {{
{P}
  ROOT %r = f32[2]{{0}} reduce-scatter(%p), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, \
dimensions={{0}}, to_apply=%sum
}}, execution_thread="side" """


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_collectives(form: str):
    lines, expected = FORMS[form]
    (part,) = read(*lines, computations=f"{SUM}\n\n{INNER}")
    assert (part.name, part.payload, *vars(part.cost).values()) == expected
    assert part.axes == ("fsdp",)
    assert (part.op_name, part.ours) == ("", False)


def test_of_two_branches_the_false_one_is_the_first():
    conditional = "%r = f32[2]{0} conditional(%p, %p, %p), true_computation=%inner, false_computation=%sum"
    (branches,) = read(conditional, computations=f"{SUM}\n\n{INNER}")
    assert [len(branch.parts) for branch in branches.branches] == [0, 1]
    assert not read(conditional.replace("inner", "sum"), computations=SUM)


@pytest.mark.parametrize(
    ("opcode", "name"), [("add", "psum"), ("maximum", "pmax"), ("or", "pmax"), ("and", "pmin"), ("minimum", "pmin")]
)
def test_sums_of_other_kinds(opcode: str, name: str):
    (part,) = read(REDUCE.replace("GROUPS", "{}"), computations=SUM.replace("add(", f"{opcode}("))
    assert part.name == name


OURS = {
    "jit(step)/shard_map/jsparse/psum": True,
    "jsparse/psum_invariant": True,
    "jit(step)/jsparse/cond/branch_1_fun/psum": True,
    "jit(step)/vmap(jsparse)/psum": True,
    "jit(step)/transpose(jvp(jsparse))/psum": True,
    "jit(step)/jsparse/(a/psum:psum)": True,
    "jit(step)/(jsparse/psum:(jsparse/psum:b/jsparse/psum))": True,
    "(jsparse/psum:jit(f)/jsparse/psum)": True,
    "jit(step)/(jsparse/psum:psum)": False,
    "jit(step)/(jsparse/psum:(jsparse/psum:psum))": False,
    "jit(step)/psum": False,
    "jit(jsparse_step)/psum": False,
    "jit(step)/jsparse.optimizer/psum": False,
    # XLA names what it adds after an operation beside it.
    "jit(step)/jsparse/concatenate": False,
    "jit(step)/jsparse/all_gather": False,
    "jsparse": False,
    "": False,
}


@pytest.mark.parametrize("name", OURS)
def test_names_tell_whose_it_is(name: str):
    (part,) = read(
        f'{REDUCE.replace("GROUPS", "{}")}, metadata={{op_name="{name}" stack_frame_id=3}}', computations=SUM
    )
    assert (part.op_name, part.ours) == (name, OURS[name])
    whose = "by jsparse" if part.ours else f"by XLA for {name}" if name else "by XLA (unnamed)"
    assert str(part) == f"psum float32[8] over replica, fsdp, {whose}"


def test_what_xla_marks_as_its_own_is_not_ours():
    ours = f'{REDUCE.replace("GROUPS", "{}")}, metadata={{op_name="jsparse/psum"}}'
    theirs = ours.replace("metadata=", 'frontend_attributes={is_spmd_generated="true"}, metadata=')
    assert [part.ours for line in (ours, theirs) for part in read(line, computations=SUM)] == [True, False]


def test_names_with_quotes():
    name = r"p[\'a\']/\"x\", replica_groups={{0,1}}, to_apply=%none"
    (part,) = read(f'{REDUCE.replace("GROUPS", "[2,4]<=[8]")}, metadata={{op_name="{name}"}}', computations=SUM)
    assert part.op_name == "p['a']/\"x\", replica_groups={{0,1}}, to_apply=%none"
    assert part.axes == ("fsdp",)


UNKNOWN = {
    "groups": REDUCE.replace("GROUPS", "(0,1)"),
    "more groups": REDUCE.replace("GROUPS", "[2,4]<=[8]+1"),
    "no groups": "%r = f32[8]{0} all-reduce(%p), channel_id=1, to_apply=%sum",
    "collective": "%r = f32[8]{0} all-shuffle(%p), replica_groups={{0,1}}",
    "send": "%r = (f32[8]{0}, u32[], token[]) send(%p, %p), channel_id=1",
    "part of an array": "%r = f32[8]{0} collective-permute(%p, %p), source_target_pairs={{0,1}}, slice_sizes={{4}}",
    "type": "%q = f32[<=8]{0} copy(%p)\n  %r = f32[8]{0} all-gather(%q), replica_groups={}, use_global_device_ids=true",
    "MPI": '%r = f32[8]{0} custom-call(%p), custom_call_target="mpi_allreduce_ffi"',
    "call": "%r = f32[8]{0} frobnicate(%p), runs=%inner",
    "number of rounds": "%r = f32[8]{0} map(%p), to_apply=%inner",
    "line": "%r is f32[8]{0} add(%p, %p)",
}


@pytest.mark.parametrize("form", UNKNOWN)
def test_an_unknown_form_is_refused(form: str):
    with pytest.raises(NotImplementedError, match="known"):
        read(UNKNOWN[form], computations=f"{SUM}\n\n{INNER}")


def test_several_programs_or_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="2 programs"):
        read(computations="ENTRY %other () -> f32[] {\n}")
    with pytest.raises(NotImplementedError, match="devices"):
        read(header="num_partitions=4")


def test_what_sends_nothing():
    lines = [
        "%i = u32[] partition-id()",
        "%s = (f32[8]{0}, u32[], token[]) send(%p, %p), channel_id=1, is_host_transfer=true",
        "%t = token[] send-done(%s), channel_id=1, is_host_transfer=true",
        "%r = f32[8]{0} sort(%p), dimensions={0}, to_apply=%sum",
    ]
    assert not read(*lines, computations=SUM)
