"""The same attention in square tiles: exact, in bounded memory, without the masked half.

A scan goes over blocks of queries; inside, loops go over the blocks of keys that the queries may
see. The softmax needs the whole row before the second mixing can start (each value head adds rows
of different normalisers, so no online softmax over one pass is exact). So each block of queries
goes over its keys twice, and what the second pass needs of the first lies in buffers of one block
of rows. The program has two small loop nests whatever the length, one forward, one backward, and
no array of queries × keys.

The backward pass is a custom VJP: it keeps the inputs and one number per row and head (the
logarithm of the softmax's denominator), computes each tile again, and adds the gradients of keys
and values in place.

All arrays are cut into tiles first, with the tile's indices as leading axes: then a tile is
contiguous, which halves the time of what XLA's CPU backend makes of reading one.
"""

import dataclasses
import functools

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
from jax_extractor.ops.attention_inputs import Inputs, Sizes, accumulator
from jax_extractor.ops.tiles import (
    Tiling,
    add_tile,
    cut_all,
    join,
    read_tiles,
    split_rows,
    tilings,
)
from jax_extractor.shapes import Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one call."""

    block: int  # queries and keys per tile
    queries: int  # T, without padding
    keys: int  # S, without padding
    causal: bool
    rates: tuple[float, float]
    cuts: Inputs  # the Tiling of each input
    mask_cut: Tiling | None

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
    """The block size that is fastest, or the number of queries where one block is.

    Measured on CPU with 8 heads, forward and backward: below 256 × 256 the plain path wins or the
    gain is small; from there blocks of 64 win, from 1024 queries on blocks of 128.
    """
    if sizes.queries * sizes.keys < 256 * 256:
        return sizes.queries
    return 64 if sizes.queries < 1024 else 128


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
    cuts, mask_cut = tilings(inputs, mask, queries, keys)
    plan = Plan(block_size, queries, keys, causal, rates, cuts, mask_cut)
    tiles, mask = cut_all(inputs, mask, plan)
    o = _tiled(plan, tiles, mask, rng)
    o = jnp.moveaxis(o, 0, -3)  # (rows, Hv, *B, block, K) -> (Hv, *B, rows · block, K)
    return o.reshape(*o.shape[:-3], plan.rows * block_size, o.shape[-1])[..., :queries, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(plan, inputs, mask, rng):
    return _forward(plan, inputs, mask, rng)[0]


def _forward(plan: Plan, inputs: Inputs, mask, rng):
    """The outputs and log Σ exp of every row's logits, block by block."""
    row_shape, dtype = _row_shape(plan, inputs), accumulator(inputs.q)
    by_row, shared = split_rows((inputs, mask), (plan.cuts, plan.mask_cut))

    def block(_, row):
        i, row_inputs = row
        tile = functools.partial(_tile, plan, join(row_inputs, shared), rng, i)

        def first_pass(j, carry):
            buffer, peak, total = carry
            x, allowed, key = tile(j)
            s = scores(x.q, x.k, x.scale)
            logits = hide(mixed_logits(s, x.pre, x.bias, plan.rates[0], key), allowed)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
            part = jnp.sum(jnp.exp(logits - higher), axis=-1, keepdims=True)
            return _write(buffer, logits, j), higher, total * jnp.exp(peak - higher) + part

        def second_pass(j, o):
            x, _, key = tile(j)
            return o + weigh(jnp.exp(buffer[j] - norm), x.post, x.v, plan.rates[1], key)

        stop = plan.columns_of(i)
        carry = (
            jnp.zeros((plan.columns, *row_shape, plan.block), dtype),
            jnp.full((*row_shape, 1), jnp.finfo(dtype).min),
            jnp.zeros((*row_shape, 1), dtype),
        )
        buffer, peak, total = lax.fori_loop(0, stop, first_pass, carry)
        norm = jnp.where(total == 0, 0, peak + jnp.log(jnp.where(total == 0, 1, total)))
        _, value_heads, *_, width = inputs.v.shape
        o = jnp.zeros((value_heads, *row_shape[1:], width), dtype)
        return None, (lax.fori_loop(0, stop, second_pass, o), norm)

    return lax.scan(block, None, (jnp.arange(plan.rows), by_row))[1]


def _forward_rule(plan, inputs, mask, rng):
    o, norm = _forward(plan, inputs, mask, rng)
    return o, (inputs, mask, rng, norm)


