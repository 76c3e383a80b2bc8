"""The same attention in square tiles: exact, in bounded memory, without the masked half.

A scan goes over blocks of queries; inside, loops go over the blocks of keys that the queries may
see. The softmax needs the whole row before the second mixing can start (each value head adds rows
of different normalisers, so no online softmax over one pass is exact). So each block of queries
goes over its keys twice, and what the second pass needs of the first lies in buffers of one block
of rows. The program has two small loop nests whatever the length, one forward, one backward, and
no array of queries × keys.

The backward pass is a custom VJP: it keeps the inputs and one number per row and head (the
logarithm of the softmax's denominator), computes each tile again, and adds the gradients of keys
and values in place. The gradients of the steps within a tile are JAX's own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_core import (
    hide,
    mixed_logits,
    row_dot,
    scores,
    visible,
    weigh,
)
from jax_extractor.ops.attention_gradients import (
    mixed_logits_gradients,
    scores_gradients,
    weigh_gradients,
)
from jax_extractor.ops.attention_inputs import Inputs, Projection, Sizes, accumulator
from jax_extractor.shapes import Array


class Plan(NamedTuple):
    """What is static about one call."""

    block: int  # queries and keys per tile
    queries: int  # T, without padding
    keys: int  # S, without padding
    causal: bool
    rates: tuple[float, float]

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return -(-self.queries // self.block)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return -(-self.keys // self.block)

    def columns_of(self, i):
        """How many blocks of keys the i-th block of queries may see."""
        if not self.causal:
            return self.columns
        reach = (i + 1) * self.block + self.keys - self.queries
        return jnp.clip(-(-reach // self.block), 0, self.columns)


def choose_block_size(sizes: Sizes) -> int:
    """The block size that is fastest, or the number of queries where one block is."""
    return sizes.queries


def blocked_attend(
    inputs: Inputs,
    mask: Array | None,
    *,
    block_size: int,
    causal: bool,
    rates: tuple[float, float],
    rng: Array | None,
) -> Array:
    """`attend`, tile by tile. Reverse mode only: forward mode needs the plain path."""
    queries, keys = inputs.q.shape[-2], inputs.k.shape[-2]
    plan = Plan(block_size, queries, keys, causal, rates)
    grow = {
        "row": (queries, plan.rows * block_size - queries),
        "column": (keys, plan.columns * block_size - keys),
    }

    def pad(x, axes):
        for axis, side in axes:
            size, more = grow[side]
            if more:
                widths = [(0, 0)] * x.ndim
                widths[axis] = (0, more)
                x = jnp.pad(x, widths)
        return x

    inputs = jax.tree.map(pad, inputs, tiled_axes(inputs, queries, keys))
    mask = None if mask is None else pad(mask, _pair_axes(mask, queries, keys))
    return _tiled(plan, inputs, mask, rng)[..., :queries, :]


def tiled_axes(inputs: Inputs, queries: int, keys: int) -> Inputs:
    """For each array the axes that are cut into tiles, as pairs (axis, "row" or "column")."""
    row, column = ((-2, "row"),), ((-2, "column"),)

    def of_projection(p: Projection | None):
        if p is None:
            return None
        per_query = None if p.per_query is None else row
        return Projection((), per_query, None if p.per_key is None else column)

    return Inputs(
        q=row,
        k=column,
        v=column,
        scale=(),
        pre=of_projection(inputs.pre),
        post=of_projection(inputs.post),
        bias=None if inputs.bias is None else _pair_axes(inputs.bias, queries, keys),
    )


def _pair_axes(x: Array, queries: int, keys: int):
    rows = ((-2, "row"),) if x.shape[-2] == queries else ()
    columns = ((-1, "column"),) if x.shape[-1] == keys else ()
    return rows + columns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(plan, inputs, mask, rng):
    return _forward(plan, inputs, mask, rng)[0]


def _forward(plan: Plan, inputs: Inputs, mask, rng):
    """The outputs, and log Σ exp of every row's logits."""
    cut = _Cutter(plan, inputs, mask, rng)
    row_shape = _row_shape(inputs, plan.block)
    dtype = accumulator(inputs.q)

    def block(_, i):
        def first_pass(j, carry):
            buffer, peak, total = carry
            x, allowed, key = cut(i, j)
            s = scores(x.q, x.k, x.scale)
            logits = hide(mixed_logits(s, x.pre, x.bias, plan.rates[0], key), allowed)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
            part = jnp.sum(jnp.exp(logits - higher), axis=-1, keepdims=True)
            total = total * jnp.exp(peak - higher) + part
            return _write(buffer, logits, j), higher, total

        def second_pass(j, o):
            x, _, key = cut(i, j)
            weights = jnp.exp(_read(buffer, plan.block, j) - norm)
            return o + weigh(weights, x.post, x.v, plan.rates[1], key)

        stop = plan.columns_of(i)
        buffer, peak, total = lax.fori_loop(
            0,
            stop,
            first_pass,
            (
                jnp.zeros((*row_shape, plan.columns * plan.block), dtype),
                jnp.full((*row_shape, 1), jnp.finfo(dtype).min),
                jnp.zeros((*row_shape, 1), dtype),
            ),
        )
        norm = jnp.where(total == 0, 0, peak + jnp.log(jnp.where(total == 0, 1, total)))
        o = jnp.zeros((inputs.v.shape[0], *row_shape[1:], inputs.v.shape[-1]), dtype)
        return None, (lax.fori_loop(0, stop, second_pass, o), norm)

    _, (o, norm) = lax.scan(block, None, jnp.arange(plan.rows))
    return _join_rows(o), _join_rows(norm)


