"""What decoding needs of W, computed once per model."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.errors import UsageError
from jax_extractor.ops.dft import Dft, times_i, transform
from jax_extractor.shapes import Array, Float, PyTree

# G: offsets met directly at every token, and the smallest tile. All larger tiles take the dense DFT,
# which reads as many numbers as a direct tile (2U matrices) and multiplies less. A direct head saves
# the launches of the smallest tiles and costs G products per token. Measured on a busy 2-core x86-64
# CPU (jax 0.10.2, float32, L=1024, D=128, medians of 9): G = 2, 4, 8, 16 took 69, 64, 58, 59
# microseconds per token at B=1 and 607, 428, 443, 618 at B=8.
LEAF = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["head", "tiles", "far"],
    meta_fields=["length", "form", "scale", "dtype"],
)
@dataclass(frozen=True)
class StreamPlan:
    """W as `stream_step` and `stream_prefill` read it. Leaves: arrays; static: the four last.

    head (G, D, E): W_G..W_1, the newest offset last, for the direct product.
    tiles: one spectrum (U, 2D, E) for each tile size U = G, 2G, ..., R/2 (R the window's power of
      two), real parts over imaginary parts: W'' + i W' in the transform of `dft`, W' the first U
      offsets and W'' the next U. The offsets of `head` count as zero here.
    far: W'' of the size R/2 alone.
    For the forms (L, D) and (L,) the last two axes are (2, D) and (2, 1), head's last is D or 1.
    """

    head: PyTree
    tiles: PyTree
    far: PyTree
    length: int
    form: int
    scale: str | None
    dtype: str

    @property
    def leaf(self) -> int:
        """G: offsets that every token meets directly, and the smallest tile."""
        return min(LEAF, ceil_power(self.length))

    @property
    def ring(self) -> int:
        """R: the power of two that holds the window."""
        return ceil_power(self.length)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tile sizes G, 2G, ..., R; none where the head is the whole window."""
        if self.ring <= self.leaf:
            return ()
        count = (self.ring // self.leaf).bit_length()
        return tuple(self.leaf << k for k in range(count))

    @property
    def work_dtype(self):
        """The dtype of the state and of all sums: float64 for float64 weights, else float32."""
        return working_dtype(self.dtype)


def ceil_power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def working_dtype(dtype) -> jnp.dtype:
    """float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def tile_dft(size: int) -> Dft:
    """The DFT of a tile of 2^k vectors, at the least N1 + 2 N2 (one stage for the small ones)."""
    factors = [1 << k for k in range((size.bit_length() + 1) // 2)]
    n2 = min(factors, key=lambda n2: size // n2 + 2 * n2 + 12 * (n2 > 1))
    return Dft(size // n2, n2, lax.Precision.HIGHEST)


def plan_stream(w: Array, *, scale: str | None = None) -> StreamPlan:
    """Transforms W for decoding: once per model, never inside the loop over tokens.

    Formula: the transforms of W_1..W_2U (zero beyond W_L) for the tile sizes U of `stream_step`.

    Shapes: w (L, D, E), (L, D) or (L,), any L >= 1. The plan is a pytree of about three times W's
    size; under `jax.vmap` (stacked layers) its arrays get the leading axis, and `lax.scan` over
    layers may take it apart again. float16 and bfloat16 weights are planned in float32.

    Raises:
      UsageError: an unknown scale, or w of a shape or dtype that is none of the forms.

    Source: relaxed multiplication (van der Hoeven 2002), there for power series; for one filter a
    channel FutureFill (Agarwal et al. 2024) and Flash Inference (Oncescu et al. 2024).
    """
    check_weights(w, scale)
    length, form = w.shape[0], w.ndim
    weights = w.astype(working_dtype(w.dtype))
    if form < 3:
        weights = weights.reshape(length, 1, -1)
    ring = ceil_power(length)
    leaf = min(LEAF, ring)
    padded = jnp.pad(weights, [(0, ring - length), (0, 0), (0, 0)])
    plan = StreamPlan(padded[:leaf][::-1], (), (), length, form, scale, str(w.dtype))
    tail = padded.at[:leaf].set(0)
    tiles: list[Array] = []
    far: PyTree = ()
    for size in plan.sizes[:-1]:
        near = spectrum(tail[:size])
        far = spectrum(tail[size : 2 * size])
        tiles.append(stack_rows(far + times_i(near)))
    return replace(plan, tiles=tuple(tiles), far=stack_rows(far) if tiles else ())


def spectrum(weights: Float[Array, "U D E"]) -> Float[Array, "U 2 D E"]:
    """The transform over offsets, with the inverse's 1/U."""
    size = weights.shape[0]
    out = transform(weights.reshape(size, -1) / size, tile_dft(size))
    return out.reshape(size, 2, *weights.shape[1:])


def stack_rows(spectra: Float[Array, "U 2 D E"]) -> Float[Array, "U Q E"]:
    """Real rows over imaginary rows, Q = 2D."""
    return spectra.reshape(spectra.shape[0], -1, spectra.shape[-1])


def check_weights(w, scale) -> None:
    """Refuses weights and scales that cannot be planned."""
    if scale not in (None, "rsqrt"):
        raise UsageError(f"scale={scale!r} is unknown: choose None or 'rsqrt'")
    if w.ndim not in (1, 2, 3):
        raise UsageError(f"w has shape {w.shape}: give (L, D, E), (L, D) or (L,)")
    if 0 in w.shape:
        raise UsageError(f"w has shape {w.shape}: give every axis a length of at least 1")
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise UsageError(f"w has dtype {w.dtype}: give a floating-point array")
