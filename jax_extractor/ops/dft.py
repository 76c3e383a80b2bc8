"""The dense two-stage DFT: only real arrays and matrix products, no complex dtype, no FFT.

The transform of z_0 .. z_{N-1} (real) is taken at the frequencies k + 1/4, k = 0 .. N-1::

    Z_k = sum_n z_n exp(-2 pi i n (k + 1/4) / N)

A product of two such transforms is a convolution modulo N whose wrapped part comes back multiplied
by -i. So N complex frequencies, all alike, hold the whole linear convolution of two real blocks of
N (the usual way pads to 2N and keeps N + 1 frequencies of which two are real): after the inverse
map, the real part is the first N outputs and the imaginary part, negated, the N that follow.

With N = N1 N2, n = n1 N2 + n2 and k = k1 + N1 k2 the transform falls into two matrix products::

    A[k1, n2]     = sum_n1 z[n1, n2] exp(-2 pi i n1 (k1 + 1/4) / N1)
    Z[k1 + N1 k2] = sum_n2 A[k1, n2] exp(-2 pi i n2 ((k1 + 1/4) / N + k2 / N2))

Frequencies stay in the order (k1, k2): a product per frequency does not care. A frequency holds its
real row, then its imaginary row. The cost is 2 N1 + 4 N2 multiplications per element of z.

Source: Cooley and Tukey's factorisation; the quarter-shifted frequencies are the right-angle
convolution of the number-theoretic literature. This arrangement is our own.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_extractor.shapes import Array, Float

# The second stage's pass over the data costs as much as this many multiplications per point.
SECOND_PASS = 32


class Dft(NamedTuple):
    """A transform of N = n1 * n2 points, in products of the given precision.

    To all frequencies, or to those of `groups` (first, last) of the N1 values of k1.
    """

    n1: int
    n2: int
    precision: Any = None
    groups: tuple[int, int] | None = None

    @property
    def points(self) -> int:
        return self.n1 * self.n2

    @property
    def k1(self) -> slice:
        return slice(*(self.groups or (0, self.n1)))

    @property
    def k1_count(self) -> int:
        return self.k1.stop - self.k1.start

    @property
    def frequencies(self) -> int:
        return self.k1_count * self.n2

    @property
    def multiplications(self) -> int:
        """Multiply-adds per point, where all frequencies are wanted."""
        return 2 * self.n1 + 4 * self.n2 * (self.n2 > 1)

    def split(self, count: int) -> "list[Dft]":
        """Transforms to about equally many frequencies, together all of its own."""
        first, last = self.k1.start, self.k1.stop
        count = min(count, last - first)
        cuts = [first + (last - first) * i // count for i in range(count + 1)]
        return [self._replace(groups=g) for g in itertools.pairwise(cuts)]


@functools.lru_cache(maxsize=64)
def _tables(n1: int, n2: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Complex: stage 1 (N1, N1), and stage 2's twiddles (N1, N2) and its DFT (N2, N2)."""
    shifted = np.arange(n1) + 0.25
    stage1 = np.exp(-2j * np.pi * np.outer(shifted, np.arange(n1)) / n1)
    twiddles = np.exp(-2j * np.pi * np.outer(shifted, np.arange(n2)) / (n1 * n2))
    return stage1, twiddles, np.exp(-2j * np.pi * np.outer(np.arange(n2), np.arange(n2)) / n2)


def _first_stage(dft: Dft, dtype) -> Float[Array, "rows N1"]:
    """(2 N1, N1): rows (k1, real/imaginary)."""
    table = _tables(dft.n1, dft.n2)[0][dft.k1]
    rows = np.stack([table.real, table.imag], axis=1).reshape(2 * dft.k1_count, dft.n1)
    return jnp.asarray(rows, dtype)


