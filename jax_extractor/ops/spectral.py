"""The extraction sum by the dense two-stage DFT: one matrix product per frequency.

x and w are cut into blocks of N vectors and N offsets. The linear convolution of block c of x with
block b of w ends in the outputs of block c + b, its first half, and of the block after that, its
second half. In the transform of `dft` the second half is a factor i, so both arrive together::

    Y_c = sum_b (X_{c-b} + i X_{c-b-1}) W_b        y_c = (1/N) transpose(Y_c)

Short blocks make the transforms cheap and the products many; `block_length` weighs the two. A
window (T > L) is only more blocks of x: w is never padded to T. The transform of w is made, used
and dropped for some input features at a time (`spectral_plan`): where W is large, no array of the
size of its spectrum is ever stored. Where it is not, differentiation on CPU keeps the spectrum.

The three maps of the trilinear form sum(y ybar) — y(x, w), xbar(ybar, w), wbar(x, ybar) — are each
written out below, since each is the derivative of the others (`trilinear`).

Relative errors at T = L = 4096, D = 16, unit normal x and w (root mean square over positions,
against float64; 2-core x86-64 CPU, jax 0.10.2):

    dtype     method    first 32   last 1024   |  bfloat16, of the unrounded inputs' result
    float32   spectral   7.3e-7     3.3e-7     |
    float32   fft        2.4e-6     1.9e-7     |
    float32   conv       2.4e-7     4.0e-7     |
    float32   scan       9.9e-8     1.1e-6     |
    bfloat16  all four   1.7e-3     1.7e-3     |  2.7e-3, 2.9e-3

A transform spreads rounding evenly over positions, so the first, where the sum is short, are the
relatively worst. bfloat16 is transformed and summed in float32: all that is lost is its own rounding,
of the inputs and of the result.
"""

import functools

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
from jax_extractor.ops.spectral_plan import Plan, make_plan, share_spectrum
from jax_extractor.ops.trilinear import trilinear_family
from jax_extractor.shapes import Array, Float

# Spectra of x and y are in the order (F, B, 2, C, features): frequency, sequence, real/imaginary,
# block. So the rows of the matrices below are (B, 2, C), no reordering, and a batch sharded over
# devices stays so.