def _forward_rule(plan, inputs, mask, rng):
    o, norm = _forward(plan, inputs, mask, rng)
    return o, (inputs, mask, rng, norm)


def _backward_rule(plan: Plan, residuals, do):
    """The gradients of the inputs, from the gradient of the outputs."""
    inputs, mask, rng, norm = residuals
    cut = _Cutter(plan, inputs, mask, rng)
    row_shape = _row_shape(inputs, plan.block)
    dtype = accumulator(inputs.q)

    def block(grads, i):
        do_i, norm_i = (_slice(x, -2, i, plan.block) for x in (do, norm))

        def first_pass(j, carry):
            grads, s_row, w_row, dw_row, total = carry
            x, allowed, key = cut(i, j)
            s = scores(x.q, x.k, x.scale)
            logits = hide(mixed_logits(s, x.pre, x.bias, plan.rates[0], key), allowed)
            w = jnp.exp(logits - norm_i)
            dw, dpost, dv_t = weigh_gradients(w, x.post, x.v, plan.rates[1], key, do_i)
            grads = cut.add(grads, i, j, post=dpost, v=dv_t)
            s_row = None if s_row is None else _write(s_row, s, j)
            return grads, s_row, _write(w_row, w, j), _write(dw_row, dw, j), total + row_dot(w, dw)

        def second_pass(j, grads):
            x, _, key = cut(i, j)
            w, dw = _read(w_row, plan.block, j), _read(dw_row, plan.block, j)
            dlogits = w * (dw - total)
            s = None if s_row is None else _read(s_row, plan.block, j)
            ds, dpre, dbias = mixed_logits_gradients(
                s, x.pre, x.bias, plan.rates[0], key, dlogits
            )
            dq, dk_t, dscale = scores_gradients(x.q, x.k, x.scale, ds)
            return cut.add(grads, i, j, q=dq, k=dk_t, scale=dscale, pre=dpre, bias=dbias)

        def row(heads):
            return jnp.zeros((heads, *row_shape[1:], plan.columns * plan.block), dtype)

        stop = plan.columns_of(i)
        s_row = None if inputs.pre is None else row(inputs.q.shape[0])
        carry = (grads, s_row, row(row_shape[0]), row(row_shape[0]), jnp.zeros((*row_shape, 1), dtype))
        grads, s_row, w_row, dw_row, total = lax.fori_loop(0, stop, first_pass, carry)
        return lax.fori_loop(0, stop, second_pass, grads), None

    zeros = _transpose_memory(jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), inputs))
    grads, _ = lax.scan(block, zeros, jnp.arange(plan.rows))
    grads = _transpose_memory(grads)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, inputs), None, None


