"""The gradients of attention's steps, for the backward pass in blocks.

JAX's own transposition of a mixing puts the heads last, which costs two transposed copies of every
tile; here all products keep heads first. Everything is head-major, see attention_inputs. The
arguments are those of the step in attention_core and the gradient of its result; the results are
the gradients of its arguments, in the accumulator's dtype.

Products per head are written so that both sides are contracted over their next to last axis,
wherever what has to be turned for it is narrow. XLA's CPU backend gives the others to a library
that takes up to twice as long for blocks of 64 or 128 rows (jax 0.10.2).
"""

import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.attention_core import batched_dot, dropout, mix_heads, mixed_weights
from jax_extractor.ops.attention_inputs import Projection
from jax_extractor.shapes import Array, Float


def scores_gradients(q, k, scale, ds: Float[Array, "Hk *B T S"]):
    """Of J = scale · QKᵀ: (dq, dk, dscale)."""
    dtype, ds = ds.dtype, ds.astype(q.dtype)
    dq = batched_dot(ds, k, contract=(-1, -1), dtype=dtype)
    dk = batched_dot(q, ds, contract=(-2, -2), dtype=dtype)
    if scale is None:
        return dq, dk, None
    return scale * dq, scale * dk, jnp.sum(dq * q.astype(dtype))


def mixed_logits_gradients(j, pre, bias, rate, rng, dlogits: Float[Array, "H *B T S"]):
    """Of L = dropout(J·P_l) + bias: (dj, dpre, dbias). Needs j only if there is a mixing."""
    dj, dpre = mix_heads_gradients(j, pre, dropout(dlogits, rate, rng, stage=0))
    return dj, dpre, None if bias is None else _sum_to(dlogits, bias.shape)


def weigh_gradients(
    w, post, v, rate, rng, do: Float[Array, "Hv *B T K"], do_t: Float[Array, "Hv *B K T"]
):
    """Of O = dropout(W·P_w)·V: (dw, dpost, dv)."""
    dtype, do, do_t = do.dtype, do.astype(v.dtype), do_t.astype(v.dtype)
    u = mixed_weights(w, post, rate, rng).astype(v.dtype)
    dv = batched_dot(do, u, contract=(-2, -2), dtype=dtype)
    du = dropout(batched_dot(do_t, v, contract=(-2, -2), dtype=dtype), rate, rng, stage=1)
    return *mix_heads_gradients(w, post, du), dv


def mix_heads_gradients(x, projection: Projection | None, g):
    """Of Σ_g x[g] · (P + per_query[t] + per_key[s])[g, h]: (dx, dprojection)."""
    if projection is None:
        return g, None
    static, per_query, per_key = projection
    transposed = Projection(static.T, _swap_heads(per_query), _swap_heads(per_key))
    dprojection = Projection(
        _head_products(x, g),
        None if per_query is None else jnp.einsum("g...ts,h...ts->g...th", x, g),
        None if per_key is None else jnp.einsum("g...ts,h...ts->g...sh", x, g),
    )
    return mix_heads(g, transposed), dprojection


def _head_products(x, g):
    """Σ x[g]·g[h] over all other axes, (Hin, Hout).

    With the other axes made one, XLA's CPU backend needs no transposed copy of g.
    """
    x, g = (a.reshape(a.shape[0], -1) for a in (x, g))
    return lax.dot_general(x, g, (((1,), (1,)), ((), ())))


def _swap_heads(x: Array | None) -> Array | None:
    """(Hin, …, rows, Hout) -> (Hout, …, rows, Hin)."""
    return None if x is None else jnp.swapaxes(x, 0, -1)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which an array of this shape was broadcast to x."""
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    return jnp.sum(x, axis=axes, keepdims=True)
