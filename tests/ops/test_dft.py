"""The dense two-stage DFT against its definition and numpy's FFT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_extractor.ops.dft import (
    Dft,
    plan_points,
    times_i,
    times_minus_i,
    transform,
    transposed,
)

pytestmark = pytest.mark.core

SIZES = [(1, 1), (5, 1), (8, 4), (3, 3), (16, 2)]


def complex_in_order(z_hat, dft):
    """(F, 2, X) as complex numbers, k = k1 + N1 k2 in its natural order."""
    z_hat = np.asarray(z_hat).reshape(dft.n1, dft.n2, 2, -1)
    z = z_hat[:, :, 0] + 1j * z_hat[:, :, 1]
    return z.swapaxes(0, 1).reshape(dft.points, -1)


@pytest.mark.parametrize("n1, n2", SIZES)
def test_transform_is_the_dft_at_shifted_frequencies(n1, n2, x64):
    dft = Dft(n1, n2)
    z = np.random.default_rng(0).standard_normal((dft.points, 3))
    twisted = z * np.exp(-0.5j * np.pi * np.arange(dft.points) / dft.points)[:, None]
    got = complex_in_order(jax.jit(transform, static_argnames="dft")(jnp.asarray(z), dft=dft), dft)
    np.testing.assert_allclose(got, np.fft.fft(twisted, axis=0), atol=1e-12)


@pytest.mark.parametrize("n1, n2", SIZES)
def test_transposed_is_the_transpose_and_the_inverse(n1, n2, x64):
    dft = Dft(n1, n2)
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.standard_normal((dft.points, 2)))
    z_hat = jnp.asarray(rng.standard_normal((dft.points, 2, 2)))
    there = transform(z, dft)
    np.testing.assert_allclose(jnp.vdot(z_hat, there), jnp.vdot(transposed(z_hat, dft), z))
    np.testing.assert_allclose(transposed(there, dft) / dft.points, z, atol=1e-12)


def test_missing_rows_are_zero(x64):
    dft = Dft(8, 2)
    z = jnp.asarray(np.random.default_rng(0).standard_normal((11, 2)))
    padded = jnp.pad(z, ((0, 5), (0, 0)))
    np.testing.assert_array_equal(transform(z, dft), transform(padded, dft))


def test_a_product_is_the_whole_linear_convolution(x64):
    """The first N outputs in the real part; the N that follow after a factor i."""
    dft = Dft(4, 4)
    a, b = np.random.default_rng(0).standard_normal((2, 16))
    a_hat, b_hat = (transform(jnp.asarray(z)[:, None], dft) for z in (a, b))
    product = jnp.stack(
        [
            a_hat[:, 0] * b_hat[:, 0] - a_hat[:, 1] * b_hat[:, 1],
            a_hat[:, 0] * b_hat[:, 1] + a_hat[:, 1] * b_hat[:, 0],
        ],
        axis=1,
    )
    halves = [transposed(p, dft)[:, 0] / dft.points for p in (product, times_i(product, axis=1))]
    np.testing.assert_allclose(np.concatenate(halves)[:31], np.convolve(a, b), atol=1e-12)
    np.testing.assert_array_equal(times_minus_i(times_i(product, 1), 1), product)


@pytest.mark.parametrize("points", [1, 2, 7, 31, 64, 100, 257, 1000, 4096, 10000])
def test_plans_cover_the_points_without_waste(points):
    n1, n2 = plan_points(points)
    assert points <= n1 * n2 <= max(1.25 * points, points + 3)
    assert 2 * n1 + 4 * n2 <= max(2 * points + 4, 14 * np.sqrt(points))


def test_the_program_holds_no_table_of_the_second_stage():
    """Its N1 (2 N2)^2 numbers are made on the device; constants stay O(N1^2 + N2^2 + N)."""
    dft = Dft(64, 64)
    text = jax.jit(transform, static_argnames="dft").lower(jnp.zeros((4096, 1)), dft=dft).as_text()
    assert len(text) < 20 * (2 * 64**2 + 4 * 64**2)
