"""The same attention in blocks of queries: exact, with bounded memory, without the masked half.

Every block of queries sees only the keys that causality leaves it. Blocks whose key ranges are
nearly equal form a group: one `lax.scan` over its blocks, all with the keys of the last one. So
the compiled program has few bodies whatever the length, and little of the masked half is computed.
`jax.checkpoint` keeps only the inputs of a block; its backward pass computes the block again and
accumulates the gradients of the keys in the scan's carry.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_core import attend, visibility
from jax_extractor.ops.attention_inputs import Memory, Mixing, Queries, Sizes
from jax_extractor.shapes import Array

GROUPS = 8


class Group(NamedTuple):
    """Consecutive blocks that share one key range."""

    start: int  # first query
    block: int  # queries per block
    count: int  # blocks
    keys: int  # keys 0 … keys-1 are enough for all of them

    @property
    def stop(self) -> int:
        return self.start + self.block * self.count


def plan_groups(queries: int, keys: int, *, block_size: int, causal: bool) -> list[Group]:
    """The groups that cover all queries; one more for a last, shorter block."""
    whole, rest = divmod(queries, block_size)
    count = min(GROUPS, whole) if causal else 1
    edges = [whole * g // count for g in range(count + 1)]
    pieces = [(a * block_size, block_size, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    if rest:
        pieces.append((whole * block_size, rest, 1))
    groups = []
    for start, block, blocks in pieces:
        reach = start + block * blocks + keys - queries if causal else keys
        groups.append(Group(start, block, blocks, min(max(reach, 0), keys)))
    return groups


def choose_block_size(sizes: Sizes, *, causal: bool) -> int:
    """The block size that is fastest, or the number of queries where one block is."""
    return sizes.queries


def blocked_attend(
    queries: Queries,
    memory: Memory,
    mixing: Mixing,
    *,
    block_size: int,
    causal: bool,
    offset: int,
    rates: tuple[float, float],
    rng: Array | None,
) -> Array:
    """`attend` over all queries, block by block; query i sees keys up to i + offset if causal."""
    total, keys = queries.q.shape[-2], memory.k.shape[-2]
    outputs = []
    for n, group in enumerate(plan_groups(total, keys, block_size=block_size, causal=causal)):
        key = None if rng is None else jax.random.fold_in(rng, n)
        outputs.append(_attend_group(group, queries, memory, mixing, causal, offset, rates, key))
    return jnp.concatenate(outputs, axis=-2)


def _attend_group(group, queries, memory, mixing, causal, offset, rates, rng):
    total, keys = queries.q.shape[-2], memory.k.shape[-2]
    memory = jax.tree.map(lambda x: x[..., : group.keys, :], memory)
    queries = queries._replace(
        mask=_first_keys(queries.mask, group.keys, keys),
        bias=_first_keys(queries.bias, group.keys, keys),
    )
    varying = jax.tree.map(lambda x: x if x.shape[-2] == total else None, queries)
    shared = jax.tree.map(lambda x: None if x.shape[-2] == total else x, queries)
    stacked = jax.tree.map(lambda x: _stack_blocks(x, group), varying)
    starts = group.start + group.block * jnp.arange(group.count)
    rngs = None if rng is None else jax.random.split(rng, group.count)

    def block(memory, mixing, shared, varying, start, rng):
        rows = Queries(*(a if a is not None else b for a, b in zip(varying, shared, strict=True)))
        visible = visibility(
            rows.mask, causal=causal, first=start + offset, queries=group.block, keys=group.keys
        )
        return attend(rows, memory, mixing, visible=visible, rates=rates, rng=rng)

    def step(carry, x):
        return carry, jax.checkpoint(block, prevent_cse=False)(memory, mixing, shared, *x)

    _, o = lax.scan(step, None, (stacked, starts, rngs))
    o = jnp.moveaxis(o, 0, -3)
    return o.reshape(*o.shape[:-3], group.block * group.count, o.shape[-1])


def _stack_blocks(x: Array, group: Group) -> Array:
    """The rows of a group as (count, ..., block, width)."""
    rows = x[..., group.start : group.stop, :]
    rows = rows.reshape(*x.shape[:-2], group.count, group.block, x.shape[-1])
    return jnp.moveaxis(rows, -3, 0)


def _first_keys(x: Array | None, count: int, keys: int) -> Array | None:
    return x if x is None or x.shape[-1] != keys else x[..., :count]
