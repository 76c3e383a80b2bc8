"""The extraction sum of the Extractor family: checks, scale and the choice of the method."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.ops.auto import choose_method
from jax_extractor.ops.extraction_methods import (
    conv_extract,
    fft_extract,
    resolve_precision,
    scan_extract,
    toeplitz_extract,
)
from jax_extractor.ops.spectral import spectral_extract
from jax_extractor.ops.weight_spectrum import WeightSpectrum, extract_with_spectrum
from jax_extractor.shapes import Array

METHODS = {
    "scan": scan_extract,
    "toeplitz": toeplitz_extract,
    "conv": conv_extract,
    "fft": fft_extract,
    "spectral": spectral_extract,
}


def causal_extract(
    x: Array,
    w: Array | WeightSpectrum,
    *,
    scale: str | None = None,
    method: str = "auto",
    precision=None,
    valid: Array | None = None,
) -> Array:
    """Sums the vectors so far, each through the weight of its offset: SHE's and iSHE's first half.

    Formula, positions i = 1..T, window L (offsets beyond it carry no weight)::

        y_i = c_i * sum_{j = max(1, i-L+1) .. i} x_j W_{i-j+1}
        c_i = 1 (scale=None)   or   1/sqrt(number of real vectors in the sum) (scale="rsqrt"),
        which is 1/sqrt(min(i, L)) when all vectors are real.

    Shapes: x (..., T, D) with any leading axes; w (L, D, E) a matrix per offset, or (L, D) a weight
    per channel, or (L,) one weight per offset (E = D for both); y (..., T, E). T and L are free.
    w may be what `transform_weights` made of (L, D, E) for this T: method is then "spectral".

    Args:
      scale: None or "rsqrt".
      method: "auto", "scan", "toeplitz" and "conv" (causal to the last bit), "fft" and "spectral"
        (causal to rounding). All compute the same sum; `auto.choose_method` says which one "auto"
        takes, and `tuning.tune` replaces its rule by a measurement.
      precision: of the products, as in `jax.lax.dot_general`. None means the precision set by
        `jax.default_matmul_precision` and, where none is set, full float32: never TF32 or bfloat16
        passes unasked.
      valid: bool, broadcastable to x's axes (..., T). Vectors that are not valid count as zero, and
        not in c_i, so padded and unpadded sequences agree on the real positions.

    dtypes: the result has the promoted dtype of x and w; halves are summed in float32.

    Raises:
      UsageError: a shape, dtype or name that does not fit, in one line with the remedy.

    Source: seed paper of the Extractor, Eq. (1), with and without its factor.
    """
    dtype = check_arguments(x, w, scale, method, valid)
    time, length = x.shape[-2], w.shape[0]
    features = w.shape[2] if w.ndim == 3 else x.shape[-1]
    if valid is not None:
        valid = jnp.broadcast_to(valid, x.shape[:-1])
        x = jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))
    shape = (*x.shape[:-1], features)
    if 0 in x.shape or features == 0:
        return jnp.zeros(shape, dtype)
    batched = x.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else x
    batched = batched.astype(dtype)
    if isinstance(w, WeightSpectrum):
        y = extract_with_spectrum(batched, w)
    else:
        w = w[:time].astype(dtype)
        if method == "auto":
            method = choose_method(batched.shape, w.shape, dtype)
        y = METHODS[method](batched, w, resolve_precision(precision))
    y = y.reshape(shape)
    if scale == "rsqrt":
        y = y * extraction_factor(time, length, valid=valid, dtype=y.dtype)[..., None]
    return y.astype(dtype)


def extraction_factor(
    time: int, length: int, *, valid: Array | None = None, dtype=jnp.float32
) -> Array:
    """iSHE's factor c_i = 1/sqrt(number of real vectors among the last L up to i, at least 1).

    Shapes: valid (..., T) bool, or None (all real: c_i = 1/sqrt(min(i, L))); c (..., T), or (T,).
    Source: seed paper of the Extractor, Eq. (1); counting real vectors is how left-padded batches
    agree with unpadded ones.
    """
    if valid is None:
        count = jnp.minimum(jnp.arange(1, time + 1), length)
    else:
        total = jnp.cumsum(valid, axis=-1, dtype=jnp.int32)
        if length < time:
            before = [(0, 0)] * (total.ndim - 1) + [(length, 0)]
            total = total - jnp.pad(total[..., :-length], before)
        count = jnp.maximum(total, 1)
    return lax.rsqrt(count.astype(dtype))


def check_arguments(x, w, scale, method, valid):
    """Refuses what cannot be computed; returns the dtype of the result."""
    if method != "auto" and method not in METHODS:
        raise unknown_name("method", method, ["auto", *METHODS])
    if scale not in (None, "rsqrt"):
        raise UsageError(f"scale={scale!r} is unknown: choose None or 'rsqrt'")
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise UsageError(f"{name} has dtype {array.dtype}: give a floating-point array")
    if x.ndim < 2:
        raise UsageError(f"x has shape {x.shape}: give at least two axes (..., T, D)")
    if w.ndim not in (1, 2, 3):
        raise UsageError(f"w has shape {w.shape}: give (L, D, E), (L, D) or (L,)")
    if w.shape[0] == 0:
        raise UsageError(f"w has shape {w.shape}: give at least one offset (L >= 1)")
    if w.ndim > 1 and w.shape[1] != x.shape[-1]:
        raise UsageError(
            f"w has {w.shape[1]} input features and x has {x.shape[-1]} "
            f"(w {w.shape}, x {x.shape}): make w's second axis equal to x's last"
        )
    if isinstance(w, WeightSpectrum):
        if method not in ("auto", "spectral"):
            raise UsageError(f"method={method!r} with transformed weights: choose 'spectral'")
        if x.shape[-2] != w.time:
            raise UsageError(
                f"x has {x.shape[-2]} vectors and w was transformed for {w.time}: "
                "call transform_weights with x's shape"
            )
    if valid is not None:
        check_valid(x, valid)
    with jax.numpy_dtype_promotion("standard"):  # explicit: this is the documented result dtype
        return jnp.promote_types(x.dtype, w.dtype)


def check_valid(x, valid) -> None:
    """Refuses a `valid` that is not bool or does not fit x's axes (..., T)."""
    if valid.dtype != jnp.bool_:
        raise UsageError(f"valid has dtype {valid.dtype}: give bool, True for real vectors")
    fits = valid.ndim in range(1, x.ndim) and valid.shape[-1] == x.shape[-2]
    pairs = zip(valid.shape[::-1], x.shape[-2::-1], strict=False)
    if not fits or any(v not in (1, n) for v, n in pairs):
        raise UsageError(
            f"valid has shape {valid.shape}, which does not fit x {x.shape}: give {x.shape[:-1]}"
        )
