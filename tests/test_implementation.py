"""Tests which form of an operation runs, and that the choice works under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
from kernels_pallas import _implementation

FORMS = {
    "xla": lambda x, y: (x + y, jnp.int32(0)),
    "triton": lambda x, y, interpret=False: (x + y, jnp.int32(2 if interpret else 1)),
    "mosaic": lambda x, y: (x + y, jnp.int32(3)),
}
NUMBER = {"xla": 0, "triton": 1, "interpret": 2, "mosaic": 3}


def taken(x, y=1.0, implementation=None, forms=FORMS, **options):
    return _implementation.choose(implementation, forms, x, jnp.asarray(y, jnp.float32), **options)[1]


@pytest.fixture(params=[False, True], ids=["cpu", "cuda"])
def cuda(request, monkeypatch):
    """Whether the process sees a GPU.

    If it does, the kernel and the plain form are traced, and the plain form is lowered for the
    CPU.
    """
    monkeypatch.setattr(_implementation, "sees_cuda", lambda: request.param)
    return request.param


@pytest.mark.parametrize("name", NUMBER)
def test_what_is_named_runs(name: str, cuda):
    assert taken(jnp.ones(3), implementation=name) == NUMBER[name]
    with kernels_pallas.using(name):
        assert taken(jnp.ones(3)) == NUMBER[name]
        assert taken(jnp.ones(3), implementation="mosaic") == NUMBER["mosaic"]
        with kernels_pallas.using(None):
            assert taken(jnp.ones(3)) == NUMBER["xla"]
        assert taken(jnp.ones(3)) == NUMBER[name]
    assert taken(jnp.ones(3)) == NUMBER["xla"]


def test_this_process_sees_no_gpu_that_is_not_there():
    assert _implementation.sees_cuda() == any(device.platform == "gpu" for device in jax.devices())


def test_what_was_compiled_under_one_choice_is_compiled_again_under_another(cuda):
    compiled = jax.jit(taken)
    for name in (*NUMBER, *NUMBER):
        with kernels_pallas.using(name):
            assert compiled(jnp.ones(3)) == NUMBER[name]


def test_an_operation_without_that_form_chooses_for_itself(cuda):
    forms = {"xla": FORMS["xla"]}
    with kernels_pallas.using("interpret"):
        assert taken(jnp.ones(3), forms=forms, on_cuda="xla") == NUMBER["xla"]


def test_float64_takes_the_plain_form(cuda):
    with jax.enable_x64(True):
        for name in NUMBER:
            assert taken(jnp.ones(3, jnp.float32), implementation=name) == NUMBER[name]
            assert taken(jnp.ones(3, jnp.float64), implementation=name) == NUMBER["xla"]
        assert taken(jnp.ones(3, jnp.float64)) == NUMBER["xla"]


def lowered(**options) -> str:
    def run(x):
        return _implementation.choose(None, {"xla": jnp.sin, "triton": jnp.cos, "mosaic": jnp.exp}, x, **options)

    return jax.jit(run).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()


def test_what_is_lowered_for_a_gpu(monkeypatch):
    """The lowered program has only the form that was chosen."""
    monkeypatch.setattr(_implementation, "sees_cuda", lambda: True)
    for options, operation in (({}, "cosine"), ({"on_cuda": "mosaic"}, "exponential"), ({"on_cuda": "xla"}, "sine")):
        text = lowered(**options)
        assert [name for name in ("sine", "cosine", "exponential") if f"stablehlo.{name} " in text] == [operation]
    monkeypatch.setattr(_implementation, "sees_cuda", lambda: False)
    assert "stablehlo.sine " in lowered()


def test_a_process_without_a_gpu_traces_the_plain_form_alone(monkeypatch):
    for sees_cuda in (False, True):
        monkeypatch.setattr(_implementation, "sees_cuda", lambda: sees_cuda)  # noqa: B023
        text = str(jax.make_jaxpr(lambda x: taken(x))(jnp.ones(3)))
        assert ("platform_index" in text) == sees_cuda


def total(x, y):
    return _implementation.choose(None, FORMS, x, y)[0]


@pytest.mark.parametrize("name", [None, "interpret"])
def test_under_every_transformation(name: str | None, cuda):
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.float32(1)
    mesh = Mesh(np.array(jax.devices()[:4]), ("workers",))
    split, whole = PartitionSpec("workers"), PartitionSpec()
    runs = {
        "eager": total,
        "jit": jax.jit(total),
        "vmap": jax.jit(jax.vmap(total, (0, None))),
        "vmap of y": jax.jit(lambda x, y: jax.vmap(total, (None, 0))(x, jnp.stack([y, y]))[0]),
        "cond": jax.jit(lambda x, y: lax.cond(y > 0, total, lambda x, y: x - y, x, y)),
        "while": jax.jit(lambda x, y: lax.fori_loop(0, 2, lambda i, x: total(x, y / 2), x)),
        **{
            f"shard_map {check}": jax.jit(
                jax.shard_map(total, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=check)
            )
            for check in (True, False)
        },
    }
    with kernels_pallas.using(name):
        for transformation, run in runs.items():
            np.testing.assert_array_equal(run(x, y), x + y, transformation)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: taken(jnp.ones(3), implementation="cuda"), r"'cuda'; .* 'xla', 'triton', 'mosaic', 'interpret', or"),
        (
            lambda: taken(jnp.ones(3), implementation="interpret", forms={"xla": FORMS["xla"]}),
            "'interpret'; for this operation it must be one of 'xla', or None",
        ),
        (lambda: kernels_pallas.using("trition").__enter__(), "'trition'; it must be one of 'xla', 'triton'"),
    ],
)
def test_a_wrong_name_is_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
