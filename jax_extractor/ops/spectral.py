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

from jax_extractor.ops.complex_products import (
    per_frequency,
    x_from_matrices,
    x_matrices,
    y_from_matrices,
    y_matrices,
)
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
THREE_PRODUCTS_FROM = 24
PASS_COST = 40  # measured on a 2-core x86-64 CPU, float32


class Plan(NamedTuple):
    """How one pair of shapes is computed; hashable, so it can be a static argument."""

    dft: Dft
    length: int  # L, which xbar and ybar do not tell
    chunk: int  # input features transformed at a time
    groups: int = 1  # real matrix products per complex one, see `complex_products`
    lanes: int = 1  # parts of a chunk that may be computed at the same time
    dtype: Any = jnp.dtype(jnp.float32)  # of x, w and their cotangents; y and ybar are summed wider

    @property
    def w_blocks(self) -> int:
        return -(-self.length // self.dft.points)

    @property
    def w_dft(self) -> Dft:
        """The transform of w: with the rows that its part in the complex products asks for."""
        return self.dft._replace(rows=3 if self.groups == 3 else 2)


def blocks_of(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "N C B D"]:
    """C blocks of N vectors."""
    points, (batch, time, features) = plan.dft.points, x.shape
    blocks = -(-time // points)
    x = x.astype(accumulation_dtype(x.dtype))
    x = jnp.pad(x, ((0, 0), (0, blocks * points - time), (0, 0)))
    return x.reshape(batch, blocks, points, features).transpose(2, 1, 0, 3)


def from_blocks(z: Float[Array, "N C B D"], time: int) -> Float[Array, "B T D"]:
    """The transposed map of `blocks_of`."""
    points, blocks, batch, features = z.shape
    z = z.transpose(2, 1, 0, 3).reshape(batch, blocks * points, features)
    return z[:, :time]


def x_spectrum(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "F 2 C B D"]:
    """X_c + i X_{c-1} for every block c of every sequence."""
    z_hat = transform(blocks_of(x, plan), plan.dft)
    if z_hat.shape[2] > 1:
        z_hat = z_hat + times_i(later(z_hat[:, :, :-1], 1))
    return z_hat


def x_spectrum_transposed(z_hat: Float[Array, "F 2 C B D"], plan: Plan, time: int) -> Array:
    """The transposed map of `x_spectrum`: (B, T, D)."""
    if z_hat.shape[2] > 1:
        z_hat = z_hat + times_minus_i(earlier(z_hat[:, :, 1:], 1))
    return from_blocks(transposed(z_hat, plan.dft), time)


def y_spectrum_transposed(ybar: Float[Array, "B T E"], plan: Plan) -> Float[Array, "F 2 C B E"]:
    """The cotangent of Y, given y's."""
    return transform(blocks_of(ybar, plan) / plan.dft.points, plan.dft)


def later(z_hat: Float[Array, "F 2 c B D"], blocks: int) -> Float[Array, "F 2 C B D"]:
    """Moved to later blocks, zeros in front."""
    return jnp.pad(z_hat, ((0, 0), (0, 0), (blocks, 0), (0, 0), (0, 0)))


def earlier(z_hat: Float[Array, "F 2 c B D"], blocks: int) -> Float[Array, "F 2 C B D"]:
    """Moved to earlier blocks, zeros behind."""
    return jnp.pad(z_hat, ((0, 0), (0, 0), (0, blocks), (0, 0), (0, 0)))


def w_matrices(w, block: int, start, size: int, plan: Plan, dtype) -> Float[Array, "F G c E"]:
    """The transform of one block of offsets and some input features of w, see `complex_products`."""
    points = plan.dft.points
    part = lax.dynamic_slice_in_dim(w[block * points : (block + 1) * points], start, size, axis=1)
    w_hat = transform(part.astype(dtype), plan.w_dft)
    return w_hat.reshape(points, plan.groups, -1, w.shape[2])


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


def output(x, w, plan: Plan):
    """y (B, T, E): Y_c is the sum over blocks b of X_{c-b} W_b."""
    batch, time, features = x.shape
    x_hat = x_spectrum(x, plan)
    blocks = x_hat.shape[2]

    def term_of(start, size):
        part = lax.dynamic_slice_in_dim(x_hat, start, size, axis=4)
        total = jnp.zeros((), x_hat.dtype)
        for b in range(plan.w_blocks):
            w_mat = w_matrices(w, b, start, size, plan, x_hat.dtype)
            x_mat = x_matrices(part[:, :, : blocks - b], plan.groups)
            y_mat = per_frequency(x_mat, w_mat, 3, 2, plan.dft.precision)
            total = total + later(y_from_matrices(y_mat, batch), b)
        return total

    zero = jnp.zeros((*x_hat.shape[:4], w.shape[2]), x_hat.dtype)
    y_hat = over_chunks(features, plan, term_of, lambda total, _, term: total + term, zero)
    return from_blocks(transposed(y_hat, plan.dft) / plan.dft.points, time)


def input_cotangent(ybar, w, plan: Plan):
    """xbar (B, T, D)."""
    batch, time, _ = ybar.shape
    y_hat = y_spectrum_transposed(ybar, plan)
    y_mats = [y_matrices(y_hat[:, :, b:], plan.groups) for b in range(plan.w_blocks)]

    def columns_of(start, size):
        total = jnp.zeros((), y_hat.dtype)
        for b in range(plan.w_blocks):
            w_mat = w_matrices(w, b, start, size, plan, y_hat.dtype)
            x_mat = per_frequency(y_mats[b], w_mat, 3, 3, plan.dft.precision)
            total = total + earlier(x_from_matrices(x_mat, batch), b)
        return total

    def put(x_hat, start, columns):
        return lax.dynamic_update_slice_in_dim(x_hat, columns, start, axis=4)

    zero = jnp.zeros((*y_hat.shape[:4], w.shape[1]), y_hat.dtype)
    x_hat = over_chunks(w.shape[1], plan, columns_of, put, zero)
    return x_spectrum_transposed(x_hat, plan, time).astype(plan.dtype)


def weight_cotangent(x, ybar, plan: Plan):
    """wbar (L, D, E)."""
    x_hat = x_spectrum(x, plan)
    y_hat = y_spectrum_transposed(ybar, plan)
    y_mats = [y_matrices(y_hat[:, :, b:], plan.groups) for b in range(plan.w_blocks)]
    points, blocks = x_hat.shape[0], x_hat.shape[2]
    features, outputs = x.shape[2], ybar.shape[2]

    def part_of(start, size):
        part = lax.dynamic_slice_in_dim(x_hat, start, size, axis=4)
        parts = []
        for b in range(plan.w_blocks):
            x_mat = x_matrices(part[:, :, : blocks - b], plan.groups)
            w_mat = per_frequency(x_mat, y_mats[b], 2, 2, plan.dft.precision)
            w_hat = w_mat.reshape(points, plan.w_dft.rows, size, outputs)
            w_part = transposed(w_hat, plan.w_dft)
            parts.append(w_part[: plan.length - b * points].astype(plan.dtype))
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
    groups = 3 if rows_met(x_shape, length, dft.points) >= THREE_PRODUCTS_FROM else 1
    chunk = min(features, max(1, limit // (8 * dft.points * outputs)))
    chunk = largest_divisor(features, chunk)
    return Plan(dft, length, chunk, groups, lanes=2 if on_cpu else 1)


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
    n1, n2 = plan_points(-(-length // blocks))
    products = 4 * rows_met(x_shape, length, n1 * n2)
    return blocks * n1 * n2 * (2 * n1 + 4 * n2 * (n2 > 1) + PASS_COST + products)


def rows_met(x_shape, length: int, points: int) -> float:
    """How many rows of x's spectrum a frequency of w meets, on average over w's blocks."""
    x_blocks, w_blocks = -(-x_shape[1] // points), -(-length // points)
    return x_shape[0] * sum(max(0, x_blocks - b) for b in range(w_blocks)) / w_blocks


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to limit, unless it is far below it: then limit itself."""
    divisor = max(d for d in range(1, limit + 1) if n % d == 0)
    return divisor if 2 * divisor > limit else limit


def spectral_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """The dense two-stage DFT; causal to rounding. Transforms are in float32 at least."""
    if w.ndim == 3:
        plan = make_plan(x.shape, w.shape, precision)._replace(dtype=x.dtype)
        return matrix_extract(x, w, plan)
    length, time = w.shape[0], x.shape[1]
    plan = Plan(Dft(*plan_points(length), precision), length, x.shape[2])
    x_hat = x_spectrum(x, plan)
    w_hat = transform(w.astype(x_hat.dtype).reshape(length, 1, 1, -1), plan.dft)
    x_re, x_im, w_re, w_im = x_hat[:, 0], x_hat[:, 1], w_hat[:, 0], w_hat[:, 1]
    y_hat = jnp.stack([x_re * w_re - x_im * w_im, x_re * w_im + x_im * w_re], axis=1)
    return from_blocks(transposed(y_hat, plan.dft) / plan.dft.points, time)
