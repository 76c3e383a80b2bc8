"""What attention remembers while decoding: a ring of the last S keys, values and what goes with them.

Pure functions over a pytree of static shapes. The order of keys does not matter to attention, so a
ring needs no shifting: time t lies in slot t mod S, and each slot knows its time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_extractor.errors import UsageError
from jax_extractor.shapes import Array, Bool, Int, PyTree


class KeyCache(NamedTuple):
    """The last S positions of B sequences."""

    entries: PyTree
    """Arrays (B, S, …): keys, values, or whatever a mixer attends to."""
    valid: Bool[Array, "B S"]
    """Whether the slot holds a real position."""
    time: Int[Array, " S"]
    """When the slot was written; −1 for never."""
    seen: Int[Array, ""]
    """Positions seen so far, padding included."""

    def mask(self) -> Bool[Array, "B 1 1 S"]:
        """Which slots the newest position may attend to."""
        return (self.valid & (self.time >= 0))[:, None, None, :]


def check_decodable(causal: bool, max_length: int | None) -> None:
    """Raises UsageError unless attention can be decoded with a cache."""
    if not causal:
        raise UsageError("decode=True with causal=False: a cache knows the past only; set causal")
    if max_length is None or max_length < 1:
        raise UsageError(f"decode=True with max_length={max_length}: set the cache's length")


def fill(entries: PyTree, valid: Bool[Array, "B T"], size: int) -> KeyCache:
    """A cache of S = size slots after the T positions of a prompt; the last S where T > S."""
    batch, length = valid.shape
    kept = min(length, size)

    def lay(rows: Array) -> Array:
        last = rows[:, length - kept :]
        padded = jnp.pad(last, [(0, 0), (0, size - kept)] + [(0, 0)] * (rows.ndim - 2))
        return jnp.roll(padded, length % size, axis=1) if length > size else padded

    time = jnp.arange(length, dtype=jnp.int32)[None] + jnp.zeros((batch, 1), jnp.int32)
    # Times are shifted by one so that the padding's zeros come out as −1.
    return KeyCache(
        entries=jax.tree.map(lay, entries),
        valid=lay(valid),
        time=lay(time + 1)[0] - 1,
        seen=jnp.asarray(length, jnp.int32),
    )


def append(cache: KeyCache, entries: PyTree, valid: Bool[Array, "B 1"]) -> KeyCache:
    """The cache with one position more; the oldest slot is written over."""
    slot = cache.seen % cache.time.shape[0]

    def write(slots: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(slots, row.astype(slots.dtype), slot, axis=1)

    return KeyCache(
        entries=jax.tree.map(write, cache.entries, entries),
        valid=write(cache.valid, valid),
        time=jax.lax.dynamic_update_slice_in_dim(cache.time, cache.seen[None], slot, axis=0),
        seen=cache.seen + 1,
    )
