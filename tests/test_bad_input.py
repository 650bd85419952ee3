"""Invariant 7: wrong use is refused with the fix named."""

import dataclasses
import inspect
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jsparse
import transports
from jsparse._presets import files
from tiers import full
from transports import AXIS

allreduce, quantize, select = jsparse.allreduce, jsparse.quantize, jsparse.select


def general(**kwargs):
    return jsparse.sparse_allreduce(AXIS, select=select.TopK(0.1), allreduce=allreduce.TopkAllGather(), **kwargs)


def signs():
    return jsparse.quantized(AXIS, quantize=quantize.Sign())


def of_all(allreduce, **kwargs):
    return jsparse.sparse_allreduce(AXIS, select=None, allreduce=allreduce, **kwargs)


def topk(**kwargs):
    return jsparse.topk_allgather(AXIS, density=0.1, **kwargs)


ARGUMENTS = [
    (lambda: jsparse.oktopk(AXIS, density=0.0), "density is 0.0"),
    (lambda: jsparse.oktopk(AXIS, density=1.5), "density is 1.5"),
    (lambda: jsparse.topk_allgather(AXIS, density=-0.1), "density is -0.1"),
    (lambda: jsparse.topk_allgather(AXIS, density=float("nan")), "density is nan"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, tau_threshold=0), "tau_threshold is 0"),
    (lambda: jsparse.demo(AXIS, error_feedback=False), "error_feedback is False"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, tau_region=-1), "tau_region is -1"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, split="spin"), "split is 'spin'"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, put_back="nobody"), "put_back is 'nobody'"),
    (lambda: allreduce.OkTopk(balance_above=0.5), "balance_above is 0.5"),
    (lambda: allreduce.OkTopk(balance_above=float("nan")), "balance_above is nan"),
    (lambda: allreduce.OkTopk(room=3), "room is 3"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, scope="layer"), "scope is 'layer'"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, dense_below=-1), "dense_below is -1"),
    (lambda: jsparse.dense(AXIS, bucket_bytes=0), "bucket_bytes is 0"),
    (lambda: jsparse.dense(3), "mesh axis name"),
    (lambda: jsparse.dense(()), "mesh axis name"),
    (lambda: jsparse.hitopk("a", "a", density=0.1), "one of them twice"),
    (lambda: jsparse.torus(("a", "b"), "b"), "one of them twice"),
    (lambda: jsparse.hitopk("a", "b", density=0.0), "density is 0.0"),
    (lambda: jsparse.torus("a", None), "mesh axis name"),
    (lambda: jsparse.cost.exact(jsparse.torus("a", "b"), {}, 8), "size is 8"),
    (lambda: jsparse.parameter_server(AXIS, staleness=-1), "staleness is -1"),
    (lambda: jsparse.gtopk(AXIS, density=0.1, topology="ring"), "topology is 'ring'"),
    (lambda: jsparse.gtopk(AXIS, density=0.1, put_back="all"), "put_back is 'all'"),
    (lambda: jsparse.gtopk(AXIS, density=2.0), "density is 2.0"),
    (lambda: jsparse.dsar_split_allgather(AXIS, density=0.1, group=0), "group is 0"),
    (lambda: jsparse.qsgd(AXIS, levels=0), "levels is 0"),
    (lambda: jsparse.qsgd(AXIS, levels=2**15), "levels is 32768"),
    (lambda: jsparse.qsgd(AXIS, bucket=0), "bucket is 0"),
    (lambda: quantize.QSGD(scale="mean"), "scale is 'mean'"),
    (lambda: quantize.Sign(-1), "bucket is -1"),
    (lambda: quantize.Block8(0), "bucket is 0"),
    (lambda: quantize.Codebook(3), "bits is 3"),
    (lambda: jsparse.quantized(AXIS, quantize=quantize.Codebook(4)), r"quantize is Codebook\(bits=4\)"),
    (lambda: jsparse.allreduce.DsarSplitAllGather(quantize=quantize.Codebook(2)), r"Codebook\(bits=2\), which changes"),
    (lambda: jsparse.quantized(AXIS, quantize=quantize.Block8(), split="rotate"), "split is 'rotate'"),
    (lambda: jsparse.quantized(AXIS, quantize=quantize.TernGrad(), error_feedback=True), "contract=True"),
    (lambda: jsparse.gtopk(AXIS, density=0.1, wire=jsparse.wire.Compact(quantize.QSGD())), "contract=True"),
    (lambda: jsparse.ErrorFeedback(decay=0.0), "decay is 0.0; .* error_feedback=False"),
    (lambda: jsparse.ErrorFeedback(decay=1.5), "decay is 1.5"),
    (lambda: jsparse.ErrorFeedback(subtract="all"), "subtract is 'all'"),
    (lambda: general(error_feedback=0.9), r"error_feedback is 0.9; .*jsparse\.ErrorFeedback"),
    (lambda: jsparse.dgc(AXIS, density=0.0), "density is 0.0"),
    (lambda: jsparse.dgc(AXIS, density=0.1, momentum=1.0), "momentum is 1.0"),
    (lambda: jsparse.dgc(AXIS, density=0.1, momentum=-0.5), "momentum is -0.5"),
    (lambda: jsparse.dgc(AXIS, density=0.1, clip_norm=0.0), "clip_norm is 0.0"),
    (lambda: jsparse.dgc(AXIS, density=0.1, allreduce=allreduce.Dense()), "select"),
    (lambda: jsparse.phases(()), r"there are no phases: pass \(\(steps, tx\), \.\.\., tx\)"),
    (lambda: jsparse.phases(topk()), "there are no phases"),
    (lambda: jsparse.phases((topk(), topk())), "phase 0 has no end"),
    (lambda: jsparse.phases(((5, topk()), (5, topk()))), "phase 1 has an end"),
    (lambda: jsparse.phases(((0, topk()), topk())), "steps of phase 0 is 0"),
    (lambda: jsparse.phases(((2.5, topk()), topk())), "phase 0 is tuple"),
    (lambda: jsparse.phases(((2**31, topk()), topk())), "2147483648 steps"),
    (lambda: jsparse.phases(((5, optax.chain(topk(), optax.sgd(0.1))), topk())), r"optax\.chain\(jsparse\.phases"),
    (lambda: jsparse.phases(((5, topk()), optax.sgd(0.1))), "phase 1 is GradientTransformation"),
    (lambda: jsparse.phases(((5, jsparse.phases((topk(),))), topk())), "phase 0 has phases itself"),
    (lambda: jsparse.phases(((5, topk()), jsparse.oktopk("other", density=0.1))), "phase 1 .* name the same axes"),
    (lambda: jsparse.phases(((5, jsparse.hitopk("a", "b", density=0.1)), jsparse.dense("a"))), r"jsparse\.torus"),
    (lambda: jsparse.phases(((5, topk()), topk(scope="leaf"))), "phase 1 .* its scope is leaf, theirs global"),
    (lambda: jsparse.phases(((5, topk()), topk(dense_below=9))), "its dense_below is 9, theirs 0"),
    (lambda: jsparse.phases(((5, topk()), general(tiles=8))), "its tiles is 8, theirs None"),
    (lambda: general(tiles=0), "tiles is 0"),
    (lambda: jsparse.phases(((5, topk()), general(error_feedback=False))), "its memory is NoMemory"),
    (lambda: jsparse.phases(((5, topk()), jsparse.dgc(AXIS, density=0.1))), "its memory is MomentumCorrection"),
    (lambda: jsparse.phases(((5, jsparse.dense(AXIS, bucket_bytes=100)), topk())), "phase 0 .* bucket_bytes"),
    (lambda: jsparse.phases(((5, jsparse.parameter_server(AXIS, staleness=1)), topk())), "take staleness=0"),
    (lambda: jsparse.phases(((5, jsparse.powersgd(AXIS)), jsparse.demo(AXIS))), "of matrices, .* and not demo"),
    (lambda: jsparse.phases(((5, jsparse.powersgd(AXIS)), general(tiles=4))), "choose phases without tiles"),
    (lambda: of_all(jsparse.allreduce.ParameterServer(1)), "and be sent again: pass error_feedback=False"),
    (lambda: of_all(jsparse.allreduce.Dense(), wire=jsparse.wire.Compact()), "lays out sparse vectors.*leave it out"),
    (lambda: jsparse.phases(((5, topk()), jsparse.dense(AXIS)), flush=False), "leave flush out"),
    (lambda: jsparse.phases(((5, topk()), jsparse.vote(AXIS))), "phase 1 .* MajorityVote.* makes no sum"),
    (lambda: jsparse.phases(((5, jsparse.scale_by_dion(AXIS)), topk())), "phase 0 .* Orthonormal.* makes no sum"),
    (lambda: jsparse.phases(((5, jsparse.powersgd(AXIS)), jsparse.vote(AXIS))), "phase 1 .* MajorityVote.* makes no"),
    (lambda: jsparse.phases(((5, signs()), jsparse.vote(AXIS))), "phase 1 .* MajorityVote.* makes no sum"),
    (
        lambda: jsparse.phases(((5, topk(error_feedback=False)), jsparse.scale_by_dion(AXIS))),
        "phase 1 .* Orthonormal.* makes no sum",
    ),
    (
        lambda: jsparse.phases(((5, topk(error_feedback=False)), jsparse.powersgd(AXIS))),
        "phase 1 .* its residual would be dropped",
    ),
    (
        lambda: jsparse.phases(((5, signs()), topk(error_feedback=False))),
        "phase 0 .* its residual would be dropped",
    ),
    (lambda: jsparse.phases(((5, jsparse.vote(AXIS)), signs())), "phase 0 .* MajorityVote.* makes no sum"),
    (lambda: jsparse.phases(((5, jsparse.scale_by_dion(AXIS)), jsparse.dense(AXIS))), "phase 0 .* Orthonormal.* makes"),
    (lambda: jsparse.phases(((5, jsparse.powersgd(AXIS)), jsparse.scale_by_dion(AXIS))), "phase 1 .* Orthonormal"),
    (lambda: jsparse.phases(((5, jsparse.scale_by_dion(AXIS)), jsparse.vote(AXIS))), "makes no sum"),
    (lambda: jsparse.scalecom(AXIS, density=0.1, wire=jsparse.wire.Compact()), r"wire is Compact.*take wire\.Full"),
    (lambda: jsparse.dion(AXIS, 0.1, others=0.1), "others is 0.1"),
    (lambda: jsparse.dion(AXIS, 0.1, matrices={"w": True}), "matrices is {'w': True}"),
    (lambda: quantize.Rotated(quantize.Int4(), seed=-1), "seed is -1"),
    (lambda: quantize.Sign(norm="two"), "norm is 'two'"),
    (
        lambda: jsparse.demo(AXIS, decay=0.5, error_feedback=jsparse.ErrorFeedback(0.9)),
        "decay is 0.5, and error_feedback .* pass one of them",
    ),
    (lambda: select.TopK(2.0), "density is 2.0"),
    (lambda: select.SampledThreshold(0.0), "density is 0.0"),
    (lambda: select.ReusedThreshold(0.1, 0), "tau_threshold is 0"),
    (lambda: select.FixedThreshold(-1.0, 0.1), "threshold is -1.0"),
    (lambda: select.FixedThreshold(1.0, 0.0), "density is 0.0"),
    (lambda: select.MSTopK(0.1, searches=0), "searches is 0"),
    (lambda: select.DgcThreshold(0.1, sample=0.0), "sample is 0.0"),
    (lambda: select.BucketedTopK(0.1, bucket=0), "bucket is 0"),
    (lambda: select.BlockTopK(0), "k is 0"),
    (lambda: select.BlockTopK(64, block=0), "block is 0"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, select=select.BlockTopK(64)), "density is 0.1, and that of.* is 0.0156"),
    (lambda: quantize.Float4(0), "bucket is 0"),
    (lambda: quantize.Int4(bucket=-1), "bucket is -1"),
    (lambda: select.StochasticTopK(0.1, "best"), "rule is 'best'"),
    (lambda: select.StochasticTopK(0.1, bucket=500), "bucket is 500; it must be a multiple of 32"),
    (lambda: select.GaussianThreshold(0.1, "often"), "adjust is 'often'.*enough"),
    (lambda: select.RandomK(1.5), "density is 1.5"),
    (lambda: select.ChunkedTopK(0.0), "density is 0.0"),
    (lambda: select.PerLeaf(0.1), r"select is 0.1; it is the selector for each leaf, such as TopK\(0.01\)"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, select=select.PerLeaf(select.TopK(0.2))), "and that of.* is 0.2"),
    (lambda: jsparse.oktopk(AXIS, density=0.1, select=select.TopK(0.2)), "density is 0.1, and that of.* is 0.2"),
    (lambda: jsparse.oktopk(AXIS), "density is missing"),
    (lambda: jsparse.sparse_allreduce(AXIS, select=None, allreduce=allreduce.OkTopk()), "select"),
    (lambda: jsparse.sparse_allreduce(AXIS, select=select.TopK(0.1), allreduce=allreduce.Dense()), "select"),
]


