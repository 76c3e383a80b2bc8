"""Extraction one token at a time, exact and without end, in quasi-linear time."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.errors import UsageError
from jax_extractor.ops.stream_plan import StreamPlan, plan_stream
from jax_extractor.ops.stream_tiles import prefill_blocks, tile
from jax_extractor.shapes import Array, Bool, Float, PyTree

__all__ = [
    "StreamPlan",
    "StreamState",
    "init_stream",
    "plan_stream",
    "stream_prefill",
    "stream_step",
]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["position", "recent", "inputs", "pending", "valid", "count"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StreamState:
    """What a stream remembers of its past; shapes never change, and *B are the batch axes.

    position (): tokens since the prompt, modulo R once it has passed R (R the window's power of
      two); shared by the batch, every other leaf has the batch axes in front.
    recent (*B, G, D): the last G vectors, newest last.
    inputs (*B, R, D): the vectors of the running block of R tokens, written G at a time;
      pending (*B, R, E): what older vectors contribute to the block's outputs. Both are empty where
      `recent` is the whole window.
    valid (*B, R): which of the last R vectors were real; count (*B): how many of the last L.
      Both are None without the scale.
    """

    position: PyTree
    recent: PyTree
    inputs: PyTree
    pending: PyTree
    valid: PyTree
    count: PyTree


def init_stream(
    plan: StreamPlan, batch_shape: tuple[int, ...] = (), *, features: int | None = None
) -> StreamState:
    """The state of streams that have seen nothing yet: O(L*D) numbers per sequence, all zero.

    Shapes: any batch_shape, static. `features` (D) is needed for weights of the form (L,) alone,
    which do not tell it.

    Raises:
      UsageError: features missing for the form (L,), or different from the plan's D.
    """
    features, outputs = plan_features(plan, features)
    batch, block = tuple(batch_shape), plan.ring if plan.sizes else 0
    zeros = partial(jnp.zeros, dtype=plan.work_dtype)
    counted = plan.scale is not None
    return StreamState(
        position=jnp.zeros((), jnp.int32),
        recent=zeros((*batch, plan.leaf, features)),
        inputs=zeros((*batch, block, features)),
        pending=zeros((*batch, block, outputs)),
        valid=jnp.zeros((*batch, plan.ring), bool) if counted else None,
        count=jnp.zeros(batch, jnp.int32) if counted else None,
    )


def stream_step(
    plan: StreamPlan, state: StreamState, x: Array, valid: Array | None = None
) -> tuple[Array, StreamState]:
    """The next output of `causal_extract`, from the next vector and the state of its past.

    Formula, n the tokens so far, G and R the smallest and the largest tile, powers of two::

        y_n = c_n * (pending_n + sum_{k=0..G-1} x_{n-k} W_{k+1})
        before that, if G divides n: for U the largest power of two that divides n, at most R,
        pending_{n+r} += sum_{m=1..U} x_{n-m} W_{r+m+1}, r = 0..U-1, offsets below G left out

    Every pair of positions meets in one tile, that of the highest bit in which they differ; beyond
    R >= L there is no weight, so the largest tile may overwrite: the window slides without end at
    a bounded cost, O(log L) products of D*E per token besides the transforms of the vectors. The
    dearest token, every R-th, reads twice W's size. Offsets below G and the tile sizes are
    explained in `stream_plan`.

    Shapes: x (*B, D); valid (*B) bool or None; y (*B, E). The position is shared by the batch.

    dtypes: y has the promoted dtype of x and w; sums are float32, or float64 for float64 weights.

    Raises:
      UsageError: x or valid of a shape or dtype that does not fit the plan and the state.

    Source: relaxed multiplication (van der Hoeven 2002); FutureFill (Agarwal et al. 2024) and Flash
    Inference (Oncescu et al. 2024) for one filter a channel. Matrix weights, the direct head and
    the sliding window are our reconstruction.
    """
    dtype = check_vectors(plan, state, x, valid, state.recent.ndim - 1)
    batch = x.shape[:-1]
    x = keep(x, valid).astype(plan.work_dtype)
    flat = replace(
        state,
        recent=flatten(state.recent, 2),
        inputs=flatten(state.inputs, 2),
        pending=flatten(state.pending, 2),
    )
    y, flat = advance(plan, flat, flatten(x, 1))
    y = y.reshape(*batch, y.shape[-1])
    state = replace(
        flat,
        recent=flat.recent.reshape(state.recent.shape),
        inputs=flat.inputs.reshape(state.inputs.shape),
        pending=flat.pending.reshape(state.pending.shape),
    )
    if plan.scale is not None:
        factor, state = count_valid(plan, state, valid)
        y = y * factor[..., None]
    position = state.position + 1
    position = jnp.where(position == 2 * plan.ring, plan.ring, position)
    return y.astype(dtype), replace(state, position=position)


def advance(
    plan: StreamPlan, state: StreamState, x: Float[Array, "B D"]
) -> tuple[Float[Array, "B E"], StreamState]:
    """`stream_step` for one batch axis, without the scale."""
    recent = jnp.concatenate([state.recent[:, 1:], x[:, None]], 1)
    y = head_product(plan, recent)
    if not plan.sizes:
        return y, replace(state, recent=recent)
    inputs, pending = add_tile(plan, state)
    y = y + lax.dynamic_slice_in_dim(pending, state.position % plan.ring, 1, 1)[:, 0]
    return y, replace(state, recent=recent, inputs=inputs, pending=pending)


def head_product(plan: StreamPlan, recent: Float[Array, "B G D"]) -> Float[Array, "B E"]:
    """sum_k x_{n-k} W_{k+1} over the newest G offsets, one contiguous product."""
    if plan.form < 3:
        return jnp.sum(recent * plan.head[:, 0], 1)
    weights = plan.head.reshape(-1, plan.head.shape[-1])
    flat = recent.reshape(recent.shape[0], weights.shape[0])
    return jnp.matmul(flat, weights, precision="highest")


def add_tile(
    plan: StreamPlan, state: StreamState
) -> tuple[Float[Array, "B R D"], Float[Array, "B R E"]]:
    """`inputs` and `pending` after the tile that is due at this position, if one is."""
    n, leaf, ring = state.position, plan.leaf, plan.ring
    at = n % ring
    size = jnp.minimum(n & -n, ring)

    def due(buffers):
        inputs, pending = buffers
        inputs = lax.dynamic_update_slice_in_dim(inputs, state.recent, (at - leaf) % ring, 1)
        for u in plan.sizes:
            pending = in_place_if(size == u, partial(tile, plan, u, inputs, at), pending)
        return inputs, pending

    return in_place_if(size >= leaf, due, (state.inputs, state.pending))


def in_place_if(condition: Bool[Array, ""], f, buffers: PyTree) -> PyTree:
    """f(buffers) if the condition holds, else buffers, as a loop of at most one turn.

    `lax.cond` copies the buffers at every call (XLA on CPU, jax 0.10); a loop leaves them in place.
    """
    turn = (condition, buffers)
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), f(c[1])), turn)[1]


def stream_prefill(
    plan: StreamPlan, state: StreamState, x: Array, valid: Array | None = None
) -> tuple[Array, StreamState]:
    """Takes a whole prompt into a fresh state: its outputs, and its part in all that follow.

    Formula: blocks of R/2 vectors (zeros in front of the first), each through the transforms of the
    first and the second half of W, so that it reaches its own outputs and those of the next two
    blocks; what reaches beyond the prompt is pending. Then `stream_step` goes on as from a fresh
    schedule.

    Shapes: x (*B, P, D) with any P >= 0; valid (*B, P) bool or None, False for the zeros in front
    of shorter prompts; y (*B, P, E).

    dtypes: as in `stream_step`.

    Raises:
      UsageError: x or valid of a shape or dtype that does not fit the plan and the state.

    Source: overlap-add; that online convolution restarts after a prompt is FutureFill's (Agarwal
    et al. 2024).
    """
    dtype = check_vectors(plan, state, x, valid, state.recent.ndim)
    batch, time = x.shape[:-2], x.shape[-2]
    if time == 0:
        return jnp.zeros((*batch, 0, state.pending.shape[-1]), dtype), state
    xs = flatten(keep(x, valid).astype(plan.work_dtype), 2)
    leaf = plan.leaf
    led = jnp.pad(xs, [(0, 0), (leaf, 0), (0, 0)])
    recent = led[:, time:]
    shifted = jnp.stack([led[:, k + 1 : k + 1 + time] for k in range(leaf)], 2)
    rows = xs.shape[0] * time
    y = head_product(plan, shifted.reshape(rows, leaf, xs.shape[-1]))
    y = y.reshape(*xs.shape[:2], y.shape[-1])
    state = replace(state, recent=recent.reshape(state.recent.shape))
    if plan.sizes:
        far, pending = prefill_blocks(plan, xs)
        y = y + far
        state = replace(state, pending=pending.reshape(state.pending.shape))
    y = y.reshape(*batch, time, y.shape[-1])
    if plan.scale is not None:
        real = jnp.ones((*batch, time), bool) if valid is None else valid
        factor, state = count_prompt(plan, state, real)
        y = y * factor[..., None]
    if valid is not None:  # exactly 0 before the first real vector
        begun = jnp.cumsum(valid, -1, dtype=jnp.int32)[..., None] > 0
        y = jnp.where(begun, y, jnp.zeros((), y.dtype))
    return y.astype(dtype), state


def count_valid(
    plan: StreamPlan, state: StreamState, valid: Array | None
) -> tuple[Float[Array, "*B"], StreamState]:
    """1/sqrt of the real vectors among the last L, this one included."""
    at = state.position % plan.ring
    shape = state.count.shape
    new = jnp.ones(shape, bool) if valid is None else jnp.broadcast_to(valid, shape)
    axis = len(shape)
    old = lax.dynamic_index_in_dim(
        state.valid, (at - plan.length) % plan.ring, axis, keepdims=False
    )
    count = state.count + new.astype(jnp.int32) - old.astype(jnp.int32)
    flags = lax.dynamic_update_index_in_dim(state.valid, new, at, axis)
    factor = lax.rsqrt(jnp.maximum(count, 1).astype(plan.work_dtype))
    return factor, replace(state, valid=flags, count=count)


def count_prompt(
    plan: StreamPlan, state: StreamState, valid: Bool[Array, "*B P"]
) -> tuple[Float[Array, "*B P"], StreamState]:
    """1/sqrt of the real vectors among the last L, for all positions of a prompt."""
    time, length, ring = valid.shape[-1], plan.length, plan.ring
    front = [(0, 0)] * (valid.ndim - 1)
    total = jnp.cumsum(valid, -1, dtype=jnp.int32)
    gone = jnp.pad(total, [*front, (length, 0)])[..., :time]
    count = total - gone
    flags = jnp.pad(valid, [*front, (ring, 0)])[..., time:]
    factor = lax.rsqrt(jnp.maximum(count, 1).astype(plan.work_dtype))
    return factor, replace(state, valid=flags, count=count[..., -1])


def flatten(array: Array, keep_last: int) -> Array:
    """All axes but the last `keep_last` as one."""
    tail = array.shape[array.ndim - keep_last :]
    size = 1
    for n in array.shape[: array.ndim - keep_last]:
        size *= n
    return array.reshape(size, *tail)


def keep(x: Array, valid: Array | None) -> Array:
    """x with zeros where it is not valid."""
    return x if valid is None else jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def plan_features(plan: StreamPlan, features: int | None) -> tuple[int, int]:
    """D and E, or the error that names what is missing."""
    _, ins, outs = plan.head.shape
    if plan.form == 1:
        if features is None:
            raise UsageError("features=None with weights of the form (L,): give features=D")
        return features, features
    if plan.form == 2:
        ins = outs
    if features not in (None, ins):
        raise UsageError(
            f"features={features} does not fit weights of {ins} features: leave it out"
        )
    return ins, outs


def check_state(plan: StreamPlan, state: StreamState) -> None:
    """Refuses a state that `init_stream` made for weights of other sizes or another scale."""
    features, outputs = plan_features(plan, state.recent.shape[-1] if plan.form == 1 else None)
    block = plan.ring if plan.sizes else 0
    found = state.recent.shape[-2:], state.inputs.shape[-2:], state.pending.shape[-2:]
    wanted = (plan.leaf, features), (block, features), (block, outputs)
    flags = None if state.valid is None else state.valid.shape[-1]
    if found != wanted or flags != (None if plan.scale is None else plan.ring):
        raise UsageError(
            f"the state (recent {found[0]}, inputs {found[1]}, pending {found[2]}) is not of this "
            f"plan, which asks for {wanted} and scale={plan.scale!r}: make it with init_stream"
        )


def check_vectors(plan, state, x, valid, ndim) -> jnp.dtype:
    """Refuses vectors that do not fit; returns the dtype of the outputs."""
    check_state(plan, state)
    batch = state.recent.shape[:-2]
    names = "(*B, D)" if ndim == len(batch) + 1 else "(*B, P, D)"
    want = f"{names} with *B = {batch} and D = {state.recent.shape[-1]}"
    if x.ndim != ndim or x.shape[: len(batch)] != batch or x.shape[-1] != state.recent.shape[-1]:
        raise UsageError(f"x has shape {x.shape}: the state asks for {want}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(f"x has dtype {x.dtype}: give a floating-point array")
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, plan.dtype)
    if dtype == jnp.float64 and plan.work_dtype != jnp.float64:
        raise UsageError(
            f"x has dtype {x.dtype} and the plan {plan.dtype}: cast x or plan in {dtype}"
        )
    if valid is not None and (valid.dtype != jnp.bool_ or valid.shape != x.shape[:-1]):
        raise UsageError(
            f"valid has shape {valid.shape} and dtype {valid.dtype}: give bool of {x.shape[:-1]}"
        )
    return dtype
