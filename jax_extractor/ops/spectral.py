"""The extraction sum by the dense two-stage DFT: one matrix product per frequency.

x is cut into blocks of N >= L vectors (one block if T <= N). The outputs of block c take the first
half of block c's linear convolution with w, and the second half of the block's before it. In the
transform of `dft` the second half is a factor i, so both arrive in one product per frequency::

    Y_c = (X_c + i X_{c-1}) W        y_c = (1/N) transpose(Y_c)

w is never padded to T, and its transform is made, used and dropped for a few input features at a
time: those few stay in the cache, and no array of the size of W's spectrum is ever stored.

The three maps of the trilinear form sum(y ybar) — y(x, w), xbar(ybar, w), wbar(x, ybar) — are each
written out below, since each is the derivative of the others (`trilinear`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.dft import (
    Dft,
    plan_points,
    times_i,
    times_minus_i,
    transform,
    transposed,
)
from jax_extractor.ops.extraction_methods import accumulation_dtype
from jax_extractor.ops.trilinear import trilinear_family
from jax_extractor.shapes import Array, Float

# The part of W's spectrum that is alive at a time: a few MB stay in a CPU's cache. Accelerators have
# no such cliff; there the part only bounds the memory.
CHUNK_BYTES = 8 << 20
CHUNK_BYTES_ELSEWHERE = 512 << 20
SMALLEST_BLOCK = 32
PASS_COST = 40  # measured on a 2-core x86-64 CPU, float32


class Plan(NamedTuple):
    """How one pair of shapes is computed; hashable, so it can be a static argument."""

    dft: Dft
    length: int  # L, which xbar and ybar do not tell
    chunk: int  # input features transformed at a time
    lanes: int = 1  # parts of a chunk that may be computed at the same time
    dtype: Any = jnp.dtype(jnp.float32)  # of x, w and their cotangents; y and ybar are summed wider

    @property
    def w_blocks(self) -> int:
        return -(-self.length // self.dft.points)


def blocks_of(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "N X"]:
    """Blocks of N vectors; columns in the order (block, sequence, feature)."""
    points, (batch, time, features) = plan.dft.points, x.shape
    blocks = -(-time // points)
    x = x.astype(accumulation_dtype(x.dtype))
    x = jnp.pad(x, ((0, 0), (0, blocks * points - time), (0, 0)))
    return x.reshape(batch, blocks, points, features).transpose(2, 1, 0, 3).reshape(points, -1)


def from_blocks(z: Float[Array, "N X"], batch: int, time: int) -> Float[Array, "B T D"]:
    """The transposed map of `blocks_of`."""
    points, blocks = z.shape[0], -(-time // z.shape[0])
    z = z.reshape(points, blocks, batch, -1).transpose(2, 1, 0, 3)
    return z.reshape(batch, blocks * points, -1)[:, :time]


def x_spectrum(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "F 2 R D"]:
    """X_c + i X_{c-1} for every block c of every sequence; R rows in the order (block, sequence)."""
    batch, time, features = x.shape
    z_hat = transform(blocks_of(x, plan), plan.dft)
    if time > plan.dft.points:
        one = batch * features
        before = jnp.pad(z_hat[:, :, :-one], ((0, 0), (0, 0), (one, 0)))
        z_hat = z_hat + times_i(before)
    return z_hat.reshape(plan.dft.points, 2, -1, features)


def x_spectrum_transposed(z_hat: Float[Array, "F 2 R D"], plan: Plan, batch: int, time: int):
    """The transposed map of `x_spectrum`: (B, T, D)."""
    one = batch * z_hat.shape[3]
    z_hat = z_hat.reshape(plan.dft.points, 2, -1)
    if time > plan.dft.points:
        after = jnp.pad(z_hat[:, :, one:], ((0, 0), (0, 0), (0, one)))
        z_hat = z_hat + times_minus_i(after)
    return from_blocks(transposed(z_hat, plan.dft), batch, time)


def y_spectrum_transposed(ybar: Float[Array, "B T E"], plan: Plan) -> Float[Array, "F 2 R E"]:
    """The cotangent of Y, given y's."""
    z_hat = transform(blocks_of(ybar, plan) / plan.dft.points, plan.dft)
    return z_hat.reshape(plan.dft.points, 2, -1, ybar.shape[2])


def as_real(z_hat: Float[Array, "F 2 R D"]) -> Float[Array, "F 2 R 2 D"]:
    """Z as the real matrix [[Zr, -Zi], [Zi, Zr]], so that a complex product is one real product."""
    return jnp.stack([z_hat, times_i(z_hat)], axis=3)