PARTS = [
    getattr(room, name)
    for room in (select, quantize, jsparse.wire, allreduce)
    for name in room.__all__
    if dataclasses.is_dataclass(getattr(room, name)) and name != "Messages"
]
NEEDED = {
    "density": 0.1,
    "select": select.TopK(0.1),
    "k": 3,
    "threshold": 1.0,
    "quantize": quantize.Block8(),
    "freeze_step": 5,
}
# What a field of each type takes of the values below, unless they are out of its range.
KINDS = {bool: {True}, int: {0, 7}, float: {0, 7, 0.5, math.inf}, type(None): {None}}


def refusal(make) -> str | None:
    """The message of the ValueError; None without one."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", [*PARTS, jsparse.ErrorFeedback, jsparse.cost.Node], ids=lambda part: part.__name__)
def test_fields_hold_what_their_types_say(part: type):
    fields = [field for field in dataclasses.fields(part) if field.init]
    needed = {field.name: NEEDED[field.name] for field in fields if field.default is dataclasses.MISSING}
    for field in fields:
        kinds = typing.get_args(field.type) or (field.type,)
        fits = [fit for kind in kinds for fit in KINDS.get(kind, ())]
        for value in (None, "wrong", True, 0, 7, 0.5, math.inf, math.nan, [], {}, part):
            message = refusal(lambda: part(**{**needed, field.name: value}))  # noqa: B023
            if message is None:
                assert any(type(value) is type(fit) and value == fit for fit in fits), f"{field.name} took {value!r}"
            else:
                assert f"{field.name} is {value!r}" in message


def needed_by(name: str) -> dict:
    """What a preset can't do without."""
    if name == "sparse_allreduce":
        return {"select": select.TopK(0.1), "allreduce": allreduce.TopkAllGather()}
    options = {*files.options_of(files.presets()[name])} - {"select"}
    return {option: NEEDED[option] for option in options if option in NEEDED}


