"""What a checkpoint knows of its arrays: paths, shapes, checksums, and PRNG keys as raw data."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_extractor.shapes import PyTree


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves by their path, written with dots: `opt_state.0.mu.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}


def to_stored(leaf):
    """A leaf as it is stored: a PRNG key as its data, a NumPy array as a copy of its own."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def stored_like(leaf) -> jax.ShapeDtypeStruct:
    """The structure of a leaf as it is stored; without a sharding, it goes to the first device."""
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def from_stored(array: jax.Array, record: dict[str, Any]) -> jax.Array:
    """A leaf as it was before `to_stored`, by its record."""
    implementation = record.get("key")
    if implementation is None:
        return array
    return jax.random.wrap_key_data(array, impl=implementation)


def records(state: PyTree, stored: PyTree) -> dict[str, dict[str, Any]]:
    """Shape, dtype and checksum of every leaf, and the implementation of those that are keys."""
    leaves = by_path(state)
    sums = checksums(list(by_path(stored).values()))
    return {path: _record(leaves[path], crc) for path, crc in zip(leaves, sums, strict=True)}


def show(leaf) -> str:
    """A record or a structure as a message shows it: `float32(8, 4)`."""
    if leaf is None:
        return "absent"
    record = leaf if isinstance(leaf, dict) else _record(leaf, None)
    return f"{record['dtype']}({', '.join(map(str, record['shape']))})"


def checksums(stored: list) -> list[int | None]:
    """The CRC-32 of each array's bytes; None where this process does not see the whole array."""

    def whole(x) -> bool:
        return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated

    def crc(x) -> int | None:
        if x is None:
            return None
        return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)

    # device_get starts every transfer before it waits for the first; zlib lets go of the GIL.
    hosts = jax.device_get([x if whole(x) else None for x in stored])
    with ThreadPoolExecutor() as threads:
        return list(threads.map(crc, hosts))


def _record(leaf, crc: int | None) -> dict[str, Any]:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    record = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "crc32": crc}
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        record["key"] = str(jax.random.key_impl(leaf))
    return record


def _is_key(leaf) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
