"""The border of the attention functions: checked arguments, brought to the head-major layout.

Inside, heads come first and rows (queries or keys) stand on the axis before the last, in every
array but k and v, which are turned: q (Hk, *B, T, K), k (Hk, *B, K, S), v (Hv, *B, K, S), mask and
bias (H|1, *B|1, T|1, S|1). So mixing heads is one (H × Hk) product over everything else, and cutting
blocks of rows is one slice of axis -2.
"""

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_extractor.errors import UsageError
from jax_extractor.shapes import Array


class DynamicMixing(NamedTuple):
    """Terms added to a head projection P (Hin, Hout), each computed from the data.

    The mixing of query t and key s is then P + query[t] + memory[s].

    query:  (..., T, Hin, Hout) or None, one matrix per query;
    memory: (..., S, Hin, Hout) or None, one matrix per key.
    """

    query: Array | None = None
    memory: Array | None = None


class Projection(NamedTuple):
    """A mixing of heads, head-major: P + per_query[t] + per_key[s]."""

    static: Array  # (Hin, Hout)
    per_query: Array | None  # (Hin, *B, T, Hout)
    per_key: Array | None  # (Hin, *B, S, Hout)


class Inputs(NamedTuple):
    """What the output is differentiable in, head-major."""

    q: Array
    k: Array
    v: Array
    scale: Array | None  # (), or None where q already has it
    pre: Projection | None
    post: Projection | None
    bias: Array | None


class Sizes(NamedTuple):
    """The counts of one call."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    key_heads: int
    heads: int
    value_heads: int


def check_inputs(q, k, v, pre, post, mask, bias) -> Sizes:
    """The sizes of a call, or the error that names the argument, its value and the remedy."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise UsageError(f"{name} has shape {x.shape}: give it (..., length, heads, width)")
        _check_float(name, x)
        if x.dtype != q.dtype:
            raise UsageError(f"{name} is {x.dtype} while q is {q.dtype}: cast them to one dtype")
    if q.shape[-1] == 0:
        raise UsageError(f"q has shape {q.shape}: give heads a width of at least 1")
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-3] != q.shape[:-3]:
            raise UsageError(
                f"{name} has leading axes {x.shape[:-3]} while q has {q.shape[:-3]}: "
                f"broadcast {name} to q's"
            )
    if k.shape[-2:] != q.shape[-2:]:
        raise UsageError(
            f"k has (heads, width) {k.shape[-2:]} while q has {q.shape[-2:]}: "
            "project or repeat k to q's heads and width"
        )
    if v.shape[-3] != k.shape[-3]:
        raise UsageError(
            f"v has length {v.shape[-3]} while k has {k.shape[-3]}: give one value per key"
        )
    sizes = Sizes(q.shape[:-3], q.shape[-3], k.shape[-3], *_check_heads(q, v, pre, post))
    scores = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    if mask is not None and mask.dtype != jnp.bool_:
        raise UsageError(
            f"mask is {mask.dtype}: give a boolean mask (True = may attend), "
            "or pass additive terms as bias"
        )
    if bias is not None:
        _check_float("bias", bias)
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and not _broadcasts(x.shape, scores):
            raise UsageError(
                f"{name} of shape {x.shape} does not broadcast to {scores}: "
                "give it (..., heads, queries, keys), with 1 where it does not vary"
            )
    return sizes


def _check_heads(q, v, pre, post) -> tuple[int, int, int]:
    """(Hk, H, Hv) that q, v and the projections agree on."""
    for name, x in (("pre", pre), ("post", post)):
        if x is not None:
            if x.ndim != 2:
                raise UsageError(f"{name} has shape {x.shape}: give a matrix (heads in, heads out)")
            _check_float(name, x)
    key_heads, value_heads = q.shape[-2], v.shape[-2]
    if pre is not None and pre.shape[0] != key_heads:
        raise UsageError(
            f"pre has shape {pre.shape} while q has {key_heads} heads: "
            f"its first axis must be {key_heads}"
        )
    heads = key_heads if pre is None else pre.shape[1]
    if post is not None and post.shape != (heads, value_heads):
        raise UsageError(
            f"post has shape {post.shape} while the softmax has {heads} heads and v "
            f"{value_heads}: give post the shape {(heads, value_heads)}"
        )
    if post is None and heads != value_heads:
        raise UsageError(
            f"v has {value_heads} heads while the softmax has {heads}: "
            f"give post of shape {(heads, value_heads)}, or v with {heads} heads"
        )
    return key_heads, heads, value_heads