def from_real(matrix: Float[Array, "F 2 R 2 D"]) -> Float[Array, "F 2 R D"]:
    """The transposed map of `as_real`."""
    return matrix[:, :, :, 0] + times_minus_i(matrix[:, :, :, 1])


def rows_and_columns(z_hat: Array, rows: slice, start, size: int) -> Float[Array, "F rows cols"]:
    """Some blocks and some features of Z as a real matrix (F, 2 r, 2 size), see `as_real`."""
    part = as_real(lax.dynamic_slice_in_dim(z_hat[:, :, rows], start, size, axis=3))
    return part.reshape(part.shape[0], 2 * part.shape[2], 2 * size)


def w_spectrum(w, block: int, start, size: int, plan: Plan, dtype) -> Float[Array, "F columns E"]:
    """The transform of one block of offsets and some input features of w."""
    points = plan.dft.points
    part = lax.dynamic_slice_in_dim(w[block * points : (block + 1) * points], start, size, axis=1)
    z_hat = transform(part.reshape(part.shape[0], -1).astype(dtype), plan.dft)
    return z_hat.reshape(points, 2 * size, w.shape[2])


def over_chunks(features: int, plan: Plan, part_of, merge, carry):
    """carry <- merge(carry, start, part_of(start, size)) over the input features, in chunks.

    The lanes of one step are computed before any is merged: XLA's CPU runtime runs a matrix product
    on one core, and independent ones at the same time.
    """
    size = max(1, plan.chunk // plan.lanes)
    step = size * plan.lanes

    def body(carry, start, sizes):
        starts = [start + i * size for i in range(len(sizes))]
        parts = [part_of(s, n) for s, n in zip(starts, sizes, strict=True)]
        for s, part in zip(starts, parts, strict=True):
            carry = merge(carry, s, part)
        return carry

    steps, rest = divmod(features, step)
    if steps > 1:
        carry = lax.fori_loop(
            0, steps, lambda i, carry: body(carry, i * step, [size] * plan.lanes), carry
        )
    elif steps == 1:
        carry = body(carry, 0, [size] * plan.lanes)
    if rest:
        sizes = [size] * (rest // size) + [rest % size] * (rest % size > 0)
        carry = body(carry, steps * step, sizes)
    return carry


def per_frequency(a, b, a_axis: int, b_axis: int, plan: Plan):
    contraction = (((a_axis,), (b_axis,)), ((0,), (0,)))
    return lax.dot_general(a, b, contraction, precision=plan.dft.precision)


def output(x, w, plan: Plan):
    """y (B, T, E) = sum over blocks b of the transposes of X_{c-b} W_b."""
    batch, time, features = x.shape
    x_hat = x_spectrum(x, plan)
    points, _, rows, _ = x_hat.shape

    def term_of(start, size):
        total = jnp.zeros((), x_hat.dtype)
        for b in range(plan.w_blocks):
            w_hat = w_spectrum(w, b, start, size, plan, x_hat.dtype)
            seen = rows_and_columns(x_hat, slice(0, rows - b * batch), start, size)
            term = per_frequency(seen, w_hat, 2, 1, plan).reshape(points, 2, -1, w.shape[2])
            total = total + jnp.pad(term, ((0, 0), (0, 0), (b * batch, 0), (0, 0)))
        return total

    zero = jnp.zeros((points, 2, rows, w.shape[2]), x_hat.dtype)
    y_hat = over_chunks(features, plan, term_of, lambda total, _, term: total + term, zero)
    y = transposed(y_hat.reshape(points, 2, -1), plan.dft) / points
    return from_blocks(y, batch, time)


def input_cotangent(ybar, w, plan: Plan):
    """xbar (B, T, D)."""
    batch, time, outputs = ybar.shape
    y_hat = y_spectrum_transposed(ybar, plan)
    points, _, rows, _ = y_hat.shape
    features = w.shape[1]

    def columns_of(start, size):
        total = jnp.zeros((), y_hat.dtype)
        for b in range(plan.w_blocks):
            w_hat = w_spectrum(w, b, start, size, plan, y_hat.dtype)
            seen = y_hat[:, :, b * batch :].reshape(points, -1, outputs)
            term = per_frequency(seen, w_hat, 2, 2, plan).reshape(points, 2, -1, 2, size)
            after = [(0, 0)] * 2 + [(0, b * batch)] + [(0, 0)] * 2
            total = total + jnp.pad(term, after)
        return from_real(total)

    def put(x_hat, start, columns):
        return lax.dynamic_update_slice_in_dim(x_hat, columns, start, axis=3)

    zero = jnp.zeros((points, 2, rows, features), y_hat.dtype)
    x_hat = over_chunks(features, plan, columns_of, put, zero)
    return x_spectrum_transposed(x_hat, plan, batch, time).astype(plan.dtype)


def weight_cotangent(x, ybar, plan: Plan):
    """wbar (L, D, E)."""
    batch, _, features = x.shape
    x_hat = x_spectrum(x, plan)
    y_hat = y_spectrum_transposed(ybar, plan)
    points, _, rows, outputs = y_hat.shape

    def part_of(start, size):
        parts = []
        for b in range(plan.w_blocks):
            seen = rows_and_columns(x_hat, slice(0, rows - b * batch), start, size)
            later = y_hat[:, :, b * batch :].reshape(points, -1, outputs)
            w_hat = per_frequency(seen, later, 1, 1, plan).reshape(points, 2, -1)
            part = transposed(w_hat, plan.dft)[: plan.length - b * points].astype(plan.dtype)
            parts.append(part.reshape(-1, size, outputs))
        return parts

    def put(wbar, start, parts):
        for b, part in enumerate(parts):
            wbar = lax.dynamic_update_slice(wbar, part, (b * points, start, 0))
        return wbar

    zero = jnp.zeros((plan.length, features, outputs), plan.dtype)
    return over_chunks(features, plan, part_of, put, zero)


matrix_extract = trilinear_family("spectral", output, input_cotangent, weight_cotangent)


def make_plan(x_shape, w_shape, precision) -> Plan:
    """Block length and chunk for x (B, T, D) and w (L, D, E)."""
    length, features, outputs = w_shape
    dft = Dft(*plan_points(block_length(x_shape, length)), precision)
    on_cpu = jax.default_backend() == "cpu"
    limit = CHUNK_BYTES if on_cpu else CHUNK_BYTES_ELSEWHERE
    chunk = min(features, max(1, limit // (8 * dft.points * outputs)))
    return Plan(dft, length, largest_divisor(features, chunk), lanes=2 if on_cpu else 1)


def block_length(x_shape, length: int) -> int:
    """The block length of the least `spectral_work`; short blocks make products too small."""
    blocks = range(1, max(1, min(16, length // SMALLEST_BLOCK)) + 1)
    best = min(blocks, key=lambda b: _work(x_shape, length, b))
    return -(-length // best)


def spectral_work(x_shape, length: int) -> float:
    """Estimated multiplications per element of w (L, D, E), all blocks and passes weighed in.

    Transforms cost 2 N1 + 4 N2 and get cheaper with shorter blocks; the products per frequency cost
    4 B for every block that a block of offsets meets, and get dearer. Touching w and its spectrum
    costs as much as PASS_COST multiplications.
    """
    block = block_length(x_shape, length)
    return _work(x_shape, length, -(-length // block)) / length


def _work(x_shape, length: int, blocks: int) -> float:
    batch, time = x_shape[0], x_shape[1]
    n1, n2 = plan_points(-(-length // blocks))
    x_blocks = -(-time // (n1 * n2))
    met = sum(max(0, x_blocks - b) for b in range(blocks)) / blocks
    return blocks * n1 * n2 * (2 * n1 + 4 * n2 * (n2 > 1) + PASS_COST + 4 * batch * met)


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to limit, unless it is far below it: then limit itself."""
    divisor = max(d for d in range(1, limit + 1) if n % d == 0)
    return divisor if 2 * divisor > limit else limit


def spectral_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """The dense two-stage DFT; causal to rounding. Transforms are in float32 at least."""
    if w.ndim == 3:
        plan = make_plan(x.shape, w.shape, precision)._replace(dtype=x.dtype)
        return matrix_extract(x, w, plan)
    length, (batch, time, _) = w.shape[0], x.shape
    plan = Plan(Dft(*plan_points(length), precision), length, x.shape[2])
    x_hat = x_spectrum(x, plan)
    x_re, x_im = x_hat[:, 0], x_hat[:, 1]
    w_hat = transform(w.astype(x_re.dtype).reshape(length, -1), plan.dft)[:, :, None]
    w_re, w_im = w_hat[:, 0], w_hat[:, 1]
    y_hat = jnp.stack([x_re * w_re - x_im * w_im, x_re * w_im + x_im * w_re], axis=1)
    y = transposed(y_hat.reshape(plan.dft.points, 2, -1), plan.dft) / plan.dft.points
    return from_blocks(y, batch, time)
