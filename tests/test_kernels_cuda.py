"""Lowers the kernels for GPUs, and compiles them for an H200 where JAX's CUDA plugin is installed.

The tests run over the rows of the benchmark. Other files test what the kernels compute, in
Pallas's interpreter. XLA dumps the code of Triton's kernels, and tests read it. It dumps none of
Mosaic's, so for these only the lowering and the memory are tested.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import kernels_pallas
from gpus import Compiled, lowered, needs_plugin
from kernels_pallas import _implementation
from kernels_pallas.bench.operations import draw, in_blocks, operations
from kernels_pallas.kth_magnitude import triton as kth_triton
from kernels_pallas.select_block_top_k import LONGEST
from kernels_pallas.shapes import MODELS, Shape
from tiers import quick

ROW = {op.name: op for op in operations()}
KERNELS = {"triton": "custom_call @__gpu$xla.gpu.triton", "mosaic": "custom_call @mosaic_gpu"}
FORMS = [(op.name, form) for op in ROW.values() for form in op.forms if form in KERNELS]
# They consist of the kernels of other operations, and take long to compile.
COMPOSED = ("select_top_k", "select_ms_top_k")
# VGG-16's gradient has a ragged end.
VGG = MODELS[1]
DENSITY = 0.01
FLOAT = jnp.dtype(jnp.float32).itemsize


def program(name: str, form: str | None, n: int):
    """A form of an operation, and the shapes of its arguments."""
    op, k = ROW[name], Shape("", n).k(DENSITY)
    return op.ours(n, k, form), jax.eval_shape(lambda: draw(op.inputs, n, k, 0))


@pytest.mark.parametrize("name, form", FORMS)
@pytest.mark.parametrize("n", quick([1, VGG.n], VGG.n))
def test_lowering_for_cuda(name: str, form: str, n: int):
    fn, args = program(name, form, n)
    text = lowered(fn, *args)
    # For short vectors some operations use XLA's own forms.
    assert n < VGG.n or KERNELS[form] in text


@pytest.mark.parametrize(
    "name, form",
    [
        ("accumulate_and_select", "triton"),
        ("select_above", "triton"),
        ("magnitude_statistics", "triton"),
        ("count_above_many", "triton"),
        ("norms", "triton"),
        ("select_block_top_k, 512 a block", "triton"),
        ("select_stochastic", "triton"),
        ("add_sparse", None),
    ],
)
def test_what_is_chosen_on_a_gpu(monkeypatch, name: str, form: str | None):
    """The choices are those in the table of docs/kernels.md."""
    monkeypatch.setattr(_implementation, "sees_cuda", lambda: True)
    fn, args = program(name, None, VGG.n)
    text = lowered(fn, *args)
    assert [kernel for kernel in KERNELS if KERNELS[kernel] in text] == ([form] if form else [])


@functools.cache
def compiled(name: str, form: str = "triton") -> Compiled:
    fn, args = program(name, form, VGG.n)
    return Compiled(fn, *args, donate=ROW[name].donate)


def on_a_gpu(*names: str, forms: tuple[str, ...] = ("triton",)):
    """Parametrizes a test over the forms that are compiled, and runs it in one process.

    The forms are those of all operations, or of the operations whose names begin with one of
    ``names``.
    """
    chosen = [
        (name, form)
        for name, form in FORMS
        if form in forms and name not in COMPOSED and (not names or name.startswith(names))
    ]

    def mark(test):
        test = pytest.mark.parametrize("name, form", chosen)(test)
        return needs_plugin(pytest.mark.xdist_group("cuda")(test))

    return mark


@on_a_gpu()
@pytest.mark.full
def test_every_kernel_is_there(name: str, form: str):
    """None spills registers to memory: the compiler is told to refuse such a kernel."""
    assert compiled(name, form).kernels


# Blocks of 60 are padded, so all of their loads have a mask.
WIDE = ("select_block_top_k, 4096", "select_block_top_k, 512", "select_stochastic")


@pytest.mark.full
@on_a_gpu("accumulate", "select_above", "magnitude_statistics", "count_above_many", "norms", *WIDE)
def test_long_vectors_are_read_16_bytes_at_a_time(name: str, form: str):
    """Except for their ragged end, which has a mask."""
    loads = compiled(name, form).reader.accesses("ld")
    assert loads.count(16) >= 4
    assert sum(size for size in loads if size == 16) >= 0.8 * sum(loads), loads


@on_a_gpu("accumulate")
def test_the_residual_is_written_16_bytes_at_a_time(name: str, form: str):
    stores = compiled(name, form).reader.accesses("st")
    assert stores.count(16) >= 4
    assert set(stores) == {16}


@on_a_gpu(forms=("triton", "mosaic"))
def test_what_is_donated_is_overwritten(name: str, form: str):
    assert compiled(name, form).memory.alias_size_in_bytes == len(ROW[name].donate) * VGG.n * FLOAT


@on_a_gpu(forms=("triton", "mosaic"))
def test_nothing_long_is_copied(name: str, form: str):
    found = compiled(name, form)
    assert not re.findall(rf"= f32\[{VGG.n}\]\S* copy(?:-start)?\(", found.text)
    assert found.memory.temp_size_in_bytes < VGG.n * FLOAT / 5


@needs_plugin
@pytest.mark.xdist_group("cuda")
@pytest.mark.parametrize("n", quick([65_536, 200_000, kth_triton.HELD], 200_000))
def test_the_search_fits_the_registers(n: int):
    """In programs of the fewest, of some and of the most elements: the compiler refuses spills."""
    kernels = Compiled(functools.partial(kth_triton.largest, k=n // 2), jax.ShapeDtypeStruct((n,), jnp.float32)).kernels
    named = {re.sub(r"(_+\d+)?$", "", kernel.name) for kernel in kernels}
    assert named == {"kth_magnitude", "top_k_count", "top_k_share", "top_k_place"}


@pytest.mark.parametrize(
    "function, inputs, options",
    [
        (kernels_pallas.select_block_top_k, ("x",), {}),
        (kernels_pallas.select_stochastic, ("x", "words"), {"exact": True}),
    ],
)
@needs_plugin
@pytest.mark.xdist_group("cuda")
@pytest.mark.full
def test_the_longest_block_fits_the_registers(function, inputs: tuple[str, ...], options: dict):
    """Above it the plain form runs."""
    k = VGG.k(DENSITY)
    args = jax.eval_shape(lambda: draw(inputs, VGG.n, k, 0))
    assert len(Compiled(in_blocks(LONGEST, function, **options)(VGG.n, k, "triton"), *args).kernels) == 3


@needs_plugin
@pytest.mark.xdist_group("cuda")
def test_a_kernel_that_spills_is_refused():
    """Without this the tests above would not show that no kernel spills."""

    def kernel(x, y, out):
        a, b = x[...], y[...]
        out[...] = jnp.cumsum(a) * b + a * jnp.sum(b)

    def spill(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((4096,), jnp.float32),
            grid=(1,),
            compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        )(x, y)

    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        Compiled(spill, *[jax.ShapeDtypeStruct((4096,), jnp.float32)] * 2)