def _transpose_memory(grads: Inputs) -> Inputs:
    return grads._replace(k=jnp.swapaxes(grads.k, -1, -2), v=jnp.swapaxes(grads.v, -1, -2))


_tiled.defvjp(_forward_rule, _backward_rule)


class _Cutter:
    """Cuts the inputs of a tile out of the whole, and adds a tile's gradients into the whole."""

    def __init__(self, plan: Plan, inputs: Inputs, mask, rng):
        self.plan, self.inputs, self.mask, self.rng = plan, inputs, mask, rng
        padded = (plan.rows * plan.block, plan.columns * plan.block)
        self.axes = tiled_axes(inputs, *padded)
        column = ((-1, "column"),)
        self.gradient_axes = self.axes._replace(k=column, v=column)
        self.mask_axes = () if mask is None else _pair_axes(mask, *padded)

    def __call__(self, i, j):
        """The inputs of tile (i, j), the keys its queries may attend to, and its random key."""
        plan = self.plan
        x = jax.tree.map(lambda a, axes: self._slice(a, axes, i, j), self.inputs, self.axes)
        mask = None if self.mask is None else self._slice(self.mask, self.mask_axes, i, j)
        steps = jnp.arange(plan.block)
        allowed = visible(
            mask,
            causal=plan.causal,
            reach=i * plan.block + plan.keys - plan.queries + steps,
            keys=j * plan.block + steps,
            limit=plan.keys if plan.keys % plan.block else None,
        )
        key = None if self.rng is None else jax.random.fold_in(self.rng, i * plan.columns + j)
        return x, allowed, key

    def add(self, grads: Inputs, i, j, **parts) -> Inputs:
        """The gradients of all inputs, with those of tile (i, j) added for the fields named."""

        def add(whole, part, axes):
            if not axes:
                return whole + part
            start = self._start(whole, axes, i, j)
            here = lax.dynamic_slice(whole, start, part.shape, allow_negative_indices=False)
            return lax.dynamic_update_slice(
                whole, here + part, start, allow_negative_indices=False
            )

        sums = {
            name: jax.tree.map(add, getattr(grads, name), part, getattr(self.gradient_axes, name))
            for name, part in parts.items()
        }
        return grads._replace(**sums)

    def _start(self, x, axes, i, j):
        start = [jnp.zeros((), jnp.int32)] * x.ndim
        for axis, side in axes:
            start[axis] = jnp.asarray(i if side == "row" else j, jnp.int32) * self.plan.block
        return start

    def _slice(self, x, axes, i, j):
        sizes = list(x.shape)
        for axis, _ in axes:
            sizes[axis] = self.plan.block
        if not axes:
            return x
        return lax.dynamic_slice(
            x, self._start(x, axes, i, j), sizes, allow_negative_indices=False
        )


def _row_shape(inputs: Inputs, block: int) -> tuple[int, ...]:
    """(H, *B, block): the softmax rows of one block of queries."""
    heads = inputs.q.shape[0] if inputs.pre is None else inputs.pre.static.shape[1]
    return (heads, *inputs.q.shape[1:-2], block)


def _write(row: Array, tile: Array, j) -> Array:
    start = j * tile.shape[-1]
    return lax.dynamic_update_slice_in_dim(row, tile, start, -1, allow_negative_indices=False)


def _read(row: Array, block: int, j) -> Array:
    return _slice(row, -1, j, block)


def _slice(x: Array, axis: int, index, block: int) -> Array:
    start = index * block
    return lax.dynamic_slice_in_dim(x, start, block, axis, allow_negative_indices=False)


def _join_rows(blocks: Array) -> Array:
    """(rows, …, block, width) -> (…, rows · block, width)."""
    x = jnp.moveaxis(blocks, 0, -3)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