@pytest.mark.parametrize("name", sorted(files.presets()))
def test_options_of_presets_hold_what_they_should(name: str):
    preset = files.presets()[name]
    axes = ("a", "b") if "intra" in inspect.signature(preset).parameters else ("a",)
    preset(*axes, **needed_by(name))
    for option in files.options_of(preset):
        for value in ("wrong", [], {}, -0.5):
            assert f"{option} is" in (refusal(lambda: preset(*axes, **{**needed_by(name), option: value})) or "")  # noqa: B023


@pytest.mark.parametrize(("make", "message"), ARGUMENTS)
def test_arguments(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def over_workers(fn, size: int = 2):
    return jax.vmap(fn, axis_name=AXIS)(jnp.arange(size))


@pytest.mark.full
def test_groups_that_do_not_divide_the_workers():
    tx = jsparse.dsar_split_allgather(AXIS, density=0.5, group=4)
    with pytest.raises(ValueError, match=r"group is 4 with 6 workers; .* choose of 1, 2, 3, 6"):
        over_workers(lambda _: tx.update(transports.zeros(), tx.init(transports.zeros())), 6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.float8_e4m3fn])
def test_types_of_leaves(dtype):
    params = {"w": jnp.ones(3), "count": jnp.zeros(2, dtype)}
    with pytest.raises(ValueError, match=r"leaf \['count'\] has type .*keep what is not trained"):
        over_workers(lambda _: jsparse.oktopk(AXIS, density=0.5).init(params))


