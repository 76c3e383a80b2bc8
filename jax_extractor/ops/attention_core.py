"""The steps of attention: scores, mixing of heads, masked softmax, mixing of heads, values.

All arrays are head-major (see attention_inputs): heads first, rows on axis -2. Each step works on
all queries and keys, as in the plain path, or on a tile of them, as in the blocked one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_inputs import Inputs, Projection, accumulator
from jax_extractor.shapes import Array, Float


def attend(inputs: Inputs, mask, *, causal, rates, rng) -> Float[Array, "Hv *B T K"]:
    """The outputs of all queries over all keys, in the accumulator's dtype."""
    rows, keys = inputs.q.shape[-2], inputs.k.shape[-1]
    allowed = visible(
        mask, causal=causal, reach=keys - rows + jnp.arange(rows), keys=jnp.arange(keys)
    )
    j = scores(turn(inputs.q), inputs.k, inputs.scale)
    w = softmax(hide(mixed_logits(j, inputs.pre, inputs.bias, rates[0], rng), allowed))
    return weigh(w, inputs.post, inputs.v, rates[1], rng)


def scores(
    q_t: Float[Array, "Hk *B K T"], k: Float[Array, "Hk *B K S"], scale
) -> Float[Array, "Hk *B T S"]:
    """J = scale · QKᵀ, per key head, accumulated and kept in at least float32."""
    j = batched_dot(q_t, k, contract=(-2, -2), dtype=accumulator(q_t))
    return j if scale is None else scale * j


def mixed_logits(j: Float[Array, "Hk *B T S"], pre: Projection | None, bias, rate, rng):
    """L = dropout(J·P_l) + bias, per softmax head."""
    logits = dropout(mix_heads(j, pre), rate, rng, stage=0)
    return logits if bias is None else logits + bias


def mixed_weights(w: Float[Array, "H *B T S"], post: Projection | None, rate, rng):
    """U = dropout(W·P_w), per value head."""
    return dropout(mix_heads(w, post), rate, rng, stage=1)


def weigh(w, post: Projection | None, v: Float[Array, "Hv *B K S"], rate, rng):
    """O = U·V, per value head, in the accumulator's dtype."""
    u = mixed_weights(w, post, rate, rng)
    return batched_dot(u.astype(v.dtype), v, contract=(-1, -1), dtype=u.dtype)


def mix_heads(x, projection: Projection | None):
    """Σ_g x[g] · (P + per_query[t] + per_key[s])[g, h]; without a projection, x itself."""
    if projection is None:
        return x
    mixed = jnp.tensordot(projection.static.T, x, axes=1)
    if projection.per_query is not None:
        mixed += jnp.einsum("g...th,g...ts->h...ts", projection.per_query, x)
    if projection.per_key is not None:
        mixed += jnp.einsum("g...sh,g...ts->h...ts", projection.per_key, x)
    return mixed


def visible(mask, *, causal: bool, reach, keys):
    """Which keys each query may attend to, or None for all.

    `reach` is the last key that each query sees if causal; `keys` are the indices of the keys.
    """
    if not causal:
        return mask
    past = keys[None, :] <= reach[:, None]
    return past if mask is None else mask & past


def hide(logits, allowed):
    """The logits with -inf where a key is not visible."""
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


@jax.custom_jvp
def softmax(logits: Float[Array, "*H T S"]) -> Float[Array, "*H T S"]:
    """exp(l) / Σ exp(l) over the last axis; a row of -inf only gives 0, and gradients of 0."""
    peak = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(logits.dtype).min)
    e = jnp.exp(logits - peak)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e * (1 / jnp.where(total == 0, 1, total))


@softmax.defjvp
def _softmax_jvp(primals, tangents):
    w, (t,) = softmax(*primals), tangents
    wt = w * t
    # Sum and broadcast as products with ones: XLA's CPU backend fuses "multiply, then reduce" into
    # a scalar loop, in this direction and in the transposed one, that takes 15 times as long.
    ones = jnp.ones((w.shape[-1], 1), w.dtype)
    dot = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)  # noqa: E731
    return w, wt - w * dot(dot(wt, ones), ones.T)


def row_dot(a: Float[Array, "*H T S"], b: Float[Array, "*H T S"]) -> Float[Array, "*H T 1"]:
    """Σ_s a·b, as a product (see the comment on `softmax`)."""
    batch = tuple(range(a.ndim - 1))
    dimensions = (((a.ndim - 1,),) * 2, (batch, batch))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST)[..., None]


def dropout(x: Float[Array, "..."], rate: float, rng, *, stage: int) -> Float[Array, "..."]:
    """x with each entry zero with probability `rate`, the others divided by 1 - rate."""
    if rate == 0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(rng, stage), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def turn(x: Array) -> Array:
    """x with its last two axes swapped."""
    return jnp.swapaxes(x, -1, -2)


def batched_dot(a, b, *, contract, dtype):
    """A product over the last two axes of a and b; all axes before them are batch axes."""
    n = a.ndim
    batch = tuple(range(n - 2))
    dimensions = (((n + contract[0],), (n + contract[1],)), (batch, batch))
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)
