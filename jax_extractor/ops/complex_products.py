"""The complex products X W per frequency, as real matrix products with batch (F, G).

G = 1, four multiplications for a complex one: [[Xr, -Xi], [Xi, Xr]] times [Wr; Wi] is [Yr; Yi].
G = 3, Gauss's three, which pay once X has some tens of rows (W then has three parts, not two)::

    K1 = (Xr + Xi) Wr     K2 = Xr (Wi - Wr)     K3 = Xi (Wr + Wi)     Yr = K1 - K3     Yi = K1 + K2

The parts of W come ready made from `dft.transform`. X is (F, 2, C, B, s), Y is (F, 2, C, B, E); the
rows of their matrices are in the order (sequence, real/imaginary, block), so that a batch sharded
over devices stays so.
"""

import jax.numpy as jnp
from jax import lax

from jax_extractor.ops.dft import times_i, times_minus_i
from jax_extractor.shapes import Array, Float


def per_frequency(a: Array, b: Array, a_axis: int, b_axis: int, precision) -> Array:
    """The matrix product contracting a_axis with b_axis, for every (F, G)."""
    axes = (((a_axis,), (b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, axes, precision=precision)


def x_matrices(x_hat: Float[Array, "F 2 C B s"], groups: int) -> Float[Array, "F G r c"]:
    """X's factor of the products: (F, 1, 2 B C, 2 s) or (F, 3, B C, s)."""
    points, _, blocks, batch, size = x_hat.shape
    if groups == 3:
        real, imaginary = x_hat[:, 0], x_hat[:, 1]
        parts = jnp.stack([real + imaginary, real, imaginary], axis=1)
        return parts.swapaxes(2, 3).reshape(points, 3, batch * blocks, size)
    both = jnp.stack([x_hat, times_i(x_hat)], axis=4)
    return both.transpose(0, 3, 1, 2, 4, 5).reshape(points, 1, batch * 2 * blocks, 2 * size)


def x_from_matrices(matrices: Float[Array, "F G r c"], batch: int) -> Float[Array, "F 2 C B s"]:
    """The transposed map of `x_matrices`."""
    points, groups, _, columns = matrices.shape
    if groups == 3:
        both, real, imaginary = jnp.moveaxis(matrices, 1, 0)
        parts = jnp.stack([both + real, both + imaginary], axis=1)
        return parts.reshape(points, 2, batch, -1, columns).swapaxes(2, 3)
    both = matrices.reshape(points, batch, 2, -1, 2, columns // 2).transpose(0, 2, 3, 1, 4, 5)
    return both[..., 0, :] + times_minus_i(both[..., 1, :])


def y_from_matrices(matrices: Float[Array, "F G r E"], batch: int) -> Float[Array, "F 2 C B E"]:
    """Y from the products."""
    points, groups, _, outputs = matrices.shape
    if groups == 3:
        k1, k2, k3 = jnp.moveaxis(matrices, 1, 0)
        parts = jnp.stack([k1 - k3, k1 + k2], axis=1)
        return parts.reshape(points, 2, batch, -1, outputs).swapaxes(2, 3)
    return matrices.reshape(points, batch, 2, -1, outputs).transpose(0, 2, 3, 1, 4)


def y_matrices(y_hat: Float[Array, "F 2 C B E"], groups: int) -> Float[Array, "F G r E"]:
    """The transposed map of `y_from_matrices`."""
    points, _, blocks, batch, outputs = y_hat.shape
    if groups == 3:
        real, imaginary = y_hat[:, 0], y_hat[:, 1]
        parts = jnp.stack([real + imaginary, imaginary, -real], axis=1)
        return parts.swapaxes(2, 3).reshape(points, 3, batch * blocks, outputs)
    return y_hat.transpose(0, 3, 1, 2, 4).reshape(points, 1, batch * 2 * blocks, outputs)
