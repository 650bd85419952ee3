"""Compiles for GPUs that are not there, by JAX's CUDA plugin.

``make test`` installs the plugin where possible.
"""

import importlib.util
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for GPUs needs jax-cuda13-plugin: make .venv/cuda.stamp",
)
H200 = (pathlib.Path(__file__).parent / "h200.txtpb").read_text()


def devices(topology: str) -> list[Any]:
    """Devices to compile for, but not to run on. ``"1x8x1"`` is eight GPUs in one machine."""
    return topologies.get_topology_desc(platform="cuda", target_config=H200, topology=topology).devices


class Kernel:
    """One compiled kernel, as PTX code."""

    def __init__(self, text: str):
        self.name = re.search(r"\.entry (\w+)\(", text)[1]
        self.text = text

    def accesses(self, what: str) -> list[int]:
        """The bytes of each access of a thread to the GPU's memory, without accesses under a mask.

        ``what`` is ``"ld"`` for loads or ``"st"`` for stores.
        """
        found = re.findall(rf"(?:^|;)[ \t]*{what}\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", self.text, flags=re.M)
        return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]


class Compiled:
    """A program compiled for one H200: its text, its memory, and its kernels."""

    def __init__(self, fn: Callable[..., Any], *args: jax.ShapeDtypeStruct, donate: tuple[int, ...] = ()):
        mesh = Mesh(np.array(devices("1x1x1")), ("gpu",))
        here = NamedSharding(mesh, PartitionSpec())
        args = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=here) for arg in args]
        with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
            options = {
                "xla_gpu_autotune_level": 0,
                "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
                "xla_dump_to": folder,
                "xla_dump_emitter_re": "ptx",
                # The tests set these otherwise, for programs that run once.
                "xla_backend_optimization_level": 3,
                "xla_llvm_disable_expensive_passes": False,
            }
            self.program = jax.jit(fn, donate_argnums=donate).lower(*args).compile(compiler_options=options)
            dumped = "".join(path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx")))
        self.text = self.program.as_text()
        self.memory = self.program.memory_analysis()
        # Leave out XLA's own fusions. XLA adds numbers to the names of kernels that have the same
        # name.
        ours = "|".join(set(re.findall(r'name = "(\w+)", num_stages', self.text)))
        entries = re.split(r"(?=^\.visible \.entry)", dumped, flags=re.M)[1:]
        self.kernels = [kernel for kernel in map(Kernel, entries) if re.fullmatch(rf"({ours})(_+\d+)?", kernel.name)]

    @property
    def reader(self) -> Kernel:
        """The kernel with the largest number of 16-byte loads."""
        return max(self.kernels, key=lambda kernel: kernel.accesses("ld").count(16))


def abstract(shape: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> AbstractMesh:
    """A mesh of H200s that are not there, to lower for."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=device)


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    """The program that JAX passes to the compiler for an H200. It needs no plugin."""
    with use_abstract_mesh(abstract()):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
