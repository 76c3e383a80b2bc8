"""Attention of one dense block: scores, mixing, masked softmax, mixing, values.

All arrays are head-major (see attention_inputs): heads first, rows on axis -2. The plain path is
one such block, the blocked path many.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_inputs import Memory, Mixing, Queries, accumulator
from jax_extractor.shapes import Array, Bool, Float


def attend(
    queries: Queries, memory: Memory, mixing: Mixing, *, visible, rates, rng
) -> Float[Array, "Hv *B T K"]:
    """The outputs of all queries of the block over all its keys."""
    logits = mixed_logits(scores(queries, memory, mixing), queries, memory, mixing, rates[0], rng)
    weights = masked_softmax(logits, visible)
    return weigh(mixed_weights(weights, queries, memory, mixing, rates[1], rng), memory.v)


def scores(queries: Queries, memory: Memory, mixing: Mixing) -> Float[Array, "Hk *B T S"]:
    """J = scale · QKᵀ, per key head, accumulated and kept in at least float32."""
    q, dtype = queries.q, accumulator(queries.q)
    if q.dtype == dtype:  # one multiplication per feature; in low precision it would round q
        return _batched_dot(q * mixing.scale, memory.k, contract=(-1, -1), dtype=dtype)
    return mixing.scale * _batched_dot(q, memory.k, contract=(-1, -1), dtype=dtype)


def mixed_logits(j, queries: Queries, memory: Memory, mixing: Mixing, rate, rng):
    """L = dropout(J·P_l) + bias, per softmax head."""
    logits = dropout(mix_heads(j, mixing.pre, queries.pre, memory.pre), rate, rng, fold=0)
    return logits if queries.bias is None else logits + queries.bias


def mixed_weights(w, queries: Queries, memory: Memory, mixing: Mixing, rate, rng):
    """U = dropout(W·P_w), per value head."""
    return dropout(mix_heads(w, mixing.post, queries.post, memory.post), rate, rng, fold=1)


def weigh(u: Float[Array, "Hv *B T S"], v: Float[Array, "Hv *B S K"]) -> Float[Array, "Hv *B T K"]:
    """O = U·V, per value head, accumulated in at least float32 and rounded to v's dtype."""
    return _batched_dot(u.astype(v.dtype), v, contract=(-1, -2), dtype=u.dtype).astype(v.dtype)


def mix_heads(x, projection, per_query, per_key):
    """Σ_g x[g] · (P + per_query[t] + per_key[s])[g, h]; without a projection, x itself."""
    if projection is None:
        return x
    mixed = jnp.tensordot(projection.T, x, axes=1)
    if per_query is not None:
        mixed += jnp.einsum("g...th,g...ts->h...ts", per_query, x)
    if per_key is not None:
        mixed += jnp.einsum("g...sh,g...ts->h...ts", per_key, x)
    return mixed


def visibility(
    mask: Bool[Array, "..."] | None, *, causal: bool, first, queries: int, keys: int
) -> Bool[Array, "..."] | None:
    """Which keys the queries may attend to; `first` is the last key that the first query sees."""
    if not causal:
        return mask
    reach = first + jnp.arange(queries)
    past = jnp.arange(keys)[None, :] <= reach[:, None]
    return past if mask is None else mask & past


def masked_softmax(logits, visible):
    """softmax over the visible keys; a row that sees no key is exactly 0, and so is its gradient."""
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    return _softmax(logits)


@jax.custom_jvp
def _softmax(logits: Float[Array, "*H T S"]) -> Float[Array, "*H T S"]:
    """exp(l) / Σ exp(l), with 0 for a row of -inf only."""
    lowest = jnp.finfo(logits.dtype).min
    peak = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    e = jnp.exp(logits - peak)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e * (1 / jnp.where(total == 0, 1, total))


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    (logits,), (t,) = primals, tangents
    w = _softmax(logits)
    return w, w * (t - jnp.sum(w * t, axis=-1, keepdims=True))


def dropout(x: Float[Array, "..."], rate: float, rng, *, fold: int) -> Float[Array, "..."]:
    """x with each entry zero with probability `rate`, the others divided by 1 - rate."""
    if rate == 0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(rng, fold), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def _batched_dot(a, b, *, contract, dtype):
    """A product over the last two axes of a and b; all axes before them are batch axes."""
    n = a.ndim
    batch = tuple(range(n - 2))
    dimensions = (((n + contract[0],), (n + contract[1],)), (batch, batch))
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)
