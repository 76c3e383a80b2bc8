"""How `spectral` computes one pair of shapes: block length, transform, chunk of input features."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_extractor.ops.dft import Dft, plan_points, transform_cost

# Of W's spectrum only the part of some input features, a chunk, is alive at a time. On CPU a chunk is
# so large that a product of a lane sums over SUMMED rows of W (2 · blocks · features) per frequency:
# half of that took a tenth to a third longer, and twice of it gained nothing (2-core x86-64 CPU,
# float32, jax 0.10.2; so were the constants of the cost model found). Accelerators take chunks of
# CHUNK_BYTES, which bounds the memory everywhere.
SUMMED = 128
# Products of a plan on CPU that may be computed at the same time.
AT_ONCE = 2
CHUNK_BYTES = 512 << 20
# Under differentiation on CPU, a spectrum of W up to this size is made once for both directions.
SHARED_BYTES = 256 << 20
SMALLEST_BLOCK = 32
PASS_COST = 40


class Plan(NamedTuple):
    """How one pair of shapes is computed; hashable, so it can be a static argument."""

    dft: Dft
    length: int  # L, which xbar and ybar do not tell
    chunk: int  # input features transformed at a time
    lanes: int = 1  # parts of a chunk that may be computed at the same time, their results added
    parts: int = 1  # parts of the frequencies, likewise
    dtype: Any = jnp.dtype(jnp.float32)  # of x, w and their cotangents; y and ybar are summed wider

    @property
    def w_blocks(self) -> int:
        return -(-self.length // self.dft.points)

    def split(self) -> "list[Plan]":
        """One for each part of the frequencies."""
        return [self._replace(dft=dft, parts=1) for dft in self.dft.split(self.parts)]


def make_plan(x_shape, w_shape, precision) -> Plan:
    """Block length and chunk for x (B, T, D) and w (L, D, E)."""
    length, features, _ = w_shape
    dft = Dft(*plan_points(block_length(x_shape, length)), precision)
    chunk = max(1, CHUNK_BYTES // spectrum_bytes(1, w_shape))
    cpu = jax.default_backend() == "cpu"
    if cpu:
        blocks = -(-length // dft.points)
        chunk = min(chunk, AT_ONCE * max(1, SUMMED // (2 * blocks)))
    chunk = largest_divisor(features, min(features, chunk))
    lanes, parts = 1, 1
    if cpu and chunk == features:
        parts = AT_ONCE  # each reads all of w, so only where one chunk holds it
    elif cpu:
        lanes = AT_ONCE
    return Plan(dft, length, chunk, lanes, parts)


def spectrum_bytes(features: int, w_shape) -> int:
    """The size of the spectrum of that many input features of w (L, D, E), in float32."""
    return 8 * w_shape[0] * features * w_shape[2]


def share_spectrum(plan: Plan, x_shape, w_shape) -> Plan:
    """The plan of y(x, w) and of its derivatives where both are wanted.

    All input features in one chunk: the transforms of w in the two directions are then the same
    expressions, which XLA computes once where it compiles both together. That saves one of three
    transforms and takes the memory of a whole spectrum, so it is done up to SHARED_BYTES; on
    accelerators chunks are that large anyway. Two lanes as well, unless their terms of y, which are
    added up, are large beside w.
    """
    (batch, time, features), length = x_shape, w_shape[0]
    if jax.default_backend() != "cpu" or spectrum_bytes(features, w_shape) > SHARED_BYTES:
        return plan
    lanes = AT_ONCE if length * features > 8 * batch * time else 1
    return plan._replace(chunk=features, lanes=lanes, parts=AT_ONCE)


def block_length(x_shape, length: int) -> int:
    """The block length of the least `spectral_work`, of L halved some times.

    Other divisions need padding, a copy of w: 13 blocks took a third longer than 8. Short blocks
    make products too small.
    """
    blocks = [1] + [b for b in (2, 4, 8, 16) if length >= b * SMALLEST_BLOCK]
    best = min(blocks, key=lambda b: _work(x_shape, length, b))
    return -(-length // best)


def spectral_work(x_shape, length: int) -> float:
    """Estimated multiplications per element of w (L, D, E), all blocks and passes weighed in.

    Transforms get cheaper with shorter blocks; the 4 B products per frequency and block of x
    (block Toeplitz, its zeros multiplied too), small ones that cost twice their count, get dearer.
    Touching w and its spectrum costs as much as PASS_COST multiplications.
    """
    block = block_length(x_shape, length)
    return _work(x_shape, length, -(-length // block)) / length


def _work(x_shape, length: int, blocks: int) -> int:
    n1, n2 = plan_points(-(-length // blocks))
    products = 8 * x_shape[0] * -(-x_shape[1] // (n1 * n2))
    return blocks * n1 * n2 * (transform_cost(n1, n2) + PASS_COST + products)


def multiplications(x_shape, w_shape) -> int:
    """Multiply-adds of one of the three maps for x (B, T, D) and w (L, D, E); all take the same.

    A transform of every block of w (or back), a product per frequency of every block of x with
    every block of w, and transforms of x's and y's blocks.
    """
    (batch, time, features), (length, _, outputs) = x_shape, w_shape
    dft = Dft(*plan_points(block_length(x_shape, length)))
    points, transform = dft.points, dft.points * dft.multiplications
    x_blocks, w_blocks = batch * -(-time // points), -(-length // points)
    of_w = w_blocks * features * outputs * (transform + 4 * points * x_blocks)
    return of_w + x_blocks * (features + outputs) * transform


def saved_multiplications(x_shape, w_shape) -> int:
    """What y and both cotangents together take less than three maps: a transform of w, if shared."""
    _, features, outputs = w_shape
    plan = share_spectrum(make_plan(x_shape, w_shape, None), x_shape, w_shape)
    if plan.chunk < features:
        return 0
    return plan.w_blocks * plan.dft.points * features * outputs * plan.dft.multiplications


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to limit, unless it is far below it: then limit itself."""
    divisor = max(d for d in range(1, limit + 1) if n % d == 0)
    return divisor if 2 * divisor > limit else limit
