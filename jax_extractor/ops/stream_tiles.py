"""Tiles of the streaming sum: blocks of vectors through the planned transforms of W."""

import math

import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.dft import times_i, times_minus_i, transform, transposed
from jax_extractor.ops.stream_plan import StreamPlan, tile_dft
from jax_extractor.shapes import Array, Float, Int


def tile(
    plan: StreamPlan,
    size: int,
    inputs: Float[Array, "B R D"],
    at: Int[Array, ""],
    pending: Float[Array, "B R E"],
) -> Float[Array, "B R E"]:
    """Adds the contribution of the newest `size` inputs to the next `size` outputs."""
    if size == plan.ring:
        return window_tile(plan, inputs)
    xs = lax.dynamic_slice_in_dim(inputs, at - size, size, 1)
    y = backward(multiply(forward(xs), plan.tiles[plan.sizes.index(size)], plan.form))
    y = y + lax.dynamic_slice_in_dim(pending, at, size, 1)
    return lax.dynamic_update_slice_in_dim(pending, y, at, 1)


def window_tile(plan: StreamPlan, inputs: Float[Array, "B R D"]) -> Float[Array, "B R E"]:
    """All that a full block of R inputs leaves to the next R outputs, in halves of the block."""
    batch, ring, features = inputs.shape
    z = forward(inputs.reshape(2 * batch, ring // 2, features))
    z = z.reshape(ring // 2, 2, batch, 2, features)
    far = times_i(multiply(z, plan.far, plan.form))
    near = multiply(z[..., 1, :], plan.tiles[-1], plan.form)
    y = backward(jnp.stack([near + far[..., 0, :], far[..., 1, :]], 3))
    return y.reshape(batch, ring, y.shape[-1])


def forward(xs: Float[Array, "B U D"]) -> Float[Array, "U 2 B D"]:
    """The transforms of vectors over time."""
    batch, size, features = xs.shape
    z = jnp.moveaxis(xs, 0, 1).reshape(size, batch * features)
    return transform(z, tile_dft(size)).reshape(size, 2, batch, features)


def backward(z: Float[Array, "U 2 *B E"]) -> Float[Array, "*B U E"]:
    """The vectors over time of transforms; 1/U is in the plan."""
    size, _, *batch, outputs = z.shape
    y = transposed(z.reshape(size, 2, math.prod(batch) * outputs), tile_dft(size))
    return jnp.moveaxis(y.reshape(size, *batch, outputs), 0, -2)


def multiply(
    z: Float[Array, "U 2 *B D"], spectrum: Float[Array, "U Q W"], form: int
) -> Float[Array, "U 2 *B E"]:
    """One complex product per frequency, as the real one [[r, -i], [i, r]] [Wr; Wi]."""
    size, _, *batch, features = z.shape
    count = math.prod(batch)
    z = z.reshape(size, 2, count, features)
    rows = jnp.stack([z, times_i(z)], 3)
    if form < 3:
        return jnp.sum(rows * spectrum[:, None, None], 3).reshape(size, 2, *batch, features)
    rows = rows.reshape(size, 2 * count, 2 * features)
    dims = (((2,), (1,)), ((0,), (0,)))
    out = lax.dot_general(rows, spectrum, dims, precision=lax.Precision.HIGHEST)
    return out.reshape(size, 2, *batch, out.shape[-1])


def prefill_blocks(
    plan: StreamPlan, xs: Float[Array, "B P D"]
) -> tuple[Float[Array, "B P E"], Float[Array, "B R E"]]:
    """The prompt's outputs beyond the head's offsets, and what it leaves pending."""
    batch, time, features = xs.shape
    size = plan.ring // 2
    count = -(-time // size)
    start = count * size - time
    blocks = jnp.pad(xs, [(0, 0), (start, 0), (0, 0)]).reshape(batch * count, size, features)
    z = forward(blocks).reshape(size, 2, batch, count, features)
    near, far = (multiply(z, w, plan.form) for w in (plan.tiles[-1], plan.far))

    def later(spectra, by):
        return jnp.pad(spectra, [(0, 0)] * 3 + [(by, 2 - by), (0, 0)])

    total = later(times_minus_i(near - far), 0) + later(near, 1) + later(times_i(far), 2)
    out = backward(total)
    out = out.reshape(batch, (count + 2) * size, out.shape[-1])
    return out[:, start : start + time], out[:, count * size :]
