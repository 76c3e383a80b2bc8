"""The extraction sum, one small function per method. All compute the same thing:

    y_i = sum_{k=0..min(i,L)-1} x_{i-k} w_k        (positions i from 1, offsets k from 0)

Arguments are canonical (`extraction.causal_extract` makes them so): x (B, T, D) and w share one
dtype, 1 <= L <= T, nothing is empty. The product `x w` is a vector-matrix product for w (L, D, E),
and element-wise for w (L, D) and w (L,). Results come in the accumulation dtype (float32 for
halves).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_extractor.shapes import Array, Float


def resolve_precision(precision):
    """None stands for the user's `jax.default_matmul_precision`, else for full float32."""
    if precision is None:
        configured = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        return configured or lax.Precision.HIGHEST
    return precision


def accumulation_dtype(dtype) -> jnp.dtype:
    """Sums of bfloat16 and float16 products are kept in float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def scan_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """One offset a step: O(B T D) extra memory, forward and backward; causal to the last bit."""
    length, time = w.shape[0], x.shape[1]
    dtype = accumulation_dtype(x.dtype)
    padded = jnp.pad(x, ((0, 0), (length - 1, 0), (0, 0)))

    def add_offset(total, step):
        k, w_k = step
        shifted = lax.dynamic_slice_in_dim(padded, length - 1 - k, time, axis=1)
        if w_k.ndim == 2:
            term = jnp.einsum(
                "btd,de->bte", shifted, w_k, precision=precision, preferred_element_type=dtype
            )
        else:
            term = shifted.astype(dtype) * w_k.astype(dtype)
        return total + term, None

    # Without the checkpoint, the backward pass would keep every shifted copy of x: O(L B T D).
    add_offset = jax.checkpoint(add_offset, prevent_cse=False)
    features = w.shape[2] if w.ndim == 3 else x.shape[2]
    start = jnp.zeros((x.shape[0], time, features), dtype)
    return lax.scan(add_offset, start, (jnp.arange(length), w))[0]


def sliding_windows(z: Array, rows: int, width: int) -> Array:
    """R[i, m] = z[i + m] for z (n, ...), without a gather, whose transpose would be a scatter.

    A sequence repeated with period n and read in rows of n + 1 moves by one in every row.
    """
    n = z.shape[0]
    repeated = jnp.broadcast_to(z[None], (rows + 1, *z.shape)).reshape(-1, *z.shape[1:])
    return repeated[: rows * (n + 1)].reshape(rows, n + 1, *z.shape[1:])[:, :width]


def toeplitz_matrix(w: Float[Array, "L ..."], time: int) -> Array:
    """M[i, j] = w[i - j] where that offset exists, else 0; (T, T, ...)."""
    pad = [(time - w.shape[0], time - 1)] + [(0, 0)] * (w.ndim - 1)
    return sliding_windows(jnp.pad(w[::-1], pad), time, time)[::-1]


def toeplitz_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """One matrix product over the Toeplitz structure; causal to the last bit for finite x.

    A matrix per offset meets the windows of x, O(B T L D) memory; the smaller forms meet x as
    Toeplitz matrices, O(T^2 D) and O(T^2) memory.
    """
    length, time = w.shape[0], x.shape[1]
    dtype = accumulation_dtype(x.dtype)
    if w.ndim < 3:
        spec = "ijd,bjd->bid" if w.ndim == 2 else "ij,bjd->bid"
        operands = toeplitz_matrix(w, time), x
    else:
        spec = "imbd,mde->bie"
        padded = jnp.pad(x.swapaxes(0, 1), ((length - 1, 0), (0, 0), (0, 0)))
        operands = sliding_windows(padded, time, length), w[::-1]
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=dtype)


def conv_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """XLA's convolution, left-padded; causal to the last bit."""
    dtype = accumulation_dtype(x.dtype)
    batch, time, features = x.shape
    groups = 1
    if w.ndim == 1:  # every feature is a sequence of its own
        x = x.swapaxes(1, 2).reshape(batch * features, time, 1)
        kernel = w[:, None, None]
    elif w.ndim == 2:
        kernel, groups = w[:, None, :], features
    else:
        kernel = w
    y = lax.conv_general_dilated(
        x.astype(dtype),
        kernel[::-1].astype(dtype),
        window_strides=(1,),
        padding=[(w.shape[0] - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
        precision=precision,
    )
    return y.reshape(batch, features, time).swapaxes(1, 2) if w.ndim == 1 else y


def fast_length(n: int) -> int:
    """The smallest 2^a 3^b 5^c that is at least n: lengths on which every FFT library is fast."""
    best = 1 << (n - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            two = 1 << max(0, (-(-n // three) - 1).bit_length())
            best = min(best, two * three)
            three *= 3
        five *= 5
    return best


def fft_extract(x: Float[Array, "B T D"], w: Float[Array, "L ..."], precision):
    """A product per frequency of the zero-padded FFTs; causal to rounding.

    XLA gathers a sharded FFT input onto every device. Under a mesh the result is right all the same;
    call it inside `jax.shard_map` to keep a batch where it is, or use "spectral".
    """
    dtype = accumulation_dtype(x.dtype)
    time = x.shape[1]
    n = fast_length(time + w.shape[0] - 1)
    x_hat = jnp.fft.rfft(x.astype(dtype), n, axis=1)
    w_hat = jnp.fft.rfft(w.astype(dtype), n, axis=0)
    if w.ndim == 3:
        y_hat = jnp.einsum("bfd,fde->bfe", x_hat, w_hat, precision=precision)
    else:
        y_hat = x_hat * (w_hat if w.ndim == 2 else w_hat[:, None])
    return jnp.fft.irfft(y_hat, n, axis=1)[:, :time].astype(dtype)
