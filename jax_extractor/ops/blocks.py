"""Cutting the inputs of attention into blocks of queries and the keys they see, and putting the
gradients of the parts together."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_extractor.ops.attention_inputs import Inputs, Projection
from jax_extractor.shapes import Array


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Which axis of an array counts queries (row) and which keys (column)."""

    row: int | None = None
    column: int | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks of queries, from `start` to before `stop`, that read the first `width` keys."""

    start: int
    stop: int
    width: int


def tilings(inputs: Inputs, mask, queries: int, keys: int) -> tuple[Inputs, Tiling | None]:
    """The Tiling of each input and of the mask."""
    whole, row = Tiling(), Tiling(row=-2)
    column, memory = Tiling(column=-2), Tiling(column=-1)

    def of_projection(p: Projection | None):
        if p is None:
            return None
        per_query = None if p.per_query is None else row
        per_key = None if p.per_key is None else column
        return Projection._make((whole, per_query, per_key))

    def of_pairs(x: Array | None):
        if x is None:
            return None
        return Tiling(
            row=-2 if x.shape[-2] == queries else None, column=-1 if x.shape[-1] == keys else None
        )

    scale = None if inputs.scale is None else whole
    pre, post = of_projection(inputs.pre), of_projection(inputs.post)
    fields = (row, memory, memory, scale, pre, post, of_pairs(inputs.bias))
    return Inputs._make(fields), of_pairs(mask)


def cut_rows(tree, cuts, block: int, count: int):
    """Every array that counts queries as (count, …, block, …), padded with zeros."""

    def cut(x: Array, tiling: Tiling) -> Array:
        if tiling.row is None:
            return x
        axis = tiling.row + x.ndim
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * block - x.shape[axis])
        x = jnp.pad(x, widths)
        x = x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return jax.tree.map(cut, tree, cuts)


def take_group(tree, cuts, group: Group):
    """What a group reads: its blocks of queries, its keys, and all of the other arrays."""

    def take(x: Array, tiling: Tiling) -> Array:
        if tiling.column is not None:
            x = jax.lax.slice_in_dim(x, 0, group.width, axis=tiling.column)
        return x if tiling.row is None else x[group.start : group.stop]

    return jax.tree.map(take, tree, cuts)


def put_group(tree, part, cuts, group: Group):
    """The tree of arrays without rows, with a group's columns replaced by those of `part`."""

    def put(x: Array, y: Array, tiling: Tiling) -> Array:
        if tiling.column is None:
            return y
        return jax.lax.dynamic_update_slice_in_dim(x, y, 0, axis=tiling.column)

    return jax.tree.map(put, tree, part, cuts)


def join_groups(parts: list, cuts, keys: int):
    """The arrays with rows of all groups, one after the other; what a group does not read is 0."""

    def concatenate(tiling: Tiling, *parts: Array) -> Array:
        if tiling.column is not None:
            parts = tuple(_widen(x, tiling.column, keys) for x in parts)
        return jnp.concatenate(parts)

    return jax.tree.map(concatenate, cuts, *parts)


def _widen(x: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def split_rows(tree, cuts):
    """The tree with only the arrays that have rows, and with only the others (None elsewhere)."""
    rows = jax.tree.map(lambda x, t: None if t.row is None else x, tree, cuts)
    others = jax.tree.map(lambda x, t: x if t.row is None else None, tree, cuts)
    return rows, others


def join(a, b):
    """The tree that `split_rows` has split."""
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)