def _backward_rule(plan: Plan, residuals, do):
    """The gradients of the inputs, from the gradient of the outputs."""
    inputs, mask, rng, norm = residuals
    row_shape, dtype = _row_shape(plan, inputs), accumulator(inputs.q)
    by_row, shared = split_rows((inputs, mask), (plan.cuts, plan.mask_cut))
    zeros = _transpose_memory(jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), inputs))

    def block(sums, row):
        i, row_inputs, row_zeros, do_i, norm_i = row
        tile = functools.partial(_tile, plan, join(row_inputs, shared), rng, i)

        def first_pass(j, carry):
            grads, s_row, w_row, dw_row, total = carry
            x, allowed, key = tile(j)
            s = scores(x.q, x.k, x.scale)
            logits = hide(mixed_logits(s, x.pre, x.bias, plan.rates[0], key), allowed)
            w = jnp.exp(logits - norm_i)
            dw, dpost, dv_t = weigh_gradients(w, x.post, x.v, plan.rates[1], key, do_i)
            grads = add_tile(grads, plan.cuts, j, post=dpost, v=dv_t)
            s_row = None if s_row is None else _write(s_row, s, j)
            return grads, s_row, _write(w_row, w, j), _write(dw_row, dw, j), total + row_dot(w, dw)

        def second_pass(j, grads):
            x, _, key = tile(j)
            dlogits = w_row[j] * (dw_row[j] - total)
            s = None if s_row is None else s_row[j]
            ds, dpre, dbias = mixed_logits_gradients(s, x.pre, x.bias, plan.rates[0], key, dlogits)
            dq, dk_t, dscale = scores_gradients(x.q, x.k, x.scale, ds)
            parts = {"q": dq, "k": dk_t, "scale": dscale, "pre": dpre, "bias": dbias}
            return add_tile(grads, plan.cuts, j, **parts)

        def buffer(heads):
            return jnp.zeros((plan.columns, heads, *row_shape[1:], plan.block), dtype)

        stop = plan.columns_of(i)
        heads = row_shape[0]
        s_row = None if inputs.pre is None else buffer(inputs.q.shape[1])
        grads = join(row_zeros, sums)
        carry = (grads, s_row, buffer(heads), buffer(heads), jnp.zeros((*row_shape, 1), dtype))
        grads, s_row, w_row, dw_row, total = lax.fori_loop(0, stop, first_pass, carry)
        grads = lax.fori_loop(0, stop, second_pass, grads)
        row_grads, sums = split_rows(grads, plan.cuts)
        return sums, row_grads

    row_zeros, sums = split_rows(zeros, plan.cuts)
    rows = (jnp.arange(plan.rows), by_row, row_zeros, do, norm)
    sums, row_grads = lax.scan(block, sums, rows)
    grads = _transpose_memory(join(row_grads, sums))
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, inputs), None, None


_tiled.defvjp(_forward_rule, _backward_rule)


def _tile(plan: Plan, row, rng, i, j):
    """The inputs of tile (i, j), the keys its queries may attend to, and its random key."""
    inputs, mask = read_tiles(row, (plan.cuts, plan.mask_cut), j)
    steps = jnp.arange(plan.block)
    allowed = visible(
        mask,
        causal=plan.causal,
        reach=i * plan.block + plan.keys - plan.queries + steps,
        keys=j * plan.block + steps,
        limit=plan.keys if plan.keys % plan.block else None,
    )
    key = None if rng is None else jax.random.fold_in(rng, i * plan.columns + j)
    return inputs, allowed, key


def _row_shape(plan: Plan, inputs: Inputs) -> tuple[int, ...]:
    """(H, *B, block): the softmax rows of one block of queries."""
    _, key_heads, *batch, block, _ = inputs.q.shape
    heads = key_heads if inputs.pre is None else inputs.pre.static.shape[1]
    return (heads, *batch, block)


def _write(row: Array, tile: Array, j) -> Array:
    return lax.dynamic_update_index_in_dim(row, tile, j, 0)


def _transpose_memory(grads: Inputs) -> Inputs:
    """k and v as the gradients of a tile come: (…, K, S)."""
    return grads._replace(k=jnp.swapaxes(grads.k, -1, -2), v=jnp.swapaxes(grads.v, -1, -2))