def check_dynamic(sizes: Sizes, pre, post, dynamic_pre, dynamic_post) -> None:
    """Refuse dynamic terms without a static projection, or of the wrong shape."""
    for name, static, dynamic in (("pre", pre, dynamic_pre), ("post", post, dynamic_post)):
        for side, rows in (("query", sizes.queries), ("memory", sizes.keys)):
            if not isinstance(dynamic, DynamicMixing | None):
                raise UsageError(
                    f"dynamic_{name} is a {type(dynamic).__name__}: give DynamicMixing"
                )
            x = None if dynamic is None else getattr(dynamic, side)
            if x is None:
                continue
            if static is None:
                raise UsageError(
                    f"dynamic_{name}.{side} is given while {name}=None: "
                    f"give the static {name} it is added to (the identity: jnp.eye)"
                )
            _check_float(f"dynamic_{name}.{side}", x)
            expected = (*sizes.batch, rows, *static.shape)
            if x.shape != expected:
                raise UsageError(
                    f"dynamic_{name}.{side} has shape {x.shape}: give it the shape {expected}"
                )


def check_options(dropout, dropout_rng, block_size) -> tuple[float, float]:
    """The two dropout rates, after refusing what cannot be used."""
    rates = tuple(dropout) if isinstance(dropout, Sequence) else (0.0, dropout)
    if len(rates) != 2 or not all(isinstance(r, numbers.Real) and 0 <= float(r) < 1 for r in rates):
        raise UsageError(
            f"dropout={dropout!r}: give one rate for the weights, or the pair "
            "(rate of the logits, rate of the weights), each at least 0 and below 1"
        )
    if any(rates) and dropout_rng is None:
        raise UsageError(
            f"dropout={dropout!r} with dropout_rng=None: pass a key, such as jax.random.key(0)"
        )
    if block_size is not None and (
        isinstance(block_size, bool)
        or not isinstance(block_size, numbers.Integral)
        or block_size < 1
    ):
        raise UsageError(
            f"block_size={block_size!r}: give a whole number of queries, at least 1, or None"
        )
    return rates


def head_major(
    q, k, v, pre, post, *, mask, bias, scale, dynamic_pre, dynamic_post
) -> tuple[Sizes, Inputs, Array | None]:
    """The sizes of a call, and its arguments, checked, in the layout of this module; the mask last."""
    sizes = check_inputs(q, k, v, pre, post, mask, bias)
    check_dynamic(sizes, pre, post, dynamic_pre, dynamic_post)
    dtype = accumulator(q)
    if scale is not None and jnp.ndim(scale) != 0:
        raise UsageError(f"scale has shape {jnp.shape(scale)}: give one number")
    scale = jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    if q.dtype == dtype:  # one product per feature, not per pair; in low precision it would round
        q, scale = q * scale, None
    inputs = Inputs(
        q=jnp.moveaxis(q, -2, 0),
        k=_turned(k),
        v=_turned(v),
        scale=scale,
        pre=_projection(pre, dynamic_pre, dtype),
        post=_projection(post, dynamic_post, dtype),
        bias=_pairs_first(_cast(bias, dtype), q.ndim),
    )
    return sizes, inputs, _pairs_first(mask, q.ndim)


def _projection(static, dynamic: DynamicMixing | None, dtype) -> Projection | None:
    if static is None:
        return None
    terms = (_heads_first(_cast(x, dtype)) for x in dynamic or DynamicMixing())
    return Projection(static.astype(dtype), *terms)


def accumulator(q: Array):
    """The dtype of scores, softmax and mixings: float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)


def _heads_first(x: Array | None) -> Array | None:
    """(*B, rows, heads, width) -> (heads, *B, rows, width)."""
    return None if x is None else jnp.moveaxis(x, -2, 0)


def _turned(x: Array) -> Array:
    """(*B, S, heads, width) -> (heads, *B, width, S)."""
    return jnp.moveaxis(x, (-2, -3), (0, -1))


def _pairs_first(x: Array | None, rank: int) -> Array | None:
    """Broadcastable to (*B, H, T, S) -> broadcastable to (H, *B, T, S), of full rank."""
    if x is None:
        return None
    return jnp.moveaxis(x.reshape((1,) * (rank - x.ndim) + x.shape), -3, 0)


def _cast(x: Array | None, dtype) -> Array | None:
    return None if x is None else x.astype(dtype)


def _check_float(name: str, x: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(f"{name} is {x.dtype}: cast it to a floating dtype, such as float32")


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of this shape broadcasts to the target without growing it."""
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return all(size in (1, full) for size, full in zip(shape, tail, strict=True))
