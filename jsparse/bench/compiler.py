"""Compiles the programs that all hosts of one machine run: each program once, on one of the hosts.

The hosts share the cores of this machine. If each compiled everything for itself, most of a
measurement's time would go into that.
"""

import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from .hosts import FOLDER


class Compiler:
    """Compiles for all hosts. Every host must ask for the same programs in the same order.

    The programs are those that run on all devices of all hosts.

    Elsewhere than on hosts of one machine (``jsparse network``) each process compiles for itself.

    Args:
      rank: this host's number.
      hosts: how many there are.
    """

    def __init__(self, rank: int, hosts: int):
        self._folder = pathlib.Path(os.environ[FOLDER]) if FOLDER in os.environ else None
        if self._folder:
            # A program that was read from JAX's own cache lacks parts when another host loads it.
            # JAX asks only once whether it has a cache, and may have done so before.
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
        self._rank, self._hosts = rank, hosts
        self._asked = 0

    def compile(self, programs: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
        """Compiles lowered programs, each on one host. The hosts take turns."""
        if not self._folder:
            return [program.compile() for program in programs]
        paths = [self._folder / _digest(program) for program in programs]
        mine = [(self._asked + i) % self._hosts == self._rank for i in range(len(programs))]
        self._asked += len(programs)
        compiled = [
            self._compile(program, path) if own and not path.exists() else None
            for program, path, own in zip(programs, paths, mine, strict=True)
        ]
        return [own or _load(program, path) for program, path, own in zip(programs, paths, compiled, strict=True)]

    def _compile(self, program: jax.stages.Lowered, path: pathlib.Path) -> jax.stages.Compiled:
        compiled = program.compile()
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(serialize_executable.serialize(compiled)[0])
        os.rename(file.name, path)  # No host sees half a file under this name.
        return compiled


def _load(program: jax.stages.Lowered, path: pathlib.Path) -> jax.stages.Compiled:
    # A collective would not wait as long as a compilation may take. Where the other host fails,
    # this one is ended, too.
    while not path.exists():
        time.sleep(0.02)
    return serialize_executable.deserialize_and_load(path.read_bytes(), program.in_tree, program.out_tree)


def _digest(program: jax.stages.Lowered) -> str:
    """A name for what a program compiles to: of its text, JAX's version, and XLA's options."""
    parts = program.as_text(), jax.__version__, os.environ.get("XLA_FLAGS", "")
    return hashlib.sha256(repr(parts).encode()).hexdigest()
