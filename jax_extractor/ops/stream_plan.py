"""What decoding needs of W, computed once per model."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_extractor.errors import UsageError
from jax_extractor.ops.stream_dft import Dft, dft, second_factor, transform
from jax_extractor.shapes import Array, Float, PyTree

LEAF = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["head", "tiles", "window"],
    meta_fields=["length", "form", "scale", "dtype"],
)
@dataclass(frozen=True)
class StreamPlan:
    """W as `stream_step` and `stream_prefill` read it. Leaves: arrays; static: the four last.

    head (G, D, E): W_G..W_1, the newest offset last, for the direct product.
    tiles: one spectrum (F, 2D, E) for each tile size G, 2G, ..., R/4 (R the window's power of two),
      real parts over imaginary parts, of the offsets a tile meets, those of `head` set to zero.
    window: the spectrum of all offsets in two parts; the even one is also the tile size R/2's.
    For the forms (L, D) and (L,) the last two axes are (2, D) and (2, 1), head's last is D or 1.
    """

    head: PyTree
    tiles: PyTree
    window: PyTree
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


def window_dft(ring: int) -> Dft:
    """The DFT of 2R points."""
    return dft(2 * ring, second_factor(2 * ring))


def tile_dft(size: int, ring: int) -> Dft:
    """The DFT of a tile's 2U points; at U = R/2 it takes the factors of the window's."""
    return dft(2 * size, second_factor(4 * size if 2 * size == ring else 2 * size))


def plan_stream(w: Array, *, scale: str | None = None) -> StreamPlan:
    """Transforms W for decoding: once per model, never inside the loop over tokens.

    Formula: the spectra of W_1..W_2U (zero beyond W_L) for the tile sizes U of `stream_step`.

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
    padded = jnp.pad(weights, [(0, 2 * ring - length), (0, 0), (0, 0)])
    head = padded[:leaf][::-1]
    tail = padded.at[:leaf].set(0)
    plan = StreamPlan(head, (), (), length, form, scale, str(w.dtype))
    if not plan.sizes:
        return plan
    tiles = tuple(spectra(tail[: 2 * u], tile_dft(u, ring)) for u in plan.sizes[:-2])
    constants = window_dft(ring)
    window = spectra(tail[:ring], constants)
    evens = tile_dft(ring // 2, ring).frequencies
    return StreamPlan(
        head, tiles, (window[:evens], window[evens:]), length, form, scale, str(w.dtype)
    )


def spectra(weights: Float[Array, "U D E"], constants: Dft) -> Float[Array, "F Q E"]:
    """The spectrum of weights over offsets, real parts over imaginary ones (Q = 2D)."""
    offsets, features, outputs = weights.shape
    out = transform(weights.reshape(offsets, features * outputs), constants)
    return out.reshape(-1, 2 * features, outputs)


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