WHOLE = PartitionSpec()


def no_loss(params, batch):
    return jnp.zeros(())


DOORS = {
    "preset": lambda tx, mesh, params: over_workers(lambda _: tx.init(params)),
    "init": lambda tx, mesh, params: jsparse.init(optax.chain(tx, optax.adam(0.1)), params, mesh, AXIS),
    "step": lambda tx, mesh, params: jsparse.train_step(no_loss, tx, mesh, AXIS).init(params),
    "shards": lambda tx, mesh, params: jsparse.train_step(no_loss, tx, mesh, AXIS, param_specs=WHOLE).init(params),
    "over_mesh": lambda tx, mesh, params: jsparse.over_mesh(tx, mesh, AXIS).init(params),
    "gradients": lambda tx, mesh, params: jsparse.worker_value_and_grad(no_loss, mesh, AXIS)(params, ()),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("leaf", [np.tanh, "tanh"], ids=["function", "text"])
def test_a_model_with_leaves_that_are_no_arrays(door, leaf):
    params = {"w": np.ones(3, np.float32), "activation": leaf}
    with pytest.raises(ValueError, match=r"leaf \['activation'\] is .*tanh.*, which is no array: .*eqx\.partition"):
        door(jsparse.oktopk(AXIS, density=0.5), transports.mesh(2), params)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_shapes_without_values(door):
    params = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
    with pytest.raises(ValueError, match=r"leaf \['w'\] is .*, a shape without values: .*jax\.eval_shape"):
        door(jsparse.oktopk(AXIS, density=0.5), transports.mesh(2), params)


@pytest.mark.parametrize("tx", [jsparse.oktopk(AXIS, density=0.5), jsparse.dense(AXIS)], ids=["oktopk", "dense"])
def test_an_axis_that_is_not_bound(tx):
    with pytest.raises(ValueError, match=r"the axis 'workers' is not bound here: .*jsparse\.init"):
        tx.init(transports.zeros())
    state = jax.tree.map(lambda x: x[0], over_workers(lambda _: tx.init(transports.zeros())))
    with pytest.raises(ValueError, match="not bound here"):
        jax.jit(tx.update)(transports.zeros(), state)


@pytest.mark.parametrize("make", [jsparse.lars, jsparse.lamb], ids=["lars", "lamb"])
def test_an_axis_of_shared_norms_that_is_not_bound(make):
    tx, params = make(AXIS, 0.1), transports.zeros()
    state = tx.init(params)
    with pytest.raises(ValueError, match="the axis 'workers' is not bound here"):
        tx.update(params, state, params)


def test_an_axis_of_a_local_gradient_that_is_not_bound():
    with pytest.raises(ValueError, match="the axis 'workers' is not bound here"):
        jsparse.local_value_and_grad(lambda params: jnp.sum(params**2), AXIS)(jnp.ones(4))


def test_a_parameter_that_is_a_number_of_pythons():
    tx = jsparse.oktopk(AXIS, density=0.5)
    with pytest.raises(ValueError, match=r"leaf \['scale'\] is 1.0, .*jnp.asarray"):
        over_workers(lambda _: tx.init({"scale": 1.0}))


def test_a_mesh_without_the_axis():
    mesh = transports.mesh(2)
    with pytest.raises(ValueError, match=r"the mesh has axes \('workers',\), and not 'data'"):
        jsparse.init(jsparse.oktopk("data", density=0.1), transports.zeros(), mesh, "data")


def test_a_bucket_too_long_for_its_indices():
    params = [jax.ShapeDtypeStruct((2**30,), jnp.bfloat16)] * 2
    with pytest.raises(ValueError, match=r'2147483648 elements in one bucket.*scope="leaf"'):
        jsparse.oktopk(AXIS, density=0.1).synchroniser.space.buckets(jax.tree.leaves(params))
    assert len(jsparse.oktopk(AXIS, density=0.1, scope="leaf").synchroniser.space.buckets(jax.tree.leaves(params))) == 2


def test_a_state_of_other_parameters():
    tx = jsparse.oktopk(AXIS, density=0.5)

    def run(_):
        return tx.update({"w": jnp.ones(4)}, tx.init({"w": jnp.ones(3)}))

    with pytest.raises(ValueError, match="initialise the state"):
        over_workers(run)


def loss_fn(params, x):
    return jnp.sum(params["w"] * x)


@pytest.mark.parametrize(
    "tx", [topk(), full(jsparse.oktopk(AXIS, density=0.5)), jsparse.dense(AXIS)], ids=["topk", "oktopk", "dense"]
)
def test_gradients_already_summed(tx):
    """Under ``check_vma=True``, jax.grad sums the gradient of replicated parameters."""
    mesh, params = transports.mesh(2), {"w": jnp.arange(3.0)}
    state = jsparse.init(tx, params, mesh, AXIS)
    specs = jsparse.state_specs(state, AXIS)

    def step(grad):
        def local(params, state, x):
            return tx.update(grad(params, x[0]), state)[0]

        in_specs = (PartitionSpec(), specs, PartitionSpec(AXIS))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec()))

    x = jnp.array([[1.0, 2, 3], [10, 20, 30]])
    with pytest.raises(ValueError, match=r"leaf \['w'\].*already summed.*jsparse.local_value_and_grad"):
        step(jax.grad(loss_fn))(params, state, x)
    local_grad = jsparse.local_value_and_grad(loss_fn, AXIS)
    updates = step(lambda params, x: local_grad(params, x)[1])(params, state, x)
    assert updates["w"][2] == 16.5


