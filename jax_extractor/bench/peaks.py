"""What the device can do at best: matrix products and copies, measured in the same run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_extractor.bench.timing import compile_contestant, interleaved_medians


class Peaks(NamedTuple):
    """Measured rates of one device."""

    multiplications: float
    """Multiply-adds a second of one large square matrix product."""
    bytes: float
    """Bytes a second, read and written, of one large copy."""

    def seconds(self, multiplications: int, moved_bytes: int) -> float:
        """The least time for that many multiply-adds and bytes, done at once."""
        return max(multiplications / self.multiplications, moved_bytes / self.bytes)


def measure_peaks(dtype, precision, repeats: int = 5) -> Peaks:
    """The device's peaks for arrays of that dtype, and products in that precision."""
    n, elements = (1536, 1 << 25) if jax.default_backend() == "cpu" else (8192, 1 << 29)
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    line = jnp.zeros(elements, dtype)
    product = compile_contestant("product", lambda a: jnp.dot(a, a, precision=precision), a)
    copy = compile_contestant("copy", lambda x: x + jnp.ones((), x.dtype), line)
    seconds = interleaved_medians([product, copy], repeats)
    return Peaks(n**3 / seconds["product"], 2 * line.nbytes / seconds["copy"])
