"""Which method `causal_extract(method="auto")` takes, and why.

The rule counts multiplications per element of w and compares; the constants were fitted to forward
plus backward times on a 2-core x86-64 CPU (float32, jax 0.10.2; that of the first row when `spectral`
took up to a quarter longer). Other platforms use the same rule, unmeasured there: `tuning.tune`
measures instead of guessing.

    weights             condition                                             method
    (L, D, E) matrices  B T <= 0.62 `spectral_work` (few, short sequences)  conv
                        otherwise                                             spectral
    (L, D) channels     T <= 64                                               toeplitz
                        otherwise                                             spectral
    (L,) scalars        T <= 384 (one (T, T) matrix product)                  toeplitz
                        otherwise                                             spectral

`scan` is the choice of none of these rows, but of least memory; `fft` lost to `spectral` at every
size measured.
"""

import math

import jax
import numpy as np

from jax_extractor.ops.spectral_plan import spectral_work

CHANNEL_TOEPLITZ_UNTIL = 64
SCALAR_TOEPLITZ_UNTIL = 384
DIRECT_UNTIL = 0.62

# What `tuning.tune` measured: (platform, x shape, w shape, dtype) -> method.
Key = tuple[str, tuple[int, ...], tuple[int, ...], str]
measured: dict[Key, str] = {}


def shape_key(x_shape, w_shape, dtype, platform: str | None = None) -> Key:
    """The key of `measured`: x's leading axes are one batch, w is cut to T offsets."""
    *leading, time, features = x_shape
    batched = (math.prod(leading), time, features)
    cut = (min(w_shape[0], time), *w_shape[1:])
    return platform or jax.default_backend(), batched, cut, np.dtype(dtype).name


def choose_method(x_shape, w_shape, dtype=np.float32, platform: str | None = None) -> str:
    """The method that "auto" takes for x (..., T, D) and w (L, D, E), (L, D) or (L,)."""
    key = shape_key(x_shape, w_shape, dtype, platform)
    if key in measured:
        return measured[key]
    _, (batch, time, features), (length, *rest), _ = key
    if len(rest) == 2:
        work = spectral_work((batch, time, features), length)
        return "conv" if batch * time <= DIRECT_UNTIL * work else "spectral"
    limit = CHANNEL_TOEPLITZ_UNTIL if rest else SCALAR_TOEPLITZ_UNTIL
    return "toeplitz" if time <= limit else "spectral"