@pytest.mark.parametrize("checked", [True, False])
def test_local_value_and_grad_is_local(checked: bool):
    """And its other arguments: ``argnums``, ``has_aux``."""
    grad = jsparse.local_value_and_grad(lambda x, p: (loss_fn(p, x), {"x": x[0]}), AXIS, argnums=1, has_aux=True)

    def local(params, x):
        (value, aux), grads = grad(x[0], params)
        return value[None], aux["x"][None], grads["w"][None]

    x = jnp.array([[1.0, 2, 3], [10, 20, 30]])
    value, aux, grads = jax.shard_map(
        local,
        mesh=transports.mesh(2),
        in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(AXIS),
        check_vma=checked,
    )({"w": jnp.ones(3)}, x)
    np.testing.assert_array_equal(value, [6, 60])
    np.testing.assert_array_equal(aux, [1, 10])
    np.testing.assert_array_equal(grads, x)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((), r"leading axes are \[\]"),
        ((jnp.ones(3), jnp.ones(4)), r"leading axes are \[\(3,\), \(4,\)\]; .*map_in_parts"),
        ((jnp.ones(()),), r"leading axes are \[\(\)\]; .*closure"),
        ((jnp.ones(3, jnp.complex64),), "a result has type complex64"),
        ((jnp.ones(3, jnp.int4),), "a result has type int4"),
    ],
)
def test_arrays_that_have_no_parts(arrays, message: str):
    with pytest.raises(ValueError, match=message):
        over_workers(lambda _: jsparse.in_parts(lambda *xs: xs, AXIS, *arrays))