def spectrum(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "F B 2 C D"]:
    """The transform of every block of N vectors; the last block is filled with zeros."""
    points, (batch, time, features) = plan.dft.points, x.shape
    blocks = -(-time // points)
    x = x.astype(accumulation_dtype(x.dtype))
    x = jnp.pad(x, ((0, 0), (0, blocks * points - time), (0, 0)))
    x = x.reshape(batch, blocks, points, features).transpose(2, 0, 1, 3)
    return transform(x, plan.dft).swapaxes(1, 2)


def spectrum_transposed(x_hat: Float[Array, "F B 2 C D"], plan: Plan, time: int):
    """The transposed map of `spectrum`: (B, T, D)."""
    _, batch, _, blocks, features = x_hat.shape
    x = transposed(x_hat.swapaxes(1, 2), plan.dft).transpose(1, 2, 0, 3)
    return x.reshape(batch, blocks * plan.dft.points, features)[:, :time]


def x_spectrum(x: Float[Array, "B T D"], plan: Plan) -> Float[Array, "F B 2 C D"]:
    """X_c + i X_{c-1} for every block c of every sequence."""
    x_hat = spectrum(x, plan)
    return x_hat if x_hat.shape[3] == 1 else x_hat + times_i(later(x_hat, 1), axis=2)


def x_spectrum_transposed(x_hat: Float[Array, "F B 2 C D"], plan: Plan, time: int) -> Array:
    """The transposed map of `x_spectrum`: (B, T, D)."""
    if x_hat.shape[3] > 1:
        x_hat = x_hat + times_minus_i(earlier(x_hat, 1), axis=2)
    return spectrum_transposed(x_hat, plan, time)


def later(z_hat: Float[Array, "F B 2 C D"], blocks: int) -> Float[Array, "F B 2 C D"]:
    """Moved to later blocks, zeros in front."""
    kept = z_hat[:, :, :, : z_hat.shape[3] - blocks]
    return jnp.pad(kept, ((0, 0), (0, 0), (0, 0), (blocks, 0), (0, 0)))


def earlier(z_hat: Float[Array, "F B 2 C D"], blocks: int) -> Float[Array, "F B 2 C D"]:
    """The transposed map of `later`: moved to earlier blocks, zeros behind."""
    return jnp.pad(z_hat[:, :, :, blocks:], ((0, 0), (0, 0), (0, 0), (0, blocks), (0, 0)))


# The sum over w's blocks of X_{c-b} W_b is, per frequency, one real matrix product Y = X W:
#     Y  rows (sequence, real/imaginary, block c)    columns outputs
#     W  rows (real/imaginary, block b, feature)     columns outputs
#     X  rows as Y, columns as W's rows: [[Xr, -Xi], [Xi, Xr]], block Toeplitz


def x_matrix(x_hat: Float[Array, "F B 2 C s"], w_blocks: int) -> Float[Array, "F rows columns"]:
    """X: per frequency, the spectra that meet each block of w, as a real matrix."""
    frequencies, batch, _, blocks, size = x_hat.shape
    met = jnp.stack([later(x_hat, b) for b in range(w_blocks)], axis=4)
    both = jnp.stack([met, times_i(met, axis=2)], axis=4)
    return both.reshape(frequencies, batch * 2 * blocks, 2 * w_blocks * size)


def x_from_matrix(
    matrix: Float[Array, "F rows columns"], w_blocks: int, batch: int
) -> Float[Array, "F B 2 C s"]:
    """The transposed map of `x_matrix`."""
    frequencies, rows, columns = matrix.shape
    shape = frequencies, batch, 2, rows // (2 * batch), 2, w_blocks, columns // (2 * w_blocks)
    both = matrix.reshape(shape)
    met = both[:, :, :, :, 0] + times_minus_i(both[:, :, :, :, 1], axis=2)
    return functools.reduce(jnp.add, [earlier(met[:, :, :, :, b], b) for b in range(w_blocks)])


def y_matrix(y_hat: Float[Array, "F B 2 C E"]) -> Float[Array, "F rows E"]:
    """Y: per frequency, one row for each sequence, real or imaginary part, and block."""
    return y_hat.reshape(y_hat.shape[0], -1, y_hat.shape[4])


def w_matrix(w, start, size: int, plan: Plan, dtype) -> Float[Array, "F columns E"]:
    """The transforms of all blocks of offsets, for some input features of w."""
    points, blocks, outputs = plan.dft.points, plan.w_blocks, w.shape[2]
    part = lax.dynamic_slice_in_dim(w, start, size, axis=1).astype(dtype)
    part = jnp.pad(part, ((0, blocks * points - plan.length), (0, 0), (0, 0)))
    part = part.reshape(blocks, points, size, outputs).swapaxes(0, 1)
    return transform(part, plan.dft).reshape(plan.dft.frequencies, 2 * blocks * size, outputs)


def w_from_matrix(matrix: Float[Array, "F columns E"], size: int, plan: Plan):
    """The transposed map of `w_matrix`: (L, size, E)."""
    points, blocks, outputs = plan.dft.points, plan.w_blocks, matrix.shape[2]
    part = transposed(matrix.reshape(plan.dft.frequencies, 2, blocks, size, outputs), plan.dft)
    return part.swapaxes(0, 1).reshape(blocks * points, size, outputs)[: plan.length]


def per_frequency(a: Array, b: Array, a_axis: int, b_axis: int, plan: Plan) -> Array:
    """The matrix products that contract a_axis with b_axis."""
    axes = (((a_axis,), (b_axis,)), ((0,), (0,)))
    return lax.dot_general(a, b, axes, precision=plan.dft.precision)


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


def over_parts(of_part):
    """The map that is the sum of what each part of the frequencies adds: of_part(a, b, its plan).

    Like lanes, parts keep more than one core busy.
    """

    @functools.wraps(of_part)
    def whole(a, b, plan: Plan):
        if plan.parts == 1:
            return of_part(a, b, plan)
        wide = plan._replace(dtype=accumulation_dtype(plan.dtype))
        return functools.reduce(jnp.add, [of_part(a, b, part) for part in wide.split()])

    return whole


@over_parts
def output(x, w, plan: Plan):
    """y (B, T, E)."""
    _, time, features = x.shape
    x_hat = x_spectrum(x, plan)

    def term_of(start, size):
        part = lax.dynamic_slice_in_dim(x_hat, start, size, axis=4)
        w_mat = w_matrix(w, start, size, plan, x_hat.dtype)
        return per_frequency(x_matrix(part, plan.w_blocks), w_mat, 2, 1, plan)

    shape = *x_hat.shape[:4], w.shape[2]
    zero = y_matrix(jnp.zeros(shape, x_hat.dtype))
    y_mat = over_chunks(features, plan, term_of, lambda total, _, term: total + term, zero)
    return spectrum_transposed(y_mat.reshape(shape), plan, time) / plan.dft.points


@over_parts
def input_cotangent(ybar, w, plan: Plan):
    """xbar (B, T, D)."""
    batch, time, _ = ybar.shape
    y_hat = spectrum(ybar / plan.dft.points, plan)
    y_mat = y_matrix(y_hat)
    y_turned = y_mat.swapaxes(1, 2)

    def columns_of(start, size):
        w_mat = w_matrix(w, start, size, plan, y_hat.dtype)
        if w_mat.shape[1] > y_mat.shape[1]:  # turn the smaller matrix, Y once or W in the product
            columns = per_frequency(w_mat, y_turned, 2, 1, plan).swapaxes(1, 2)
        else:
            columns = per_frequency(y_mat, w_mat, 2, 2, plan)
        return x_from_matrix(columns, plan.w_blocks, batch)

    def put(x_hat, start, columns):
        return lax.dynamic_update_slice_in_dim(x_hat, columns, start, axis=4)

    zero = jnp.zeros((*y_hat.shape[:4], w.shape[1]), y_hat.dtype)
    x_hat = over_chunks(w.shape[1], plan, columns_of, put, zero)
    return x_spectrum_transposed(x_hat, plan, time)


@over_parts
def weight_cotangent(x, ybar, plan: Plan):
    """wbar (L, D, E)."""
    x_hat = x_spectrum(x, plan)
    y_mat = y_matrix(spectrum(ybar / plan.dft.points, plan))

    def part_of(start, size):
        part = lax.dynamic_slice_in_dim(x_hat, start, size, axis=4)
        w_mat = per_frequency(x_matrix(part, plan.w_blocks), y_mat, 1, 1, plan)
        return w_from_matrix(w_mat, size, plan).astype(plan.dtype)

    def put(wbar, start, part):
        return lax.dynamic_update_slice_in_dim(wbar, part, start, axis=1)

    zero = jnp.zeros((plan.length, x.shape[2], ybar.shape[2]), plan.dtype)
    return over_chunks(x.shape[2], plan, part_of, put, zero)


matrix_extract = trilinear_family(
    "spectral", output, input_cotangent, weight_cotangent, share_spectrum
)


def spectral_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """The dense two-stage DFT; causal to rounding. Transforms are in float32 at least."""
    if w.ndim == 3:
        plan = make_plan(x.shape, w.shape, precision)._replace(dtype=x.dtype)
        return matrix_extract(x, w, plan)
    length, time = w.shape[0], x.shape[1]
    plan = Plan(Dft(*plan_points(length), precision), length, x.shape[2])
    x_hat = x_spectrum(x, plan)
    w_hat = transform(w.astype(x_hat.dtype).reshape(length, -1), plan.dft)
    w_re, w_im = (w_hat[:, part, None, None] for part in (0, 1))
    x_re, x_im = x_hat[:, :, 0], x_hat[:, :, 1]
    y_hat = jnp.stack([x_re * w_re - x_im * w_im, x_re * w_im + x_im * w_re], axis=2)
    return spectrum_transposed(y_hat, plan, time) / plan.dft.points
