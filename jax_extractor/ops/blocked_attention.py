"""The same attention in blocks of queries: exact, in bounded memory, without most of the masked half.

Causal rows are cut into a few groups; every group reads the keys up to its last row and no others, so
its arrays have one static width, and a scan goes over its blocks of queries. The program has two
small loops a group whatever the length, one forward, one backward, and no array of queries × keys.

The backward pass is a custom VJP: it keeps the inputs and two numbers per row and head (the logits'
peak and the logarithm of the softmax's denominator), computes each block again, and adds up the
gradients of keys and values. The sum of both would be one number, but beside a peak of −1e9, as
additive masks make it, float32 rounds the logarithm away.

A block holds whole rows on purpose. Square tiles, which stay in a core's cache, took a tenth longer
at 1024 and a quarter longer at 4096 queries (2-core x86-64 CPU, jax 0.10.2): XLA runs products that
small on one core, and rows of the softmax that are cut must be gone over twice, since the second
mixing adds up heads of different denominators.
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
    turn,
    visible,
    weigh,
)
from jax_extractor.ops.attention_gradients import (
    mixed_logits_gradients,
    scores_gradients,
    weigh_gradients,
)
from jax_extractor.ops.attention_inputs import Inputs, Sizes, accumulator
from jax_extractor.ops.blocks import (
    Group,
    Tiling,
    cut_rows,
    join,
    join_groups,
    put_group,
    split_rows,
    take_group,
    tilings,
)
from jax_extractor.shapes import Array

# More groups multiply less of the masked half, and take longer to compile.
GROUPS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one call."""

    block: int  # queries per block
    queries: int  # T, without padding
    keys: int  # S
    causal: bool
    rates: tuple[float, float]
    cuts: Inputs  # the Tiling of each input
    mask_cut: Tiling | None

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return -(-self.queries // self.block)

    @property
    def groups(self) -> list[Group]:
        """Blocks of queries with the keys that the last of them may see."""
        if not self.causal:
            return [Group(0, self.rows, self.keys)]
        count = min(GROUPS, self.rows)
        ends = [self.rows * n // count for n in range(count + 1)]
        reach = [end * self.block + self.keys - self.queries for end in ends]
        widths = [min(max(r, 1), self.keys) for r in reach]
        return [Group(*item) for item in zip(ends, ends[1:], widths[1:], strict=False)]


def choose_block_size(sizes: Sizes) -> int:
    """The block size that is fastest, or the number of queries where one block is.

    Measured with 8 heads, causal, forward and backward (2-core x86-64 CPU, jax 0.10.2): from
    128 × 128 on blocks take about half of the plain path's time; blocks of 64 win below 512
    queries, blocks of 128 from there on.
    """
    if sizes.queries * sizes.keys < 128 * 128:
        return sizes.queries
    return 64 if sizes.queries < 512 else 128


def blocked_attend(
    inputs: Inputs,
    mask: Array | None,
    *,
    block_size: int,
    causal: bool,
    rates: tuple[float, float],
    rng: Array | None,
) -> Array:
    """`attend`, block by block. Reverse mode only: forward mode needs the plain path."""
    queries, keys = inputs.q.shape[-2], inputs.k.shape[-1]
    cuts, mask_cut = tilings(inputs, mask, queries, keys)
    plan = Plan(block_size, queries, keys, causal, rates, cuts, mask_cut)
    blocks, mask = cut_rows((inputs, mask), (cuts, mask_cut), block_size, plan.rows)
    o = _blocked(plan, blocks, mask, rng)
    o = jnp.moveaxis(o, 0, -3)  # (rows, Hv, *B, block, K) -> (Hv, *B, rows, block, K)
    return o.reshape(*o.shape[:-3], plan.rows * block_size, o.shape[-1])[..., :queries, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(plan, inputs, mask, rng):
    return _forward(plan, inputs, mask, rng)[0]


def _forward(plan: Plan, inputs: Inputs, mask, rng):
    """The outputs, and of every row the logits' peak and −log Σ exp(l − peak), block by block.

    The logarithm is −∞ in a row that sees nothing, whose weights are exp(−∞) = 0.
    """
    cuts, dtype = (plan.cuts, plan.mask_cut), accumulator(inputs.q)
    results = []
    for group in plan.groups:
        by_row, shared = split_rows(take_group((inputs, mask), cuts, group), cuts)

        def block(_, row, shared=shared):
            i, q_t, by_row = row
            x, key, _, logits = _logits(plan, q_t, join(by_row, shared), rng, i)
            peak = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(dtype).min)
            e = jnp.exp(logits - peak)
            total = jnp.sum(e, axis=-1, keepdims=True)
            inverse = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
            o = weigh(e * inverse, x.post, x.v, plan.rates[1], key)
            return None, (o, (peak, jnp.log(inverse)))

        rows = (jnp.arange(group.start, group.stop), turn(by_row[0].q), by_row)
        results.append(lax.scan(block, None, rows)[1])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _forward_rule(plan, inputs, mask, rng):
    o, softmax = _forward(plan, inputs, mask, rng)
    return o, (inputs, mask, rng, softmax)


def _backward_rule(plan: Plan, residuals, do):
    """The gradients of the inputs, from the gradient of the outputs."""
    inputs, mask, rng, softmax = residuals
    cuts, dtype = (plan.cuts, plan.mask_cut), accumulator(inputs.q)
    row_cuts, sum_cuts = split_rows(plan.cuts, plan.cuts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), inputs)
    _, sums = split_rows(zeros, plan.cuts)
    parts = []
    for group in plan.groups:
        by_row, shared = split_rows(take_group((inputs, mask), cuts, group), cuts)

        def block(sums, row, shared=shared):
            i, (q_t, do_t), do_i, (peak, log_inverse), by_row = row
            x, key, s, logits = _logits(plan, q_t, join(by_row, shared), rng, i)
            w = jnp.exp((logits - peak) + log_inverse)
            dw, dpost, dv = weigh_gradients(w, x.post, x.v, plan.rates[1], key, do_i, do_t)
            dlogits = w * (dw - row_dot(w, dw))
            ds, dpre, dbias = mixed_logits_gradients(s, x.pre, x.bias, plan.rates[0], key, dlogits)
            dq, dk, dscale = scores_gradients(x.q, x.k, x.scale, ds)
            grads = Inputs(dq, dk, dv, dscale, dpre, dpost, dbias)
            row_grads, others = split_rows(grads, plan.cuts)
            return jax.tree.map(jnp.add, sums, others), row_grads

        mine = slice(group.start, group.stop)
        mine_softmax = jax.tree.map(lambda x, mine=mine: x[mine], softmax)
        # Turned here and not in the loop, where XLA would fold it into the product again.
        turned = (turn(by_row[0].q), turn(do[mine]))
        rows = (jnp.arange(group.start, group.stop), turned, do[mine], mine_softmax, by_row)
        group_sums, row_grads = lax.scan(block, take_group(sums, sum_cuts, group), rows)
        sums = put_group(sums, group_sums, sum_cuts, group)
        parts.append(row_grads)
    grads = join(join_groups(parts, row_cuts, plan.keys), sums)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, inputs), None, None


_blocked.defvjp(_forward_rule, _backward_rule)


def _logits(plan: Plan, q_t, row, rng, i):
    """The inputs of the i-th block of queries, its random key, its scores and masked logits."""
    x, mask = row
    keys = x.k.shape[-1]
    allowed = visible(
        mask,
        causal=plan.causal,
        reach=i * plan.block + plan.keys - plan.queries + jnp.arange(plan.block),
        keys=jnp.arange(keys),
    )
    key = None if rng is None else jax.random.fold_in(rng, i)
    s = scores(q_t, x.k, x.scale)
    return x, key, s, hide(mixed_logits(s, x.pre, x.bias, plan.rates[0], key), allowed)