def test_in_parts_without_a_row_for_each():
    with pytest.raises(ValueError, match=r"of 2 rows fn made an array of shape \(\); it must return a row for each"):
        over_workers(lambda _: jsparse.in_parts(jnp.sum, AXIS, jnp.ones(4)))


def test_map_in_parts_of_complex_results():
    with pytest.raises(ValueError, match="a result has type complex64"):
        over_workers(lambda _: jsparse.map_in_parts(jnp.fft.fft, AXIS, [jnp.ones(4)]))


def test_trust_ratios_without_parameters():
    tx = jsparse.scale_by_trust_ratio(AXIS)
    with pytest.raises(ValueError, match="need the parameters"):
        over_workers(lambda _: tx.update(transports.zeros(), tx.init(transports.zeros())))


@pytest.mark.parametrize(
    "tx",
    [jsparse.scale_by_trust_ratio(AXIS), jsparse.sharded(optax.sgd(0.1), AXIS)],
    ids=["ratio", "sharded"],
)
def test_parts_of_what_is_not_alike(tx):
    """Before the all-reduce, or without one."""
    mesh = transports.mesh(2)
    for chain in (tx, optax.chain(tx, jsparse.dense(AXIS))):
        with pytest.raises(ValueError, match=r"\] differs between workers, .*: put this after the all-reduce"):
            jsparse.init(chain, transports.zeros(), mesh, AXIS)


def test_a_sharded_state_of_others():
    tx = jsparse.sharded(optax.adam(0.1), AXIS)
    state = jax.tree.map(lambda x: x[0], over_workers(lambda _: tx.init({"w": jnp.ones(8)})))
    with pytest.raises(ValueError, match=r"have shapes .*\(4,\).*\(2,\).*for as many workers"):
        over_workers(lambda _: tx.update({"w": jnp.ones(8)}, state), 4)


def test_readers_of_a_state_without_ours():
    state = optax.adam(0.1).init({"w": jnp.ones(3)})
    for read in (jsparse.residual, jsparse.stats, jsparse.metrics):
        with pytest.raises(ValueError, match="holds no state of a jsparse transformation"):
            read(state)


def test_sync_of_a_chain():
    tx = optax.chain(jsparse.oktopk(AXIS, density=0.1), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"jsparse\.apply_sparse"):
        jsparse.sync(tx, {}, ())


def test_sync_of_phases():
    with pytest.raises(ValueError, match=r"this transformation has none: use tx\.update"):
        jsparse.sync(jsparse.phases(((5, topk()), topk())), {}, ())


