"""The Extractor family as Flax modules: one module, five presets.

    e_i   = s_i · Σ_{j=max(1,i−L+1)..i} v_j W_{i−j+1}      extraction
    a_i   = act(x_i W_adj + b_adj)                          adjustment
    out_i = (e_i ⊙ a_i) W_o

with v = x W_v where the preset has a value projection and v = x otherwise, W_o only where it has
an output projection, and s_i = 1/√min(i, L) for scale="rsqrt", 1 for scale=None.

| preset | W_1…W_L          | s_i         | W_v, W_o | parameters | source              |
|--------|------------------|-------------|----------|------------|---------------------|
| SHE    | a matrix (D, D)  | 1           | no       | (L+1)D²    | Chen 2023a          |
| ISHE   | a matrix (D, D)  | 1/√min(i,L) | no       | (L+1)D²    | Chen 2023b, Eq. (1) |
| HE     | one per channel  | 1/√min(i,L) | yes      | 3D² + L·D  | our reconstruction  |
| WE     | one per head     | 1/√min(i,L) | yes      | 3D² + L·H  | our reduced variant |
| ME     | one              | 1/√min(i,L) | no       | D² + L     | our reduced variant |

Certain: the extraction of SHE and iSHE, the element-wise product, and that HE has as many
parameters as multi-head attention (4D², equal at L = D) and fewer operations. The linear form of
the adjustment is our reconstruction (bias and activation are options, off by default); so are HE's
equation and WE and ME, whose names are the family's.

Extractors take no positional embeddings: the weights depend on the offset.

Sources: Chen 2023a, "Attention Is Not All You Need Anymore", arXiv:2308.07661; Chen 2023b,
"Interpretation of the Transformer and Improvement of the Extractor", arXiv:2311.12678.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_extractor import ops
from jax_extractor.errors import UsageError, unknown_name
from jax_extractor.mixers.common import (
    activation,
    check_divisible,
    check_input,
    check_one_step,
    compute_dtype,
    projection,
)
from jax_extractor.shapes import Array

KERNELS = ("matrix", "channel", "head", "scalar")


class Extractor(nn.Module):
    """Static position-relevant weights and an element-wise adjustment in place of self-attention.

    The equations are at the head of this file. Called as `(x, valid, deterministic)` with x
    (B, T, D) and valid (B, T) bool, True = real position; returns (B, T, D). Positions that are not
    valid count as zero vectors, and s_i counts the real vectors only, so that left-padded and
    unpadded sequences agree. T may exceed max_length: the sum is a window of the last L vectors.
    With decode=True x continues the sequence in the collections "cache" and "plan", see `mixers`.

    Attributes:
        max_length: L, the number of offsets.
        num_heads: H, read by kernel="head" only; must divide D.
        kernel: what W_k is: a (D, D) "matrix", a weight per "channel", per "head", or one "scalar".
        scale: "rsqrt" for s_i = 1/√min(i, L), None for 1.
        project_values: whether v = x W_v; otherwise v = x.
        project_outputs: whether the product passes W_o.
        adjust_bias: whether the adjustment has b_adj (initially 0).
        adjust_activation: name of act: identity, relu, gelu, silu, tanh or sigmoid.
        kernel_scale: standard deviation of W_k at the start, times √D for a matrix (the variance of
            a matrix's entries is kernel_scale²/D, of other weights kernel_scale²). None: 1/√L.
        method: how the sum is computed, see `ops.causal_extract`.
        dtype: of the computation and the result. None: what x and param_dtype promote to.
        param_dtype: of the parameters.
        precision: of the products in the sum, see `ops.causal_extract`.

    Raises:
        UsageError: a shape, dtype, size or name that does not fit.
    """

    max_length: int
    num_heads: int = 1
    kernel: str = "matrix"
    scale: str | None = "rsqrt"
    project_values: bool = False
    project_outputs: bool = False
    adjust_bias: bool = False
    adjust_activation: str = "identity"
    kernel_scale: float | None = None
    method: str = "auto"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None

    @nn.compact
    def __call__(
        self,
        x: Array,
        valid: Array | None = None,
        deterministic: bool = True,
        decode: bool = False,
    ) -> Array:
        """Returns (B, T, D) for x (B, T, D); no dropout inside, so `deterministic` is not read."""
        check_input(x, valid)
        features = x.shape[-1]
        x = x.astype(compute_dtype(x, self.dtype, self.param_dtype))
        values = self._projection(x, "value") if self.project_values else x
        weights = self._weights(features).astype(x.dtype)
        if decode:
            extracted = self._stream(values, weights, valid)
        else:
            extracted = ops.causal_extract(
                values,
                self._transformed(weights, values.shape),
                scale=self.scale,
                valid=valid,
                method=self.method,
                precision=self.precision,
            )
            if valid is not None:  # exactly 0 before the first real vector, by any method
                begun = jnp.cumsum(valid, axis=1, dtype=jnp.int32)[..., None] > 0
                extracted = jnp.where(begun, extracted, 0)
        adjusted = extracted * self._adjustment(x)
        return self._projection(adjusted, "output") if self.project_outputs else adjusted

    def _transformed(self, weights: Array, shape: tuple[int, ...]) -> Array | ops.WeightSpectrum:
        """The weights, or their transforms where the caller keeps the collection "spectra".

        Applied with mutable=["spectra"], the module gives the transforms out; given them, it reads
        them in the weights' place.
        """
        if self.is_mutable_collection("spectra") and not self.is_initializing():
            method = self.method
            if method == "auto":
                method = ops.choose_method(shape, weights.shape, weights.dtype)
            if method == "spectral" and weights.ndim == 3:
                spectrum = ops.transform_weights(weights, shape, precision=self.precision)
                self.put_variable("spectra", "kernel", spectrum)
        if self.has_variable("spectra", "kernel"):
            return self.get_variable("spectra", "kernel")
        return weights

    def _stream(self, values: Array, weights: Array, valid: Array | None) -> Array:
        """The extraction of vectors that continue the sequence in the "cache" collection.

        A first call is a prompt of any length; every later one is one vector. The transforms of
        the weights are made by the first call and kept in the collection "plan".
        """
        if not self.has_variable("plan", "plan"):
            self.put_variable("plan", "plan", ops.plan_stream(weights, scale=self.scale))
        plan: ops.StreamPlan = self.get_variable("plan", "plan")
        if self.has_variable("cache", "stream"):
            check_one_step(values)
            seen = None if valid is None else valid[:, 0]
            y, state = ops.stream_step(
                plan, self.get_variable("cache", "stream"), values[:, 0], seen
            )
            y = y[:, None]
        else:
            batch, _, features = values.shape
            state = ops.init_stream(plan, (batch,), features=features)
            y, state = ops.stream_prefill(plan, state, values, valid)
        self.put_variable("cache", "stream", state)
        return y

    def _projection(self, x: Array, name: str, use_bias: bool = False) -> Array:
        return projection(x.shape[-1], name, x.dtype, self.param_dtype, use_bias)(x)

    def _adjustment(self, x: Array) -> Array:
        act = activation(self.adjust_activation)
        return act(self._projection(x, "adjust", self.adjust_bias))

    def _weights(self, features: int) -> Array:
        if self.max_length < 1:
            raise UsageError(f"max_length={self.max_length}: choose at least 1")
        if self.kernel not in KERNELS:
            raise unknown_name("kernel", self.kernel, KERNELS)
        scale = self.max_length**-0.5 if self.kernel_scale is None else self.kernel_scale
        shape: tuple[int, ...] = (self.max_length,)
        if self.kernel == "matrix":
            shape += (features, features)
            scale *= features**-0.5
        elif self.kernel == "channel":
            shape += (features,)
        elif self.kernel == "head":
            check_divisible(features, self.num_heads)
            shape += (self.num_heads,)
        weights = self.param("kernel", nn.initializers.normal(scale), shape, self.param_dtype)
        if self.kernel == "head":
            return jnp.repeat(weights, features // self.num_heads, axis=1)
        return weights


class SHE(Extractor):
    """Super high-performance Extractor: a D×D matrix per offset, no scale. Chen 2023a."""

    scale: str | None = None


class ISHE(Extractor):
    """Improved SHE: SHE times 1/√min(i, L), no parameter more. Chen 2023b, Eq. (1)."""


class HE(Extractor):
    """Higher-performance Extractor: a weight per offset and channel, W_v, W_o (reconstruction)."""

    kernel: str = "channel"
    project_values: bool = True
    project_outputs: bool = True


class WE(Extractor):
    """Worthwhile Extractor: a weight per offset and head, W_v and W_o. Our reduced variant of HE."""

    kernel: str = "head"
    project_values: bool = True
    project_outputs: bool = True


class ME(Extractor):
    """Minimalist Extractor: one weight per offset, no W_v, no W_o. Our reduced variant."""

    kernel: str = "scalar"
