"""The dense DFT of one streaming tile: U real vectors in, the U outputs that follow them out.

A tile of size U multiplies spectra of N = 2U points. With N = N1*N2 and n = N2*n1 + n2,
k = k1 + N1*k2, the transform is two small matrix products; real and imaginary parts are separate
real numbers, so nothing but `dot_general` is needed. k1 runs over 0..N1/2 only, because the input
is real, and the frequencies stay in the order in which they fall out::

    stage 1   A[k1, n2] = sum_n1 z[N2*n1 + n2] exp(-2 pi i k1 n1 / N1)
    stage 2   Z[k1, k2] = sum_n2 A[k1, n2] exp(-2 pi i n2 (k1 + N1*k2) / N)

The inverse is the transposed map, k1 = 0 and k1 = N1/2 with weight 1/N and the others with 2/N.
The order of k1 is even numbers first: the even part of the N-point spectrum of a sequence whose
second half is zero is the N/2-point spectrum of its first half, so that both can share one array.
"""

from dataclasses import dataclass
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_extractor.shapes import Array, Float

ONE_STAGE = 128  # up to this many points one product is no slower than two


@dataclass(frozen=True)
class Dft:
    """The constants of a DFT of `points` real numbers, as float64 NumPy arrays.

    first (K1, 2, N1): stage 1; second (K1, N2, 2, 2, N2) as [k1, k2, out, in, n2], or None where
    N2 = 1; last (K1, 2, N1): stage 1 with the inverse's weights.
    """

    points: int
    n2: int
    first: np.ndarray
    second: np.ndarray | None
    last: np.ndarray

    @property
    def frequencies(self) -> int:
        return self.first.shape[0] * self.n2


def second_factor(points: int) -> int:
    """N2 for the DFT of the whole window: near sqrt(N)/2, where both stages cost the same."""
    return 1 if points <= ONE_STAGE else 2 ** round(np.log2(np.sqrt(points) / 2))


def evens_first(n1: int) -> np.ndarray:
    """0..n1/2, even numbers first, and these in the order of half of n1."""
    if n1 == 1:
        return np.zeros(1, int)
    return np.r_[2 * evens_first(n1 // 2), 1 : n1 // 2 + 1 : 2]


@lru_cache
def dft(points: int, n2: int) -> Dft:
    """The constants of the real DFT with N2 = n2 (a power of two, at most points/4)."""
    n1 = points // n2
    k1 = evens_first(n1)
    phase = 2 * np.pi * ((k1[:, None] * np.arange(n1)) % n1) / n1
    first = np.stack([np.cos(phase), -np.sin(phase)], 1)
    weight = np.where((k1 == 0) | (2 * k1 == n1), 1.0, 2.0) / points
    second = None
    if n2 > 1:
        k = k1[:, None] + n1 * np.arange(n2)
        phase = 2 * np.pi * ((k[..., None] * np.arange(n2)) % points) / points
        c, s = np.cos(phase), np.sin(phase)
        second = np.stack([np.stack([c, s], 2), np.stack([-s, c], 2)], 2)
    return Dft(points, n2, first, second, first * weight[:, None, None])


def transform(z: Float[Array, "U X"], constants: Dft) -> Float[Array, "F 2 X"]:
    """The spectrum of z, U = N or U = N/2 (then the second half counts as zero)."""
    n2, columns = constants.n2, z.shape[1]
    first = constants.first[:, :, : z.shape[0] // n2]
    k1, rows = first.shape[0], first.shape[2]
    a = product(first.reshape(2 * k1, rows), z.reshape(rows, n2 * columns))
    if constants.second is None:
        return a.reshape(k1, 2, columns)
    matrix = jnp.asarray(constants.second.reshape(k1, 2 * n2, 2 * n2), z.dtype)
    a = a.reshape(k1, 2 * n2, columns)
    dims = (((2,), (1,)), ((0,), (0,)))
    out = lax.dot_general(matrix, a, dims, precision=lax.Precision.HIGHEST)
    return out.reshape(k1 * n2, 2, columns)


def inverse(spectrum: Float[Array, "F 2 X"], constants: Dft, half: slice) -> Float[Array, "U X"]:
    """The sequence of a spectrum: its first half, its second or all, as `half` slices n1."""
    n2, columns = constants.n2, spectrum.shape[2]
    last = constants.last[:, :, half]
    k1, rows = last.shape[0], last.shape[2]
    a = spectrum.reshape(k1, 2 * n2, columns)
    if constants.second is not None:
        matrix = jnp.asarray(constants.second.reshape(k1, 2 * n2, 2 * n2), a.dtype)
        dims = (((1,), (1,)), ((0,), (0,)))
        a = lax.dot_general(matrix, a, dims, precision=lax.Precision.HIGHEST)
    last = last.reshape(2 * k1, rows).T
    return product(last, a.reshape(2 * k1, n2 * columns)).reshape(rows * n2, columns)


def product(constant: np.ndarray, z: Float[Array, "R X"]) -> Float[Array, "Q X"]:
    """A constant matrix times z, in full precision."""
    return jnp.matmul(jnp.asarray(constant, z.dtype), z, precision=lax.Precision.HIGHEST)
