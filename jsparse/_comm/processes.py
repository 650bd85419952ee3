"""Makes global arrays over several processes from the arrays of each process."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


def put(tree: Any, shardings: Any) -> Any:
    """Puts a tree on the devices of a mesh.

    Args:
      tree: arrays, the same in every process.
      shardings: for each leaf where it goes, a NamedSharding; or one for all of them.

    Raises:
      ValueError: the processes have different values. Arrays that are global already are not
        compared.
    """
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    if not any(sharding.mesh.is_multi_process for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    own = numbers(tree)
    check_equal_values(own, multihost_utils.process_allgather)

    def place(path, leaf, sharding):
        value = own.get(jax.tree_util.keystr(path))
        if value is None:
            return jax.device_put(leaf, sharding)
        whole = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else whole

    return jax.tree_util.tree_map_with_path(place, tree, shardings)


def is_global(leaf: Any) -> bool:
    """Whether a leaf is an array over several processes."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and not leaf.is_fully_addressable


def is_share(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf is only this process's share of an array over several processes.

    A tracer or a shape stands for the whole array.

    Args:
      leaf: the leaf.
      sharding: that of the whole array.
    """
    stands_for_it = isinstance(leaf, Tracer | jax.ShapeDtypeStruct) or is_global(leaf)
    return not sharding.is_fully_addressable and not stands_for_it


def from_shares(batch: Any, sharding: NamedSharding) -> Any:
    """Makes global arrays from this process's shares of them; global arrays stay as they are.

    Args:
      batch: the shares.
      sharding: that of the global arrays.
    """

    def whole(leaf):
        share = is_share(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, leaf) if share else leaf

    return jax.tree.map(whole, batch)


def local_parts(sharding: NamedSharding, axis: int, parts: int) -> int:
    """How many of the parts into which an axis of an array is cut are in this process."""
    rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[axis]))
    return len({index[0].start for index in rows.addressable_devices_indices_map((parts,)).values() if index})


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """The leaves that are this process's own, by their names; keys as their integers."""
    return {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not is_global(leaf)
    }


def check_equal_values(values: dict[str, np.ndarray], gather: Callable[[np.ndarray], Any]) -> None:
    """Checks that all processes have the same values, by digests of two words each.

    Args:
      values: this process's leaves, from :func:`numbers`.
      gather: takes a digest, and returns those of all processes along a leading axis.

    Raises:
      ValueError: the processes' leaves differ; the message names them.
    """

    def alike(digest: np.ndarray) -> bool:
        gathered = np.asarray(gather(digest))
        return bool((gathered == gathered[:1]).all())

    structure = repr([(name, value.shape, value.dtype) for name, value in values.items()])
    digests = {name: _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8)) for name, value in values.items()}
    together = [_digest(structure.encode()), _digest(b"".join(digest.tobytes() for digest in digests.values()))]
    if alike(np.stack(together)):
        return
    fix = "all begin with the same values: make them from the same seed, or read the same file"
    # Processes with different leaves cannot compare them one by one.
    if not alike(together[0]):
        raise ValueError(f"the processes have parameters of different names, shapes or types; {fix}")
    differ = [name for name, digest in digests.items() if not alike(digest)]
    raise ValueError(f"the processes have different values of {', '.join(differ)}; {fix}")


def _digest(data: Any) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
