"""Compiles the programs that all hosts of a benchmark run: each program once, on one of the hosts.

The hosts share the cores of this machine. If each compiled everything for itself, most of a
benchmark's time would go into that.
"""

import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax
from jax.experimental import serialize_executable

# The environment variable that names a folder which all hosts see, and which is empty at first.
FOLDER = "JSPARSE_COMPILED"


class Compiler:
    """Compiles for all hosts. Every host must ask for the same programs in the same order.

    Args:
      rank: this host's number.
      hosts: how many there are.
    """

    def __init__(self, rank: int, hosts: int):
        # A program that was read from JAX's own cache lacks parts when another host loads it.
        jax.config.update("jax_enable_compilation_cache", False)
        self._folder = pathlib.Path(os.environ[FOLDER])
        self._rank, self._hosts = rank, hosts
        self._done = 0

    def compile(self, programs: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
        """Compiles lowered programs: the first on host 0, the second on host 1, and so on."""
        paths = [self._folder / str(self._done + i) for i in range(len(programs))]
        self._done += len(programs)
        mine = [i % self._hosts == self._rank for i in range(len(programs))]
        compiled = [
            self._compile(program, path) if own else None
            for program, path, own in zip(programs, paths, mine, strict=True)
        ]
        return [own or self._load(program, path) for program, path, own in zip(programs, paths, compiled, strict=True)]

    def _compile(self, program: jax.stages.Lowered, path: pathlib.Path) -> jax.stages.Compiled:
        compiled = program.compile()
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(serialize_executable.serialize(compiled)[0])
        os.rename(file.name, path)  # No host sees half a file under this name.
        return compiled

    def _load(self, program: jax.stages.Lowered, path: pathlib.Path) -> jax.stages.Compiled:
        # A collective would not wait as long as a compilation may take. Where the other host
        # fails, this one is ended, too.
        while not path.exists():
            time.sleep(0.02)
        return serialize_executable.deserialize_and_load(path.read_bytes(), program.in_tree, program.out_tree)
