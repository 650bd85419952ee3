"""Global arrays over the devices of several processes, of what each process has."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of a mesh.

    Raises:
      ValueError: the mesh is over several processes, and they do not all have the same values. Arrays that are global
        already are not compared.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    if not mesh.is_multi_process:
        return jax.device_put(tree, everywhere)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    own = [(path, _numbers(leaf)) for path, leaf in leaves if not is_global(leaf)]
    _check_alike(own)
    numbers = iter(own)
    placed = []
    for _, leaf in leaves:
        if is_global(leaf):
            placed.append(jax.device_put(leaf, everywhere))
            continue
        _, value = next(numbers)
        whole = jax.make_array_from_callback(value.shape, everywhere, value.__getitem__)
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        placed.append(jax.random.wrap_key_data(whole, impl=jax.random.key_impl(leaf)) if is_key else whole)
    return jax.tree.unflatten(treedef, placed)


def is_share(leaf: Any, mesh: Mesh) -> bool:
    """Whether it is what this process has of an array over several; a tracer, or a shape, stands for the whole."""
    return (
        mesh.is_multi_process and not is_global(leaf) and not isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct)
    )


def from_shares(batch: Any, sharding: NamedSharding) -> Any:
    """Global arrays, cut along their first axis, of this process's shares of them; what is global already stays."""

    def whole(leaf):
        share = is_share(leaf, sharding.mesh)
        return jax.make_array_from_process_local_data(sharding, leaf) if share else leaf

    return jax.tree.map(whole, batch)


def local_workers(sharding: NamedSharding, workers: int) -> int:
    """How many workers have a device in this process."""
    return len({part.start for (part,) in sharding.addressable_devices_indices_map((workers,)).values()})


def is_global(leaf: Any) -> bool:
    """Whether it is an array over several processes."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def _numbers(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else jnp.asarray(leaf))


def _check_alike(values: list[tuple[Any, np.ndarray]]) -> None:
    """Compares what all processes have, by digests."""
    names = [jax.tree_util.keystr(path) for path, _ in values]
    structure = repr([(name, value.shape, value.dtype) for name, (_, value) in zip(names, values, strict=True)])
    digests = [_digest(np.ascontiguousarray(value).tobytes()) for _, value in values]
    together = np.stack([_digest(structure.encode()), _digest(b"".join(d.tobytes() for d in digests))])
    if _alike(together):
        return
    fix = "all begin with the same: make them from the same seed, or read the same file"
    # Who has other leaves can't compare them one by one.
    if not _alike(together[:1]):
        raise ValueError(f"the processes have parameters of different names, shapes or types; {fix}")
    differ = [name for name, digest in zip(names, digests, strict=True) if not _alike(digest)]
    raise ValueError(f"the processes have different values of {', '.join(differ)}; {fix}")


def _digest(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)


def _alike(value: np.ndarray) -> bool:
    gathered = multihost_utils.process_allgather(value)
    return bool((gathered == gathered[:1]).all())