def _second_stage(dft: Dft, dtype) -> Float[Array, "N1 rows columns"]:
    """(N1, 2 N2, 2 N2): rows (k2, real/imaginary of the result), columns (real/imaginary, n2).

    Multiplied out on the device from two small tables: as a literal it would fill the program.
    """
    _, twiddles, small = _tables(dft.n1, dft.n2)
    twiddles = twiddles[dft.k1]
    a, b = (jnp.asarray(t, dtype)[:, None] for t in (twiddles.real, twiddles.imag))
    c, d = (jnp.asarray(t, dtype)[None] for t in (small.real, small.imag))
    real, imaginary = a * c - b * d, a * d + b * c  # (N1, k2, n2)
    rows = [jnp.stack([real, -imaginary], 2), jnp.stack([imaginary, real], 2)]
    return jnp.stack(rows, 2).reshape(dft.k1_count, 2 * dft.n2, 2 * dft.n2)


def transform(z: Float[Array, "n *X"], dft: Dft) -> Float[Array, "F 2 *X"]:
    """Z of every column; z has at most N rows, missing ones are zero. F = `dft.frequencies`.

    The columns' axes are never merged, so that an array sharded over any of them stays so.
    """
    columns = z.shape[1:]
    if z.shape[0] < dft.points:
        z = jnp.pad(z, [(0, dft.points - z.shape[0])] + [(0, 0)] * len(columns))
    z = z.reshape(dft.n1, dft.n2, *columns)
    a = lax.dot_general(
        _first_stage(dft, z.dtype), z, (((1,), (0,)), ((), ())), precision=dft.precision
    )
    if dft.n2 > 1:
        a = _second(dft, a.reshape(dft.k1_count, 2 * dft.n2, *columns), 2)
    return a.reshape(dft.frequencies, 2, *columns)


def transposed(z_hat: Float[Array, "F 2 *X"], dft: Dft) -> Float[Array, "n *X"]:
    """The transposed map of `transform`.

    Divided by N, and summed over parts where `dft` is one, it is the real part of the inverse.
    """
    columns = z_hat.shape[2:]
    a = z_hat.reshape(dft.k1_count, 2 * dft.n2, *columns)
    if dft.n2 > 1:
        a = _second(dft, a, 1)
    a = a.reshape(2 * dft.k1_count, dft.n2, *columns)
    z = lax.dot_general(
        _first_stage(dft, a.dtype), a, (((0,), (0,)), ((), ())), precision=dft.precision
    )
    return z.reshape(dft.points, *columns)


def _second(dft: Dft, a: Float[Array, "N1 rows *X"], contract: int) -> Array:
    matrices = _second_stage(dft, a.dtype)
    axes = (((contract,), (1,)), ((0,), (0,)))
    return lax.dot_general(matrices, a, axes, precision=dft.precision)


def times_i(z_hat: Array, axis: int = 1) -> Array:
    """i Z, real and imaginary parts along `axis`; what the outputs that follow need (see above)."""
    real, imaginary = jnp.split(z_hat, 2, axis)
    return jnp.concatenate([-imaginary, real], axis)


def times_minus_i(z_hat: Array, axis: int = 1) -> Array:
    """-i Z, the transposed map of `times_i`."""
    real, imaginary = jnp.split(z_hat, 2, axis)
    return jnp.concatenate([imaginary, -real], axis)


@functools.lru_cache(maxsize=1024)
def plan_points(points: int) -> tuple[int, int]:
    """(N1, N2) with N = N1 N2 >= points and the least `transform_cost`, padding counted.

    A second stage must save what its pass over the data costs. Sizes beyond 8 are multiples of 8,
    whole vector registers.
    """
    best = None
    for n2 in [*range(1, 9), *range(16, 257, 8)]:
        n1 = -(-points // n2)
        n1 += -n1 % 8 if n1 > 8 else 0
        cost = n1 * n2 * (transform_cost(n1, n2) + (SECOND_PASS if n2 > 1 else 0))
        if best is None or cost < best[0]:
            best = (cost, n1, n2)
    assert best is not None
    return best[1], best[2]


def transform_cost(n1: int, n2: int) -> int:
    """The time of a transform's products, per point, in multiplications of the first stage.

    The first stage has 2 N1 of them, wide products; the second 4 N2, in products so small that each
    costs as much as 4.5: fitted to the order of the fastest plans at seven sizes (2-core x86-64 CPU,
    float32, jax 0.10.2).
    """
    return 2 * n1 + 18 * n2 * (n2 > 1)
