"""Where the workers of a training step are: along a mesh, or each in a process of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm, Comm
from .._comm.processes import from_shares, is_share, local_workers, put_everywhere
from .placement import AxisName, state_specs
from .state import TrainState, number_of_workers


class OnMesh:
    """Workers along axes of a mesh, in one program; in several processes, which each have some of its devices."""

    def __init__(self, mesh: Mesh, axis: AxisName, check_vma: bool):
        self._mesh, self._axis, self._check_vma = mesh, axis, check_vma
        self.comm, self._workers = AxisComm(axis), number_of_workers(mesh, axis)
        self._sharding = NamedSharding(mesh, PartitionSpec(axis))

    def run(self, local_step, stacked, state, batch, key):
        whole, parted = PartitionSpec(), PartitionSpec(self._axis)
        params, kept = (parted if by else whole for by in (stacked.params, stacked.model_state))
        specs = TrainState(params, state_specs(state.opt_state, self._axis), kept)
        step = jax.shard_map(
            local_step,
            mesh=self._mesh,
            in_specs=(specs, parted, whole),
            out_specs=(specs, whole),
            check_vma=self._check_vma,
        )
        if AxisType.Explicit in self._mesh.axis_types:
            batch = jax.tree.map(lambda x: jax.sharding.reshard(x, self._sharding), batch)
        return step(state, batch, key)

    def sharers(self, leaf: Any) -> tuple[int, str]:
        """How many workers a leaf of a batch is divided among, and whose they are."""
        if is_share(leaf, self._sharding):
            return local_workers(self._sharding, self._workers), "this process's "
        return self._workers, ""

    def whole(self, batch: Any) -> Any:
        """The batch of all processes."""
        return from_shares(batch, self._sharding)

    def replicate(self, tree: Any) -> Any:
        """For all workers alike."""
        return put_everywhere(tree, self._mesh)

    def for_each(self, tree: Any) -> Any:
        """For each worker one of its own, along a leading axis."""
        ranks = jnp.arange(self._workers)
        return jax.jit(lambda tree: _for_each(ranks, tree), out_shardings=self._sharding)(tree)


class Process:
    """One worker, this process, which has its own arrays; the others run the same program."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def run(self, local_step, stacked, state, batch, key):
        del stacked
        return local_step(state, batch, key)

    def sharers(self, leaf: Any) -> tuple[int, str]:
        del leaf
        return 1, "this process's "

    def whole(self, batch: Any) -> Any:
        return batch

    def replicate(self, tree: Any) -> Any:
        return tree

    def for_each(self, tree: Any) -> Any:
        return _for_each(self.comm.rank()[None], tree)


def _for_each(ranks: jax.Array, tree: Any) -> Any:
    """Copies for these workers, stacked; of a random key, a different one for each."""

    def copies(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(
                lambda rank: jax.vmap(lambda key: jax.random.fold_in(key, rank))(x.reshape(-1)).reshape(x.shape)
            )(ranks)
        return jnp.broadcast_to(x, (len(ranks), *x.shape))

    return jax.tree.map(copies, tree)
