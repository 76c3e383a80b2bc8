"""Multi-head and talking-heads attention as pure functions on projected queries, keys, values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_extractor.ops.attention_core import (
    attend,
    hide,
    mixed_logits,
    mixed_weights,
    scores,
    softmax,
    turn,
    visible,
)
from jax_extractor.ops.attention_inputs import (
    DynamicMixing,
    check_options,
    head_major,
)
from jax_extractor.ops.blocked_attention import blocked_attend, choose_block_size
from jax_extractor.shapes import Array


class AttentionMaps(NamedTuple):
    """What talking-heads attention computes on the way to its output, heads before time.

    scores:  J (..., Hk, T, S), scaled products of queries and keys;
    logits:  L (..., H, T, S), after the first mixing, bias and mask (-inf where masked);
    weights: W (..., H, T, S), their softmax;
    mixed:   U (..., Hv, T, S), after the second mixing.
    """

    scores: Array
    logits: Array
    weights: Array
    mixed: Array


def talking_heads_attention(
    q: Array,
    k: Array,
    v: Array,
    pre: Array | None = None,
    post: Array | None = None,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    scale: float | Array | None = None,
    block_size: int | None = None,
    dynamic_pre: DynamicMixing | None = None,
    dynamic_post: DynamicMixing | None = None,
    dropout: float | tuple[float, float] = 0.0,
    dropout_rng: Array | None = None,
) -> Array:
    """Attention whose heads are mixed before and after the softmax.

        J = scale · QKᵀ                       per key head
        L = dropout(J · P_l) + bias           per softmax head
        W = softmax over the visible keys (L)
        U = dropout(W · P_w)                  per value head
        O = U · V

    P_l is `pre`, P_w is `post`; either may be None, which leaves its mixing out, and without both
    this is plain attention. Mask and bias act on L, after the first mixing: before it, masked keys
    would leak into other heads. A query that may attend to nothing gets exactly 0 and finite
    gradients. Scores, softmax and mixings are float32 (float64 for float64 inputs); the output
    has v's dtype.

    Args:
      q: (..., T, Hk, Dk).
      k: (..., S, Hk, Dk), of q's dtype.
      v: (..., S, Hv, Dv), of q's dtype.
      pre: (Hk, H), P_l.
      post: (H, Hv), P_w.
      mask: boolean, broadcastable to (..., H, T, S); True = may attend. What masked keys and values
        hold changes nothing as long as it is finite (0 · NaN is NaN).
      bias: broadcastable to (..., H, T, S), added to L.
      causal: query i sees key j if j - i <= S - T: the last query is aligned with the last key.
        Together with a mask, both must allow a key.
      scale: a number, 1/√Dk by default.
      block_size: queries per block. Blocks bound the memory, and skip the keys after a causal
        block; the result is that of the plain path to rounding. None chooses; T or more is plain.
        Blocks have reverse-mode gradients only: forward mode (jvp) needs the plain path.
      dynamic_pre: terms added to P_l per query, (..., T, Hk, H), and per key, (..., S, Hk, H).
      dynamic_post: terms added to P_w per query, (..., T, H, Hv), and per key, (..., S, H, Hv).
      dropout: the rate after the second mixing, or the pair of rates after the first and second.
        Which entries are dropped depends on the key and on the block size.
      dropout_rng: a JAX random key, needed where a rate is not 0.

    Returns:
      (..., T, Hv, Dv).

    Raises:
      UsageError: shapes, dtypes or options that do not fit together.

    Source: Shazeer et al. 2020, "Talking-Heads Attention"; the dynamic terms are those of its
    section on dynamic projections.
    """
    rates = check_options(dropout, dropout_rng, block_size)
    sizes, inputs, mask = head_major(
        q,
        k,
        v,
        pre,
        post,
        mask=mask,
        bias=bias,
        scale=scale,
        dynamic_pre=dynamic_pre,
        dynamic_post=dynamic_post,
    )
    block_size = block_size or choose_block_size(sizes)
    if block_size < sizes.queries:
        o = blocked_attend(
            inputs, mask, block_size=block_size, causal=causal, rates=rates, rng=dropout_rng
        )
    else:
        o = attend(inputs, mask, causal=causal, rates=rates, rng=dropout_rng)
    return jnp.moveaxis(o, 0, -2).astype(v.dtype)


def dot_product_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    scale: float | Array | None = None,
    block_size: int | None = None,
    dropout: float = 0.0,
    dropout_rng: Array | None = None,
) -> Array:
    """Plain multi-head attention, softmax(scale · QKᵀ + bias) · V over the visible keys.

    Talking-heads attention without its mixings, and the same code, which on CPU takes less than half
    the time of `jax.nn.dot_product_attention` (causal, forward and backward): q (..., T, H, Dk),
    k (..., S, H, Dk), v (..., S, H, Dv) -> (..., T, H, Dv). All options and errors are those of
    `talking_heads_attention`; `dropout` is the rate on the weights.

    Source: Vaswani et al. 2017, "Attention Is All You Need", Eq. (1).
    """
    return talking_heads_attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        causal=causal,
        scale=scale,
        block_size=block_size,
        dropout=dropout,
        dropout_rng=dropout_rng,
    )


def attention_maps(
    q: Array,
    k: Array,
    pre: Array | None = None,
    post: Array | None = None,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    scale: float | Array | None = None,
    dynamic_pre: DynamicMixing | None = None,
    dynamic_post: DynamicMixing | None = None,
) -> AttentionMaps:
    """The scores, logits and weights inside `talking_heads_attention`, before and after mixing.

    Takes the arguments of `talking_heads_attention` without v and dropout, and returns
    J (..., Hk, T, S), L and W (..., H, T, S) and U (..., Hv, T, S) of its formula, the whole of
    each. Raises UsageError for what does not fit together.
    """
    heads = pre.shape[-1] if pre is not None else q.shape[-2]
    value_heads = post.shape[-1] if post is not None else heads
    v = jnp.zeros((*k.shape[:-2], value_heads, 0), q.dtype)
    sizes, inputs, mask = head_major(
        q,
        k,
        v,
        pre,
        post,
        mask=mask,
        bias=bias,
        scale=scale,
        dynamic_pre=dynamic_pre,
        dynamic_post=dynamic_post,
    )
    offset = sizes.keys - sizes.queries
    reach = offset + jnp.arange(sizes.queries)
    allowed = visible(mask, causal=causal, reach=reach, keys=jnp.arange(sizes.keys))
    j = scores(turn(inputs.q), inputs.k, inputs.scale)
    logits = hide(mixed_logits(j, inputs.pre, inputs.bias, 0.0, None), allowed)
    weights = softmax(logits)
    maps = AttentionMaps(j, logits, weights, mixed_weights(weights, inputs.post, 0.0, None))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -3), maps)