def test_apply_sparse_to_other_parameters():
    update = jsparse.SparseVector(jnp.ones(1), jnp.zeros(1, jnp.int32), 4)
    with pytest.raises(ValueError, match="3 elements, the update is for 4"):
        jsparse.apply_sparse({"w": jnp.ones(3)}, update)


@pytest.mark.parametrize(
    ("made_by", "given_to"),
    [
        (topk(), jsparse.oktopk(AXIS, density=0.1)),
        (jsparse.oktopk(AXIS, density=0.1), topk()),
        (topk(), jsparse.phases(((1, topk()), topk()))),
        (topk(), jsparse.a2sgd(AXIS)),
        (jsparse.powersgd(AXIS, rank=2, min_rate=0), jsparse.powersgd(AXIS, rank=1, min_rate=0)),
    ],
    ids=["no regions", "regions", "no phases", "a2sgd", "another rank"],
)
def test_a_state_of_another_transformation(made_by, given_to):
    grads = {"w": jnp.ones((2, 8, 8))}
    state = jax.vmap(made_by.init, axis_name=AXIS)(grads)
    with pytest.raises(ValueError, match="initialise the state by the same transformation"):
        jax.vmap(given_to.update, axis_name=AXIS)(grads, state)


def step_of(tx, size: int):
    """A training step of so many workers."""
    chain = optax.chain(tx, optax.scale(-0.1))
    return jsparse.train_step(lambda params, x: jnp.sum(params["w"][None] * x), chain, transports.mesh(size), AXIS)


@pytest.mark.parametrize(
    "tx",
    [
        jsparse.parameter_server(AXIS, staleness=2),
        jsparse.oktopk(AXIS, density=0.5),
        optax.chain(jsparse.per_worker(optax.trace(0.9)), jsparse.dense(AXIS)),
    ],
    ids=["parameter_server", "oktopk", "per_worker"],
)
@pytest.mark.parametrize(("had", "have"), [(4, 2), full(2, 4)])
def test_a_state_of_another_number_of_workers(tx, had: int, have: int):
    """One that did not go through ``reshard``."""
    params = {"w": jnp.ones(8)}
    step, old = step_of(tx, have), step_of(tx, had).init(params)
    state = step.init(params)._replace(opt_state=jax.tree.map(np.asarray, old.opt_state))
    with pytest.raises(ValueError, match=r"jsparse\.reshard"):
        step(state, jnp.ones((4, 8)))


@pytest.mark.parametrize(
    "tx",
    [
        jsparse.dense(AXIS),
        jsparse.parameter_server(AXIS, staleness=2),
        jsparse.a2sgd(AXIS),
        jsparse.per_worker(optax.trace(0.9)),
    ],
    ids=["dense", "parameter_server", "a2sgd", "per_worker"],
)
def test_a_worker_with_the_state_of_two(tx):
    """As in a loop of one's own, with as many workers as divide those of the state."""
    grads = {"w": jnp.ones((4, 8))}
    state = jax.vmap(tx.init, axis_name=AXIS)(grads)
    joined = jax.tree.map(lambda x: x.reshape(2, -1), state)
    with pytest.raises(ValueError, match=r"jsparse\.reshard"):
        jax.vmap(tx.update, axis_name=AXIS)({"w": jnp.ones((2, 8))}, joined)


@pytest.mark.parametrize("number", [None, "two", 2.5, 0])
def test_micro_batches_that_are_no_number(number):
    with pytest.raises(ValueError, match=f"micro_batches is {number!r}"):
        jsparse.train_step(loss_fn, topk(), transports.mesh(2), AXIS, micro_batches=number)


def test_no_state_at_all():
    with pytest.raises(ValueError, match="is of type dict"):
        jax.vmap(lambda g: topk().update(g, {}), axis_name=AXIS)({"w": jnp.ones((2, 8))})


@pytest.mark.parametrize(
    "options",
    [{"wire": jsparse.wire.Full}, {"wire": None}, {"select": "topk"}, {"select": select.TopK}],
    ids=str,
)
def test_parts_that_are_none(options):
    with pytest.raises(ValueError, match="an object of a class that inherits from jsparse's"):
        jsparse.oktopk(AXIS, density=0.1, **options)


def test_an_option_that_is_misspelt():
    with pytest.raises(TypeError, match="perhaps 'density' is meant"):
        jsparse.oktopk(AXIS, densty=0.1)
