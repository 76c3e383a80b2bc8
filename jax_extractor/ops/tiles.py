"""Cutting the inputs of attention into tiles of equal size, and adding up tiles of gradients."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_inputs import Inputs, Projection
from jax_extractor.shapes import Array


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Which axes of an array are cut into blocks of queries (row) and of keys (column)."""

    row: int | None = None
    column: int | None = None


def tilings(inputs: Inputs, mask, queries: int, keys: int) -> tuple[Inputs, Tiling | None]:
    """The Tiling of each input and of the mask."""
    whole, row, column = Tiling(), Tiling(row=-2), Tiling(column=-2)

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
    fields = (row, column, column, scale, pre, post, of_pairs(inputs.bias))
    return Inputs._make(fields), of_pairs(mask)


def cut_all(inputs: Inputs, mask, plan):
    """Every array with the indices of its tiles as leading axes: (rows, columns, …), as it has."""

    def cut(x, tiling: Tiling):
        if tiling.column is not None:
            x = _cut_axis(x, tiling.column, plan.block, plan.columns)
        if tiling.row is not None:
            x = _cut_axis(x, tiling.row, plan.block, plan.rows)
        return x

    return jax.tree.map(cut, (inputs, mask), (plan.cuts, plan.mask_cut))


def _cut_axis(x: Array, axis: int, block: int, count: int) -> Array:
    """(…, size, …) -> (count, …, block, …), padded with zeros."""
    axis += x.ndim
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * block - x.shape[axis])
    x = jnp.pad(x, widths)
    x = x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def split_rows(tree, cuts):
    """The tree with only the arrays that have rows, and with only the others (None elsewhere)."""
    rows = jax.tree.map(lambda x, t: None if t.row is None else x, tree, cuts)
    others = jax.tree.map(lambda x, t: x if t.row is None else None, tree, cuts)
    return rows, others


def join(a, b):
    """The tree that `split_rows` has split."""
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)


def read_tiles(row, cuts, j):
    """Of one block of rows, the tile in column j."""
    return jax.tree.map(lambda x, t: x if t.column is None else x[j], row, cuts)


def add_tile(sums: Inputs, cuts: Inputs, j, **parts) -> Inputs:
    """The sums of one block of rows, with a tile's parts in column j added to the fields named."""

    def add(whole, part, tiling):
        if tiling.column is None:
            return whole + part
        return lax.dynamic_update_index_in_dim(whole, whole[j] + part, j, 0)

    added = {
        name: jax.tree.map(add, getattr(sums, name), part, getattr(cuts, name))
        for name, part in parts.items()
    }
    return sums._replace(**added)
